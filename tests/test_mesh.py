"""Decoding on several devices: the same texts, everything really in parts, no weight gathered."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import make_engine, random_target, tiny_llama

from infer import lossless_run
from infer.bench import measure, phases
from infer.bench.costs import DEVICES
from infer.tune import search
from poss_jax import Engine, SamplingConfig, TreeConfig, UserError
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import DraftConfig, MeshConfig
from poss_jax.decode.tree import root_tree
from poss_jax.engine.batch import FixedBatch
from poss_jax.engine.device import least_bytes
from poss_jax.model.quantise import quantise_target
from poss_jax.model.ranking import top_k
from poss_jax.model.sharding import decoding_mesh, make_mesh

LLAMA = tiny_llama(vocab_size=256, num_heads=16, num_kv_heads=8, intermediate_size=64)
POSS = DraftConfig(layer=replace(LLAMA, num_layers=1), positions_per_specialist=(1, 1))
DEEP = replace(POSS, layers_per_specialist=(3, 1))
TWO_KV_HEADS = replace(LLAMA, num_kv_heads=2)
E3 = DraftConfig(
    layer=replace(TWO_KV_HEADS, num_layers=1),
    positions_per_specialist=(2,),
    family="eagle3",
    kv="shared",
    aux_layers=(0, 1),
    head_size=128,
)
TREE = TreeConfig(depth=2, top_k=2, total_tokens=5)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8]]
SAMPLED = SamplingConfig(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=3)
MIXED = [SAMPLED, SamplingConfig(), SamplingConfig(temperature=1, seed=4)]
EIGHT = MeshConfig(data=1, tensor=8)
N = 12


def random_engine(
    draft: DraftConfig,
    mesh: MeshConfig | None,
    *,
    kind: Any = None,
    vocabulary: Any = None,
    num_layers: int = LLAMA.num_layers,
) -> Engine:
    """An engine with random weights; the target's layers are as the draft's."""
    llama = replace(draft.layer, num_layers=num_layers)
    target = random_target(llama)
    if kind is not None:
        target = quantise_target(target, kind)
    return make_engine(llama, target, draft, vocabulary=vocabulary, tree=TREE, mesh=mesh)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return random_engine(POSS, EIGHT)


def moved(text: str) -> Iterator[tuple[str, int]]:
    """Arrays that a program moves between devices to gather or reshard them: line, numbers."""
    kinds = "all-gather|all-to-all|collective-permute"
    for line in text.splitlines():
        if found := re.search(rf"= (.*?) (?:{kinds})(?:-start)?\(", line):
            shapes = re.findall(r"\[([\d,]*)\]", found[1])
            yield line, max(math.prod(map(int, filter(None, s.split(",")))) for s in shapes)


# --------------------------------------------------------------------------------------------------
# Texts


@pytest.mark.quick
def test_a_stream_on_eight_devices_is_that_of_one() -> None:
    engine, plain = (random_engine(DEEP, mesh) for mesh in (EIGHT, None))
    assert plain.mesh is None
    for one in (engine, plain):
        *_, last = one.stream(PROMPTS[0], max_new_tokens=N)
        assert last.answer is not None
        if one is engine:
            answer = last.answer
    assert answer == last.answer
    assert len(answer.accepted_per_round) > 2


@pytest.mark.slow
def test_a_mixed_batch_of_three_on_two_groups_of_four_is_that_of_one_device() -> None:
    """Two key heads do not divide among four, and the groups are done after different rounds."""
    prompts = [*PROMPTS[:2], [5] * 400]
    call = {"max_new_tokens": N, "batch_size": 3, "sampling": MIXED}
    vocabulary = tuple(range(0, 256, 2))
    draft = {"kind": "int8", "vocabulary": vocabulary}
    groups, one = (random_engine(E3, mesh, **draft) for mesh in (MeshConfig(tensor=4), None))
    answers = groups.generate(prompts, **call)
    assert answers == one.generate(prompts, **call)
    rounds = [len(answer.accepted_per_round) for answer in answers]
    assert max(rounds[:2]) != rounds[2]


@pytest.mark.slow
def test_sampled_drafts_on_two_groups_of_four_write_the_texts_of_one_device() -> None:
    call = {"max_new_tokens": N, "batch_size": 3, "sampling": MIXED}
    answers = [
        random_engine(POSS, mesh).with_tree(TREE, drafting="sampled").generate(PROMPTS, **call)
        for mesh in (MeshConfig(tensor=4), None)
    ]
    assert answers[0] == answers[1]


# --------------------------------------------------------------------------------------------------
# Parts


def test_weights_and_caches_are_held_in_parts(engine: Engine) -> None:
    target, draft = engine.weights
    layer, specialist = target["layers"][0], draft["specialists"][1]
    cut = {
        "embed": (target["embed"]["weight"], (32, 32)),
        "head": (target["head"]["weight"], (32, 32)),
        "qkv": (layer["attention"]["qkv"]["weight"], (32, 32)),
        "o": (layer["attention"]["o"]["weight"], (32, 16)),
        "gate_up": (layer["mlp"]["gate_up"]["weight"], (2, 8, 32)),
        "down": (layer["mlp"]["down"]["weight"], (32, 8)),
        "kv": (specialist["attention"]["kv"]["weight"], (16, 32)),
        "fc": (draft["fc"]["weight"], (4, 64)),
    }
    for name, (leaf, shape) in cut.items():
        assert leaf.sharding.shard_shape(leaf.shape) == shape, name
    assert draft["head"]["weight"] is target["head"]["weight"]
    batch = FixedBatch(engine, [engine.prepare(PROMPTS[0], N)])
    batch.start()
    config, state = batch.config, batch.state
    for cache in (state.target_cache, state.draft.cache):
        assert cache.k[0].sharding.shard_shape(cache.k[0].shape) == (1, 1, config.rows, 8)
        assert cache.v[0].sharding.spec == P(None, "tensor")
    one = random_engine(POSS, None)
    sizes = [
        least_bytes(e.weights, FixedBatch(e, [e.prepare([1], N)]).config, batch_size=1)
        for e in (engine, one)
    ]
    assert sizes[0] < sizes[1] / 6


def test_a_quantised_weight_is_cut_with_its_scale_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poss_jax.engine.models.wants_sums", lambda: True)
    weights = random_engine(POSS, EIGHT, kind="int8").weights.target["layers"][0]
    both, o = weights["mlp"]["gate_up"]["weight"], weights["attention"]["o"]["weight"]
    assert both.values.sharding.spec == P(None, "tensor", None)
    assert both.scale.sharding.spec == both.sums.sharding.spec == P(None, "tensor")
    assert o.values.sharding.spec == P(None, "tensor") and o.scale.sharding.spec == P(None)


def test_a_round_moves_no_weight_no_cache_and_no_scores() -> None:
    engine = random_engine(DEEP, EIGHT)
    batch = FixedBatch(engine, [engine.prepare(PROMPTS[0], N)])
    batch.start()
    _, config, request, state = batch.arguments
    leaves, tree = jax.tree.flatten((request, state))

    @jax.jit
    def run_round(weights, leaves):
        return jax.tree.leaves(phases.run_round(weights, config, *tree.unflatten(leaves)))

    text = run_round.lower(engine.weights, leaves).compile().as_text()
    assert "all-reduce" in text
    width, most_rows = 2 * LLAMA.hidden_size, config.tree.num_nodes
    large = [line for line, numbers in moved(text) if numbers > width * most_rows]
    assert large == []


@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_loaded_weights_are_those_of_one_device(fixtures: Path, num_kv_heads: int) -> None:
    folder = fixtures / "format_v1"
    mesh = MeshConfig(data=-1, tensor=num_kv_heads)
    pair = folder / "target", folder / "draft", EngineConfig(tree=TREE)
    engines = [Engine.load(*pair, mesh=m) for m in (mesh, None)]
    cut, whole = (jax.tree.leaves(engine.weights) for engine in engines)
    assert sum(not leaf.sharding.is_fully_replicated for leaf in cut) > 10
    for a, b in zip(cut, whole, strict=True):
        np.testing.assert_array_equal(a, b)


# --------------------------------------------------------------------------------------------------
# What is measured


def test_measured_programs_run_on_the_mesh(engine: Engine) -> None:
    batch = FixedBatch(engine, [engine.prepare(PROMPTS[0], N)])
    batch.start()
    _, config, request, state = batch.arguments
    tree = root_tree(state.root)
    out = phases.verify_tree(engine.weights, config, state, tree)
    assert out.logits.sharding.spec == P(None, None, "tensor")  # nobody gathers them
    programs = {
        phases.draft_tree: (request, state),
        phases.verify_tree: (state, tree),
        phases.accept: (request, state, tree, out.logits),
        lossless_run._start: (request,),
        lossless_run._run_round: (request, state),
        search._record_step: (request, state),
        search._finish_round: (request, state, tree),
        measure._plain_steps: (request, state),
        measure._loop: (request, state),
    }
    for program, arrays in programs.items():
        assert "shard_map" in str(program.trace(engine.weights, config, *arrays).jaxpr)


def test_floors_are_those_of_a_device(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "prefill", "draft/level0", "draft/level1", "draft", "verify", "accept", "commit"
    milliseconds = dict.fromkeys((*names, "round"), 1.0)
    monkeypatch.setattr(phases, "measure_phases", lambda *_, **__: milliseconds)
    ones = np.ones(2)
    monkeypatch.setattr(measure, "time_in_turn", lambda programs, *_: dict.fromkeys(programs, ones))
    rates, whole = DEVICES["v5e"], random_engine(POSS, None)
    groups = random_engine(POSS, MeshConfig(data=2, tensor=4))
    for one, num_parts in ((engine, 8), (groups, 4)):
        cards = [
            phases.measure_card(each, each.prepare(PROMPTS[1], N), rates)["costs"]
            for each in (whole, one)
        ]
        for name, cost in cards[0].items():
            for key in ("bytes", "flops", "floor_milliseconds"):
                assert cards[1][name][key] == pytest.approx(cost[key] / num_parts)
    floors = [
        measure.measure_steps(each, each.prepare(PROMPTS[1], N), rates)["floor"]
        for each in (whole, engine)
    ]
    assert floors[1] == pytest.approx(floors[0] / 8)


# --------------------------------------------------------------------------------------------------
# The best of cut scores


@pytest.mark.parametrize("k", [3, 11])
def test_the_best_of_cut_scores_are_those_of_whole_ones(k: int) -> None:
    mesh = make_mesh(EIGHT)
    scores = jnp.asarray(np.random.default_rng(k).integers(0, 9, (2, 3, 64)), jnp.float32)
    scores = jax.device_put(scores, NamedSharding(mesh, P(None, None, "tensor")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda scores: top_k(scores, k)).lower(scores).compile()
    best, ids = compiled(scores)
    expected = lax.top_k(np.asarray(scores), k)
    np.testing.assert_array_equal(best, expected[0])
    np.testing.assert_array_equal(ids, expected[1])
    assert all(numbers <= 6 * 8 * min(k, 8) for _, numbers in moved(compiled.as_text()))


# --------------------------------------------------------------------------------------------------
# Grids


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"tensor": 3}, "mesh data=-1 fsdp=1 tensor=3 does not fit 8 devices"),
        ({"data": 1, "tensor": 4}, "want sizes whose product is 8"),
        ({"fsdp": 2}, r"^mesh\.fsdp 2: decoding would gather .*; want 1, and the devices in .*$"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(sizes: dict[str, int], error: str) -> None:
    with pytest.raises(UserError, match=error):
        Engine.load("nowhere", mesh=MeshConfig(**sizes))


def test_a_grid_of_one_is_no_grid() -> None:
    assert decoding_mesh(MeshConfig(data=1)) is None
    assert isinstance(decoding_mesh(MeshConfig()), Mesh)
