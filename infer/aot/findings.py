"""Findings in optimised HLO: copies, re-layouts, upcasts, sorts, and the bytes that kernels move.

Everything here is a pure function of a program (`hlo`).
"""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from .hlo import FREE, Op, Place, Program, Shape

_COLLECTIVES = {
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
}
_COMPUTES = {"dot", "convolution", "reduce", "custom-call", "gather", "sort"}
_STARTS = {"copy-start", "slice-start", "async-start"}
_PARTS = {"dynamic-slice", "gather", "slice"}
_TRITON = "__gpu$xla.gpu.triton"  # attention, which stops where a text does
_MOVES = {  # write what they read, elsewhere or in another order
    *("copy", "transpose", "reshape", "bitcast-convert", "convert", "pad", "concatenate", "slice"),
}
_ADDED = re.compile(
    r"jit\(.*\)|while|body|cond|closed_call|pjit|branch_\d+_fun|checkpoint|vmap\(.*"
)


def is_copy(program: Program, place: Place) -> bool:
    """Tells whether a kernel moves an array within the main memory and computes nothing."""
    inner = {one.op.kind for one in program.inside(place)} - FREE - {"fusion", "broadcast"}
    if not inner or not inner <= _MOVES or inner == {"convert"}:
        return False
    spaces = {shape.space for shape in (*program.operand_shapes(place), *place.op.shapes)}
    return spaces == {0} or is_relayout(program, place)


def is_relayout(program: Program, place: Place) -> bool:
    """Tells whether a kernel copies an array into another order of its dimensions."""
    inner = {one.op.kind for one in program.inside(place)} - FREE - {"fusion", "broadcast"}
    given = place.op.shapes[0]
    taken = [s for s in program.operand_shapes(place) if s.size == given.size > 1]
    if not inner or not inner <= _MOVES or len(taken) != 1:
        return False
    return bool(inner & {"transpose", "reshape"}) or given.strides != taken[0].strides


def is_upcast(program: Program, place: Place) -> bool:
    """Tells whether a kernel writes a wider copy of an array to memory."""
    root = program.root(place)
    if root.kind != "convert" or place.op.kind not in ("convert", "fusion"):
        return False
    given, *_ = root.shapes
    taken = [s for s in program.operand_shapes(place) if s.size == given.size]
    return any(shape.bits < given.bits for shape in taken)


def is_collective(place: Place) -> bool:
    """Tells whether devices exchange data here; an asynchronous exchange counts at its start."""
    return place.op.kind.removesuffix("-start") in _COLLECTIVES


def sorts(program: Program, least: int) -> list[Place]:
    """Lists sorts of at least `least` elements."""
    return [
        place
        for place in program.kernels()
        for inner in program.inside(place)
        if inner.op.kind == "sort" and _sorted_size(inner.op) >= least
    ]


def vector_products(program: Program, weights: Collection[tuple[int, ...]]) -> list[Place]:
    """Lists products of a weight that are multiplied and summed element by element.

    The TPU compiler does this for a product with one row. It takes four times as long as eight
    rows on the matrix unit. Shapes of weights are those on a device.
    """
    known = {_sides(shape) for shape in weights}

    def is_one(place: Place) -> bool:
        taken = program.operand_shapes(place)
        return place.op.kind == "reduce" and any(_sides(shape.dims) in known for shape in taken)

    return [
        place for place in program.kernels() if any(is_one(one) for one in program.inside(place))
    ]


def copies_of(program: Program, shapes: Collection[tuple[int, ...]]) -> list[Place]:
    """Lists kernels that rewrite a whole weight or cache of these shapes, maybe with other rows."""
    known = {_sides(shape) for shape in shapes}

    def is_one(place: Place) -> bool:
        taken = [shape for shape in _kept(program, place) if _sides(shape.dims) in known]
        written = _written_bytes(program, place)
        return any(shape.nbytes <= written for shape in taken)

    return [place for place in program.kernels() if is_one(place)]


def scatters(program: Program) -> list[Place]:
    """Lists scatters, and the loops that a compiler makes of them."""
    found = [place for place in program.kernels() if program.root(place).kind == "scatter"]
    loops = [place for place in program.loops() if place.op.path.rpartition("/")[2] == "scatter"]
    return [*found, *loops]


def count_kernels(program: Program, root: str | None = None) -> dict[str, int]:
    """Counts kernels by kind; custom calls and fusions by what they are."""
    kinds = (f"{place.op.kind} {place.op.target}".rstrip() for place in program.kernels(root))
    return dict(Counter(kinds).most_common())


def scope_of(path: str, depth: int = 2) -> str:
    """At most `depth` scopes of an `Op.path`, without what JAX and Flax add; `-` if none."""
    parts = [part for part in path.split("/")[:-1] if not _ADDED.fullmatch(part)]
    scopes = itertools.takewhile(re.compile(r"[a-z_]+\d*").fullmatch, parts)
    return "/".join([*scopes][:depth]) or "-"


