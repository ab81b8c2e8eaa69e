"""Keeps measurements as they come, so that the same command resumes after an interruption.

Journal  answers of a benchmark, in its output folder
Kept     results of other long measurements, in the cache folder until these are finished
"""

import json
import logging
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from poss_jax.checkpoint.whole import naming, write_file
from poss_jax.config.bench import BenchConfig
from poss_jax.config.json_reading import JsonError, parse_json
from poss_jax.config.paths import cache_folder
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt

from .measure import digest, identify

_LOG = logging.getLogger(__name__)

SETTINGS, ANSWERS, METHODS = "bench.json", "answers.jsonl", "methods.json"

# Settings of each set or method.
_BY_NAME = {"sets", "methods", "weights", "trees", "draft_vocabularies"}


class Cell(NamedTuple):
    """A set of questions, by name, with a temperature and a seed."""

    set: str
    temperature: float
    seed: int


class Key(NamedTuple):
    """Key of an answer in a benchmark."""

    cell: Cell
    repeat: int  # number of the timed pass, from 0
    method: str  # name of the draft, or of the baseline
    question: int  # index in its set, from 0


@dataclass(frozen=True)
class Turn:
    """The answer to one turn of a question; seconds count from the prompt on the device."""

    text: str  # without the stop token; "" without a tokenizer
    output_ids: list[int]  # the stop token included
    accepted: list[int]  # drafted tokens of every round, bonus token not counted
    offered: list[int]  # deepest position that the tree offered on the accepted path, per round
    copied: list[int]  # accepted tokens of every round that lookup copied; [] without lookup
    seconds: float  # to the finished answer
    first_token_seconds: float


@dataclass(frozen=True)
class Answer:
    """The answers to all turns of one question that were played, with its id and category."""

    key: Key
    id: Any
    category: str
    turns: list[Turn]

    def join(self, name: str) -> list[int]:
        """Joins a list of all turns, such as `accepted`."""
        return [number for turn in self.turns for number in getattr(turn, name)]

    @property
    def seconds(self) -> float:
        """Seconds of all turns."""
        return sum(turn.seconds for turn in self.turns)


_ANSWER = TypeAdapter(Answer)


class Journal:
    """Measurements of a benchmark, in memory and, with a folder, in files."""

    def __init__(
        self, folder: Path | None, settings: dict[str, Any], *, from_scratch: bool = False
    ) -> None:
        """Opens a folder; unless from scratch, resumes if it holds answers of the same settings.

        Args:
          folder: where the journal is kept; None keeps it in memory only.
          settings: what decides the answers, JSON-compatible. A mapping, such as the drafts, may
            gain and lose names, but a name that was measured keeps its value.

        Raises:
          UserError: the folder holds a run of other settings, or a damaged file.
        """
        self.answers: dict[Key, Answer] = {}
        self.methods: dict[str, dict[str, Any]] = {}  # other measurements, by method
        self._folder = folder
        if folder is None:
            return
        if from_scratch or not (folder / SETTINGS).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            for name in (ANSWERS, METHODS):
                (folder / name).unlink(missing_ok=True)
            _write_json(folder / SETTINGS, settings)
            return
        saved = _read_json(folder / SETTINGS, "give --overwrite to start from scratch")
        for number, line in enumerate(_read_whole_lines(folder / ANSWERS), start=1):
            try:
                answer = _ANSWER.validate_json(line)
            except ValidationError as error:
                raise UserError(
                    f"{folder / ANSWERS}:{number}: want an answer of infer.bench, got a damaged "
                    "line; remove it, and the question is answered again"
                ) from error
            self.answers[answer.key] = answer
        if (folder / METHODS).is_file():
            advice = "remove it, and the methods are measured again"
            self.methods = _read_json(folder / METHODS, advice)
        measured = {name for key in self.answers for name in (key.method, key.cell.set)}
        settings = _join_settings(folder, saved, settings, {*measured, *self.methods})
        _write_json(folder / SETTINGS, settings)

    def add(self, answer: Answer) -> None:
        """Takes in an answer, and writes it to the file before it returns."""
        self.answers[answer.key] = answer
        if self._folder is not None:
            _append(self._folder / ANSWERS, asdict(answer))

    def describe(self, name: str, numbers: dict[str, Any]) -> None:
        """Keeps other measurements of a method, JSON-compatible."""
        self.methods[name] = numbers
        if self._folder is not None:
            _write_json(self._folder / METHODS, self.methods)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_file(path, json.dumps(value, indent=2) + "\n")


