"""What a user of the library holds: a loaded target, perhaps a draft, and `generate`.

engine = poss_jax.Engine.load("models/llama", draft="models/poss3")
for answer in engine.generate(["def fibonacci("], max_new_tokens=64):
    print(answer.text, answer.mean_acceptance_length)

Without a draft the same call decodes autoregressively, and gives the same text.
"""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jinja2 import TemplateError

from poss_jax import speculate
from poss_jax.checkpoint import ModelRecord, load_draft, load_target
from poss_jax.config import ACCELERATOR_TREE, CPU_TREE, DraftConfig, TreeConfig, UserError
from poss_jax.data import load_tokenizer
from poss_jax.draft import attach
from poss_jax.shapes import Params
from poss_jax.speculate import DecodeConfig, Output, Request, Weights

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""Text, token ids, or chat messages ({"role", "content"})."""

_LOG = logging.getLogger(__name__)
_SMALLEST_BUCKET = 32

generate_jit = jax.jit(speculate.generate, static_argnums=1)


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
      prompt_ids: tokens that were continued.
      output_ids: new tokens, with the stop token if there was one.
      text: the new tokens as text, without the stop token; None without a tokenizer.
      accepted_per_round: accepted drafted tokens of every round, bonus token not counted.
      offered_per_round: deepest position the tree offered on the accepted path, per round.
      stop_reason: `stop` (a stop token) or `length` (the limit).
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    accepted_per_round: list[int]
    offered_per_round: list[int]
    stop_reason: Literal["stop", "length"]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, bonus token included; 1 where no round was needed."""
        return float(np.mean(self.accepted_per_round)) + 1 if self.accepted_per_round else 1.0


