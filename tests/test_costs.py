"""The cost card: a small config counted by hand, XLA's own count, and phases that add up."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import make_engine, random_draft, random_target, tiny_llama

from infer.bench import costs, phases, rates
from infer.bench.costs import DEVICES, Cost, Device, Workload, cost_card
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.decode import speculate
from poss_jax.decode.state import StaticShape, Weights
from poss_jax.engine.engine import Engine
from poss_jax.model.families import init_draft
from poss_jax.model.quantise import quantise, quantise_specialists, sum_values, tile_values
from poss_jax.model.specialists import fuse_draft

# One layer: q and o 4 x 6 each, k and v 4 x 2 each, MLP 3 x 4 x 5; the head 10 x 4.
SHAPE = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 5, "head_dim": 2}
LLAMA = tiny_llama(**SHAPE, num_heads=3, num_kv_heads=1)
QO, KV, MLP, HEAD, FC = 48, 16, 60, 40, 32
LAYERS = 2 * (QO + KV + MLP)
PAIR = 2 * 2  # numbers in a key and a value of one row
SPANS = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2))
WORK = Workload(
    target=LLAMA, draft=SPANS, tree=TreeConfig(depth=3, top_k=2, total_tokens=5), batch=2, context=7
)


def test_target_by_hand():
    step = costs.decode(WORK)
    # 8 rows are attended: 7 and the row itself, by each of 2 sequences in each of 2 layers.
    assert step.bytes == 4 * (LAYERS + HEAD + 2 * 2 * 8 * PAIR)
    assert step.flops == 2 * 2 * (LAYERS + HEAD) + 4 * 2 * 3 * (2 * 2 * 8)
    tree = costs.cost_card(WORK, prompt_tokens=1)["verify"]
    assert tree.bytes == 4 * (LAYERS + HEAD + 2 * 2 * 12 * PAIR)
    assert tree.flops == 2 * 10 * (LAYERS + HEAD) + 4 * 2 * 3 * (2 * 10 * 12)
    assert costs.accept(WORK) == Cost(bytes=4 * 2 * 5 * 10)
    quantised = costs.decode(replace(WORK, target_bytes=1.0, cache_bytes=2.0))
    assert quantised.bytes == LAYERS + HEAD + 2 * (2 * 2 * 8 * PAIR)


def test_draft_by_hand():
    first, second, third = (costs.draft_level(WORK, depth) for depth in range(3))
    windowed = replace(WORK, draft=replace(SPANS, window=2))
    assert costs.draft_level(windowed, 0).bytes == first.bytes - 4 * (2 * 1 * PAIR)
    assert first.bytes == 4 * (QO + MLP + HEAD + 2 * 7 * PAIR)
    assert first.flops == 2 * 2 * (QO + MLP + HEAD) + 4 * 2 * 3 * (2 * 7)
    # Two new rows of each sequence are written, and attended with the context.
    level = FC + QO + KV + MLP + HEAD
    assert second.bytes == 4 * (level + (2 * 9 + 4) * PAIR)
    assert second.flops == 2 * 4 * level + 4 * 2 * 3 * (4 * 9)
    assert third.bytes == 4 * (level + (2 * 11 + 4) * PAIR)  # the same specialist's own stream
    moved = costs.draft_level(
        replace(WORK, draft=replace(SPANS, positions_per_specialist=(2, 1))), 2
    )
    assert moved.bytes - third.bytes == 4 * 4 * PAIR  # another one's: the level before it, too
    assert moved.flops - third.flops == 2 * 4 * KV
    small = costs.draft_level(replace(WORK, draft_vocabulary=3), 1)
    assert second.bytes - small.bytes == 4 * 7 * 4
    quantised = replace(WORK, specialist_bytes=1.0)
    assert second.bytes - costs.draft_level(quantised, 1).bytes == 3 * (QO + KV + MLP)
    assert costs.commit(WORK).bytes - costs.commit(quantised).bytes == 3 * 2 * KV


def test_what_a_draft_vocabulary_saves(monkeypatch):
    monkeypatch.setattr(costs, "FEW_TOKENS", 4)
    head = 3 * (10 - 4) * 4 * 4  # levels x rows of the head x its width x bytes
    full_bytes = cost_card(WORK, prompt_tokens=1)["round"].bytes
    assert costs.saved_by_vocabulary(WORK) == pytest.approx(head / full_bytes)


def test_commit_and_prefill_by_hand():
    # Rows of 4 nodes are read and written; both specialists' caches take in 4 pairs.
    assert costs.commit(WORK).bytes == 4 * (2 * 2 * 8 * PAIR + FC + 2 * KV + 2 * 8 * PAIR)
    assert costs.commit(WORK).flops == 2 * 8 * (FC + 2 * KV)
    shallow = costs.commit(replace(WORK, tree=TreeConfig(depth=1, top_k=3, total_tokens=4)))
    assert shallow.flops == 2 * 4 * (FC + KV)  # one stream is read
    assert costs.commit(replace(WORK, draft=None)) == Cost()
    prompt = costs.prefill(replace(WORK, draft=None), 3)
    assert prompt.bytes == 4 * (LAYERS + HEAD + 2 * 6 * PAIR)
    assert prompt.flops == 2 * (6 * LAYERS + 2 * HEAD) + 2 * 4 * 2 * 3 * (2 * 6)
    pairs = costs.prefill(WORK, 3)
    assert pairs.flops - prompt.flops == 2 * 6 * (FC + 2 * KV)


def test_card_adds_up():
    card = cost_card(WORK, prompt_tokens=3)
    levels = [f"draft/level{depth}" for depth in range(3)]
    assert list(card) == ["prefill", *levels, "draft", "verify", "accept", "commit", "round"]
    for total, parts in (("draft", levels), ("round", phases.PARTS)):
        assert card[total].flops == sum(card[part].flops for part in parts)
        assert card[total].bytes == sum(card[part].bytes for part in parts)
    device = Device("d", bytes_per_second=1e3, flops_per_second=1e4, memory_bytes=0)
    assert Cost(bytes=2, flops=30).milliseconds(device) == 3
    assert Cost(bytes=4, flops=30).milliseconds(device) == 4
    least = costs.floors({"verify": Cost(bytes=2, flops=30), "commit": Cost(bytes=4)}, device)
    assert least == {"verify": 3, "commit": 4, "round": 7}
    assert phases.phases_to_round({"verify": 2.0, "commit": 1.0, "round": 4.0}) == 0.75


EAGLE3 = {"family": "eagle3", "kv": "shared", "aux_layers": (0, 1), "head_size": 40}
SMALL = tiny_llama()


def workload(**draft: Any) -> Workload:
    """A chain of two levels, whose caches cost nothing."""
    tree = TreeConfig(depth=2, top_k=1, total_tokens=3)
    config = DraftConfig(layer=SMALL, **draft)
    return Workload(target=SMALL, draft=config, tree=tree, cache_bytes=0)


def count(tree: Any) -> int:
    """Numbers in a model, norms and biases apart."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim > 1)


