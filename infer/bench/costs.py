"""The cost card: bytes and FLOPs of every phase of decoding, and the least time they take.

Bytes are the weights, once per phase, the cache rows that are attended or written, and the logits
that are read; FLOPs are the matrix products. Norms, biases, looked-up embeddings, activations and
the ids that lookup reads are left out, since weights dwarf them.

    level = draft_level(work, depth=0)
    level.milliseconds(DEVICES["h100"])    # its floor on this device

An idle device needs at least the time of moving a phase's bytes or of computing its FLOPs,
whichever is longer. Phases run one after another, so a round's floor is the sum of its phases'.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh

from poss_jax.config.models import ACCELERATOR_TREE, DraftConfig, LlamaConfig, TreeConfig
from poss_jax.decode.state import StaticShape, Weights
from poss_jax.model.parameters import item_shapes
from poss_jax.model.target import compute_dtype


@dataclass(frozen=True)
class Device:
    """Bandwidth and size of a device's memory, and its rate of dense matrix products.

    The rate is of the products that decoding computes: bfloat16, on a CPU float32, or those of the
    kernel with int8 weights.
    """

    name: str
    bytes_per_second: float
    flops_per_second: float
    memory_bytes: float


DEVICES = {
    device.name: device
    for device in (
        Device("v5e", 819e9, 197e12, 16e9),
        Device("v5p", 2765e9, 459e12, 95e9),
        Device("v6e", 1640e9, 918e12, 32e9),
        Device("h100", 3350e9, 989e12, 80e9),
        Device("h200", 4800e9, 989e12, 141e9),
    )
}
"""Datasheet numbers of TPU chips and GPUs (SXM), by name."""

FEW_TOKENS = 32_000
"""Tokens of a usual draft vocabulary, as of EAGLE-3's heads."""


@dataclass(frozen=True)
class Cost:
    """Bytes moved and floating-point operations of matrix products (a multiply-add counts two)."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, cost: "Cost") -> "Cost":
        return Cost(self.bytes + cost.bytes, self.flops + cost.flops)

    def __truediv__(self, parts: int) -> "Cost":
        return Cost(self.bytes / parts, self.flops / parts)

    def milliseconds(self, device: Device) -> float:
        """The floor: the longer of moving the bytes and computing the FLOPs."""
        seconds = self.bytes / device.bytes_per_second, self.flops / device.flops_per_second
        return 1000 * max(seconds)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A decoding method whose phases are counted; bytes are per weight, of caches per number."""

    target: LlamaConfig
    draft: DraftConfig | None = None  # None decodes autoregressively
    tree: TreeConfig = ACCELERATOR_TREE
    lookup: int = 0  # most tokens that a round copies, with or without a draft
    batch: int = 1  # sequences
    context: int = 0  # committed tokens of each
    draft_vocabulary: int | None = None  # tokens that the draft may propose; None: all of its head
    target_bytes: float = 4.0  # of its layers and head; 1 if they are quantised
    specialist_bytes: float = 4.0  # of the specialists' layers
    draft_bytes: float = 4.0  # of the draft's other matrices
    cache_bytes: float = 4.0

    @property
    def shape(self) -> StaticShape:
        """The same as a setting of decoding, which knows the size of a round's tree."""
        return StaticShape(self.target, self.draft, self.tree, rows=0, lookup=self.lookup)


def describe_workload(
    weights: Weights, config: StaticShape, *, batch: int, context: int
) -> Workload:
    """Describes a decoding method, with the bytes per weight that its arrays really have."""
    target = config.target
    arrays = weights.target["layers"], weights.target["head"]
    size = target.num_layers * _layer_weights(target) + target.vocab_size * target.hidden_size
    work = Workload(
        target=target,
        tree=config.tree,
        lookup=config.lookup,
        batch=batch,
        context=context,
        target_bytes=_num_bytes(arrays) / size,
        draft_bytes=compute_dtype(weights.target).itemsize,
        cache_bytes=compute_dtype(weights.target).itemsize,
    )
    if config.draft is None:
        return work
    specialists = weights.draft["specialists"]
    further = weights.draft.get("further", [])
    size = _layer_weights(config.draft.layer, _input_width(config.draft))
    size = len(specialists) * (size + _project_weights(config.draft))
    size += len(further) * _layer_weights(config.draft.layer)
    return replace(
        work,
        draft=config.draft,
        draft_vocabulary=weights.draft["head"]["weight"].shape[0],
        specialist_bytes=_num_bytes((specialists, further)) / size,
    )


