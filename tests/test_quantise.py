"""Quantised targets: rounding, the seam in `linear`, texts, model folders, refusals."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import PHI3, draft_tensors, fuse, run, target_tensors, write_source
from jax.sharding import PartitionSpec as P
from models import (
    assert_same,
    make_engine,
    needs_f16c,
    random_draft,
    random_target,
    random_tokens,
    stacked,
    tiny_llama,
)
from oracle import Shape
from programs import Runs, copy_model, generate, refusal, summary, write_lines

from poss_jax import Engine, SamplingConfig, TreeConfig, UserError
from poss_jax.checkpoint.folder import check_quantisation, load_target
from poss_jax.checkpoint.record import read_record
from poss_jax.checkpoint.writing import verify_model
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import DraftConfig, MeshConfig
from poss_jax.convert.__main__ import main as convert_main
from poss_jax.decode import speculate
from poss_jax.engine.batch import FixedBatch
from poss_jax.model.documents import encode
from poss_jax.model.linear import linear
from poss_jax.model.parameters import partition, place_tree, place_weights
from poss_jax.model.quantise import (
    KINDS,
    Quantised,
    pack,
    quantise,
    quantise_items,
    quantise_target,
    unpack,
)
from poss_jax.model.sharding import make_mesh
from train.regenerate import main as regenerate_main

READ = ["int8", pytest.param("fp8", marks=needs_f16c)]
kinds = pytest.mark.parametrize("kind", KINDS)
read_kinds = pytest.mark.parametrize("kind", READ)  # where values are read, not only written
MESH = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
TREE = TreeConfig(depth=2, top_k=3, total_tokens=7)
PROMPTS = ["def area_7", "def area_1_1(width, heig", [0, 5, 260]]
SAMPLED = SamplingConfig(temperature=0.8, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def quantised(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The trained target as the converter quantises it: kind -> model folder."""
    folder = tmp_path_factory.mktemp("quantised")
    run("export", model=runs.model("target"), output=folder / "exported")
    for kind in KINDS:
        run("target", source=folder / "exported", output=folder / kind, quantise=kind)
    return {kind: str(folder / kind) for kind in KINDS}


def dequantise(weight: Quantised) -> jax.Array:
    """The float32 weight that a quantised one stands for."""
    return weight.values.astype(jnp.float32) * weight.scale[:, None]


def dequantised(params: Any) -> Any:
    """The float32 target that a quantised one stands for."""
    is_leaf = lambda leaf: isinstance(leaf, Quantised)  # noqa: E731
    return jax.tree.map(lambda x: dequantise(x) if is_leaf(x) else x, params, is_leaf=is_leaf)


# --------------------------------------------------------------------------------------------------
# Rounding


def test_int8_drawn():
    weight = quantise(jnp.array([[1.0, -2.54, 0.49], [0.0, 0.0, 0.0]]), "int8")
    assert weight.values.dtype == jnp.int8
    np.testing.assert_array_equal(weight.values, [[50, -127, 24], [0, 0, 0]])
    np.testing.assert_allclose(weight.scale, [0.02, 1.0], rtol=1e-6)


@needs_f16c
def test_fp8_drawn():
    weight = quantise(jnp.array([[448.0, -1.0, 1.1, 0.001]]), "fp8")
    assert weight.values.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(weight.values.astype(jnp.float32), [[448, -1, 1.125, 2**-9]])
    np.testing.assert_array_equal(weight.scale, [1.0])


@read_kinds
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, pytest.param(jnp.float16, marks=needs_f16c)]
)
def test_error_is_bounded(kind, dtype):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 96)) * 10.0 ** rng.integers(-4, 4, (64, 1))
    weight = jnp.asarray(weight, dtype)
    rounded = quantise(weight, kind)
    wide, scale = np.asarray(weight, np.float32), np.asarray(rounded.scale)[:, None]
    bound = scale / 2 if kind == "int8" else np.maximum(np.abs(wide) / 16, scale * 2**-10)
    error = np.abs(dequantise(rounded) - wide)
    assert (error <= bound * (1 + 1e-5)).all()
    assert error.max(axis=1).min() > 0
    np.testing.assert_allclose(np.abs(dequantise(rounded)).max(1), np.abs(wide).max(1), rtol=1e-6)


