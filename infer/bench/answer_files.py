"""Answers in the layouts that the evaluation scripts of EAGLE, PosS and Spec-Bench read.

They count differently: PosS's `accept_length` leaves the bonus token out, Spec-Bench's
`accept_lengths` includes it.
"""

import json
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .journal import Answer


def write_answer_files(answers: Sequence[Answer], folder: Path) -> None:
    """Writes the first repeat, one file per set, method, temperature and seed.

    `eagle/SET/model_answer/` is for EAGLE and PosS, `spec-bench/SET/model_answer/` for Spec-Bench.
    Files of an earlier report are removed. Names are quoted as in URLs.
    """
    files: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    for answer in answers:
        cell = answer.key.cell
        if answer.key.repeat == 0:
            name = f"{answer.key.method}-temperature-{cell.temperature:g}-seed-{cell.seed}"
            files[quote(cell.set, safe=""), quote(name, safe="")].append(answer)
    for layout, convert in (("eagle", as_eagle), ("spec-bench", as_spec_bench)):
        for earlier in (folder / layout).glob("*/model_answer/*.jsonl"):
            earlier.unlink()
        for (name, model), few in files.items():
            path = folder / layout / name / "model_answer" / f"{model}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(convert(one, model)) for one in sorted(few, key=_place)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def as_eagle(answer: Answer, model: str) -> dict[str, Any]:
    """Converts an answer to the layout of EAGLE and PosS."""
    turns = answer.turns
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "idxs": [len(turn.accepted) - 1 for turn in turns],
        "new_tokens": [len(turn.output_ids) for turn in turns],
        "wall_time": [turn.seconds for turn in turns],
        "accept_length": answer.accepted,
    }
    return _about(answer, model) | {"choices": [choice], "tstamp": 0.0}


def as_spec_bench(answer: Answer, model: str) -> dict[str, Any]:
    """Converts an answer to the layout of Spec-Bench."""
    turns = answer.turns
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [len(turn.accepted) for turn in turns],
        "new_tokens": [len(turn.output_ids) for turn in turns],
        "wall_time": [turn.seconds for turn in turns],
        "accept_lengths": [count + 1 for count in answer.accepted],
    }
    about = _about(answer, model) | {"category": answer.category}
    return about | {"choices": [choice], "tstamp": 0.0}


def _about(answer: Answer, model: str) -> dict[str, Any]:
    name = json.dumps([model, answer.key])
    return {
        "question_id": answer.id,
        "answer_id": str(uuid.uuid5(uuid.NAMESPACE_URL, name)),
        "model_id": model,
    }


def _place(answer: Answer) -> int:
    return answer.key.question
