"""Dumps what the project computes, so that a change of its shape can be shown to change nothing.

    python tests/behaviour.py dump before.npz     # on the commit before a change
    python tests/behaviour.py dump after.npz      # after it, on the same machine
    python tests/behaviour.py compare before.npz after.npz

A dump holds trees, scores, losses and gradients of the recorded models, and training of tiny models
and their generations, greedy and sampled, in batches and streamed. It takes four minutes on one
core, and less where `JAX_COMPILATION_CACHE_DIR` names a folder that an earlier dump has filled.
`compare` prints each name that differs with the largest difference, then one line of JSON, and
exits with 1 if anything differs.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

import golden
import jax
import numpy as np
import programs
import test_golden
import test_posterior

from poss_jax import Engine, SamplingConfig, TreeConfig
from poss_jax.checkpoint.folder import load_draft, load_target
from poss_jax.config.decoding import EngineConfig
from poss_jax.decode import speculate
from poss_jax.model.documents import encode
from poss_jax.model.target import stack_layers

Dump = Iterator[tuple[str, Any]]  # name, array or text

TEN_STEPS = programs.DRAFT | {
    "num_tokens": 640,
    "objective": {"feature_noise": 0.2, "depth_weights": [1, 0.9, 0.8, 0.7, 0.6, 0.5]},
}
POSS3 = {"positions_per_specialist": [3, 3], "depth": 6}
CHUNKS = {"vocabulary_chunk": 5, "attention_block": 7}
DRAFTS = {
    "poss3": {"specialists": POSS3, "step": CHUNKS},
    "poss3_shared": {"specialists": POSS3 | {"kv": "shared"}, "step": {"accumulation_steps": 2}},
}
PROMPTS = ["def area_7", "def area_1_1(width, heig", [0, 5, 260], "\u4e2d"]
SAMPLED = SamplingConfig(temperature=1.1, top_p=0.95, repetition_penalty=1.1, seed=5)
SMALL = TreeConfig(depth=5, top_k=3, total_tokens=9)


def recorded(model: golden.Golden) -> Dump:
    """Rounds, generations and one training step of a recorded method."""
    for suffix, tree in golden.TREES.items():
        if rounds := golden.read_json(f"draft_rounds{suffix}_{model.method}"):
            request = test_golden.pad_prompts(
                [case["prompt"] for case in rounds["cases"]], limit=96
            )
            config = model.decode_config(tree)
            state = jax.jit(speculate.start, static_argnums=1)(model.weights, config, request)
            for index in range(len(rounds["cases"][0]["rounds"])):
                args = (model.weights, config, request, state)
                state, candidates, tree, acceptance = test_golden.round_in_pieces(*args)
                shown = {"candidates": candidates, "tree": tree, "acceptance": acceptance}
                for part, struct in shown.items():
                    yield from under(f"rounds{suffix}/{index}/{part}", vars(struct).items())
                yield f"rounds{suffix}/{index}/root", state.root
    cases = golden.read_json(f"generate_{model.method}")
    prompts = [(case["prompt"], test_golden.NO_STOP) for case in cases["cases"]]
    yield from under("generate", texts(test_golden.generate(model, "", prompts)))
    ends = [jax.numpy.asarray([case["eos_token_id"]], np.int32) for case in cases["eos_cases"]]
    prompts = [(case["prompt"], end) for case, end in zip(cases["eos_cases"], ends, strict=True)]
    yield from under("generate_eos", texts(test_golden.generate(model, "", prompts)))
    task = test_golden.recorded_task(model)
    batch = test_golden.recorded_batch(model, task)
    predictions, losses, gradients = test_golden.train(model, task, batch)
    yield "train/predictions", predictions
    yield from under("train/loss", losses.items())
    yield from under("train/gradient", gradients.items())


def recorded_scores(model: golden.Golden) -> Dump:
    """Features, logits, processed scores and where draws end."""
    stacked = model.target | {"layers": stack_layers(model.target["layers"])}
    tokens = jax.numpy.asarray(golden.read_npz("target_forward")["input_ids"])
    features = encode(stacked, model.llama, tokens, block=32)
    yield "features", features
    yield "logits", features @ model.target["head"]["weight"].T
    for case in test_posterior.CASES:
        scores, tree = test_posterior.scores_of(case), test_posterior.tree_of(case)
        yield f"posterior/{case}/scores", scores
        yield f"posterior/{case}/ends", test_posterior.draw_ends(scores, tree)


def tiny_models(folder: Path) -> Dump:
    """Training by the program, and generations of what it trained."""
    runs = programs.tiny_runs(folder)
    for name, values in DRAFTS.items():
        config = programs.config_file(runs, folder / name, TEN_STEPS | values)
        programs.train_main(["--config", config])
    target = runs.root / "target" / "model"
    trained = {name: runs.root / name for name in ("target", "eagle", "poss2")}
    trained |= {name: folder / name / "run" for name in DRAFTS}
    for name, run in trained.items():
        yield f"{name}/metrics", json.dumps(programs.metrics(run), indent=1)
        yield from under(name, parameters(run / "model", None if name == "target" else target))
    engines = {
        name: Engine.load(target, trained[name] / "model", EngineConfig(tree=SMALL))
        for name in ("eagle", "poss3", "poss3_shared")
    }
    engines["uncoupled"] = engines["poss3"].with_tree(SMALL, drafting="argmax")
    for name, engine in {"plain": Engine.load(target), **engines}.items():
        for size, sampling in ((1, None), (3, SAMPLED)):
            if sampling is None and name in ("eagle", "uncoupled"):
                continue  # the recorded EAGLE decodes greedily; greedy drafts have no noise
            options = {"max_new_tokens": 40, "batch_size": size, "sampling": sampling}
            yield from under(f"{name}/batch_{size}", texts(engine.generate(PROMPTS, **options)))
    for sampling in (None, SAMPLED):
        chunks = engines["poss3"].stream(PROMPTS[1], max_new_tokens=40, sampling=sampling)
        shown = [[chunk.text, chunk.output_ids, chunk.is_drafted] for chunk in chunks]
        yield f"poss3/stream{'_sampled' if sampling else ''}", json.dumps(shown)


def parameters(folder: Path, target: Path | None = None) -> Dump:
    """Arrays of a model folder, by their path."""
    loaded = load_draft(folder, target=load_target(target)[0]) if target else load_target(folder)
    for path, leaf in jax.tree_util.tree_leaves_with_path(loaded[1]):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def texts(answers: list) -> Dump:
    return ((str(n), json.dumps(vars(answer))) for n, answer in enumerate(answers))


def under(prefix: str, items: Any) -> Dump:
    return ((f"{prefix}/{name}", value) for name, value in items)


def everything(folder: Path) -> Dump:
    """All arrays and texts by name; writes models into `folder`."""
    models = [golden.load_golden(folder / "golden", method) for method in golden.METHODS]
    for model in models:
        yield from under(f"recorded/{model.method}", recorded(model))
    yield from under("recorded", recorded_scores(models[0]))
    yield from under("tiny", tiny_models(folder))


def dump(path: str) -> None:
    found = {}
    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, quiet:
        for name, value in everything(Path(folder)):
            array = np.asarray(value)
            is_narrow = array.dtype == jax.numpy.bfloat16  # which a .npz file does not know
            found[name] = array.view(np.uint16) if is_narrow else array
    np.savez_compressed(path, **found)
    print(json.dumps({"output": path, "names": len(found)}))


def difference(a: np.ndarray | None, b: np.ndarray | None) -> str:
    """Describes the differences; empty if there are none."""
    if a is None or b is None:
        return "only in the " + ("second" if a is None else "first")
    if a.dtype.kind == b.dtype.kind == "U":
        return "" if a == b else f"{str(a)[:80]!r} against {str(b)[:80]!r}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {a.shape} against {b.dtype} {b.shape}"
    if a.tobytes() == b.tobytes():
        return ""
    return f"largest difference {np.abs(a.astype(float) - b.astype(float)).max():.3g}"


def compare(first: str, second: str) -> None:
    one, two = dict(np.load(first)), dict(np.load(second))
    found = {name: difference(one.get(name), two.get(name)) for name in sorted({*one, *two})}
    different = [f"{name}: {words}" for name, words in found.items() if words]
    print(*different, json.dumps({"names": len(found), "different": len(different)}), sep="\n")
    sys.exit(bool(different))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["dump", path]:
            dump(path)
        case ["compare", first, second]:
            compare(first, second)
        case _:
            sys.exit("usage: behaviour.py dump OUT.npz, or behaviour.py compare A.npz B.npz")
