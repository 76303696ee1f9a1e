from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from motet.runtime.models.gguf_reader import MappedGGUFReader
from motet.runtime.models.loader import find_model

VALUES: dict[str, object] = {
    "strings": ["", "a", "é👋", "a\x00b", "x" * 1000],
    "integers": [1, -2, 3],
    "floats": [0.5, -1.25],
    "booleans": [True, False, True],
    "one": ["alone"],
    "text": "plain",
}


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in VALUES.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_uint8("byte", 200)
    writer.add_float64("double", 0.1)
    writer.add_int64("long", -(1 << 40))
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(ours: gguf.GGUFReader, theirs: gguf.GGUFReader) -> None:
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert ours.fields[name].contents() == field.contents(), name
        assert ours.fields[name].types == field.types, name
    assert ours.data_offset == theirs.data_offset
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        assert (a.name, a.tensor_type, a.data_offset) == (b.name, b.tensor_type, b.data_offset)
        np.testing.assert_array_equal(a.shape, b.shape)
        np.testing.assert_array_equal(a.data, b.data)


def test_it_reads_what_upstream_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    assert_same(MappedGGUFReader(path), gguf.GGUFReader(path))
    contents = {name: MappedGGUFReader(path).fields[name].contents() for name in VALUES}
    assert contents == VALUES


def test_it_reads_a_file_of_the_other_byte_order_as_upstream_does(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_array("strings", ["a", "bc"])
    writer.add_array("integers", [1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same(MappedGGUFReader(tmp_path / "big.gguf"), gguf.GGUFReader(tmp_path / "big.gguf"))


def test_it_reads_the_demo_model_as_upstream_does_but_several_times_as_fast() -> None:
    path = find_model("demo")
    start = time.thread_time()
    ours = MappedGGUFReader(path)
    middle = time.thread_time()
    theirs = gguf.GGUFReader(path)
    end = time.thread_time()
    assert_same(ours, theirs)
    assert len(ours.fields["tokenizer.ggml.tokens"].contents()) == 49_152
    assert (end - middle) > 3 * (middle - start)


@pytest.mark.parametrize("left", [0, 3, 8, 30, 60, 200, 700, 1300])
def test_a_file_cut_short_raises(left: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(Exception, match=r"."):
        {name: field.contents() for name, field in MappedGGUFReader(path).fields.items()}
