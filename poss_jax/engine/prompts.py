"""Prompts of every kind -> token ids."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from poss_jax.config import UserError

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""Text, token ids, or chat messages ({"role", "content"})."""


def encode_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int) -> list[int]:
    """Turns a prompt into token ids; a BOS that it begins with is not doubled.

    Args:
      prompt: of any kind.
      tokenizer: of the target; None leaves token ids alone.
      vocab_size: of the target.

    Raises:
      UserError: the prompt is empty, holds ids outside the vocabulary, or is text (or messages)
        for a target without tokenizer (or chat template).
    """
    if not prompt:
        raise UserError("prompt: want at least one token, got an empty prompt; write something")
    if isinstance(prompt, str):
        ids = _tokenise(prompt, tokenizer)
    elif isinstance(prompt[0], dict):
        ids = _tokenise(_apply_chat_template(prompt, tokenizer), tokenizer)
    else:
        ids = [int(token) for token in prompt]  # type: ignore[arg-type]
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        raise UserError(
            f"prompt: want token ids of 0 to {vocab_size - 1}, got {outside[0]}; "
            "tokenise with the target's own tokenizer"
        )
    return ids


def _tokenise(text: str, tokenizer: Any) -> list[int]:
    _check_tokenizer(tokenizer)
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids = list(tokenizer(text, add_special_tokens=not has_bos, verbose=False)["input_ids"])
    if not set(ids) - {tokenizer.bos_token_id}:
        raise UserError(f"prompt: want at least one token, got none from {text!r}; write more")
    return ids


def _apply_chat_template(messages: Any, tokenizer: Any) -> str:
    _check_tokenizer(tokenizer)
    if not tokenizer.chat_template:
        raise UserError(
            "messages: want a tokenizer with a chat template, this target's has none; "
            "give `prompt` (text) instead"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise UserError(
            f"messages: the target's chat template refuses them: {error}; change their roles"
        ) from error


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is None:
        raise UserError("prompt: this target has no tokenizer; give `prompt_ids`")
