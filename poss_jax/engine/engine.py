"""The engine: a target, perhaps a draft, and what turns prompts into answers with them.

engine = poss_jax.Engine.load("models/llama", draft="models/poss3")
for answer in engine.generate(["def fibonacci("], max_new_tokens=64):
    print(answer.text, answer.mean_acceptance_length)
for chunk in engine.stream("def fibonacci(", max_new_tokens=64):
    print(chunk.text, end="", flush=True)

Without a draft the same calls decode autoregressively, and give the same text.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.checkpoint import ModelRecord, load_draft, load_target
from poss_jax.config import DraftConfig, SamplingConfig, TreeConfig, UserError
from poss_jax.data import load_tokenizer
from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeConfig, Output, Request, Weights
from poss_jax.engine.answers import Chunk, Generation, read_answer
from poss_jax.engine.live import LiveAnswer, run_live
from poss_jax.engine.memory import check_memory
from poss_jax.engine.prompts import Prompt, encode_prompt
from poss_jax.engine.settings import (
    Trees,
    check_bias,
    default_dtype,
    default_tree,
    fit_tree,
    sampling_arrays,
    sampling_per_prompt,
    tree_for,
)
from poss_jax.engine.text import check_stop
from poss_jax.model.specialists import attach
from poss_jax.shapes import Params

_SMALLEST_BUCKET = 32

generate_jit = jax.jit(speculate.generate, static_argnums=1)


class Engine:
    """Decodes prompts with a target, speculatively if it holds a draft.

    Attributes:
      target_config: shape of the target.
      draft_config: shape of the draft; None decodes autoregressively.
      weights: parameters of both, on the device.
      trees: size of the draft tree per batch size, clamped to what can be drafted.
      is_coupled: whether the draft looks at the noise that the target samples with.
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
        tree: TreeConfig | Trees | None = None,
        max_length: int | None = None,
        is_coupled: bool = True,
    ) -> None:
        record, params = target
        self.target_config = record.llama
        self.draft_config: DraftConfig | None = None
        self.is_coupled = is_coupled
        draft_params: Params = {}
        if draft is not None:
            draft_record, draft_params = draft
            self.draft_config = draft_record.draft
            vocabulary = draft_record.draft_vocabulary
            ids = None if vocabulary is None else jnp.asarray(vocabulary, jnp.int32)
            draft_params = attach(draft_params, params, ids)
        self.weights = Weights(params, draft_params)
        self.trees = _fit_trees(tree or default_tree(), draft_params)
        self.tokenizer = tokenizer
        self.stop_ids = _stop_ids(self.target_config.eos_token_ids, tokenizer)
        self.max_length = max_length or self.target_config.max_position_embeddings

    @classmethod
    def load(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        tree: TreeConfig | Trees | None = None,
        dtype: Any = None,
        max_length: int | None = None,
        is_coupled: bool = True,
        allow_target_mismatch: bool = False,
    ) -> "Engine":
        """Loads model folders (see `python -m poss_jax.convert`).

        Args:
          target: folder of the target.
          draft: folder of a draft made for it; None decodes autoregressively.
          tree: size of the draft tree, or one per batch size (None there: no draft); None: 6/10/60
            on accelerators, 4/4/16 on CPU.
          dtype: of weights and caches; None: float32 on CPU, bfloat16 elsewhere.
          max_length: most tokens of prompt and answer; None: what the target was made for.
          is_coupled: let the draft look at the noise that the target samples with; the output is
            the same, the acceptance length is not.
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
        return cls(
            loaded,
            drafted,
            tokenizer=tokenizer,
            tree=tree,
            max_length=max_length,
            is_coupled=is_coupled,
        )

    def with_tree(self, tree: TreeConfig | Trees, *, is_coupled: bool | None = None) -> "Engine":
        """The same models with another tree, and perhaps other coupling; shares the weights."""
        other = copy(self)
        other.trees = _fit_trees(tree, self.weights.draft)
        if is_coupled is not None:
            other.is_coupled = is_coupled
        return other

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        batch_size: int = 1,
        sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """Continues every prompt.

        Args:
          prompts: texts, token ids or chat messages.
          max_new_tokens: most new tokens of each.
          batch_size: prompts decoded together.
          sampling: how tokens are chosen, for all prompts (the first then has its seed, the others
            seeds derived from it and their index) or one per prompt; None is greedy.
          stop: strings that end a text; they are not part of it.

        Raises:
          UserError: a prompt is empty, too long, or holds ids outside the vocabulary; stop strings
            without a tokenizer, or ones that no answer can hold; more than the memory can hold.
        """
        if isinstance(prompts, str):
            raise UserError("prompts: want a list, got one text; put it into a list")
        if batch_size < 1:
            raise UserError(f"batch_size: want at least 1, got {batch_size}")
        encoded = [self.prepare(prompt, max_new_tokens) for prompt in prompts]
        settings = sampling_per_prompt(sampling, len(prompts))
        check_bias(settings, self.target_config.vocab_size)
        check_stop(stop, self.tokenizer, self.stop_ids, max_new_tokens)
        config = self.decode_config(max_new_tokens, batch_size)
        answers: list[Generation] = []
        for first in range(0, len(encoded), batch_size):
            batch = slice(first, first + batch_size)
            request = self.request(
                encoded[batch], max_new_tokens, batch_size=batch_size, sampling=settings[batch]
            )
            if stop:
                live = self._live_answers(encoded[batch], stop)
                rounds = list(run_live(self.weights, config, request, live))
                ended = [chunk.answer for chunks in zip(*rounds, strict=True) for chunk in chunks]
                answers += [answer for answer in ended if answer is not None]
            else:
                state = generate_jit(self.weights, config, request)
                answers += self.read(encoded[batch], state.output)
        return answers

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[Chunk]:
        """Continues one prompt, round by round; the text is that of `generate`.

        Args:
          prompt: text, token ids or chat messages.
          max_new_tokens: most new tokens.
          sampling: how tokens are chosen; None is greedy.
          stop: strings that end the text; they are not part of it.

        Yields:
          A chunk per round; the last one holds the whole answer.

        Raises:
          UserError: as `generate`.
        """
        ids = self.prepare(prompt, max_new_tokens)
        settings = [sampling or SamplingConfig()]
        check_stop(stop, self.tokenizer, self.stop_ids, max_new_tokens)
        config = self.decode_config(max_new_tokens)
        request = self.request([ids], max_new_tokens, batch_size=1, sampling=settings)
        rounds = run_live(self.weights, config, request, self._live_answers([ids], stop))
        return (chunks[0] for chunks in rounds)

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
        """Turns a prompt into token ids (see `encode_prompt`)."""
        return encode_prompt(prompt, self.tokenizer, self.target_config.vocab_size)

    def decode_config(self, max_new_tokens: int, batch_size: int = 1) -> DecodeConfig:
        """Static side of a call; limits share it in steps of a bucket, and so share a program."""
        steps = -(-max_new_tokens // _SMALLEST_BUCKET)
        tree = tree_for(self.trees, batch_size)
        return DecodeConfig(
            self.target_config,
            self.draft_config if tree else None,
            tree or TreeConfig(),
            steps * _SMALLEST_BUCKET,
            self.is_coupled,
        )

    def request(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        batch_size: int,
        sampling: Sequence[SamplingConfig] = (),
    ) -> Request:
        """Pads prompts to a bucketed length, and the batch with prompts that end at once.

        Args:
          prompts: token ids.
          max_new_tokens: most new tokens of each.
          batch_size: number of sequences.
          sampling: settings of every prompt; empty is greedy.

        Raises:
          UserError: more than the memory can hold.
        """
        size = _bucket(max(len(ids) for ids in prompts))
        config = self.decode_config(max_new_tokens, batch_size)
        check_memory(self.weights, config, batch_size=batch_size, prompt_size=size)
        missing = batch_size - len(prompts)
        rows = [*prompts, *[prompts[0]] * missing]
        tokens = np.zeros((batch_size, size), np.int32)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        limits = [max_new_tokens] * len(prompts) + [1] * missing
        settings = [*sampling, *[SamplingConfig()] * (batch_size - len(sampling))]
        return Request(
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray([len(ids) for ids in rows], jnp.int32),
            limits=jnp.asarray(limits, jnp.int32),
            stop_ids=jnp.asarray(self.stop_ids or [-1], jnp.int32),
            sampling=sampling_arrays(settings, self.target_config.vocab_size),
        )

    def read(self, prompts: Sequence[list[int]], output: Output) -> list[Generation]:
        """Brings finished texts to the host."""
        host = jax.device_get(vars(output))
        answers = [read_answer(ids, host, row, self.stop_ids) for row, ids in enumerate(prompts)]
        if self.tokenizer is None:
            return answers
        return [replace(answer, text=self._decode(answer.output_ids)) for answer in answers]

    def _decode(self, ids: list[int]) -> str:
        """Text of an answer, without its stop token."""
        shown = ids[:-1] if ids[-1] in self.stop_ids else ids
        return self.tokenizer.decode(shown, skip_special_tokens=True)

    def _live_answers(self, prompts: Sequence[list[int]], stop: Sequence[str]) -> list[LiveAnswer]:
        """What the sequences of a batch become when it is decoded from the host."""
        return [
            LiveAnswer(ids, row, tokenizer=self.tokenizer, stop_ids=self.stop_ids, stop=stop)
            for row, ids in enumerate(prompts)
        ]


def _fit_trees(tree: TreeConfig | Trees, draft: Params) -> Trees:
    """Trees per batch size, none of which asks for more than can be drafted."""
    trees = {1: tree} if isinstance(tree, TreeConfig) else tree
    if not draft:
        return trees
    return {size: tree and fit_tree(tree, len(draft["vocabulary"])) for size, tree in trees.items()}


def _stop_ids(eos_token_ids: Sequence[int], tokenizer: Any) -> list[int]:
    known = set(eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        known.add(tokenizer.eos_token_id)
    return sorted(known)


def _bucket(length: int) -> int:
    """Prompt lengths are padded to powers of two, so that few shapes are compiled."""
    return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
