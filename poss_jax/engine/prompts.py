"""Prompts of every kind -> token ids that fit, with their settings; several of them -> a batch.

    str, ids or messages ─► Engine.prepare ─► PreparedPrompt ─► lay_out ─► Request

`Engine.prepare` tokenises and checks a prompt, once: code that takes a `PreparedPrompt` trusts it.
"""

import dataclasses
import json
import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.reading import UserError, lone_surrogates, shorten
from poss_jax.data.rendering import (
    RenderError,
    encode_rendered,
    find_left_out,
    hide_marks,
    render_chat,
)
from poss_jax.data.tokenizer import call_tokenizer
from poss_jax.decode.sampling import SETTINGS, Sampling
from poss_jax.decode.state import Request
from poss_jax.engine.guides import GrammarState

MOST_BIASED = 300
"""Tokens that a request to a server may bias, as in the OpenAI API."""

MOST_STOP_IDS = 16
"""Tokens that may end the answer to a request to a server."""

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""Text, token ids, or chat messages ({"role", "content"}, and other fields the template reads)."""


class Rendering(NamedTuple):
    """Settings of the chat template."""

    tools: Sequence[dict[str, Any]] | None = None  # JSON schemas of what the assistant may call
    is_asking: bool = True  # end with the template's request for an answer
    variables: Mapping[str, Any] = MappingProxyType({})  # see `data.rendering.render_steps`


class PreparedPrompt(NamedTuple):
    """A prompt ready for decoding, made and checked by `Engine.prepare`."""

    ids: list[int]  # at least one, all in the target's vocabulary
    max_new_tokens: int  # prompt and answer fit `max_length`
    sampling: SamplingConfig = SamplingConfig()  # greedy; biased tokens are in the vocabulary
    stop_ids: Sequence[int] = ()  # tokens that end the answer
    # Tokens at the end of `ids` that already belong to the answer: frequency and presence penalties
    # count them, and stop strings may begin in them.
    num_continued: int = 0
    is_chat: bool = False  # the answer is a new message, decoded alone, else as a continuation
    shown_ids: Sequence[int] = ()  # special tokens whose names are text, such as marks of calls
    guide: GrammarState | None = None  # what the answer must match; None: anything
    drafts: bool = True  # False decodes it without drafts and copies
    lookup: bool = True  # False decodes it without copies

    def choice(self, index: int) -> "PreparedPrompt":
        """The same prompt with the seed of another answer (see `prompt_seed`)."""
        return self._replace(sampling=with_seed(self.sampling, index))


class PromptTooLong(UserError):
    """A prompt and its answer are longer than `max_length`, or the prompt alone is."""

    def __init__(self, num_tokens: int, max_new_tokens: int, max_length: int) -> None:
        super().__init__(
            f"prompt of {num_tokens} tokens and {max_new_tokens} new ones do not fit a length of "
            f"{max_length}; shorten the prompt, lower max_new_tokens, or raise max_length"
        )
        self.leaves_no_room = num_tokens >= max_length


def encode_prompt(
    prompt: Prompt,
    tokenizer: Any,
    vocab_size: int,
    rendering: Rendering | None = None,
    *,
    is_bare: bool = False,
) -> list[int]:
    """Turns a prompt into token ids.

    A text gets the special tokens that the tokenizer adds (one BOS at most) and those it spells
    out. Messages become what `apply_chat_template` gives: BOS only if the template writes one, and
    no special tokens from their content.

    Args:
      tokenizer: the target's tokenizer; None accepts token ids only.
      rendering: how messages are written; None: asking for an answer.
      is_bare: a text gets only the special tokens that it spells out.

    Raises:
      UserError: the prompt is not a sequence, is empty, holds ids outside the vocabulary, text
        that is not UTF-8, or messages without role or content; or it is text (or messages) and
        the target has no tokenizer (or chat template).
    """
    if not isinstance(prompt, Sequence):
        raise UserError(
            f"prompt: want text, a list of token ids or a list of messages, got {shorten(prompt)}; "
            "a list of prompts holds one of these for each"
        )
    if len(prompt) == 0:
        raise UserError("prompt: want at least one token, got an empty prompt; write something")
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        if tokenizer is None:
            raise UserError("prompt: this target has no tokenizer; give `prompt_ids`")
        if not isinstance(prompt, str):
            text, ids = _encode_chat(prompt, tokenizer, rendering or Rendering())
        else:
            if lone_surrogates(prompt):
                raise UserError("prompt: want text as UTF-8, got half a character; convert it")
            has_bos = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
            adds_special = not (has_bos or is_bare)
            encoded = call_tokenizer(tokenizer, prompt, add_special_tokens=adds_special)
            text, ids = prompt, list(encoded["input_ids"])
        if not set(ids) - {tokenizer.bos_token_id}:
            got = f"{text!r:.80}"
            raise UserError(f"prompt: want at least one token, got none from {got}; write more")
    else:
        ids = list(map(_token_id, prompt))
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        raise UserError(
            f"prompt: want token ids of 0 to {vocab_size - 1}, got {shorten(outside[0])}; "
            "tokenise with the target's own tokenizer"
        )
    return ids


def is_message(value: Any) -> bool:
    """True for a chat message: a role and a content, which may be empty.

    The content may be missing if there is another field, such as `tool_calls`.
    """
    fields = value if isinstance(value, dict) else {}
    keys = {key for key, item in fields.items() if item is not None}
    role, content = fields.get("role"), fields.get("content")
    is_content = isinstance(content, str) or (content is None and len(keys) > 1)
    return isinstance(role, str) and role != "" and is_content


@lru_cache(maxsize=8)
def escapes_arguments(tokenizer: Any) -> bool:
    """True if the chat template wants the arguments of calls as objects, not as JSON.

    Clients send JSON, which many templates would write as JSON once more.
    """
    call = {"name": "f", "arguments": json.dumps({"word": "x"})}
    calls = [{"id": "a" * 9, "type": "function", "function": call}]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        chat = [{"role": "user", "content": "x"}, called]
        return r"\"word" in render_chat(tokenizer, chat, is_asking=False)
    except RenderError:
        return True


def check_bias(sampling: SamplingConfig, vocab_size: int) -> None:
    """Raises UserError if a biased token is not in the vocabulary."""
    for token in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise UserError(f"logit_bias: want token ids of 0 to {vocab_size - 1}, got {token}")


def sampling_per_prompt(
    sampling: SamplingConfig | Sequence[SamplingConfig] | None, num_prompts: int
) -> list[SamplingConfig]:
    """Gives every prompt its settings; prompts that share them get different seeds.

    Raises:
      UserError: a list of another length than the prompts.
    """
    if sampling is None or isinstance(sampling, SamplingConfig):
        shared = sampling or SamplingConfig()
        return [with_seed(shared, index) for index in range(num_prompts)]
    if len(sampling) != num_prompts:
        raise UserError(
            f"sampling: want one for all or one per prompt ({num_prompts}), got {len(sampling)}"
        )
    return list(sampling)


def with_seed(sampling: SamplingConfig, index: int) -> SamplingConfig:
    """Gives a prompt of a run its own seed (see `prompt_seed`)."""
    return dataclasses.replace(sampling, seed=prompt_seed(sampling.seed, index))


def prompt_seed(seed: int, index: int) -> int:
    """Seed of a prompt within a run: the run's own for the first, others derived from it."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def fold_seed(seed: int) -> int:
    """Turns a seed of 64 bits into one of the device's 32: small ones stay, others are hashed."""
    if 0 <= seed < 2**32:
        return seed
    return int(np.random.SeedSequence(seed % 2**64).generate_state(1)[0])


