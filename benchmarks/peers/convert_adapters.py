"""Writes the adapters as llama.cpp's server reads them, with llama.cpp's own script: seconds for each, once.

python -m benchmarks.peers.convert_adapters
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import (
    ADAPTERS_FOLDER,
    GGUF_ADAPTERS_FOLDER,
    MODEL_FOLDER,
    PEERS_FOLDER,
    make_parser,
)


def main() -> None:
    make_parser(__doc__).parse_args()
    script = next((PEERS_FOLDER / "llama_cpp/source").glob("*/vendor/llama.cpp/convert_lora_to_gguf.py"))
    GGUF_ADAPTERS_FOLDER.mkdir(parents=True, exist_ok=True)
    for folder in sorted(ADAPTERS_FOLDER.iterdir()):
        out = GGUF_ADAPTERS_FOLDER / f"{folder.name}.gguf"
        if out.exists():
            continue
        unfinished = out.with_suffix(".unfinished")
        command = [sys.executable, str(script), str(folder), "--base", str(MODEL_FOLDER)]
        command += ["--outtype", "f16", "--outfile", str(unfinished)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        unfinished.rename(out)


if __name__ == "__main__":
    main()
