"""The study of variants: what it compares by hand, and a whole one on tiny models."""

import json
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from made_up import answer
from programs import DRAFT, config_file, generate, write_config, write_lines

from benchmarks import study
from benchmarks.study_report import format_row
from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import read_record
from poss_jax.config.reading import UserError, load_config
from train.main import main as train_main

VARIANTS = {
    "one layer": {},
    "two": {"specialists": {"positions_per_specialist": [1, 1], "depth": 2}},
}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Outputs of the runs that were trained, in this process, which has compiled their programs."""
    seen: list[str] = []

    def run(command: list[str], **settings: object) -> SimpleNamespace:
        seen.append(next(word for word in command if word.startswith("output=")))
        train_main(command[command.index("--config") :])
        return SimpleNamespace(returncode=0)

    fake = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    monkeypatch.setattr(study, "subprocess", fake)
    return seen


def test_variants_are_compared_question_by_question():
    variants = VARIANTS | {"control": {"num_seeds": 1}}
    others = {"trees": {}, "seeds": (0, 1), "pairs": (("control", "two"),)}
    config = study.StudyConfig(start="s", variants=variants, bench="b", **others)
    runs = config.runs()
    assert [run.name for run in runs if run.seed == 1] == ["one layer seed 1", "two seed 1"]
    shares = {"all": {"positionwise_acceptance": {"value": [0.5, 0.25]}}}
    group = {"set": "made up", "temperature": 0.0, "seeds": [0]}
    group |= {"questions": 3, "looping_questions": [2]}
    group |= {"methods": {run.name: shares for run in runs}}
    accepted = {"one layer seed 0": [1, 3], "one layer seed 1": [3, 3], "two seed 0": [2, 4]}
    accepted |= {"two seed 1": [4, 4], "control seed 0": [0, 2]}
    answers = [
        answer((0, name, question), [*range(8)], [few[question > 0], few[1]], [4, 4], 1.0)
        for name, few in accepted.items()
        for question in range(3)
    ]
    row = study.compare_variants(config, runs, group, answers, 1)
    one, two, control = row["variants"].values()
    assert row["questions"] == 2 and one["of_seeds"] == [(3 + 4) / 2, (4 + 4) / 2]
    assert one["difference"]["value"] == 0 and two["difference"]["value"] == pytest.approx(1)
    assert two["acceptance_length"]["value"] == pytest.approx(one["acceptance_length"]["value"] + 1)
    assert two["positionwise_acceptance"] == [0.5, 0.25]
    assert control["difference"]["value"] == pytest.approx(-1)  # from the first with seed 0
    assert row["pairs"][0]["difference"]["value"] == pytest.approx(-2)


def test_held_out_rows_are_compared_batch_by_batch():
    config = study.StudyConfig(start="s", variants=VARIANTS, trees={}, seeds=(0, 1))
    accepted = {"one layer": [[0.5, 0.7], [0.6, 0.6]], "two": [[0.6, 0.8], [0.8, 0.6]]}  # by seed
    batches = {
        study.Run(name, seed): [
            {study.SIMULATED: 1 + 2 * share, "cumulative_acceptance": [share]} for share in shares
        ]
        for name, of_seeds in accepted.items()
        for seed, shares in enumerate(of_seeds)
    }
    last = {run: few[-1] for run, few in batches.items()}
    row = study.compare_held_out(config, last, batches)
    two = row["variants"]["two"]
    assert two["difference"]["value"] == pytest.approx(0.2)
    assert two["first_position"]["difference"]["value"] == pytest.approx(0.1)
    shown = format_row(row)[1]
    assert "| at pos 1 | p at pos 1 |" in shown and "cosine" not in shown


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped(runs, tmp_path, trained, capsys, monkeypatch):
    start = {**DRAFT, "init_draft": runs.model("eagle"), "num_tokens": 128, "validate_every": 1}
    bench = {"target": runs.model("target"), "num_prompts": 2, "max_new_tokens": 6, "repeats": 1}
    bench["prompts"] = write_lines(tmp_path / "p.jsonl", {"prompt": "def area_7"}, {"prompt": "de"})
    values = {
        "start": config_file(runs, tmp_path, start),
        "variants": VARIANTS,
        "bench": write_config(tmp_path, bench),
        "trees": {"2/1/3": {"depth": 2, "top_k": 1, "total_tokens": 3}},
        "seeds": [3],
        "output": str(tmp_path / "runs"),
    }
    config, output = write_config(tmp_path, values), str(tmp_path / "report")
    with monkeypatch.context() as patch:
        patch.setattr(study, "measure", lambda *arguments: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            study.main(["--config", config, "--output", output])
    assert len(trained) == 2
    rows = [path.stat().st_ino for path in (tmp_path / "runs").rglob("data.npz")]
    assert len(rows) == 2 and len(set(rows)) == 1  # made once
    study.main(["--config", config, "--output", output])
    assert len(trained) == 2  # nothing again
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = report["rows"]
    assert row["tree"] == "2/1/3" and list(row["variants"]) == list(VARIANTS)
    assert [len(curve) for curve in report["curves"].values()] == [2, 2]
    cosines = [one["feature_cosine"] for one in report["held_out"]["variants"].values()]
    assert [len(few) for few in cosines] == [1, 2]
    assert all(-1 <= cosine <= 1 for few in cosines for cosine in few)
    text = (tmp_path / "report" / "report.md").read_text()
    assert text.count("## ") == 2  # a tree, and the held-out texts
    assert "| cosine 1 | cosine 2 |" in text and "| pos 1 |" in text
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"positions.svg", "drift.svg", "convergence.svg"} <= files
    settings, run = load_config(study.StudyConfig, config), study.Run("two", 3)
    best = max(
        reversed(study.read_validations(settings, run)), key=lambda one: one[study.SIMULATED]
    )
    batches = [one["agreement"] for one in study.validate(settings, run)]  # of as many rows each
    assert np.mean(batches, axis=0) == pytest.approx(best["agreement"])
    two = {"specialists": {"positions_per_specialist": [1, 1, 1], "depth": 3}}
    other = write_config(tmp_path, values | {"variants": VARIANTS | {"two": two}})
    with pytest.raises(UserError, match=r"two/3 holds a run with another config \(special"):
        study.main(["--config", other, "--output", output])


@pytest.mark.slow
def test_a_widened_draft_predicts_the_same(runs, tmp_path):
    start = config_file(runs, tmp_path, {**DRAFT, "init_draft": runs.model("eagle")})
    settings = {"start": start, "variants": VARIANTS, "bench": "b", "trees": {}}
    config = study.StudyConfig(**settings, output=str(tmp_path / "runs"))
    folder = study.widen(config, 80)
    record, wide = load_draft(folder, target=read_record(runs.model("target")))
    assert record.draft.layer.intermediate_size == 80
    assert wide["specialists"][0]["mlp"]["up"]["weight"].shape == (80, 32)
    arguments = [tmp_path, "--prompt", "def area_7", "--tree-depth", "2"]
    narrow, widened = (
        generate(runs.model("target"), draft, *arguments)
        for draft in (runs.model("eagle"), str(folder))
    )
    assert narrow == widened  # rounds, too
    assert study.widen(config, 80) == folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": [["one layer", "three"]]}, "pairs: want names of variants, got three"),
        ({"variants": {"a": {}, "b": {"num_seeds": 3}}}, "num_seeds: want 1 to 2"),
        ({"variants": {"a": {"specialists": {"depth": "deep"}}}}, "depth: Input should be a valid"),
        pytest.param(
            {"variants": {"a": {"mesh": {"data": 3}}}},
            "training of a seed 0 failed; (see above|error: .*mesh)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_studies_are_refused_or_end_with_their_variant(runs, tmp_path, changes, message):
    bench = write_config(tmp_path, {"target": runs.model("target")})
    values = {"start": config_file(runs, tmp_path, DRAFT), "bench": bench, "seeds": [0, 1]}
    values |= {"variants": VARIANTS, "trees": {}, "output": str(tmp_path / "runs")} | changes
    arguments = ["--config", write_config(tmp_path, values), "--output", str(tmp_path / "r")]
    with pytest.raises(UserError, match=message):
        study.main([*arguments, "--jobs", "2"])
    assert not (tmp_path / "runs" / "runs" / "a" / "0").exists()