def draft_shapes(work: Workload) -> Any:
    return jax.eval_shape(lambda: init_draft(work.draft, jax.random.key(0)))


def context_bytes(work: Workload, phase: Callable[[Workload], Cost]) -> float:
    """Bytes of five rows of context in a phase."""
    longer = phase(replace(work, context=5, cache_bytes=4)).bytes
    return longer - phase(replace(work, cache_bytes=4)).bytes


@pytest.mark.parametrize("kind", [{}, EAGLE3], ids=["eagle", "eagle3"])
def test_round_reads_every_layer_of_a_deep_specialist_once(kind):
    work = workload(positions_per_specialist=(1, 1), layers_per_specialist=(3,), **kind)
    shapes = draft_shapes(work)
    # The second specialist projects drafted rows, too, unless its stream takes them only.
    last = shapes["specialists"][1]["attention"]
    committed = 0 if kind else count([last["k"], last["v"]])
    fc = count(shapes["fc"]) * (1 if kind else 2)
    heads = 2 * (40 if kind else SMALL.vocab_size) * SMALL.hidden_size
    layers = count([shapes["specialists"], shapes["further"]])
    read = [costs.commit(work), costs.draft_level(work, 0), costs.draft_level(work, 1)]
    assert sum(phase.bytes for phase in read) == 4 * (layers + committed + fc + heads)
    row = 2 * SMALL.num_kv_heads * SMALL.head_dim
    assert context_bytes(work, costs.commit) == 4 * 2 * 5 * row  # in two of three layers


