"""Traces on disk: a second start traces no model, and writes the same texts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import jax
import pytest
from models import one_layout
from test_scheduler import SETTINGS, draw_engine

from poss_jax.config.decoding import GenerateConfig
from poss_jax.engine import traces
from poss_jax.engine.engine import Engine
from poss_jax.engine.scheduler import Scheduler
from poss_jax.engine.slots import Slots
from poss_jax.model import target
from poss_jax.program.options import load_engine

Texts = list[list[int]]


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    with one_layout(num_biased=2):
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, fresh_programs: None) -> list[int]:
    """Numbers of rows for which the target's layers were traced."""
    found: list[int] = []
    run_layers = target._run_layers

    def count(*args):
        found.append(args[3].shape[1])
        return run_layers(*args)

    monkeypatch.setattr(target, "_run_layers", count)
    return found


@pytest.fixture
def start(tmp_path: Path, traced: list[int]) -> Iterator[Callable[..., Texts]]:
    """Answers like a new process; with a folder for traces, unless `is_kept` is False."""

    def answer_anew(answer: Callable[[Engine], Texts], *, is_kept: bool = True) -> Texts:
        jax.clear_caches()
        traced.clear()
        traces.keep_traces(tmp_path if is_kept else None)
        return answer(draw_engine())

    yield answer_anew
    traces.keep_traces(None)


def generate(engine: Engine) -> Texts:
    """Whole texts, and one round by round."""
    whole = engine.generate([[1, 2], [3]], max_new_tokens=9, batch_size=2, sampling=SETTINGS[1])
    streamed = engine.stream([4, 5], max_new_tokens=9, sampling=SETTINGS[1])
    return [*(one.output_ids for one in whole), *(one.output_ids for one in streamed)]


def serve(engine: Engine) -> Texts:
    """Texts of a warm scheduler; the second prompt begins like the first."""
    scheduler = Scheduler(Slots(engine, sizes=(1,), max_length=300, max_prefix_bytes=2**26))
    scheduler.warm_up()
    prompts = [engine.prepare([7] * n, 9, one) for n, one in zip((70, 80), SETTINGS, strict=False)]
    texts = [[*scheduler.submit(prompt)][-1].answer for prompt in prompts]
    assert scheduler.stats.compilations == 0
    scheduler.close()
    return [text.output_ids for text in texts if text is not None]


@pytest.mark.parametrize("answer", [generate, serve])
def test_a_second_start_traces_nothing(
    start: Callable[..., Texts], traced: list[int], answer: Callable[[Engine], Texts]
) -> None:
    want = start(answer, is_kept=False)
    assert traced
    assert start(answer) == want
    assert traced
    assert start(answer) == want
    assert not traced


def read_one(engine: Engine) -> Texts:
    return [one.output_ids for one in engine.generate([[1]], max_new_tokens=3)]


@pytest.mark.parametrize("damage", [b"not a trace", None])
def test_a_damaged_file_is_written_again(
    start: Callable[..., Texts], traced: list[int], tmp_path: Path, damage: bytes | None
) -> None:
    want = start(read_one)
    for file in tmp_path.iterdir():
        stored = file.read_bytes()
        file.write_bytes(stored[:-1] + b"\0" if damage is None else damage)
    assert start(read_one) == want
    assert traced
    assert start(read_one) == want
    assert not traced


def test_other_sources_trace_anew(
    start: Callable[..., Texts], traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(read_one)
    monkeypatch.setattr(traces, "_identity", lambda: ["a later version"])
    start(read_one)
    assert traced


def test_the_folder_is_bounded(
    start: Callable[..., Texts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_MOST_FILES", 1)
    start(read_one)
    assert len(list(tmp_path.iterdir())) == 1


def test_programs_keep_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_folder", None)
    monkeypatch.setattr(Engine, "load", lambda *_, **__: MagicMock(spec=Engine))
    monkeypatch.setenv("POSS_JAX_TRACES", str(tmp_path))
    load_engine(GenerateConfig(target="any", prompt="Once"))
    assert traces._folder == tmp_path


def test_a_folder_that_cannot_be_written_keeps_nothing(
    start: Callable[..., Texts], traced: list[int], tmp_path: Path
) -> None:
    want = start(read_one, is_kept=False)
    tmp_path.rmdir()
    tmp_path.write_text("a file")
    assert start(read_one) == want
    assert traced
