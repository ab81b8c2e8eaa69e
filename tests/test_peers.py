"""Other programs: our exports run in vLLM and speculators with equal numbers, and theirs here.

`make test-peers` makes their environments (3 GB each) and writes docs/results/peers. They run in
processes of their own (`tests/peers/`), a process each for all cases, since they start slowly. So
do clients of the server.
"""

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from chat_oracle import tokenizer_of
from convert_sources import run
from golden import Golden, load_golden, root_of, widen
from models import stacked
from safetensors.numpy import save_file
from serving import serving
from test_eagle3_variants import STEPS, T, draft_chains, train_chains

from benchmarks.python_models import python_model
from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import new_record, read_record
from poss_jax.checkpoint.writing import write_model
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import RopeConfig, TreeConfig
from poss_jax.engine.engine import Engine
from poss_jax.model.parameters import split_items
from poss_jax.model.specialists import borrow_from_target

pytestmark = [pytest.mark.peers, pytest.mark.optimised]

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs/results/peers"
TOKENS = 64

Results = dict[str, Any]


def peer(name: str, script: str, *arguments: str, jobs: Any = None) -> str:
    """Runs a script of `tests/peers` in a peer's environment; what it prints."""
    python = ROOT / f".venv-{name}/bin/python"
    if not python.exists():
        pytest.skip(f"needs {python.parent.parent.name}: make test-peers")
    command = [str(python), str(ROOT / f"tests/peers/{script}.py"), *arguments]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env |= {"PYTHONPATH": str(ROOT / "examples/vllm")}
    text = json.dumps(jobs)
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def report() -> Iterator[list[dict[str, str]]]:
    """Rows of the report, which take the places of earlier ones at the end."""
    rows: list[dict[str, str]] = []
    yield rows
    path, head = REPORT / "report.json", ["peer", "what", "result"]
    earlier = json.loads(path.read_text()) if path.exists() else []
    rows = list({row["what"]: row for row in earlier + rows}.values())
    REPORT.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")
    lines = ["# Our files in other programs", "", "`make test-peers` wrote this.", ""]
    lines += [f"| {' | '.join(head)} |", "|---|---|---|"]
    lines += [f"| {' | '.join(row[key] for key in head)} |" for row in rows]
    (REPORT / "report.md").write_text("\n".join(lines) + "\n")


# --------------------------------------------------------------------------------------------------
# vLLM: the same texts, and as many accepted tokens at every position


def change(golden: Golden, folder: Path, *, embed: Any = None, **fields: Any) -> Path:
    """The same draft with other fields of its config, which fit worse."""
    fields |= {"layer": dataclasses.replace(golden.draft_config.layer, **fields.pop("layer", {}))}
    config = dataclasses.replace(golden.draft_config, **fields)
    record = new_record(config, golden.target_record.target, tokenizer_from=None)
    items = split_items(config, golden.draft | {"embed": embed})
    write_model(folder, record, items, tokenizer_from=None)
    return folder


def draw_embedding(golden: Golden, folder: Path) -> Path:
    """The same draft with an embedding that is only like the target's."""
    embedding = np.asarray(golden.target["embed"]["weight"])
    noise = np.random.default_rng(0).normal(size=embedding.shape) * 0.3 * embedding.std()
    embed = {"weight": (embedding + noise).astype(np.float32)}
    return change(golden, folder, embed=embed, has_embedding=True)


def make_wider(golden: Golden, folder: Path) -> Path:
    """The same draft with further dimensions, all zero."""
    source = folder.with_suffix(".wide")
    source.mkdir()
    embedding = np.asarray(golden.target["embed"]["weight"])
    tensors, config = widen(root_of(golden.method) / "draft" / golden.method, embedding)
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    run("draft", source=source, target=golden.target_folder, output=folder)
    return folder


OTHER_LAYERS = partial(change, aux_layers=(1, 4, 6))
OF_YARN = RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=64)
YARN = partial(change, layer={"rope": OF_YARN})


class Case(NamedTuple):
    """A draft of the fixtures, and how it is exported and run."""

    draft: str
    layout: str
    specialist: int | None = None  # None: all
    change: Callable[[Golden, Path], Path] | None = None  # makes another draft of it first
    drafted: int = 5  # tokens per round
    poss: bool = False  # vLLM loads examples/vllm, and writes all texts together