def lay_out(prompts: Sequence[PreparedPrompt], *, num_tokens: int) -> dict[str, Any]:
    """Lays a batch into arrays of NumPy, by the names of `Request` and `Sampling`.

    Settings that a server takes do not change the shapes.

    Args:
      num_tokens: capacity per sequence, at least the longest prompt.
    """
    tokens = np.zeros((len(prompts), num_tokens), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt.ids)] = prompt.ids
    settings = [prompt.sampling for prompt in prompts]
    sampling = {
        name: np.asarray([getattr(setting, name) for setting in settings], dtype)
        for name, dtype in SETTINGS.items()
    }
    max_biased = max(len(setting.logit_bias) for setting in settings)
    width = MOST_BIASED if max_biased <= MOST_BIASED else 1 << (max_biased - 1).bit_length()
    bias_ids = np.full((len(settings), width), -1, np.int32)
    bias = np.zeros((len(settings), width), np.float32)
    for row, setting in enumerate(settings):
        bias_ids[row, : len(setting.logit_bias)] = list(setting.logit_bias)
        bias[row, : len(setting.logit_bias)] = list(setting.logit_bias.values())
    stop_ids = [prompt.stop_ids for prompt in prompts]
    width = max(MOST_STOP_IDS, *map(len, stop_ids))
    lengths = np.asarray([len(prompt.ids) for prompt in prompts], np.int32)
    continued = np.asarray([prompt.num_continued for prompt in prompts], np.int32)
    return {
        "tokens": tokens,
        "lengths": lengths,
        "max_new_tokens": np.asarray([prompt.max_new_tokens for prompt in prompts], np.int32),
        "stop_ids": np.asarray([[*ids, *[-1] * (width - len(ids))] for ids in stop_ids], np.int32),
        "output_starts": lengths - continued,
        "drafts": np.asarray([prompt.drafts for prompt in prompts]),
        "lookup": np.asarray([prompt.lookup for prompt in prompts]),
        "sampling": sampling | {"bias_ids": bias_ids, "bias": bias},
    }


def make_request(host: dict[str, Any]) -> Request:
    """Makes a request of what `lay_out` gives, within a program of the devices."""
    fields: dict[str, Any] = host | {"sampling": Sampling(**host["sampling"])}
    return Request(**fields)


def _token_id(token: Any) -> int:
    try:
        if not isinstance(token, bool):
            return operator.index(token)
    except TypeError:
        pass
    raise UserError(f"prompt: want token ids (whole numbers), got {token!r:.80}")


def _encode_chat(messages: Any, tokenizer: Any, rendering: Rendering) -> tuple[str, list[int]]:
    """Returns the rendered text, and its tokens."""
    for message in messages:
        if not is_message(message):
            raise UserError(
                "messages: want a role and a content of text in each, got "
                f"{shorten(message)}; write such as {{'role': 'user', 'content': 'Hi'}}"
            )
    if not tokenizer.chat_template:
        raise UserError(
            "messages: want a tokenizer with a chat template, this target's has none; "
            "give `prompt` (text) instead"
        )
    hidden, tools = (hide_marks(tokenizer, value) for value in (messages, rendering.tools))
    variables = hide_marks(tokenizer, dict(rendering.variables))
    options: Any = {"tools": tools, "variables": variables, "is_asking": rendering.is_asking}
    render = partial(render_chat, tokenizer, **options)
    try:
        text = render(hidden)
        left_out = find_left_out(hidden, render)
    except RenderError as error:
        raise UserError(
            f"messages: the target's chat template refuses them: {error}; change their roles"
        ) from error
    if left_out is not None:
        role = shorten(messages[left_out]["role"])
        raise UserError(
            f"messages: the target's chat template leaves out the text of message {left_out + 1} "
            f"(role {role}); put it into another message or role"
        )
    return text, encode_rendered(tokenizer, [text])[0]
