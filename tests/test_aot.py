"""Decoding compiled from shapes alone: what it must not do, what is reported, what is refused."""

import importlib.util
import json
import math
import re
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from models import tiny_llama
from programs import copy_model, refusal

from benchmarks.aot import (
    Compiled,
    Plan,
    compile_program,
    count_kernels,
    main,
    measure,
    plan,
    state_shapes,
)
from benchmarks.python_models import python_model
from infer.bench.costs import Device
from poss_jax.config.bench import AheadConfig
from poss_jax.config.models import MeshConfig, TreeConfig
from poss_jax.config.reading import UserError, load_config
from poss_jax.config.training import SpecialistsConfig
from poss_jax.model.sharding import bytes_per_device, make_mesh

pytestmark = pytest.mark.optimised

CONFIGS = Path(__file__).parent.parent / "configs" / "aot"
V = 16384
MODEL = tiny_llama(
    vocab_size=V,
    hidden_size=384,
    intermediate_size=1024,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
)
DEEP = SpecialistsConfig(positions_per_specialist=(1, 1), layers_per_specialist=(2,), depth=2)
ALL = {"draft_tokens": 1024, "batch_size": 8, "quantise": "int8", "specialists": DEEP}
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


@pytest.fixture(scope="module", autouse=True)
def shapes_stand_for_arrays():
    """Lets structs hold shapes: the checks of types want arrays."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def settings(**changes) -> AheadConfig:
    values = {
        "model": MODEL,
        "specialists": SpecialistsConfig(positions_per_specialist=(2, 2), depth=4),
        "tree": TreeConfig(depth=2, top_k=4, total_tokens=12),
        "context": 400,
        "max_new_tokens": 64,
    }
    return AheadConfig(**(values | changes))


@cache
def planned(**changes) -> Plan:
    config = settings(dtype="float32", **changes)
    return plan(config, make_mesh(config.mesh, jax.devices()[:1]))


@cache
def compiled(name: str, **changes) -> Compiled:
    return compile_program(name, planned(**changes))


@pytest.mark.parametrize("name", ["step", "round", pytest.param("rounds", marks=pytest.mark.slow)])
def test_nothing_sorts_the_vocabulary(name):
    sorts = re.findall(r"= (.*) sort\(", compiled(name).text)
    assert not [shape for shape in sorts if f"{V}]" in shape]


@pytest.mark.parametrize(
    ("name", "changes"),
    [("step", {}), ("round", {}), pytest.param("round", ALL, marks=pytest.mark.slow)],
)
def test_no_cache_is_copied(name, changes):
    described = planned(**changes)
    decode = described.decode._replace(draft=None) if name == "step" else described.decode
    state = state_shapes(described, decode)
    caches = [state.target_cache, *([state.draft.cache] if state.draft else [])]
    text = compiled(name, **changes).text
    for shape in {one.k[0].shape for one in caches}:
        dims = ",".join(map(str, shape))
        assert f"f32[{dims}]" in text
        assert not re.search(rf"f32\[{dims}\]\S* (copy|transpose)\(", text)


def sums_of_products(text: str) -> list[str]:
    """Names of YNNPACK's fusions with both a matrix product and a reduction."""
    bodies = dict(re.findall(r"^%?([\w.-]+) \(.*\{\n((?:  .*\n)+)\}", text, re.MULTILINE))
    fusions = re.findall(r"calls=%?([\w.-]+).*__ynn_fusion", text)
    return [name for name in fusions if " dot(" in bodies[name] and " reduce(" in bodies[name]]


@pytest.mark.parametrize("changes", [{}, pytest.param(ALL, marks=pytest.mark.slow)])
def test_no_fusion_on_a_cpu_sums_a_product(changes):
    """JAX 0.10.2 to 0.12.0 compute `((x @ broadcast(s)) * x).sum()` as 1e36, or NaN."""
    assert sums_of_products(compiled("round", **changes).text) == []


def test_kernels_and_sums_of_products_are_found():
    text = """HloModule drawn

%sums (p: f32[4,4], q: f32[4,4]) -> f32[] {
  %d = f32[4,4]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %r = f32[] reduce(%d, %z), dimensions={0,1}, to_apply=%add
}

ENTRY %main (p: f32[4,4], q: f32[4,4]) -> f32[] {
  %f = f32[] fusion(%p, %q), kind=kCustom, calls=%sums, backend_config={"__ynn_fusion"}
  %s = f32[4]{0} sort(%f), dimensions={0}
  %start = f32[4]{0} all-reduce-start(%s), to_apply=%add
  %done = f32[4]{0} all-reduce-done(%start)
  ROOT %r = f32[] reduce(%done, %z), to_apply=%add
}
"""
    assert sums_of_products(text) == ["sums"]
    assert count_kernels(text) == {"fusion": 1, "sort": 1, "all-reduce": 1, "reduce": 1}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*8b*.yaml")), ids=lambda path: path.stem)