@read_kinds
def test_outputs_are_quantised_apart(kind):
    """So weights may be joined, and outputs taken, before or after quantisation."""
    a, b = (jnp.asarray(np.random.default_rng(seed).normal(size=(5, 8))) for seed in (0, 1))
    together = quantise(jnp.concatenate([a, b]), kind)
    assert together.shape == (10, 8)
    joined = jax.tree.map(lambda *x: jnp.concatenate(x), quantise(a, kind), quantise(b, kind))
    assert_same(together, joined)
    rows = jnp.array([7, 0])
    taken = jax.tree.map(lambda leaf: leaf[rows], together)
    assert_same(taken, quantise(jnp.concatenate([a, b])[rows], kind))


@kinds
def test_matrices_and_head_are_quantised_embedding_norms_and_biases_are_not(kind):
    params = random_target(tiny_llama(qkv_bias=True, qk_norm=True))
    flat = jax.tree_util.tree_leaves_with_path(quantise_target(params, kind))
    types = {jax.tree_util.keystr(p, simple=True, separator="/"): x.dtype for p, x in flat}
    small = {path for path, dtype in types.items() if dtype.itemsize == 1}
    names = [f"attention/{n}" for n in "qkvo"] + [f"mlp/{n}" for n in ("gate", "up", "down")]
    want = {f"layers/{i}/{name}/weight/values" for i in range(2) for name in names}
    assert small == want | {"head/weight/values"}
    assert {dtype for path, dtype in types.items() if path not in small} == {jnp.dtype("float32")}


@kinds
def test_items_are_those_of_the_whole(kind):
    params = random_target(tiny_llama(tie_embeddings=True))
    items = (("embed", params["embed"]), ("layers/1", params["layers"][1]))
    head, embed, layer = quantise_items(items, kind, dtype=jnp.bfloat16, is_tied=True)
    want = quantise_target(params, kind)
    assert [name for name, _ in (head, embed, layer)] == ["head", "embed", "layers/1"]
    assert_same(head[1], want["head"])
    assert embed[1]["weight"].dtype == layer[1]["mlp_norm"]["scale"].dtype == jnp.bfloat16
    assert_same(layer[1]["mlp"], want["layers"][1]["mlp"])
    assert_same(pack(unpack(layer[1])), layer[1])


# --------------------------------------------------------------------------------------------------
# The seam


@read_kinds
@pytest.mark.parametrize("shape", [(1,), (7,), (40,), (2, 3)])
def test_linear_is_that_of_the_dequantised_weight(kind, shape):
    rng = np.random.default_rng(0)
    weight = quantise(jnp.asarray(rng.normal(size=(24, 16)), jnp.float32), kind)
    x = jnp.asarray(rng.normal(size=(*shape, 16)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=24), jnp.float32)
    got, want = linear(x, weight, bias), linear(x, dequantise(weight), bias)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    narrow = linear(x.astype(jnp.bfloat16), weight, bias.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), got, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("num_outputs", [1, 23])
def test_blocks_give_the_same_product(monkeypatch, num_outputs):
    """CPUs convert large weights in blocks of outputs, here of five; the last may be shorter."""
    rng = np.random.default_rng(0)
    weight = quantise(jnp.asarray(rng.normal(size=(num_outputs, 16)), jnp.float32), "int8")
    x = jnp.asarray(rng.normal(size=(5, 7, 16)), jnp.float32)
    whole = linear(x, weight)
    monkeypatch.setattr("poss_jax.model.linear.int8_products", lambda: "float")
    monkeypatch.setattr("poss_jax.model.linear._BLOCK_SIZE", 5 * 16)
    assert ("scan" in str(jax.make_jaxpr(linear)(x, weight))) == (num_outputs > 5)
    np.testing.assert_allclose(linear(x, weight), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_rows", "num_outputs"), [(1, (24,)), (4, (4, 6)), (5, (24,)), (17, (24,)), (32, (4, 6))]
)
def test_few_rows_of_int8_are_exact_where_products_are(monkeypatch, num_rows, num_outputs):
    """Whole numbers leave nothing to round, so that padding and chunks must not show."""
    monkeypatch.setattr("poss_jax.model.linear.int8_products", lambda: "float")
    rng = np.random.default_rng(num_rows)
    values = rng.integers(-127, 128, (*num_outputs, 16))
    rows = rng.integers(-9, 10, (num_rows, 16))
    weight = Quantised(jnp.asarray(values, jnp.int8), jnp.full(num_outputs, 0.5))
    got = linear(jnp.asarray(rows, jnp.float32), weight)
    np.testing.assert_array_equal(got, np.tensordot(rows, values, (-1, -1)) * 0.5)


