"""Prompts: cut out of documents, or read from a file."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from poss_jax.config import UserError
from poss_jax.data.files import json_lines
from poss_jax.data.tokenizer import encode_plain, special_ids

if TYPE_CHECKING:
    import transformers

PROMPT_KEYS = {
    "prompt": "a string",
    "prompt_ids": "a list of token ids",
    "messages": "a list of {role, content}",
    "turns": "a list of strings",
}
_PROMPT_CHARACTERS_PER_TOKEN = 100  # enough text that a prompt's last token is never cut short
_DEFINITION, _LINE = r"^(?:def|class) ", r"^\S"


def prompts_from_documents(
    texts: Sequence[str],
    tokenizer: "transformers.PreTrainedTokenizerBase",
    *,
    num_prompts: int,
    prompt_tokens: int,
) -> list[list[int]]:
    """Cuts distinct prompts of `prompt_tokens` tokens, bos included, that begin at a line's start.

    Lines beginning a function or class are used up first; documents take turns.

    Raises:
      UserError: the texts do not hold so many prompts.
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


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Reads a JSONL prompt file; each line holds exactly one of `PROMPT_KEYS`.

    Other keys (such as question_id) are kept.

    Raises:
      UserError: missing file or no lines, bad JSON, no prompt, an empty one, or a wrong type.
    """
    records = []
    for where, record in json_lines(path):
        keys = [key for key in PROMPT_KEYS if key in record]
        if len(keys) != 1 or not _is_prompt(keys[0], record[keys[0]]):
            known = ", ".join(f"{key} ({kind})" for key, kind in PROMPT_KEYS.items())
            got = json.dumps({key: record[key] for key in keys} or list(record))
            raise UserError(f"{where}: want exactly one of {known}, not empty; got {got[:80]}")
        records.append(record)
    if not records:
        raise UserError(f"{path}: want one JSON object per line, got no lines; add prompts")
    return records


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


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_message(value: Any) -> bool:
    fields = value if isinstance(value, dict) else {}
    return _is_text(fields.get("role")) and isinstance(fields.get("content"), str)


def _is_prompt(key: str, value: Any) -> bool:
    if key == "prompt":
        return _is_text(value)
    checks = {"prompt_ids": lambda item: type(item) is int, "messages": _is_message}
    return isinstance(value, list) and value != [] and all(map(checks.get(key, _is_text), value))