def cost_card(work: Workload, *, prompt_tokens: int) -> dict[str, Cost]:
    """Costs of prompts of that length and of a round's phases, by name.

    Returns:
      `prefill`, `draft/level0`, `draft/level1`, ..., all levels as `draft`, `verify`, `accept`,
      `commit`, and all phases but the prefill as `round`; without a draft no levels, and without
      lookup, too, no `draft`.
    """
    levels = range(work.tree.depth if work.draft else 0)
    phases = {f"draft/level{depth}": draft_level(work, depth) for depth in levels}
    drafting = {"draft": sum(phases.values(), Cost())} if work.shape.max_accepted else {}
    verify = decode(work, work.shape.num_nodes)  # of the root alone without a draft and lookup
    later = {"verify": verify, "accept": accept(work), "commit": commit(work)}
    total = sum([*phases.values(), *later.values()], Cost())
    return {"prefill": prefill(work, prompt_tokens), **phases, **drafting, **later, "round": total}


def saved_by_vocabulary(work: Workload) -> float:
    """Share of a round's bytes that is saved if the draft proposes only `FEW_TOKENS`."""
    full, reduced = (
        cost_card(replace(work, draft_vocabulary=size), prompt_tokens=1)["round"].bytes
        for size in (work.draft_vocabulary, FEW_TOKENS)
    )
    return 1 - reduced / full


def floors(card: dict[str, Cost], device: Device) -> dict[str, float]:
    """Least milliseconds of every phase of a card; `draft` and `round` add up their parts."""
    floor = {name: cost.milliseconds(device) for name, cost in card.items()}
    levels = [floor[name] for name in card if name.startswith("draft/")]
    floor |= {"draft": sum(levels)} if levels else {}
    parts = [floor[name] for name in ("draft", "verify", "accept", "commit") if name in floor]
    return floor | {"round": sum(parts)}


def num_parts(mesh: Mesh | None) -> int:
    """Devices that share the work of a group; each group along `data` has its own sequences."""
    return 1 if mesh is None else mesh.shape["tensor"]


def prefill(work: Workload, num_tokens: int) -> Cost:
    """Prompts of `num_tokens` through the target, and their pairs into the draft's caches."""
    config, rows = work.target, work.batch * num_tokens
    weights = config.num_layers * _layer_weights(config)
    pairs = work.batch * num_tokens * (num_tokens + 1) / 2
    costs = [
        _product(weights, rows, work.target_bytes),
        _attention(work, config, rows, pairs, config.num_layers),
        _product(config.vocab_size * config.hidden_size, work.batch, work.target_bytes),
        _commit_pairs(work, rows, attended=0, pairs=pairs),
    ]
    return sum(costs, Cost())


def decode(work: Workload, num_rows: int = 1) -> Cost:
    """One autoregressive step, or the target's pass over more rows, such as the nodes of a tree."""
    config, rows = work.target, work.batch * num_rows
    weights = config.num_layers * _layer_weights(config) + config.vocab_size * config.hidden_size
    attended = work.context + num_rows
    costs = [
        _product(weights, rows, work.target_bytes),
        _attention(work, config, work.batch * attended, rows * attended, config.num_layers),
    ]
    return sum(costs, Cost())


def draft_level(work: Workload, depth: int) -> Cost:
    """One position of drafting: a row that is committed already, or top_k new rows.

    From the second position on, the rows' inputs are joined and their keys and values projected. A
    specialist that reads its own stream also projects the tree's earlier rows again. The rows of a
    looped draft pass its further layers, too. P-EAGLE runs all positions after the first at once.
    """
    draft = work.draft
    assert draft is not None, "want a workload with a draft"
    if draft.mask_token is not None and depth > 1:
        return _draft_head(work, draft, work.batch * work.tree.top_k)
    project = _project_weights(draft)
    layer, width, top_k = draft.layer, _input_width(draft), work.tree.top_k
    if depth == 0 and draft.num_further:  # the last of its layers
        width = layer.hidden_size
    rows, new = (work.batch, 0) if depth == 0 else (work.batch * top_k, work.batch * top_k)
    if depth and draft.stream_at(depth) != draft.stream_at(depth - 1):
        new *= depth
    attended = _draft_context(work, draft) + depth * top_k
    costs = [
        _product(
            _layer_weights(layer, width) - _key_value_weights(layer, width),
            rows,
            work.specialist_bytes,
        ),
        _product(project, new or rows, work.specialist_bytes),
        _attention(work, layer, work.batch * attended + new, rows * attended),
        _draft_head(work, draft, rows),
    ]
    if depth:
        costs.append(_product(_key_value_weights(layer, width), new, work.specialist_bytes))
        if width <= layer.hidden_size:  # else specialists read both halves apart
            costs.append(_product(_fuse_weights(draft), rows, work.draft_bytes))
    if depth and draft.is_looped:
        further, moved = draft.num_further, work.batch * attended + new
        costs.append(_product(further * _layer_weights(layer), rows, work.specialist_bytes))
        costs.append(_attention(work, layer, moved, rows * attended, further))
    return sum(costs, Cost())