class Engine:
    """Decodes prompts with a target, speculatively if it holds a draft.

    Attributes:
      target_config: shape of the target.
      draft_config: shape of the draft; None decodes autoregressively.
      weights: parameters of both, on the device.
      tree: size of the draft tree, clamped to what can be drafted.
      tokenizer: of the target; None where the model folder has none (token ids still work).
      stop_ids: tokens that end a text.
      max_length: most tokens of prompt and answer together.
    """

    def __init__(
        self,
        target: tuple[ModelRecord, Any],
        draft: tuple[ModelRecord, Any] | None = None,
        *,
        tokenizer: Any = None,
        tree: TreeConfig | None = None,
        max_length: int | None = None,
    ) -> None:
        record, params = target
        self.target_config = record.llama
        self.draft_config: DraftConfig | None = None
        self.tree = tree or default_tree()
        draft_params: Params = {}
        if draft is not None:
            draft_record, draft_params = draft
            self.draft_config = draft_record.draft
            vocabulary = draft_record.draft_vocabulary
            ids = None if vocabulary is None else jnp.asarray(vocabulary, jnp.int32)
            draft_params = attach(draft_params, params, ids)
            self.tree = fit_tree(self.tree, len(draft_params["vocabulary"]))
        self.weights = Weights(params, draft_params)
        self.tokenizer = tokenizer
        self.stop_ids = _stop_ids(self.target_config.eos_token_ids, tokenizer)
        self.max_length = max_length or self.target_config.max_position_embeddings

    @classmethod
    def load(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        tree: TreeConfig | None = None,
        dtype: Any = None,
        max_length: int | None = None,
        allow_target_mismatch: bool = False,
    ) -> "Engine":
        """Loads model folders (see `python -m poss_jax.convert`).

        Args:
          target: folder of the target.
          draft: folder of a draft made for it; None decodes autoregressively.
          tree: size of the draft tree; None: 6/10/60 on accelerators, 4/4/16 on CPU.
          dtype: of weights and caches; None: float32 on CPU, bfloat16 elsewhere.
          max_length: most tokens of prompt and answer; None: what the target was made for.
          allow_target_mismatch: use a draft made for other weights of the same shape.

        Raises:
          UserError: a folder is missing or broken, or the draft does not fit the target.
        """
        dtype = dtype or default_dtype()
        loaded = load_target(target, dtype)
        drafted = None
        if draft is not None:
            drafted = load_draft(
                draft, dtype, target=loaded[0], allow_target_mismatch=allow_target_mismatch
            )
        has_tokenizer = loaded[0].tokenizer_sha256 is not None
        tokenizer = load_tokenizer(Path(target)) if has_tokenizer else None
        return cls(loaded, drafted, tokenizer=tokenizer, tree=tree, max_length=max_length)

    def generate(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, batch_size: int = 1
    ) -> list[Generation]:
        """Continues every prompt.

        Args:
          prompts: texts, token ids or chat messages.
          max_new_tokens: most new tokens of each.
          batch_size: prompts decoded together.

        Raises:
          UserError: a prompt is empty, too long, or holds ids outside the vocabulary.
        """
        if isinstance(prompts, str):
            raise UserError("prompts: want a list, got one text; put it into a list")
        if batch_size < 1:
            raise UserError(f"batch_size: want at least 1, got {batch_size}")
        encoded = [self.prepare(prompt, max_new_tokens) for prompt in prompts]
        answers: list[Generation] = []
        for first in range(0, len(encoded), batch_size):
            batch = encoded[first : first + batch_size]
            request = self.request(batch, max_new_tokens, batch_size=batch_size)
            state = generate_jit(self.weights, self.decode_config(max_new_tokens), request)
            answers += self.read(batch, state.output)
        return answers

    def prepare(self, prompt: Prompt, max_new_tokens: int) -> list[int]:
        """Turns a prompt into token ids that leave room for an answer.

        Raises:
          UserError: what `encode` refuses, or prompt and answer are longer than `max_length`.
        """
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: want at least 1, got {max_new_tokens}")
        ids = self.encode(prompt)
        if len(ids) + max_new_tokens > self.max_length:
            raise UserError(
                f"prompt of {len(ids)} tokens and {max_new_tokens} new ones do not fit a length "
                f"of {self.max_length}; shorten the prompt, lower max_new_tokens, or raise "
                "max_length"
            )
        return ids

    def encode(self, prompt: Prompt) -> list[int]:
        """Turns a prompt into token ids; a BOS that it begins with is not doubled.

        Raises:
          UserError: the prompt is empty, holds ids outside the vocabulary, or is text (or
            messages) for a target without tokenizer (or chat template).
        """
        if not prompt:
            raise UserError("prompt: want at least one token, got an empty prompt; write something")
        if isinstance(prompt, str):
            ids = self._tokenise(prompt)
        elif isinstance(prompt[0], dict):
            ids = self._tokenise(self._apply_chat_template(prompt))
        else:
            ids = [int(token) for token in prompt]  # type: ignore[arg-type]
        size = self.target_config.vocab_size
        if outside := [token for token in ids if not 0 <= token < size]:
            raise UserError(
                f"prompt: want token ids of 0 to {size - 1}, got {outside[0]}; "
                "tokenise with the target's own tokenizer"
            )
        return ids

    def decode_config(self, max_new_tokens: int) -> DecodeConfig:
        """Static side of a call; limits share it in steps of a bucket, and so share a program."""
        steps = -(-max_new_tokens // _SMALLEST_BUCKET)
        return DecodeConfig(
            self.target_config, self.draft_config, self.tree, steps * _SMALLEST_BUCKET
        )

    def request(
        self, prompts: Sequence[list[int]], max_new_tokens: int, batch_size: int
    ) -> Request:
        """Pads prompts to a bucketed length, and the batch with prompts that end at once."""
        size = _bucket(max(len(ids) for ids in prompts))
        missing = batch_size - len(prompts)
        rows = [*prompts, *[prompts[0]] * missing]
        tokens = np.zeros((batch_size, size), np.int32)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        limits = [max_new_tokens] * len(prompts) + [1] * missing
        return Request(
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray([len(ids) for ids in rows], jnp.int32),
            limits=jnp.asarray(limits, jnp.int32),
            stop_ids=jnp.asarray(self.stop_ids or [-1], jnp.int32),
        )

    def read(self, prompts: Sequence[list[int]], output: Output) -> list[Generation]:
        """Brings finished texts to the host."""
        host = jax.device_get(vars(output))
        return [self._generation(ids, host, row) for row, ids in enumerate(prompts)]

    def _generation(self, prompt: list[int], output: dict[str, np.ndarray], row: int) -> Generation:
        tokens = output["tokens"][row, : output["num_tokens"][row]].tolist()
        stopped = tokens[-1] in self.stop_ids
        text = None
        if self.tokenizer is not None:
            shown = tokens[:-1] if stopped else tokens
            text = self.tokenizer.decode(shown, skip_special_tokens=True)
        rounds = slice(0, output["num_rounds"][row])
        return Generation(
            prompt_ids=prompt,
            output_ids=tokens,
            text=text,
            accepted_per_round=output["num_accepted"][row, rounds].tolist(),
            offered_per_round=output["num_offered"][row, rounds].tolist(),
            stop_reason="stop" if stopped else "length",
        )

    def _tokenise(self, text: str) -> list[int]:
        tokenizer = self._need_tokenizer()
        has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        ids = list(tokenizer(text, add_special_tokens=not has_bos, verbose=False)["input_ids"])
        if not set(ids) - {tokenizer.bos_token_id}:
            raise UserError(f"prompt: want at least one token, got none from {text!r}; write more")
        return ids

    def _apply_chat_template(self, messages: Any) -> str:
        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            raise UserError(
                "messages: want a tokenizer with a chat template, this target's has none; "
                "give `prompt` (text) instead"
            )
        try:
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise UserError(
                f"messages: the target's chat template refuses them: {error}; change their roles"
            ) from error

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise UserError("prompt: this target has no tokenizer; give `prompt_ids`")
        return self.tokenizer


def default_dtype() -> Any:
    """float32 on CPU, where bfloat16 is many times slower; bfloat16 elsewhere."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def default_tree() -> TreeConfig:
    """The tree that suits this kind of device."""
    return CPU_TREE if jax.default_backend() == "cpu" else ACCELERATOR_TREE


def fit_tree(tree: TreeConfig, draft_vocab_size: int) -> TreeConfig:
    """Clamps a tree to what can be drafted, and says so in the log."""
    fitted = dataclasses.replace(tree, top_k=min(tree.top_k, draft_vocab_size))
    fitted = dataclasses.replace(fitted, total_tokens=fitted.num_nodes)
    if fitted != tree:
        _LOG.warning(
            "tree %d/%d/%d (depth/top_k/total_tokens) asks for more than can be drafted; using "
            "%d/%d/%d",
            *dataclasses.astuple(tree),
            *dataclasses.astuple(fitted),
        )
    return fitted


def _stop_ids(eos_token_ids: Sequence[int], tokenizer: Any) -> list[int]:
    known = set(eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        known.add(tokenizer.eos_token_id)
    return sorted(known)


def _bucket(length: int) -> int:
    """Prompt lengths are padded to powers of two, so that few shapes are compiled."""
    return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