def test_looped_draft_reads_all_of_its_layers_at_every_position():
    work = workload(layers_per_specialist=(3,), **EAGLE3)
    shapes = draft_shapes(work)
    second = partial(costs.draft_level, depth=1)
    assert second(work).bytes == 4 * (count(shapes) - shapes["fc"]["weight"].size)
    row = 2 * SMALL.num_kv_heads * SMALL.head_dim
    assert context_bytes(work, second) == 4 * 3 * 5 * row


# --------------------------------------------------------------------------------------------------
# Against XLA's count of the programs that run


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A pair whose weights outweigh everything else, as in real models."""
    llama = tiny_llama(
        vocab_size=512, hidden_size=128, intermediate_size=512, num_heads=4, head_dim=16
    )
    config = DraftConfig(layer=llama, positions_per_specialist=(2, 2))
    tree = TreeConfig(depth=3, top_k=8, total_tokens=24)
    return make_engine(llama, random_target(llama), config, tree=tree)


@pytest.mark.usefixtures("without_kernel")
def test_xla_counts_the_same(engine):
    """FLOPs are between 0.8 and 1 times XLA's; the phases' add up to the round's.

    XLA counts what the cards leave out: softmax and norms, and attention over all rows there is
    room for.
    """
    prompt = engine.prepare([*range(32)] * 2, 8)  # a chunk, which XLA counts once
    batch, weights = phases.Batch(engine, [prompt]), engine.weights
    config, request, state = batch.config, batch.request, batch.state
    shallow = [config._replace(tree=tree) for tree in phases.shallower(config)]
    tree = phases.draft_tree(weights, shallow[-1], request, state)
    out = phases.verify_tree(weights, config, state, tree)
    acceptance = phases.accept(weights, config, request, state, tree, out.logits)

    def flops(program: Any, *arguments: Any) -> float:
        place = next(i for i, one in enumerate(arguments) if isinstance(one, StaticShape))
        arrays = [one for i, one in enumerate(arguments) if i != place]
        leaves, treedef = jax.tree.flatten(arrays)

        def run(leaves: list[Any]) -> Any:  # lowered with types that jaxtyping knows
            given = treedef.unflatten(leaves)
            return program(*given[:place], arguments[place], *given[place:])

        return jax.jit(run).lower(leaves).cost_analysis()["flops"]

    deeper = [flops(phases.draft_tree, weights, one, request, state) for one in shallow]
    levels = np.diff(deeper, prepend=0.0)
    found = {f"draft/level{depth}": number for depth, number in enumerate(levels)}
    found |= {
        "draft": deeper[-1],
        "verify": flops(phases.verify_tree, weights, config, state, tree),
        "accept": flops(phases.accept, weights, config, request, state, tree, out.logits),
        "commit": flops(phases.commit, weights, config, request, state, out, acceptance),
        "round": flops(phases.run_round, weights, config, request, state),
        "prefill": flops(speculate.start, weights, config, request),
    }
    assert phases.phases_to_round(found) == pytest.approx(1, abs=0.1)
    work = costs.describe_workload(weights, config, batch=1, context=len(prompt.ids))
    card = cost_card(work, prompt_tokens=len(prompt.ids))
    assert set(found) == set(card)
    del card["accept"]  # holds no product
    found["commit"] /= 2  # 4 rows, padded to 8 on CPU
    ratios = {name: cost.flops / found[name] for name, cost in card.items()}
    assert min(ratios.values()) > 0.8 and max(ratios.values()) <= 1, ratios


def test_bytes_are_those_of_the_arrays(engine):
    """Norms and scales, which belong to the layers, add a little."""
    config, weights = engine.decode_config(1), engine.weights
    assert config.draft is not None
    draft = quantise_specialists(random_draft(config.draft), "int8")
    quantised = {**weights.draft, **fuse_draft(draft, config.draft)}
    for draft, bytes_per_weight in ((weights.draft, 4), (quantised, 1)):
        work = costs.describe_workload(Weights(weights.target, draft), config, batch=1, context=0)
        assert bytes_per_weight <= work.specialist_bytes < 1.05 * bytes_per_weight
        assert work.draft_bytes == 4


def test_copies_alone_are_a_phase() -> None:
    target = random_target(LLAMA)
    engine = make_engine(LLAMA, target, tree=TreeConfig(depth=2, top_k=2, total_tokens=4), lookup=3)
    prompt = engine.prepare([1, 2, 3], 8)
    batch = phases.Batch(engine, [prompt])
    assert batch.draft(batch.config.tree).tokens.shape == (1, 4)
    card = phases.measure_card(engine, prompt, DEVICES["v5e"], num_calls=1)
    names = {"prefill", *phases.PARTS, "round"}
    assert set(card["phase_milliseconds"]) == set(card["costs"]) == names


def test_copies_by_hand() -> None:
    """A draft's tree keeps its 5 nodes, with paths of up to 4 copies; alone they are a chain."""
    both, alone = replace(WORK, lookup=9), replace(WORK, draft=None, lookup=9)
    cards = [costs.cost_card(work, prompt_tokens=1) for work in (both, alone, WORK)]
    assert len({card["verify"] for card in cards}) == 1
    assert costs.accept(both) == costs.accept(alone) == costs.accept(WORK)
    assert costs.commit(alone) == Cost(bytes=4 * 2 * 2 * (2 * 5) * PAIR)
    # A row more of the target's caches, and a pair more of the draft's, both by 2 sequences.
    more = costs.commit(both).bytes - costs.commit(WORK).bytes
    assert more == 4 * 2 * (2 * 2 + both.draft.num_streams(3)) * PAIR
    assert cost_card(replace(alone, lookup=0), prompt_tokens=1) == cost_card(
        replace(WORK, draft=None), prompt_tokens=1
    )


