"""Writes the demo model as every engine can read it: a Hugging Face folder, and GGUF files in Q4_1 and bf16.

    python -m benchmarks.prepare_model

All hold the weights of the demo's Q4_1 file: dequantised to float32 in the folder, and these rounded to bf16.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from benchmarks.common import BF16_GGUF, MODEL_FOLDER, Q4_1_GGUF, make_parser
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from motet.runtime.models.loader import find_model

BF16 = GGMLQuantizationType.BF16


def write_folder(source: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def write_bf16_gguf(source: Path, out: Path) -> None:
    """The same file with its matrices in bf16; vectors are float32 in any GGUF."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    unfinished = out.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        element_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element_type)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim > 1:
            writer.add_tensor(tensor.name, quantize(weights, BF16), raw_dtype=BF16)
        else:
            writer.add_tensor(tensor.name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(out)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gguf", default="demo", help="another GGUF than the demo's")
    source = find_model(parser.parse_args().gguf)
    if not MODEL_FOLDER.exists():
        write_folder(source, MODEL_FOLDER)
    if not Q4_1_GGUF.exists():
        shutil.copyfile(source, Q4_1_GGUF)
    if not BF16_GGUF.exists():
        write_bf16_gguf(source, BF16_GGUF)


if __name__ == "__main__":
    main()
