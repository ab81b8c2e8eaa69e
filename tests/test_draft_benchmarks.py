"""The benchmarks of draft vocabularies and of drafting without context, on tiny models."""

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from models import random_draft, random_target, tiny_llama
from oracle import greedy_request
from programs import POSS2, Runs, config_file, refusal, tiny_runs, write_lines

from benchmarks import context, draft_vocabulary
from poss_jax.checkpoint.record import new_record, target_identity
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.decode import drafting, speculate
from poss_jax.decode.state import DecodeConfig
from poss_jax.engine.engine import Engine

TREE = TreeConfig(depth=4, top_k=1, total_tokens=5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with tiny_runs(tmp_path_factory) as runs:
        yield runs


def test_sizes_are_compared(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_lines(tmp_path / "prompts", {"prompt": "def area_7"}, {"prompt": "def"})
    config, output = config_file(runs, tmp_path, POSS2), tmp_path / "report"
    numbers = "--sizes 8 --num-prompts 2 --max-new-tokens 6 --repeats 1 --tree 3/2/6"
    options = ["--draft", f"P={runs.model('poss2')}", "--prompts", prompts, "--output", str(output)]
    draft_vocabulary.main(["--config", config, *options, *numbers.split()])
    table, _, last = capsys.readouterr().out.removesuffix("\n").rpartition("\n")
    report = json.loads(last)
    assert json.loads((output / "report.json").read_text()) == report
    assert (output / "report.md").read_text() == table + "\n"
    small, full = report["rows"]
    assert [(row["draft"], row["size"]) for row in (small, full)] == [("P", 8), ("P", 300)]
    assert small["coverage"] < full["coverage"] == full["coverage_of_answers"] == 1
    assert small["equal_outputs"] == full["equal_outputs"] == 2
    assert table.startswith("2 prompts x 6 tokens, greedy, the fastest of 1 repeats, tree 3/2/6")
    assert table.endswith("Outputs that differ: 0")
    has_plot = importlib.util.find_spec("matplotlib") is not None
    assert (output / "draft_vocabulary.png").exists() == has_plot


def test_rounds_are_counted_whole() -> None:
    assert context.whole_rounds([2, 0, 3, 1, 1], 3) == [2, 0]
    assert context.whole_rounds([2, 0, 3, 1, 1], 4) == [2, 0, 3]
    assert context.whole_rounds([2, 0, 3, 1, 1], 99) == [2, 0, 3, 1, 1]


def test_drafts_of_another_kind_are_refused(runs: Runs) -> None:
    models = ["--target", runs.model("target"), "--draft", f"P={runs.model('poss2')}"]
    assert "draft P: want several specialists that read one" in refusal(context.main, *models)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A draft of one stream whose specialists 0 and 1 draft the first two and later positions."""
    llama = tiny_llama()
    layer = dataclasses.replace(llama, num_layers=1)
    spans = {"positions_per_specialist": (2, 2), "kv": "shared"}
    config = DraftConfig(layer=layer, family="eagle3", aux_layers=(0, 1), **spans)
    target = random_target(llama)
    identity = target_identity("tiny", None, target["embed"]["weight"], target["head"]["weight"])
    engine = Engine(new_record(llama, identity, tokenizer_from=None), target, tree=TREE)
    return engine.with_draft(
        new_record(config, identity, tokenizer_from=None), random_draft(config)
    )


def draft_scores(engine: Engine, way: str, *, garbage: float = 0.0) -> np.ndarray:
    """Scores of the chain after a prompt; `garbage` lies in the context of specialist 1's cache."""
    with context.changed(engine, way) as changed:
        assert changed.draft_config is not None
        decode = DecodeConfig(changed.target_config, changed.draft_config, TREE, 8)

        @jax.jit
        def run() -> Any:
            request = greedy_request([5, 6, 7, 8], limit=8)
            state = speculate.start(changed.weights, decode, request)
            cache = state.draft.cache
            cache = cache.replace(
                k=[cache.k[0], *(part + garbage for part in cache.k[1:])],
                v=[cache.v[0], *(part + garbage for part in cache.v[1:])],
            )
            args = changed.weights.draft, changed.draft_config, TREE, cache, state.draft.root_input
            return drafting.draft(*args, drafting.top_children).candidates.scores[0]

        return np.asarray(run())


def test_later_specialists_do_not_see_the_context(engine: Engine) -> None:
    before = {name: getattr(drafting, name) for name in ("commit_pairs", "draft", "_run_level")}
    scores = {way: draft_scores(engine, way) for way in context.WAYS}
    shared, own, zeros, masked = (scores[way] for way in context.WAYS)
    for other in (own, zeros, masked):
        np.testing.assert_allclose(other[:2], shared[:2], atol=1e-6)  # specialist 0 drafts these
        assert abs(other[2] - shared[2]) > 1e-3
    np.testing.assert_array_equal(own, zeros)  # the first round finds zeros
    assert abs(masked[2] - zeros[2]) > 1e-3
    for way, is_seen in ((context.OWN_CACHES, True), (context.ZEROS, False)):
        found = draft_scores(engine, way, garbage=1.0)
        assert (abs(found[2] - scores[way][2]) > 1e-3) == is_seen
    np.testing.assert_array_equal(draft_scores(engine, context.MASKED, garbage=1.0), masked)
    assert before == {name: getattr(drafting, name) for name in before}


def test_texts_stay_the_same(engine: Engine) -> None:
    prompts = [engine.prepare([5, 6, 7, 8], 12), engine.prepare([3, 9], 12)]
    with context.changed(engine, context.OWN_CACHES) as changed:
        answers = changed.decode(prompts, batch_size=2)
    alone = engine.with_tree({1: None}).decode(prompts, batch_size=2)
    assert [one.output_ids for one in answers] == [one.output_ids for one in alone]
