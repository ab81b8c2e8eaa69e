"""Reads optimised HLO, the text of a compiled program: its kernels and their order.

A program is a list of computations, one of them the entry. A *kernel* is an instruction that the
device runs by itself, in the entry or in a loop body or branch that the entry calls; a fusion
counts as one kernel, with everything it calls. Everything here is a pure function of the text.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_BITS: Mapping[str, int] = {"pred": 8, "token": 0, "opaque": 0}
_CALLS = ("calls", "to_apply", "body", "condition", "true_computation", "false_computation")
_CONTROL = {"while", "conditional", "call"}
FREE = {  # no work on the device by themselves
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
    *("opt-barrier", "partition-id", "replica-id", "add-dependency", "domain"),
    *("copy-done", "slice-done", "async-done", "all-reduce-done", "all-gather-done", "send-done"),
    *("collective-permute-done", "recv-done", "async-update"),
}
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_OP = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_KIND = re.compile(r"([\w\-]+)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(:[^}]*)?\})?")


class Shape(NamedTuple):
    """Type of an array: name of its dtype, dimensions, and their order in memory."""

    dtype: str  # such as `bf16`
    dims: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from the fastest to the slowest, without tiles
    space: int  # number of the memory it lies in; 0 is the device's main memory

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        return self.size * self.bits // 8

    @property
    def bits(self) -> int:
        """Bits per element."""
        return _BITS.get(self.dtype, int(_find(r"(\d+)", self.dtype) or 8))

    @property
    def strides(self) -> tuple[int, ...]:
        """Sizes from the slowest dimension to the fastest, without any of size 1."""
        return tuple(self.dims[axis] for axis in reversed(self.order) if self.dims[axis] > 1)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Op:
    """One instruction."""

    name: str
    kind: str  # such as `fusion`
    shapes: tuple[Shape, ...]  # what it returns, a shape per array
    operands: tuple[str, ...]  # names of what it takes, in the same computation
    rest: str  # attributes, as text
    is_root: bool  # its result is its computation's result

    @property
    def nbytes(self) -> int:
        """Bytes it returns."""
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def cycles(self) -> int:
        """Cycles that the TPU compiler expects; 0 where it says nothing, as for sorts."""
        return int(_find(r'"estimated_cycles":"(\d+)"', self.rest) or 0)

    @property
    def path(self) -> str:
        """Named scopes and the traced operation, such as `jit(run_round)/verify/dot_general`."""
        return _find(r'op_name="([^"]*)"', self.rest)

    @property
    def target(self) -> str:
        """Name of the function that a custom call calls."""
        return _find(r'custom_call_target="([^"]*)"', self.rest)

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations it names."""
        names = re.findall(rf"(?:{'|'.join(_CALLS)})=%?([\w.\-]+)", self.rest)
        branches = _find(r"branch_computations=\{([^}]*)\}", self.rest)
        return (*names, *re.findall(r"%?([\w.\-]+)", branches))

    def calls_as(self, role: str) -> str:
        """Name of the computation it calls as `body`, `condition` and so on; empty if none."""
        return _find(rf"\b{role}=%?([\w.\-]+)", self.rest)


class Place(NamedTuple):
    """An operation in its computation, and how often it runs."""

    computation: str
    op: Op
    times: int = 1


