"""Writes the demo model, dequantised to float32, as a plain Hugging Face folder that every engine can read.

python -m benchmarks.prepare_model [FOLDER]
"""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks.common import MODEL_FOLDER, make_parser
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from motet.runtime.models.loader import find_model


def prepare_model(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_FOLDER)
    parser.add_argument("--gguf", default="demo", help="another GGUF than the demo's")
    arguments = parser.parse_args()
    prepare_model(find_model(arguments.gguf), arguments.folder)


if __name__ == "__main__":
    main()