def _join_settings(
    folder: Path, saved: dict[str, Any], settings: dict[str, Any], measured: set[str]
) -> dict[str, Any]:
    """Adds new names, and refuses changes to names that were measured."""
    for key in _BY_NAME & settings.keys():
        old = saved.get(key, {})
        saved[key] = {name: value for name, value in old.items() if name in measured}
    current = json.loads(json.dumps(settings))
    names = sorted({*saved, *current})
    if differing := [name for name in names if _differ(saved.get(name), current.get(name))]:
        raise UserError(
            f"output {folder} holds a benchmark of other settings ({', '.join(differing)}); name "
            "another folder, or give --overwrite to start from scratch"
        )
    return {key: saved[key] | new if isinstance(new, dict) else new for key, new in current.items()}


def _differ(saved: Any, current: Any) -> bool:
    """Tells whether two settings differ, of two dicts in a key that both have."""
    if isinstance(saved, dict) and isinstance(current, dict):
        return saved | current != current | saved
    return saved != current


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        value = parse_json(path.read_bytes())
        if not isinstance(value, dict):
            raise JsonError(f"a {type(value).__name__}")
    except JsonError as error:
        raise UserError(f"{path}: want a JSON object, got {error}; {remedy}") from error
    return value


def _read_whole_lines(path: Path) -> list[bytes]:
    """Reads lines that were appended, and cuts off a last one that was not written whole."""
    data = path.read_bytes() if path.is_file() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        os.truncate(path, len(complete))
    return complete.splitlines()


def _append(path: Path, value: Any) -> None:
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


# --------------------------------------------------------------------------------------------------
# Results of other measurements


class Kept:
    """Results by name, all JSON-compatible, in a file with a line per result."""

    def __init__(self, program: str, made_from: dict[str, Any]) -> None:
        """Finds what an interrupted run has kept; `made_from` is all that decides the results."""
        file = f"{program}-{digest(made_from)[:16]}.jsonl"
        self.path = cache_folder() / "unfinished" / file
        self._results: dict[str, Any] = {}
        if self.path.is_file():
            for line in _read_whole_lines(self.path):
                self._results |= json.loads(line)
            _LOG.warning("going on with %d results of %s", len(self._results), self.path)

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """Returns a result, which is measured unless it was kept; as JSON gives it back."""
        if name not in self._results:
            result = {name: measure()}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _append(self.path, result)
            self._results |= json.loads(json.dumps(result))
        return self._results[name]

    def finish(self) -> None:
        """Removes the file."""
        self.path.unlink(missing_ok=True)


def describe(
    config: BenchConfig,
    engines: Mapping[str, Engine],
    prompts: Sequence[PreparedPrompt],
    **settings: Any,
) -> dict[str, Any]:
    """All that decides texts and times of some engines, JSON-compatible."""
    of_run = {"config": config_to_dict(config), "prompts": [prompt.ids for prompt in prompts]}
    return settings | of_run | identify(config, engines)


# --------------------------------------------------------------------------------------------------
# Files that the evaluation scripts of EAGLE, PosS and Spec-Bench read. They count differently:
# PosS's `accept_length` leaves the bonus token out, Spec-Bench's `accept_lengths` includes it.


def write_answer_files(answers: Sequence[Answer], folder: Path) -> None:
    """Writes the first repeat, one file per set, method, temperature and seed.

    `eagle/SET/model_answer/` is for EAGLE and PosS, `spec-bench/SET/model_answer/` for Spec-Bench.
    Files of an earlier report are removed. Names are quoted as in URLs.
    """
    files: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    for answer in sorted(answers, key=lambda answer: answer.key.question):
        cell = answer.key.cell
        if answer.key.repeat == 0:
            name = f"{answer.key.method}-temperature-{cell.temperature:g}-seed-{cell.seed}"
            files[quote(cell.set, safe=""), quote(name, safe="")].append(answer)
    for layout in ("eagle", "spec-bench"):
        for earlier in (folder / layout).glob("*/model_answer/*.jsonl"):
            earlier.unlink()
        for (name, model), group in files.items():
            path = folder / layout / name / "model_answer" / f"{model}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(_lay_out(answer, model, layout)) for answer in group]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lay_out(answer: Answer, model: str, layout: str) -> dict[str, Any]:
    rounds, accepted = [len(turn.accepted) for turn in answer.turns], answer.join("accepted")
    if layout == "eagle":
        counts = {"idxs": [count - 1 for count in rounds], "accept_length": accepted}
    else:
        counts = {"decoding_steps": rounds, "accept_lengths": [count + 1 for count in accepted]}
    choice = {
        "index": 0,
        "turns": [turn.text for turn in answer.turns],
        "new_tokens": [len(turn.output_ids) for turn in answer.turns],
        "wall_time": [turn.seconds for turn in answer.turns],
        **counts,
    }
    return {
        "question_id": answer.id,
        "category": answer.category,
        "answer_id": str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([model, answer.key]))),
        "model_id": model,
        "choices": [choice],
        "tstamp": 0.0,
    }
