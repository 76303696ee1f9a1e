"""What to tell whoever cannot have an adapter."""

from __future__ import annotations

from collections.abc import Iterable

from motet.errors import AdapterError, AdapterExists, AdapterNotFound

MOST_NAMES = 20
"""That one message lists."""


def not_found(name: str, loaded: Iterable[str]) -> AdapterNotFound:
    names = ", ".join(map(repr, sorted(loaded)))
    others = f"only {names}" if names else "nor any other"
    return AdapterNotFound(f"no adapter {name!r} is loaded, {others}; load it with `load_adapter`")


def exists(name: str) -> AdapterExists:
    return AdapterExists(f"an adapter {name!r} is loaded: pass replace=True, or unload it first")


def another(error: AdapterError) -> AdapterError:
    """The same error for another to raise: each raising adds to an error's traceback."""
    # Without its constructor: an application's own kind of error may have one that wants other arguments.
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


def listed(names: Iterable[str]) -> str:
    """The first names in a sentence."""
    names = list(names)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