# --------------------------------------------------------------------------------------------------
# Rates of this device


def with_head(weight: Any) -> Weights:
    return Weights({"head": {"weight": weight}}, {})


def test_int8_models_have_the_rate_of_their_kernel():
    device = Device("d", bytes_per_second=1.0, flops_per_second=2.0, memory_bytes=0)
    plain = jnp.ones((64, 64))
    tiled = tile_values(sum_values({"weight": quantise(plain, "int8")}))["weight"]
    for by_rows, weight, rate in (
        ({"int8": 7.0}, tiled, 7.0),
        ({"int8": 7.0}, plain, 2.0),
        ({"512": 2.0}, tiled, 2.0),
    ):
        assert (
            rates.Roofline(device, by_rows).device_for(with_head(weight)).flops_per_second == rate
        )


def test_rates_are_measured_once(tmp_path, monkeypatch):
    sizes: list[int] = []

    def seconds(program: Any, *arrays: Any) -> float:
        del program
        sizes.append(arrays[0].nbytes)
        return 0.5 if len(arrays) == 1 else 1.0

    monkeypatch.setattr(rates, "_best_seconds", seconds)
    monkeypatch.setattr(rates, "_WIDTHS", {"cpu": (64, 16)})
    file = tmp_path / "new" / "roofline.json"
    monkeypatch.setattr(rates, "_file", lambda: file)
    found = rates.find_roofline()
    assert found.device.bytes_per_second == 4 * 64 * 64 / 0.5
    assert found.flops_by_rows["16"] == 2 * 16 * 64 * 64
    rate = max(rate for name, rate in found.flops_by_rows.items() if name != "int8")
    assert found.device.flops_per_second == rate
    count = len(sizes)
    assert rates.find_roofline() == found and len(sizes) == count
    for broken in ("{", "[]", json.dumps({found.device.name: {}})):
        file.write_text(broken)
        assert rates.find_roofline() == found
    monkeypatch.setattr(rates, "_file", lambda: None)
    assert rates.find_roofline() == found