def test_configs_describe_models_that_fit(path):
    config = load_config(AheadConfig, path, ["mesh.tensor=1"])
    described = plan(config, make_mesh(config.mesh, jax.devices()[:1]))
    assert described.decode.draft is not None
    assert described.decode.rows >= config.context + config.max_new_tokens
    weights = jax.tree.leaves(described.weights.target)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in weights)
    embedding = described.weights.target["embed"]["weight"]
    assert described.floor("step").bytes == pytest.approx(held - 2 * embedding.size, rel=0.02)


def test_a_folder_says_how_it_is_quantised_and_what_it_can_propose(tmp_path):
    target = copy_model(python_model("target"), tmp_path / "target", quantised="int8")
    mesh = make_mesh(settings().mesh, jax.devices()[:1])
    models = {"model": None, "specialists": None, "target": target}
    planned = plan(settings(**models), mesh)
    assert planned.work.target_bytes == 1
    assert planned.weights.target["head"]["weight"].values.dtype == jnp.int8
    with pytest.raises(UserError, match="quantise fp8: the target is quantised to int8"):
        plan(settings(**models, quantise="fp8"), mesh)
    own_head = {"draft": str(python_model("eagle3")), "draft_tokens": 9}
    with pytest.raises(UserError, match=r"draft_tokens: draft .* has its own head"):
        plan(settings(**models | own_head), mesh)


def test_a_tree_is_as_wide_as_the_draft_vocabulary():
    planned = plan(settings(draft_tokens=3), make_mesh(settings().mesh, jax.devices()[:1]))
    assert planned.decode.tree.top_k == planned.work.tree.top_k == 3


def test_groups_of_devices_each_read_all_weights():
    devices, whole = jax.devices()[:2], settings(batch_size=4)
    groups = settings(batch_size=4, mesh=MeshConfig(data=2, tensor=1))
    one, two = (plan(some, make_mesh(some.mesh, devices)).floor("step") for some in (groups, whole))
    assert one.bytes > 1.5 * two.bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "want either --topology SLICE or --gpu NAME"),
        (["--gpu", "a100"], "argument --gpu: invalid choice: 'a100'"),
        (["--topology", "x9:1x1"], "topology x9:1x1: want one of v5e, v5p, v6e, as in v6e:1x1"),
        (["--gpu", "h100", "specialists=null", "programs=[step,round]"], "round and rounds want"),
        (["--gpu", "h100", "specialists=null", "draft_tokens=9"], "draft_tokens=9': wants draft,"),
        (["--gpu", "h100", "--output", str(CONFIGS)], "is a folder; choose another place"),
    ],
)
def test_bad_input_is_refused_in_one_line(words, message):
    words = ["--config", str(CONFIGS / "llama3-8b.yaml"), *words]
    assert message in refusal(main, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["draft_tokens=200000"], "draft_tokens: want at most the target's 128256, got 200000"),
        (["model=null", "target={poss1}"], "poss1: want a target, got a draft"),
        (["specialists=null", "draft={target}"], "target: want a draft, got a target"),
        (["specialists=null", "draft={poss1}"], "want hidden_size 4096, got 160"),
    ],
)
def test_models_that_do_not_fit_are_refused(words, message):
    models = {name: python_model(name) for name in ("target", "poss1")}
    words = [word.format(**models) for word in words]
    config = load_config(AheadConfig, str(CONFIGS / "llama3-8b.yaml"), words)
    with pytest.raises(UserError, match=message):
        plan(config, make_mesh(config.mesh))


@pytest.mark.parametrize("changes", [{}, pytest.param(ALL, marks=pytest.mark.slow)])
def test_what_is_lent_is_counted_once(changes):
    plan = planned(**changes)
    target, draft = map(bytes_per_device, plan.weights)
    lent = ["embed"] if changes else ["embed", "head"]
    lent = bytes_per_device([plan.weights.target[part] for part in lent])
    made = compiled("round", **changes)
    report = measure("round", made, plan, Device("cpu", 1.0, 1.0, 1.0))
    taken = report["memory"]["arguments"]
    others = jax.tree.leaves(made.program.args_info[0][1:])  # request and state
    others = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in others)
    assert target <= taken <= target + draft - lent + others


@pytest.mark.skipif(not HAS_LIBTPU, reason="needs libtpu: pip install libtpu")
def test_the_program_reports_what_it_compiled(tmp_path, capsys):
    report, folder = tmp_path / "report.json", tmp_path / "dump"
    changes = ["model.num_layers=1", "model.vocab_size=4096", "model.hidden_size=256"]
    words = ["--config", str(CONFIGS / "llama3-8b.yaml"), "--topology", "v6e:1x1"]
    main([*words, *changes, "programs=[step]", "--output", str(report), "--dump", str(folder)])
    told, written = capsys.readouterr().out, json.loads(report.read_text())
    assert json.loads(told.splitlines()[-1]) == written
    assert "step: compiled in" in told and "accessed" in told
    step = written["programs"]["step"]
    assert step["kernels"] > 10 and step["accessed_bytes"] > 0
    assert step["memory"]["total"] < step["memory"]["available"]
    assert count_kernels((folder / "step.txt").read_text()) == step["kernels_by_kind"]
