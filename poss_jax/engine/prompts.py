"""Prompts of every kind -> token ids."""

import operator
from collections.abc import Sequence
from typing import Any

from poss_jax.config import UserError, lone_surrogates
from poss_jax.data import RenderError, call_tokenizer, render_chats

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""Text, token ids, or chat messages ({"role", "content"})."""


def encode_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int) -> list[int]:
    """Turns a prompt into token ids; a BOS that it begins with is not doubled.

    Args:
      prompt: of any kind.
      tokenizer: of the target; None leaves token ids alone.
      vocab_size: of the target.

    Raises:
      UserError: the prompt is empty, holds ids outside the vocabulary or text that is not UTF-8, or
        is text (or messages) for a target without tokenizer (or chat template).
    """
    if not prompt:
        raise UserError("prompt: want at least one token, got an empty prompt; write something")
    if isinstance(prompt, str):
        return _check_range(_tokenise(prompt, tokenizer), vocab_size)
    if isinstance(prompt[0], dict):
        text = _apply_chat_template(prompt, tokenizer)
        return _check_range(_tokenise(text, tokenizer), vocab_size)
    return _check_range(list(map(_token_id, prompt)), vocab_size)


def _token_id(token: Any) -> int:
    try:
        if not isinstance(token, bool):
            return operator.index(token)
    except TypeError:
        pass
    raise UserError(f"prompt: want token ids (whole numbers), got {token!r:.80}")


def _check_range(ids: list[int], vocab_size: int) -> list[int]:
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        got = outside[0] if abs(outside[0]) < 1 << 64 else "one of more than 64 bits"
        raise UserError(
            f"prompt: want token ids of 0 to {vocab_size - 1}, got {got}; "
            "tokenise with the target's own tokenizer"
        )
    return ids


def _tokenise(text: str, tokenizer: Any) -> list[int]:
    _check_tokenizer(tokenizer)
    if lone_surrogates(text):
        raise UserError("prompt: want text as UTF-8, got half a character; convert it")
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    encoded = call_tokenizer(tokenizer, text, add_special_tokens=not has_bos)
    ids = list(encoded["input_ids"])
    if not set(ids) - {tokenizer.bos_token_id}:
        raise UserError(f"prompt: want at least one token, got none from {text!r:.80}; write more")
    return ids


def _apply_chat_template(messages: Any, tokenizer: Any) -> str:
    _check_tokenizer(tokenizer)
    if not tokenizer.chat_template:
        raise UserError(
            "messages: want a tokenizer with a chat template, this target's has none; "
            "give `prompt` (text) instead"
        )
    try:
        return render_chats(tokenizer, [messages], is_asking=True)[0]
    except RenderError as error:
        raise UserError(
            f"messages: the target's chat template refuses them: {error}; change their roles"
        ) from error


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is None:
        raise UserError("prompt: this target has no tokenizer; give `prompt_ids`")
