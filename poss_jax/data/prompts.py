"""Prompts that are cut out of documents."""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from poss_jax.config.reading import UserError
from poss_jax.data.tokenizer import encode_plain, special_ids

if TYPE_CHECKING:
    import transformers

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