class Program:
    """A compiled program, read from the text that `compiled.as_text()` returns.

    Attributes:
      computations: instructions by name, per computation.
      entry: name of the entry.
      used: rows in use of a cache, and all of its rows.
    """

    def __init__(self, text: str, *, trips: int = 1, used: tuple[int, int] = (1, 1)) -> None:
        """Reads a text, in which loops of unknown length run `trips` times."""
        self._trips = trips
        self.used = used
        self.computations: dict[str, dict[str, Op]] = {}
        self.entry = ""
        ops: dict[str, Op] = {}
        self._frames = _read_frames(text)
        for line in text.splitlines():
            if head := _HEAD.match(line):
                ops = self.computations[head[2]] = {}
                if head[1]:
                    self.entry = head[2]
            elif op := _read_op(line):
                ops[op.name] = op
        if not self.entry:
            raise ValueError("want the text of a compiled program, got none with an entry")

    def kernels(self, root: str | None = None) -> Iterator[Place]:
        """Lists what the device runs by itself from a computation on; None: from the entry."""
        for name, times in self._reached(root or self.entry).items():
            for op in self.computations[name].values():
                if op.kind not in FREE and not (op.kind in _CONTROL and op.calls):
                    yield Place(name, op, times)

    def loops(self, root: str | None = None) -> Iterator[Place]:
        """Lists the loops among the kernels."""
        for name, times in self._reached(root or self.entry).items():
            for op in self.computations[name].values():
                if op.kind == "while":
                    yield Place(name, op, times)

    def inside(self, place: Place) -> Iterator[Place]:
        """Lists an operation; for a fusion, also everything in it."""
        yield place
        if place.op.kind == "fusion":
            for name in place.op.calls:
                for op in self.computations.get(name, {}).values():
                    yield from self.inside(Place(name, op))

    def root(self, place: Place) -> Op:
        """The operation that writes a fusion's result; of others, the operation itself."""
        op = place.op
        while op.kind == "fusion" and op.calls:
            inner = self.computations[op.calls[0]].values()
            op = next(one for one in inner if one.is_root)
        return op

    def operand_shapes(self, place: Place) -> list[Shape]:
        """Shapes of all arrays that an operation takes."""
        ops = self.computations[place.computation]
        return [shape for name in place.op.operands if name in ops for shape in ops[name].shapes]

    def source(self, op: Op) -> str:
        """Line of the source that an operation comes from, `file:line`; empty if unknown."""
        if frame := _find(r"stack_frame_id=(\d+)", op.rest):
            return self._frames.get(int(frame), "")
        found = re.search(r'source_file="([^"]*)" source_line=(\d+)', op.rest)
        return f"{found[1]}:{found[2]}" if found else ""

    def _reached(self, root: str) -> dict[str, int]:
        """Computations that run kernel by kernel, callers first, and how often each runs."""
        found, names = {root: 1}, [root]
        for name in names:
            for op in self.computations[name].values():
                if op.kind in _CONTROL:
                    called = [n for n in op.calls if n in self.computations and n not in found]
                    found |= dict.fromkeys(called, found[name] * self._times(op))
                    names += called
        return found

    def _times(self, op: Op) -> int:
        known = _find(r'"known_trip_count":\{"n":"(\d+)"\}', op.rest)
        return int(known) if known else self._trips if op.kind == "while" else 1


def _read_op(line: str) -> Op | None:
    start = _OP.match(line)
    if not start:
        return None
    begin = start.end()
    end = _closing(line, begin) if line[begin] == "(" else line.index(" ", begin)
    kind = _KIND.match(line, end + 1 if line[end] == " " else end)
    if not kind:
        return None
    last = _closing(line, kind.end() - 1)
    return Op(
        name=start[2],
        kind=kind[1],
        shapes=tuple(_read_shapes(line[begin:end])),
        operands=_read_operands(line[kind.end() : last - 1]),
        rest=line[last:],
        is_root=bool(start[1]),
    )


def _read_operands(text: str) -> tuple[str, ...]:
    marked = re.findall(r"%([\w.\-]+)", text)
    return tuple(marked or re.findall(r"[\w.\-]+", text))


def _closing(text: str, begin: int) -> int:
    """Index after the bracket that closes the one at `begin`, and after the blank behind it."""
    depth = 0
    for index in range(begin, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"want closed brackets, got {text[begin : begin + 80]!r}")


def _read_shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, order, tiles in _ARRAY.findall(text):
        sizes = tuple(int(size) for size in dims.split(",") if size)
        axes = tuple(int(axis) for axis in order.split(",") if axis)
        space = int(_find(r"S\((\d+)\)", tiles) or 0)
        yield Shape(dtype, sizes, axes or tuple(range(len(sizes)))[::-1], space)


def _read_frames(text: str) -> dict[int, str]:
    """Reads the tables of source lines in front of the computations."""
    files = dict(re.findall(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.M))
    places = {
        number: f"{'/'.join(files.get(file, '').split('/')[-3:])}:{line}"
        for number, file, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", _section(text, "FileLocations"), re.M
        )
    }
    frames = {
        int(number): (places.get(place, ""), int(parent or 1) - 1)  # printed one too high
        for number, place, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?",
            _section(text, "StackFrames"),
            re.M,
        )
    }
    return {number: _with_caller(frames, number) for number in frames}


def _with_caller(frames: Mapping[int, tuple[str, int]], number: int) -> str:
    """The line of a frame, and the first of its callers in another file."""
    place, above = frames[number]
    file = place.rpartition(":")[0]
    while above in frames and frames[above][0].rpartition(":")[0] == file:
        above = frames[above][1]
    return f"{place} < {frames[above][0]}" if above in frames else place


def _section(text: str, name: str) -> str:
    return _find(rf"(?ms)^{name}\n(.*?)\n\n", text)


def _find(pattern: str, text: str) -> str:
    """The first group of the first match; empty if there is none."""
    found = re.search(pattern, text)
    return found[1] if found else ""
