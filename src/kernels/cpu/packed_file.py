"""PackedFile: a model's quantised weights on the disk, so that the next start need not quantise them again.

A file is a line of JSON behind its checksum, then the memory of each weight in the order of packing. It is used only if
it proves to be what this very build of the library made of this very model, and is written anew otherwise. Reading
goes into huge pages, as packing does: the pages of a mapped file are small ones, and steps are slower on them.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from motet.kernels.cpu.weights import INT4_GROUP, INT8_GROUP, PackedWeight, Panels

logger = logging.getLogger("motet")


class PackedFile:
    """The weights of one model, one after another: as they were packed last time, or packed now and kept."""

    def __init__(self, path: Path, key: str, panels: Panels) -> None:
        """key: all that the bytes depend on. What is there is read at once."""
        self._path = path
        self._key = key
        self._weights: list[PackedWeight] = []
        try:
            with path.open("rb") as file:
                self._weights = _read(file, key, panels)
        except FileNotFoundError:
            logger.info("packed weights will be kept in %s", path)
        except (OSError, ValueError) as why:
            logger.warning("%s is not used, but written anew: %s", path, str(why))
        self._num_read = len(self._weights)
        self._num_asked = 0

    def packed(self, shape: tuple[int, int], pack: Callable[[], PackedWeight]) -> PackedWeight:
        """The next weight, [columns, inner]; it is packed if it was not read."""
        if self._num_asked == len(self._weights):
            self._weights.append(pack())
        weight = self._weights[self._num_asked]
        self._num_asked += 1
        assert (weight.columns, weight.inner) == shape, "a model asks for the same weights in the same order"
        return weight

    def write(self) -> None:
        """Writes all weights, if any was packed. Where that fails a warning says so."""
        if self._num_asked == self._num_read:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write(self._path, self._key, self._weights)
        except OSError as why:
            logger.warning("packed weights cannot be kept in %s: %s", self._path, str(why))


def _read(file: BufferedReader, key: str, panels: Panels) -> list[PackedWeight]:
    """Raises ValueError if it is not the file of this key, whole and undamaged."""
    checksum, _, description = file.readline().rstrip(b"\n").partition(b" ")
    if checksum != _checksum(description):
        raise ValueError("it does not begin as such a file does")
    described = json.loads(description)
    if described["key"] != key:
        raise ValueError("it is of another model, setting or build of the library")
    weights = []
    for format, columns, inner, checksums in described["weights"]:
        weight = (
            panels.int8(columns, inner, INT8_GROUP)
            if format == "int8"
            else panels.int4(columns, inner, INT4_GROUP)
        )
        for tensor, expected in zip(weight.memory, checksums, strict=True):
            buffer = _bytes(tensor)
            _fill(buffer, file)
            if zlib.crc32(buffer) != expected:
                raise ValueError("it is damaged")
        weights.append(weight)
    return weights


def _fill(buffer: memoryview, file: BufferedReader) -> None:
    while len(buffer):  # the system reads two GiB at once at most
        count = file.readinto(buffer)
        if count == 0:
            raise ValueError("it is cut short")
        buffer = buffer[count:]


def _write(path: Path, key: str, weights: list[PackedWeight]) -> None:
    """Whole or not at all, and never into a file that somebody reads."""
    described = [
        (weight.format, weight.columns, weight.inner, [zlib.crc32(_bytes(t)) for t in weight.memory])
        for weight in weights
    ]
    description = json.dumps({"key": key, "weights": described}).encode()
    handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_checksum(description) + b" " + description + b"\n")
            for weight in weights:
                for tensor in weight.memory:
                    file.write(_bytes(tensor))
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def _checksum(description: bytes) -> bytes:
    return b"%08x" % zlib.crc32(description)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
