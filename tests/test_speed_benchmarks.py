"""The benchmarks of speed: options and prices by hand, and whole runs on tiny models."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import tiny_llama
from programs import refusal

from benchmarks import accelerator, random_pair, structured
from benchmarks.options import read_tree
from infer.bench.costs import DEVICES, Device, Workload, cost_card, floors
from infer.bench.rates import Roofline
from poss_jax.config.models import DraftConfig, LlamaConfig, TreeConfig
from poss_jax.decode.state import StaticShape
from poss_jax.engine.answers import Generation
from poss_jax.engine.trees import ACCELERATOR_TREES, tree_for


def test_answers_under_schemas_are_counted_and_their_rounds_timed():
    """The second answer's first token ended it, so it has no rounds; the third one is cut."""
    answers = [
        Generation([1], [2, 3, 4, 5], "12", [1, 0], [1, 1], "stop"),
        Generation([1], [2], "x", [], [], "stop"),
        Generation([1], [2, 3, 4], "1", [0, 0], [1, 1], "length"),
    ]
    times = [(0.2, 0.3), (0.0, 0.0), (0.4, 0.5)]
    schema = {"type": "integer"}
    asked = [structured.Asked(schema, one, *both) for one, both in zip(answers, times, strict=True)]
    counts = {"answers": 3, "finished": 2, "valid": 1, "tokens": 8, "tokens_per_round": 1.25}
    medians = {"milliseconds": 150.0, "cpu_milliseconds": 200.0}
    assert structured.summarise(asked) == pytest.approx(counts | medians)


ROOT = Path(__file__).parent.parent
FEW = "--tiny --contexts 8 8/320 --clients 1 2 --methods autoregressive poss3 --trees 2/2/5"


@pytest.mark.slow
def test_accelerator(tmp_path):
    words = ["-m", "benchmarks.accelerator", *FEW.split(), "--output", str(tmp_path)]
    run = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    report = json.loads(run.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "report.json").read_text()) == report
    drafts = ["autoregressive", "poss3 2/2/5"]
    assert list(report["methods"]) == [f"{n}, {c}" for c in ("8", "8 of 320") for n in drafts]
    drafted = report["methods"]["poss3 2/2/5, 8"]
    assert drafted["tokens_per_round"] == 1 + (2 + 1 + 2 + 2) / 4  # of 2, 1, 2, 3 at depth 2
    assert list(report["prefill"]) == list(report["methods"])
    servers = [f"{name}, {n} clients" for name in ("autoregressive", "poss3") for n in (1, 2)]
    assert list(report["server"]) == servers
    assert all(row["answers"] >= 2 for row in report["server"].values())
    assert list(report["training"]) == ["poss3"]


def test_rows_are_written_at_once_and_not_measured_again(tmp_path, capsys, monkeypatch):
    roofline = Roofline(Device("abacus", 1e9, 1e9, 1e9), {"square": 1e9})
    monkeypatch.setattr(accelerator, "find_roofline", lambda: roofline)
    measured = []

    def measure(name: str, *_: Any) -> accelerator.Rows:
        measured.append(name)
        if measured == ["autoregressive, 8", "poss3 2/2/5, 8"]:
            raise MemoryError("out of memory")
        row = {"milliseconds": 2.0, "floor_milliseconds": 1.0, "floor_to_prefill": 0.5}
        yield name, row | {"compile_seconds": 1.0}

    monkeypatch.setattr(accelerator, "time_prefill", measure)
    words = [*FEW.split(), "--only", "prefill", "--contexts", "8", "--output", str(tmp_path)]
    with pytest.raises(MemoryError):
        accelerator.main(words)
    assert list(json.loads((tmp_path / "report.json").read_text())["prefill"]) == measured[:1]
    accelerator.main(words)
    assert measured == ["autoregressive, 8", *["poss3 2/2/5, 8"] * 2]
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report["prefill"]) == measured[:2]
    wrong = refusal(accelerator.main, *words, "--contexts", "9/9/9")
    assert "argument --contexts: invalid read_context value: '9/9/9'" in wrong
    accelerator.main([*words, "--repeats", "2"])  # other options: a new report
    assert measured[3:] == measured[:2]


@pytest.mark.parametrize("tree", random_pair.RECORDED)
def test_recorded_rounds_fit_their_trees(tree):
    config = StaticShape(tiny_llama(), DraftConfig(layer=tiny_llama()), read_tree(tree), rows=128)
    assert max(random_pair.accepted_by(config)) == config.max_accepted == int(tree[0])


LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128,
)  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_default_trees_of_accelerators_pay_at_every_load(name):
    draft = DraftConfig(layer=replace(LLAMA_8B, num_layers=1), positions_per_specialist=(3, 3))
    names = "target_bytes", "specialist_bytes", "draft_bytes", "cache_bytes"
    precision = dict.fromkeys(names, 2.0)
    rates = DEVICES[name]  # of which programs reach 80 % and 60 %
    device = Device(name, 0.8 * rates.bytes_per_second, 0.6 * rates.flops_per_second, 0.0)

    def per_token(tree: TreeConfig | None, batch: int) -> float:
        work = Workload(target=LLAMA_8B, batch=batch, context=768, **precision)
        recorded = "0" if tree is None else random_pair.RECORDED[tree.name]
        if tree is not None:
            work = replace(work, draft=draft, tree=tree)
        tokens = 1 + sum(map(int, recorded)) / len(recorded)
        return floors(cost_card(work, prompt_tokens=512), device)["round"] / tokens

    for batch in (1, 3, 4, 11, 12, 31, 32, 95, 96, 127):
        tree = tree_for(ACCELERATOR_TREES, batch)
        assert per_token(tree, batch) < per_token(None, batch)