def accept(work: Workload) -> Cost:
    """Choosing a token after every node: reads the logits, which are float32."""
    return Cost(bytes=4 * work.batch * work.shape.num_nodes * work.target.vocab_size)


def commit(work: Workload) -> Cost:
    """The accepted path into the caches: rows of the target's, pairs of the draft's."""
    length = work.shape.max_accepted + 1
    if length == 1:
        return Cost()
    rows = work.batch * length
    moved = _attention(work, work.target, 2 * rows, 0.0, work.target.num_layers)  # read and written
    if work.draft is None:
        return moved
    context = _draft_context(work, work.draft)
    pairs = rows * (context + length)
    return moved + _commit_pairs(work, rows, attended=work.batch * context, pairs=pairs)


def _draft_context(work: Workload, draft: DraftConfig) -> int:
    """Context rows that a draft attends."""
    return min(work.context, draft.num_sinks + (draft.window or work.context))


def _commit_pairs(work: Workload, rows: int, *, attended: int, pairs: float) -> Cost:
    """Projects pairs, and their keys and values for every stream that the tree reads.

    All layers but the last of a first specialist also attend and finish them.
    """
    if work.draft is None:
        return Cost()
    draft, layer, further = work.draft, work.draft.layer, work.draft.num_further
    streams = draft.num_streams(work.tree.depth)
    widths = [_input_width(draft), *[layer.hidden_size] * further]
    key_values = [_key_value_weights(layer, width) for width in widths]
    weights = (streams - len(widths)) * key_values[0] + sum(key_values)
    weights += streams * _project_weights(draft)
    for width, key_value in zip(widths[:-1], key_values[:-1], strict=True):
        weights += _layer_weights(layer, width) - key_value
    costs = [
        _product(_fuse_weights(draft), rows, work.draft_bytes),
        _product(weights, rows, work.specialist_bytes),
        _attention(work, layer, streams * rows + further * attended, further * pairs),
    ]
    return sum(costs, Cost())


def _draft_head(work: Workload, draft: DraftConfig, rows: int) -> Cost:
    tokens = work.draft_vocabulary or draft.head_size or work.target.vocab_size
    each = work.target_bytes if draft.head_size is None else work.draft_bytes
    return _product(tokens * draft.layer.hidden_size, rows, each)


def _product(weights: int, rows: int, bytes_per_weight: float) -> Cost:
    """Cost of multiplying rows by a weight."""
    return Cost(weights * bytes_per_weight, 2.0 * weights * rows)


def _attention(
    work: Workload, config: LlamaConfig, rows: int, pairs: float, layers: int = 1
) -> Cost:
    """Cost of moving keys and values of `rows` rows, and of attention over pairs (query, key)."""
    size = layers * config.head_dim
    moved = 2 * config.num_kv_heads * size * rows * work.cache_bytes
    return Cost(moved, 4 * config.num_heads * size * pairs)


def _num_bytes(arrays: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def _layer_weights(config: LlamaConfig, width: int | None = None) -> int:
    """Number of weights of a layer's products, for input of a width (None: the hidden size)."""
    width = width or config.hidden_size
    heads = config.num_heads * config.head_dim
    attention = heads * (width + config.hidden_size) + _key_value_weights(config, width)
    return attention + 3 * config.hidden_size * config.intermediate_size


def _key_value_weights(config: LlamaConfig, width: int) -> int:
    return 2 * config.num_kv_heads * config.head_dim * width


_item_shapes = cache(item_shapes)  # of a few drafts, each asked for at every level


def _input_width(draft: DraftConfig) -> int:
    """Width of what a specialist attends with: a state, or an embedding and a state."""
    return _item_shapes(draft)["specialists/0"]["attention"]["q"]["weight"][1]


def _fuse_weights(draft: DraftConfig) -> int:
    """Weights of `fc`, which joins a feature of the target to an embedding or to a state."""
    return prod(_item_shapes(draft)["fc"]["weight"]) if "fc" in _item_shapes(draft) else 0


def _project_weights(draft: DraftConfig) -> int:
    """Weights that join both halves in a specialist that has a projection."""
    specialist = _item_shapes(draft)["specialists/0"]
    return prod(specialist["project"]["weight"]) if "project" in specialist else 0
