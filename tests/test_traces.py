"""Traces on disk: a second start traces no model, and writes the same texts."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

import jax
import pytest
from models import make_engine, one_layout
from test_scheduler import LLAMA, SETTINGS, draw_engine, draw_pair

from poss_jax.config.decoding import GenerateConfig
from poss_jax.config.models import TreeConfig
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

    def answer_anew(answer: Callable[[], Texts], *, is_kept: bool = True) -> Texts:
        jax.clear_caches()
        traced.clear()
        traces.keep_traces(tmp_path if is_kept else None)
        return answer()

    yield answer_anew
    traces.keep_traces(None)


@cache
def drawn_engine() -> Engine:
    return draw_engine().with_tree(TreeConfig(depth=1, top_k=2, total_tokens=3))


def generate() -> Texts:
    """Whole texts, and one round by round."""
    engine = drawn_engine()
    whole = engine.generate([[1, 2], [3]], max_new_tokens=9, batch_size=2, sampling=SETTINGS[1])
    streamed = engine.stream([4, 5], max_new_tokens=9, sampling=SETTINGS[1])
    return [*(one.output_ids for one in whole), *(one.output_ids for one in streamed)]


def serve() -> Texts:
    """Texts of a warm scheduler; the second prompt begins like the first."""
    engine = drawn_engine()
    scheduler = Scheduler(Slots(engine, sizes=(1,), max_length=300, max_prefix_bytes=2**26))
    scheduler.warm_up()
    prompts = [engine.prepare([7] * n, 9, one) for n, one in zip((70, 80), SETTINGS, strict=False)]
    texts = [[*scheduler.submit(prompt)][-1].answer for prompt in prompts]
    assert scheduler.stats.compilations == 0
    scheduler.close()
    return [text.output_ids for text in texts if text is not None]


@pytest.mark.parametrize("answer", [generate, serve])
def test_a_second_start_traces_nothing(
    start: Callable[..., Texts], traced: list[int], answer: Callable[[], Texts]
) -> None:
    want = start(answer, is_kept=False)
    assert traced
    assert start(answer) == want
    assert traced
    assert start(answer) == want
    assert not traced


@cache
def drawn_target() -> Engine:
    return make_engine(LLAMA, draw_pair(seed=0)[0])


def read_one() -> Texts:
    """A text of the target alone."""
    return [one.output_ids for one in drawn_target().generate([[1]], max_new_tokens=3)]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Texts]:
    """What `read_one` keeps, and what it answers."""
    folder = tmp_path_factory.mktemp("traces")
    traces.keep_traces(folder)
    jax.clear_caches()
    texts = read_one()
    traces.keep_traces(None)
    return folder, texts


@pytest.mark.parametrize("damage", [b"not a trace", None])
def test_a_damaged_file_is_written_again(
    known: tuple[Path, Texts],
    start: Callable[..., Texts],
    traced: list[int],
    tmp_path: Path,
    damage: bytes | None,
) -> None:
    folder, want = known
    for file in folder.iterdir():
        stored = file.read_bytes()
        (tmp_path / file.name).write_bytes(stored[:-1] + b"\0" if damage is None else damage)
    assert start(read_one) == want
    assert traced
    assert start(read_one) == want
    assert not traced


def test_other_sources_trace_anew(
    known: tuple[Path, Texts],
    start: Callable[..., Texts],
    traced: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(known[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(traces, "_identity", lambda: ["a later version"])
    start(read_one)
    assert traced


def test_the_folder_is_bounded(
    start: Callable[..., Texts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_MOST_FILES", 1)
    for name in ("old", "older"):
        (tmp_path / name).touch()
    start(read_one)
    (file,) = tmp_path.iterdir()
    assert file.name not in ("old", "older")


def test_programs_keep_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_folder", None)
    monkeypatch.setattr(Engine, "load", lambda *_, **__: MagicMock(spec=Engine))
    monkeypatch.setenv("POSS_JAX_TRACES", str(tmp_path))
    load_engine(GenerateConfig(target="any", prompt="Once"))
    assert traces._folder == tmp_path


def test_a_folder_that_cannot_be_written_keeps_nothing(
    known: tuple[Path, Texts], start: Callable[..., Texts], traced: list[int], tmp_path: Path
) -> None:
    tmp_path.rmdir()
    tmp_path.write_text("a file")
    assert start(read_one) == known[1]
    assert traced
