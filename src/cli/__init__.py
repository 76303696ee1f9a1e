"""The command line. Knows only the public names of `motet`; its own libraries are the extra `cli`."""

from __future__ import annotations

import logging
import sys
from io import TextIOWrapper


def main() -> None:
    """The program `motet`."""
    try:
        from motet.cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(f"motet's command line needs {error.name}: pip install 'motet[cli]'") from None
    if isinstance(sys.stdout, TextIOWrapper):  # a model says what not every terminal's encoding can
        sys.stdout.reconfigure(errors="replace")
    # Here motet is the application: its warnings are shown.
    logging.basicConfig(format="%(levelname)s: %(message)s")
    app()