CASES = {
    "eagle": Case("eagle", "eagle"),
    "eagle3": Case("eagle3_full", "eagle3"),
    "sglang": Case("eagle3_full", "sglang"),
    "speculators": Case("eagle3_full", "speculators"),
    "specforge, a part of the vocabulary": Case("poss3_e3", "specforge", 0),
    "speculators, a part of the vocabulary": Case("poss3_e3", "speculators", 0),
    "sglang, other layers": Case("eagle3_full", "sglang", change=OTHER_LAYERS),
    "speculators, other layers": Case("eagle3_full", "speculators", change=OTHER_LAYERS),
    "sglang, yarn rope": Case("eagle3_full", "sglang", change=YARN),
    "sglang, its own embedding": Case("eagle3_full", "sglang", change=draw_embedding),
    "sglang, wider than its target": Case("eagle3_full", "sglang", change=make_wider),
    "speculators, wider than its target": Case("eagle3_full", "speculators", change=make_wider),
    "PosS-3 on EAGLE-3, its three specialists": Case("poss3_e3", "poss", drafted=8, poss=True),
    "PosS-3 on EAGLE-3, specialist 0 alone": Case("poss3_e3", "sglang", 0, drafted=8, poss=True),
    "PosS-3, its two specialists": Case("poss3", "poss", drafted=6, poss=True),
    "PosS-3, specialist 0 alone": Case("poss3", "eagle", 0, drafted=6, poss=True),
}
ALONE = "speculators, given the draft alone"  # which says where the target is
REFUSED = {
    "specforge, all tokens": (Case("eagle3_full", "specforge"), "draft_id_to_target_id"),
    "poss, EAGLE-3, without examples/vllm": (Case("poss3_e3", "poss"), "AssertionError"),
}


def place(folder: Path, case: str) -> Path:
    return folder / case.replace(", ", "-").replace(" ", "-")


def export(folder: Path, name: str, case: Case, golden: Golden) -> Path:
    model = golden.draft_folder
    flags: dict[str, Any] = {"specialist": case.specialist} if case.specialist is not None else {}
    if case.layout == "speculators":
        flags["verifier"] = folder / golden.target_folder.parent.name
    if case.change is not None:
        model = case.change(golden, folder / f"{name}-model")
    out = place(folder, name)
    run("export", model=model, target=golden.target_folder, output=out, format=case.layout, **flags)
    return out