@pytest.mark.optimised
@pytest.mark.parametrize("num_rows", [1, 20])
def test_a_loop_reads_int8_in_every_turn(num_rows):
    """XLA would widen a weight once before the loop, and read four times as much in each turn."""
    weight = quantise(jnp.ones((96, 96)), "int8")

    def decode(rows, weight):
        return jax.lax.fori_loop(0, 9, lambda _, x: linear(x, weight), rows)

    text = jax.jit(decode).lower(jnp.ones((num_rows, 96)), weight).compile().as_text()
    (loop,) = (line for line in text.splitlines() if " while(" in line)
    assert "s8[96,96]" in loop
    assert "f32[96,96]" not in loop


@read_kinds
def test_features_are_those_of_the_dequantised_target(kind):
    config = tiny_llama(qkv_bias=True)
    target = quantise_target(random_target(config), kind)
    tokens = random_tokens(config, 2, 9)
    run = jax.jit(encode, static_argnums=1)
    features = run(stacked(target), config, tokens)
    want = run(stacked(dequantised(target)), config, tokens)
    np.testing.assert_allclose(features, want, rtol=1e-4, atol=1e-4)
    assert np.abs(features - run(stacked(random_target(config)), config, tokens)).max() > 0.005


def converted(jaxpr: Any) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
    """Shape and types of every conversion, including inner programs'."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type":
            before, after = equation.invars[0].aval, equation.outvars[0].aval
            yield before.shape, before.dtype, after.dtype
        is_program = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")  # noqa: E731
        for inner in filter(is_program, jax.tree.leaves(equation.params, is_leaf=is_program)):
            yield from converted(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("kind", [None, *READ])
def test_no_weight_becomes_wider_than_the_activations(kind):
    llama = tiny_llama(vocab_size=307, hidden_size=40, intermediate_size=88)
    config = DraftConfig(layer=llama, positions_per_specialist=(2, 2))
    narrow = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)  # noqa: E731
    target, draft = narrow(random_target(llama)), narrow(random_draft(config))
    shapes = {leaf.shape for leaf in jax.tree.leaves((target, draft)) if leaf.ndim == 2}
    shapes |= {shape[::-1] for shape in shapes}
    target = target if kind is None else quantise_target(target, kind)
    engine = make_engine(llama, target, config, draft, tree=TREE)
    sampling = [SAMPLED, SamplingConfig()]
    prompts = [engine.prepare([3, 4, 5], 8, one) for one in sampling]
    batch = FixedBatch(engine, prompts, batch_size=2)
    decode_config, request = batch.config, batch.request

    def decode(weights, request):
        state = speculate.start(weights, decode_config, request)
        return speculate.run_rounds(weights, decode_config, request, state)

    program = jax.make_jaxpr(decode)(engine.weights, request)
    found = [(before, after) for shape, before, after in converted(program) if shape in shapes]
    assert {after for _, after in found} <= {jnp.dtype("bfloat16")}
    assert bool(found) == (kind is not None)


# --------------------------------------------------------------------------------------------------
# Lossless with respect to the quantised target


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "is_sampled"),
    [("int8", True), pytest.param("fp8", False, marks=(pytest.mark.slow, needs_f16c))],
)
def test_speculative_equals_autoregressive(kind, is_sampled):
    llama = tiny_llama()
    config = DraftConfig(layer=llama, positions_per_specialist=(1, 3))
    tree = TreeConfig(depth=2, top_k=2, total_tokens=5)
    programs = Shape(llama, config, tree, 2, is_sampled=is_sampled)
    programs.check_pairs(12, change=lambda target: quantise_target(target, kind))


def test_drafts_of_the_unquantised_target_are_used(runs, quantised):
    alone = Engine.load(quantised["int8"])
    engine = Engine.load(quantised["int8"], runs.model("poss2"), EngineConfig(tree=TREE))
    heads = (weights["head"]["weight"].values for weights in engine.weights)
    assert len({values.unsafe_buffer_pointer() for values in heads}) == 1
    for specialist in engine.weights.draft["specialists"]:
        assert isinstance(specialist["mlp"]["down"]["weight"], Quantised)
    given = {"max_new_tokens": 24, "sampling": [SAMPLED, SamplingConfig(), SAMPLED]}
    want = [answer.output_ids for answer in alone.generate(PROMPTS, **given)]
    answers = engine.generate(PROMPTS, batch_size=2, **given)
    assert [answer.output_ids for answer in answers] == want
    assert max(answer.mean_acceptance_length for answer in answers) > 1.5


def test_eagle3_drafts_read_the_layers_of_a_quantised_target():
    llama = tiny_llama(num_layers=3)
    layer = tiny_llama(num_layers=1)
    config = DraftConfig(layer=layer, family="eagle3", aux_layers=(0, 1, 2), kv="shared")
    target = quantise_target(random_target(llama), "int8")
    tree = TreeConfig(depth=2, top_k=2, total_tokens=5)
    engine = make_engine(llama, target, config, tree=tree)
    alone = engine.with_tree({1: None})
    want, got = (one.generate([[3, 4, 5]], max_new_tokens=16) for one in (alone, engine))
    assert got[0].output_ids == want[0].output_ids
    assert not isinstance(engine.weights.draft["head"]["weight"], Quantised)


# --------------------------------------------------------------------------------------------------
# Model folders


@pytest.mark.parametrize(
    ("source", "kind"), [("llama", "int8"), ("llama", "fp8"), ("tied", "int8"), ("phi3", "int8")]
)
def test_quantised_at_load_and_by_the_converter_is_the_same(tmp_path, capsys, kind, source):
    tensors, config = target_tensors(), {}
    if source == "tied":
        tensors, config = target_tensors(jnp.bfloat16), {"tie_word_embeddings": True}
        del tensors["lm_head.weight"]
    elif source == "phi3":
        tensors, config = fuse(tensors), PHI3
    write_source(tmp_path / "source", tensors, **config)
    run("target", source=tmp_path / "source", output=tmp_path / "float")
    run("target", source=tmp_path / "source", output=tmp_path / kind, quantise=kind)
    assert summary(capsys)["quantised"] == kind
    verify_model(tmp_path / kind)
    for dtype in (None, jnp.float32, jnp.bfloat16):
        record, stored = load_target(tmp_path / kind, dtype)
        same_record, loaded = load_target(tmp_path / "float", dtype, quantise=kind)
        assert record.quantised == same_record.quantised == kind
        assert record.target == same_record.target
        assert_same(stored, loaded)
    assert stored["head"]["weight"].values.dtype.itemsize == 1
    assert stored["embed"]["weight"].dtype == jnp.bfloat16
    assert stored["layers"][1]["mlp"]["up"]["weight"].scale.dtype == jnp.float32


@kinds
def test_dtype_is_that_of_the_rest_and_rounds_nothing_twice(tmp_path, capsys, kind):
    write_source(tmp_path / "source", target_tensors())
    flags = {"source": tmp_path / "source", "quantise": kind}
    run("target", output=tmp_path / "kept", **flags)
    capsys.readouterr()
    run("target", output=tmp_path / "narrow", dtype="bfloat16", **flags)
    table = capsys.readouterr().out.splitlines()
    assert json.loads(table[-1])["dtype"] == f"bfloat16+{kind}"
    rows = {line.split()[0]: line.split()[-1] for line in table[:-1]}
    assert rows["model.embed_tokens.weight"] == rows["model.norm.weight"] == "bfloat16"
    assert rows["lm_head.weight"] == rows["model.layers.{0..1}.mlp.up_proj.weight"] == kind
    kept, narrow = (load_target(tmp_path / name)[1] for name in ("kept", "narrow"))
    assert_same(kept["layers"][0]["attention"], narrow["layers"][0]["attention"])
    assert kept["embed"]["weight"].dtype == jnp.float32
    assert narrow["embed"]["weight"].dtype == jnp.bfloat16


def test_inspect(quantised, capsys):
    convert_main(["inspect", quantised["int8"], "--verify"])
    *lines, last = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert "int8, with a scale per output" in text
    rows = [line.split() for line in lines]
    assert ["layers/{0..1}/mlp/down/weight/values", "32x48", "int8"] in rows
    assert ["head/weight/scale", "300", "float32"] in rows
    assert "checksums               all agree" in text
    assert json.loads(last)["dtypes"] == ["float32", "int8"]


def test_damage_is_noticed(quantised, runs, tmp_path):
    folder = shutil.copytree(quantised["int8"], tmp_path / "model")
    shutil.rmtree(folder / "weights" / "head")
    shutil.copytree(Path(runs.model("target")) / "weights" / "head", folder / "weights" / "head")
    message = refusal(convert_main, "inspect", str(folder), "--verify")
    assert "does not fit the config" in message
    assert "weight/values want (300, 32) got None" in message


def test_parts_lie_like_the_weight_they_are_of(quantised, runs):
    for path, shape, want in (
        ("head/weight/values", (64, 32), P("tensor", "fsdp")),
        ("head/weight/scale", (64,), P("tensor")),
        ("layers/3/attention/o/weight/values", (32, 16), P("fsdp", "tensor")),
        ("layers/mlp/down/weight/scale", (5, 32), P(None, "fsdp")),
        ("layers/3/attention/q_norm/scale", (8,), P(None)),
    ):
        assert partition(path, shape, MESH) == want
    _, stored = load_target(quantised["int8"], sharding=place_weights(MESH))
    _, loaded = load_target(runs.model("target"), sharding=place_weights(MESH), quantise="int8")
    want = place_tree(stored, MESH)
    for params in (stored, loaded):
        for array, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
    assert_same(stored, loaded)
    down = stored["layers"][0]["mlp"]["down"]["weight"]
    assert down.values.sharding.spec == P("fsdp", "tensor")
    assert down.scale.addressable_shards[0].data.shape == (16,)


# --------------------------------------------------------------------------------------------------
# Programs


def test_generate_quantises(runs, tmp_path):
    target, draft = runs.model("target"), runs.model("poss2")
    given = ["--prompt", PROMPTS[0], "--quantise", "int8", "--tree", "2/2/5"]
    (line,) = generate(target, draft, tmp_path, *given)
    rounded = Engine.load(target, settings=EngineConfig(quantise="int8"))
    (answer,) = rounded.generate(PROMPTS[:1], max_new_tokens=6)
    assert line["output_ids"] == answer.output_ids


@needs_f16c
def test_answers_of_another_quantisation_are_not_joined(tmp_path, quantised):
    chats = write_lines(tmp_path / "chats.jsonl", {"prompt": "def"}, {"prompt": "area"})
    given = [f"data.source={chats}", "--max-new-tokens", "4", "--output", str(tmp_path / "a.jsonl")]
    given += ["--keep-unfinished"]
    regenerate_main(["--target", quantised["int8"], *given])
    assert "quantised" in refusal(regenerate_main, "--target", quantised["fp8"], *given)


def test_drafts_are_converted_for_a_quantised_target(tmp_path):
    """Their copy of the head is compared with the checksum of the one that was quantised."""
    tensors = target_tensors()
    write_source(tmp_path / "source", tensors)
    run("target", source=tmp_path / "source", output=tmp_path / "target", quantise="int8")
    head = tensors["lm_head.weight"]
    for name, copy in (("same", head), ("other", head * 1.5)):
        write_source(tmp_path / name, draft_tensors() | {"lm_head.weight": copy})
    given = {"target": tmp_path / "target", "output": tmp_path / "draft"}
    with pytest.raises(UserError, match=r"lm_head.weight differs from the head of the target"):
        run("draft", source=tmp_path / "other", **given)
    run("draft", source=tmp_path / "same", **given)
    assert read_record(tmp_path / "draft").target == read_record(tmp_path / "target").target


# --------------------------------------------------------------------------------------------------
# Refusals


def test_refusals(runs, quantised, tmp_path):
    with pytest.raises(UserError, match=r"^quantise: want int8 or fp8, got 'int4'$"):
        check_quantisation("target", read_record(runs.model("target")), "int4")
    with pytest.raises(UserError, match=r"is quantised to int8 already; leave out quantise, or "):
        Engine.load(quantised["int8"], settings=EngineConfig(quantise="fp8"))
    export = ["export", "--model", quantised["int8"], "--output", str(tmp_path / "out")]
    assert "is quantised to int8, which no layout holds" in refusal(convert_main, *export)
    draft = copy_model(runs.model("poss2"), tmp_path / "draft", quantised="int8")
    with pytest.raises(UserError, match="quantised: want a target, got a draft"):
        Engine.load(runs.model("target"), draft)
