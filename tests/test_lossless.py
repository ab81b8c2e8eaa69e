"""The losslessness check: what it excuses, what it does not, and the program around it."""

import json
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from models import make_engine, random_target, tiny_llama
from programs import Runs, write_lines
from test_distribution import raw_bonus

from infer import lossless_run
from infer.lossless import main
from infer.lossless_run import Scores, examine
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import TreeConfig
from poss_jax.decode import speculate
from poss_jax.engine.answers import Generation

pytestmark = pytest.mark.usefixtures("asks_json")

NO_NOISE = np.zeros(4, np.float32)


def scores(*values: float, kept=(0, 1, 2, 3)) -> Scores:
    plain = np.float32(values)
    return Scores(plain, np.where(np.isin(range(4), kept), plain, -np.inf), NO_NOISE)


NEAR, FAR = scores(0, 1, 0.99999, 0), scores(0, 1, 0.999, 0)
SWAPPED, FAR_SWAPPED = scores(0, 0.99999, 1, 0), scores(0, 0.999, 1, 0)
OTHER_NOISE = SWAPPED._replace(noise=np.float32([0, 0, 1e-7, 0]))
COLD = {"temperature": 0.02}  # scores round as coarsely as their logits


@pytest.mark.parametrize(
    ("expected", "got", "rounding", "settings", "is_excused"),
    [
        pytest.param(NEAR, SWAPPED, 2e-5, {}, True, id="near tie"),
        pytest.param(FAR, FAR_SWAPPED, 2e-3, COLD, True, id="low temperature"),
        pytest.param(FAR, FAR_SWAPPED, 2e-3, {}, False, id="the same at temperature 1"),
        pytest.param(NEAR, FAR_SWAPPED, 2e-3, {}, False, id="forwards disagree"),
        pytest.param(NEAR, NEAR, 2e-5, {}, False, id="its own scores say 1"),
        pytest.param(NEAR, SWAPPED, 1e-6, {}, False, id="forwards nearer than the gap"),
        pytest.param(NEAR, OTHER_NOISE, 2e-5, {}, False, id="other noise"),
    ],
)
def test_near_ties_alone_are_excused(expected, got, rounding, settings, is_excused):
    found = examine(expected, got, (1, 2), rounding, **settings)
    assert found["is_excused"] == is_excused and found["tokens"] == (1, 2)
    assert expected is FAR or found["gap"] == pytest.approx(1e-5, rel=1e-2)


def test_a_token_at_the_boundary_of_a_filter_is_excused():
    ours, theirs = scores(3, 2, 1, 0, kept=(0, 1)), scores(3, 2, 1, 0, kept=(0, 1, 2))
    noise = np.float32([0, 0, 9, 0])
    found = examine(ours._replace(noise=noise), theirs._replace(noise=noise), (0, 2), 1e-6)
    assert found["is_excused"] and found["tokens_at_a_filters_boundary"] == [2]


def test_more_accepted_than_the_tree_is_deep_is_a_failure():
    engine = SimpleNamespace(settings=EngineConfig(), max_accepted=3)
    setting = lossless_run.Setting("EAGLE", engine, TreeConfig(depth=3, top_k=2, total_tokens=6), 1)
    counts = [3, 2], [4, 1]
    answers = [Generation([1], [2] * 9, None, few, few, "length") for few in counts]
    (found,) = lossless_run.find_overlong(setting, answers)
    assert (found["answer"], found["accepted"], found["is_excused"]) == (1, 4, False)


def arguments(runs: Runs, tmp_path) -> list[str]:
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "def area_7"}, {"prompt": "de"})
    options = ["--target", runs.model("target"), "--draft", f"PosS-2={runs.model('poss2')}"]
    return [*options, "--prompts", prompts, "--max-new-tokens", "16"]


@pytest.fixture
def few_settings(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest tree, in batches, at three temperatures; each tree costs compilations."""
    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lossless_run, "CHAIN", TreeConfig(depth=1, top_k=3, total_tokens=4))
    monkeypatch.setattr(lossless_run, "TEMPERATURES", (0.0, 0.1, 1.0))
    every = lossless_run.list_settings

    def few(*draft, is_thorough):
        return islice(every(*draft, is_thorough=is_thorough), 1, 2)

    monkeypatch.setattr(lossless_run, "list_settings", few)


@pytest.mark.usefixtures("few_settings")
@pytest.mark.parametrize("lookup", [pytest.param(0, marks=pytest.mark.slow), 9])
def test_interrupted_check_goes_on_and_finds_nothing(
    runs: Runs, tmp_path, capsys, monkeypatch, caplog, lookup
):
    """It says first how long it takes: what was kept takes no time."""
    words = [*arguments(runs, tmp_path), "--lookup", str(lookup)]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lossless_run, "_compare", interrupt)
        main(words)
    assert "24 answers, about 1 min and compilation" in caplog.messages
    decoded = []
    decode = lossless_run._decode

    def count(engine, *args):
        decoded.append(engine.draft_config is not None)
        return decode(engine, *args)

    monkeypatch.setattr(lossless_run, "_decode", count)
    main(words)
    assert decoded == [True]  # answers without the draft were kept
    assert "12 answers, about 1 min and compilation" in caplog.messages
    assert "going on with 1 results" in caplog.text
    out = capsys.readouterr().out
    copies = f", lookup {lookup}" if lookup else ""
    assert f"| PosS-2, tree 1/3/4, batch 4{copies} | 12 | 0 | 0 |" in out
    report = json.loads(out.splitlines()[-1])
    assert report["failures"] == report["excused"] == [] and report["answers"] == 12
    assert 0 < report["largest_rounding"] < lossless_run.MAX_ROUNDING
    assert not list((tmp_path / "cache").rglob("*.jsonl"))  # nothing is left to go on with


def interrupt(*args):
    raise KeyboardInterrupt


def test_a_replay_ends_with_its_text():
    llama = tiny_llama(vocab_size=64)
    tree = TreeConfig(depth=1, top_k=3, total_tokens=4)
    engine = make_engine(llama, random_target(llama), tree=tree)
    prompt = engine.prepare([1, 2, 3], 3)
    assert len(lossless_run.replay(engine, [prompt], 0, 9, batch_size=2)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("few_settings", "fresh_programs")
def test_the_program_finds_a_planted_mistake(runs: Runs, tmp_path, capsys, monkeypatch):
    original = speculate.choose_tokens

    def mistaken(request, state, tree, logits, noise):
        if request.sampling is None or tree.tokens.shape[1] == 1:  # only where a tree was drafted
            return original(request, state, tree, logits, noise)
        return raw_bonus(request, state, tree, logits, noise, original=original)

    monkeypatch.setattr(speculate, "choose_tokens", mistaken)
    with pytest.raises(SystemExit) as exit_:
        main([*arguments(runs, tmp_path), "--num-prompts", "1"])
    assert exit_.value.code == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["failures"] and not any(found["is_excused"] for found in report["failures"])


def test_a_check_without_drafts_is_refused(runs: Runs):
    with pytest.raises(Exception, match="want at least one draft; give --draft NAME=DIR"):
        main(["--target", runs.model("target")])