def prompts_of(golden: Golden) -> list[list[int]]:
    lines = (root_of(golden.method) / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_ids"] for line in lines]


def task(golden: Golden, model: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(model), "prompts": prompts_of(golden), "max_tokens": TOKENS} | more


def plan(folder: Path, name: str, case: Case, golden: Golden) -> dict[str, Any]:
    """Exports a draft, and says what vLLM shall do with it."""
    chosen = {
        "model": str(export(folder, name, case, golden)),
        "method": "eagle" if case.layout == "eagle" else "eagle3",
        "num_speculative_tokens": case.drafted,
    }
    target = folder / golden.target_folder.parent.name
    return task(golden, target, speculative=chosen, poss=case.poss)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peers")


@pytest.fixture(scope="module")
def models(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Golden]:
    root = tmp_path_factory.getbasetemp() / "golden"
    names = {case.draft for case in CASES.values()}
    models = {name: load_golden(root, name) for name in sorted(names)}
    for golden in models.values():
        target = folder / golden.target_folder.parent.name
        if not target.exists():
            run("export", model=golden.target_folder, output=target)
    return models


@pytest.fixture(scope="module")
def of_vllm(folder: Path, models: dict[str, Golden]) -> Results:
    cases = CASES | {name: case for name, (case, _) in REFUSED.items()}
    late = sorted(cases, key=lambda name: cases[name].poss)  # the plugin stays once it is loaded
    jobs = {name: plan(folder, name, cases[name], models[cases[name].draft]) for name in late}
    jobs[ALONE] = task(models["eagle3_full"], place(folder, "speculators"))
    return json.loads(peer("vllm", "vllm_answers", jobs=jobs).splitlines()[-1])


def count_ours(folder: Path, case: str, golden: Golden, drafted: int) -> tuple[Any, int, list[int]]:
    """Texts, rounds, and rounds that accepted each position, of the exported files, as in vLLM.

    vLLM counts the last round whole, so ours runs on and the rounds that begin too late are left.
    """
    draft = place(folder, f"again-{case}-{drafted}")
    run("draft", source=place(folder, case), target=golden.target_folder, output=draft)
    tree = TreeConfig(depth=drafted, top_k=1, total_tokens=drafted + 1)
    engine = Engine.load(golden.target_folder, draft, EngineConfig(tree=tree), dtype=jnp.float32)
    answers = engine.generate(prompts_of(golden), max_new_tokens=TOKENS + drafted, batch_size=8)
    counts: list[int] = []
    for answer in answers:
        begins = np.cumsum([1, *(n + 1 for n in answer.accepted_per_round)])[:-1]
        counts += np.array(answer.accepted_per_round)[begins < TOKENS].tolist()
    reached = [sum(n > position for n in counts) for position in range(drafted)]
    return [answer.output_ids[:TOKENS] for answer in answers], len(counts), reached


@pytest.mark.parametrize("case", [*CASES, ALONE])
def test_vllm_accepts_as_many_tokens_at_every_position(case, folder, models, of_vllm, report):
    exported = case if case in CASES else "speculators"
    golden, drafted = models[CASES[exported].draft], CASES[exported].drafted
    if case == ALONE:
        drafted = golden.draft_config.trained_depth
    found = of_vllm[case]
    assert "error" not in found, found
    texts, rounds, accepted = count_ours(folder, exported, golden, drafted)
    assert (found["texts"], found["rounds"], found["accepted"]) == (texts, rounds, accepted)
    shares = " ".join(f"{n / rounds:.4f}" for n in accepted)
    said = (
        f"equal: {len(texts)} texts, {rounds} rounds, {1 + sum(accepted) / rounds:.4f} ({shares})"
    )
    report.append({"peer": f"vLLM {of_vllm['vllm']}", "what": case, "result": said})


@pytest.mark.parametrize("case", REFUSED)
def test_vllm_refuses_what_the_documentation_says(case, of_vllm, report) -> None:
    error = of_vllm[case]["error"]
    assert REFUSED[case][1] in error
    said = f"refused: {error.split('. ')[0].strip(': ')}"
    report.append({"peer": f"vLLM {of_vllm['vllm']}", "what": case, "result": said})


# --------------------------------------------------------------------------------------------------
# speculators: the same logits at every step of a chain

LLAMA = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 256,
}
QWEN = LLAMA | {"model_type": "qwen3", "layer_types": ["full_attention"]}
TWO_LAYERS = LLAMA | {"num_hidden_layers": 2}
WINDOW = {"layer_types": ["sliding_attention"], "use_sliding_window": True, "sliding_window": 512}
SHORT = WINDOW | {"sliding_window": 4}
TWO_SHORT = TWO_LAYERS | SHORT | {"layer_types": ["sliding_attention"] * 2}
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPE_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
ROPE_YARN |= {"original_max_position_embeddings": 32}
MADE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama": (LLAMA, {}),
    "norms of EAGLE-3.1": (LLAMA, {"fc_norm": True, "norm_output": True}),
    "norms of gpt-oss": (LLAMA, {"norm_before_fc": True, "norm_before_residual": True}),
    "Qwen3": (QWEN, {"norm_before_residual": True}),
    "four layers of the target": (LLAMA, {"eagle_aux_hidden_state_layer_ids": [1, 3, 4, 6]}),
    "half of the vocabulary": (LLAMA, {"draft_vocab_size": 130}),
    "a window as long as the context": (QWEN | WINDOW, {}),
    "a window of four rows": (LLAMA | SHORT, {}),
    "a window of four rows, Qwen3": (QWEN | SHORT, {}),
    "two layers": (TWO_LAYERS, {}),
    "two layers, a window of four rows": (TWO_SHORT, {}),
    "its own embedding": (LLAMA, {"embed_requires_grad": True}),
    "rope yarn": (LLAMA | {"rope_parameters": ROPE_YARN}, {}),
    "P-EAGLE": (LLAMA, {"mask_token_id": 7}),
    "P-EAGLE, two layers, a window of four rows": (TWO_SHORT, {"mask_token_id": 7}),
    "rope llama3": (LLAMA | {"rope_parameters": ROPE}, {}),
}
LOADED = {"ours, all tokens": "eagle3_full", "ours, 80 tokens": "poss3_e3"}