def cycles_by(program: Program, key: str = "scope", root: str | None = None) -> dict[str, int]:
    """Expected cycles of the kernels by scope or by source line, largest first."""
    totals: Counter[str] = Counter()
    for place in program.kernels(root):
        name = scope_of(place.op.path) if key == "scope" else program.source(place.op)
        totals[name] += place.op.cycles * place.times
    return dict(totals.most_common())


def moved_bytes(program: Program, place: Place) -> int:
    """Bytes of the main memory that a kernel reads and writes.

    Slices and gathers count bytes read; in-place updates, bytes written; Triton kernels read the
    rows in use of a cache.
    """
    op = place.op
    if op.kind in _STARTS:  # of an array or a part of it, into another memory or from it
        arrays = [shape for shape in op.shapes if shape.dims]
        arrays = [arrays[0], arrays[-1]]
        return min(shape.nbytes for shape in arrays) * sum(not shape.space for shape in arrays)
    ops = program.computations[place.computation]
    taken = [ops[name] for name in op.operands if name in ops]
    written = _written_bytes(program, place)
    if op.kind == "fusion":
        inner = program.computations[op.calls[0]]
        given = [one for one in inner.values() if one.kind == "parameter"]
        return written + sum(_read(program, inner, one) for one in given)
    if op.kind in _PARTS or op.kind == "dynamic-update-slice":
        return 2 * written
    if op.target == _TRITON:
        used, rows = program.used
        caches = sum(_main(one.shapes) for one in taken if rows in one.shapes[0].dims)
        return written + sum(_main(one.shapes) for one in taken) - caches * (rows - used) // rows
    return written + sum(_main(one.shapes) for one in taken)


def _written_bytes(program: Program, place: Place) -> int:
    """Bytes of the main memory that a kernel writes."""
    ops = program.computations[place.computation]
    if place.op.kind == "fusion":
        ops = program.computations[place.op.calls[0]]
        return _written(ops, next(one for one in ops.values() if one.is_root))
    return _written(ops, place.op)


def _kept(program: Program, place: Place) -> list[Shape]:
    """Arrays of the main memory that a kernel takes and hands on, maybe in another form."""
    if place.op.kind in _COMPUTES | _STARTS or is_collective(place):
        return []
    given = program.operand_shapes(place)
    if place.op.kind == "fusion":
        ops = program.computations[place.op.calls[0]]
        given = [
            shape
            for one in ops.values()
            if one.kind == "parameter" and _is_handed_on(ops, one)
            for shape in one.shapes
        ]
    return [shape for shape in given if shape.space == 0]


def _is_handed_on(ops: Mapping[str, Op], given: Op) -> bool:
    users = [op for op in ops.values() if given.name in op.operands]
    return given.is_root or any(
        _is_handed_on(ops, user) for user in users if user.kind not in _COMPUTES
    )


def _read(program: Program, ops: Mapping[str, Op], given: Op) -> int:
    """Bytes that a fusion reads of one of its operations."""
    whole, parts = _main(given.shapes), 0
    if given.is_root:
        return whole
    for user in ops.values():
        if given.name not in user.operands:
            continue
        if user.kind in _PARTS and user.operands[0] == given.name:
            parts += _main(user.shapes, everywhere=True)
        elif user.kind == "bitcast":
            parts += _read(program, ops, user)
        elif user.kind == "fusion":
            inner = program.computations[user.calls[0]]
            number = str(user.operands.index(given.name))
            same = [one for one in inner.values() if one.kind == "parameter"]
            parts += sum(_read(program, inner, one) for one in same if one.operands == (number,))
        elif not (user.kind == "dynamic-update-slice" and user.operands[0] == given.name):
            return whole
    return min(whole, parts)


def _written(ops: Mapping[str, Op], root: Op) -> int:
    """Bytes that an operation of a computation writes, in place if it can."""
    if root.kind == "tuple":
        return sum(_written(ops, ops[name]) for name in root.operands)
    if root.kind == "dynamic-update-slice":
        return _main(ops[root.operands[1]].shapes, everywhere=True)
    if root.kind == "bitcast":
        return _written(ops, ops[root.operands[0]])
    return _main(root.shapes)


def _main(shapes: Sequence[Shape], *, everywhere: bool = False) -> int:
    return sum(shape.nbytes for shape in shapes if everywhere or shape.space == 0)


def _sides(dims: Sequence[int]) -> tuple[int, ...]:
    """Dimensions in ascending order, without any of size 1."""
    return tuple(sorted(size for size in dims if size > 1))


def _sorted_size(op: Op) -> int:
    axis = re.search(r"dimensions=\{(\d+)\}", op.rest)
    return op.shapes[0].dims[int(axis[1])] if axis else 0