def draw(num_layers: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(T, num_layers * LLAMA["hidden_size"])).astype(np.float32)
    return {"features": features, "tokens": rng.integers(0, 256, T)}


@pytest.fixture(scope="module")
def of_speculators(folder: Path, models: dict[str, Golden]) -> str:
    """Its version, once it has written its logits into the folder."""
    jobs: dict[str, Any] = {}
    verifier = str(folder / "fixtures_e3")
    for name, (layer, changes) in MADE.items():
        usual = {"draft_vocab_size": 260, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
        jobs[name] = {"layer": layer, "make": usual | changes, "verifier": verifier}
    for name, draft in LOADED.items():
        made = export(folder, f"{name}-out", Case(draft, "speculators", 0), models[draft])
        jobs[name] = {"draft": str(made)}
    for seed, (name, one) in enumerate(jobs.items()):
        layers = one.get("make", {}).get("eagle_aux_hidden_state_layer_ids", [2, 4, 5])
        np.savez(folder / f"{name}.npz", **draw(len(layers), seed))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return peer("speculators", "speculators_logits", str(folder)).splitlines()[-1]


def chains(config: Any, params: Any, target: Any, tokens: np.ndarray, features: Any) -> np.ndarray:
    """Our logits of every step and row."""
    if config.mask_token is not None:  # trained there alone
        text = jnp.asarray(np.pad(tokens, (1, STEPS)), jnp.int32)[None]
        return np.asarray(draft_chains(config, borrow_from_target(params, target), text, features))
    weights = borrow_from_target(stacked(params), target)
    embedded = weights["embed"]["weight"][tokens]
    return np.asarray(train_chains(config, weights, embedded, features))


@pytest.mark.parametrize("name", [*MADE, *LOADED])
def test_speculators_computes_the_same_logits(name, folder, of_speculators, models, report) -> None:
    golden = models[LOADED.get(name, "eagle3_full")]
    source = folder / name if name in MADE else place(folder, f"{name}-out")
    draft = folder / f"{name}-here"
    run("draft", source=source, target=golden.target_folder, output=draft)
    record, params = load_draft(draft, jnp.float32, target=read_record(golden.target_folder))
    with np.load(folder / f"{name}.npz") as arrays:
        tokens, features = arrays["tokens"], jnp.asarray(arrays["features"])[None]
    got = chains(record.draft, params, golden.target, tokens, features)
    want = np.load(folder / f"{name}.logits.npy")
    assert got.shape == want.shape == (STEPS, T, record.draft.head_size)
    known = np.arange(T) < T - np.arange(STEPS)[:, None]  # rows whose token is in the text
    worst = np.abs(got - want)[known].max() / np.abs(want[known]).max()
    assert worst < 1e-5
    what = f"{'their draft' if name in MADE else 'our export'}: {name}"
    report.append(
        {"peer": f"speculators {of_speculators}", "what": what, "result": f"equal to {worst:.0e}"}
    )


# --------------------------------------------------------------------------------------------------
# Clients of OpenAI's API


def test_clients_of_the_server(report: list[dict[str, str]]) -> None:
    engine = Engine.load(python_model("target"), settings=EngineConfig(max_length=1024))
    engine.tokenizer.chat_template = tokenizer_of("chatml, tools").chat_template
    with serving(engine, has_grammars=True) as served:
        rows = json.loads(peer("clients", "clients", served.url).splitlines()[-1])
    report += [
        {"peer": row["client"], "what": row["what"], "result": row["result"]} for row in rows
    ]
    assert len(rows) == 12 and {row["result"] for row in rows} == {"works"}
