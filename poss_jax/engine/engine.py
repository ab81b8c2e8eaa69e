"""The engine: a target, optionally a draft, and the calls that answer prompts with them.

engine = poss_jax.Engine.load("models/llama", draft="models/poss3")
for answer in engine.generate(["def fibonacci("], max_new_tokens=64):
    print(answer.text, answer.mean_acceptance_length)
for chunk in engine.stream("def fibonacci(", max_new_tokens=64):
    print(chunk.text, end="", flush=True)

Without a draft the same calls decode autoregressively, and give the same text.
"""

import secrets
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any

import jax
from jax.sharding import Mesh

from poss_jax.bundled.default import find_bundled, recommended_sampling
from poss_jax.checkpoint.draft_vocabulary import read_draft_vocabulary
from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import ModelRecord, with_vocabulary
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.models import DraftConfig, Drafting, MeshConfig, Quantisation, TreeConfig
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import UserError
from poss_jax.data.tokenizer import load_tokenizer, special_ids
from poss_jax.decode.state import Output, Request, StaticShape, Weights
from poss_jax.engine.answers import Chunk, Generation, LiveAnswer, read_answer
from poss_jax.engine.device import (
    check_length,
    check_memory,
    default_dtype,
    prefill_chunks,
    with_rows,
)
from poss_jax.engine.grammar import Grammar
from poss_jax.engine.live import answer_live, run_live
from poss_jax.engine.models import fuse, fuse_own, join_weights, load_fused, replace_target
from poss_jax.engine.prompts import (
    PreparedPrompt,
    Prompt,
    Rendering,
    check_bias,
    encode_prompt,
    lay_out,
    limit_answer,
    make_request,
    sampling_per_prompt,
)
from poss_jax.engine.rounds import compile_batch, decode_batch
from poss_jax.engine.text import check_stop
from poss_jax.engine.trees import Trees, check_lookup, choose_trees, find_tuned, tree_for
from poss_jax.model.parameters import place_weights
from poss_jax.model.sharding import decoding_mesh
from poss_jax.shapes import Params


class Engine:
    """Decodes prompts with a target, speculatively if it holds a draft.

    A prompt passes three calls: `prepare` tokenises and checks it, `request` lays a batch of them
    into arrays, `decode` runs the batch. `generate` and `stream` do all three.

    Attributes:
      record: record of the target, as it was loaded.
      fingerprint: name of the target's weights: their digest, or drawn by `update_weights`.
      target_config: shape of the target.
      draft_config: shape of the draft; None decodes autoregressively.
      weights: parameters of both, on the device, fused for decoding.
      trees: size of the draft tree per batch size, clamped to what can be drafted.
      drafting: how the draft proposes tokens when sampling.
      lookup: most tokens that a round copies from prompt and answer; 0: none.
      tokenizer: the target's tokenizer; None if the model folder has none (token ids still work).
      stop_ids: tokens that end an answer.
      max_length: most tokens of prompt and answer together.
      mesh: grid of devices; None is one device.
      recommended: how the target's authors recommend to sample from it; the calls below are greedy
        unless a call says otherwise.
    """

    def __init__(
        self,
        record: ModelRecord,
        params: Params,
        *,
        tokenizer: Any = None,
        tree: TreeConfig | Trees | None = None,
        max_length: int | None = None,
        drafting: Drafting = "coupled",
        lookup: int = 0,
        mesh: MeshConfig | Mesh | None = None,
    ) -> None:
        """Holds a target; `with_draft` adds a draft.

        Args:
          record: record of the target.
          params: parameters of the target. The engine keeps some of these arrays: do not donate
            them to a function.
          tokenizer: the target's tokenizer; None accepts token ids only.
          tree, max_length, drafting, lookup, mesh: as in `load`.

        Raises:
          UserError: lookup with sampled drafts.
        """
        check_lookup(lookup, drafting)
        self.record = record
        self.fingerprint = record.fingerprint
        self.target_config = record.llama
        self.draft_config: DraftConfig | None = None
        self.mesh = decoding_mesh(mesh)
        self.weights = Weights(fuse(params, self.target_config, self.mesh), {})
        self._own_draft: Params = {}  # the draft's own weights, and `vocabulary`
        self._given_trees = tree  # None: each draft has its own
        self.trees = choose_trees(tree)
        self.drafting: Drafting = drafting
        self.lookup = lookup
        self.tokenizer = tokenizer
        eos = [] if tokenizer is None else special_ids(tokenizer, "eos")
        self.stop_ids = sorted({*self.target_config.eos_token_ids, *eos})
        self.max_length = check_length(max_length, self.target_config.max_position_embeddings)
        self.recommended = SamplingConfig()

    @property
    def max_accepted(self) -> int:
        """Most drafted or copied tokens that a round can accept; 0 without a draft and lookup."""
        configs = (self.config_with(tree, 2, self.max_length) for tree in self.trees.values())
        return max(config.max_accepted for config in configs)

    @classmethod
    def load(
        cls,
        target: str | AnyPath,
        draft: str | AnyPath | None = None,
        *,
        tree: TreeConfig | Trees | None = None,
        dtype: Any = None,
        max_length: int | None = None,
        drafting: Drafting = "coupled",
        lookup: int = 0,
        allow_target_mismatch: bool = False,
        draft_vocabulary: str | AnyPath | None = None,
        draft_window: int | None = None,
        quantise: Quantisation | None = None,
        mesh: MeshConfig | Mesh | None = None,
    ) -> "Engine":
        """Loads models.

        Args:
          target: model folder (see `poss convert`), or smollm2, the default one.
          draft: folder of a draft made for it, or the name of a bundled one such as PosS-1; None
            decodes autoregressively.
          tree: size of the draft tree, or one per batch size (None there: no draft); None: those
            that were tuned for the draft on this kind of device (see `poss tune`), else
            `trees.default_trees`.
          dtype: dtype of weights and caches; None: float32 on CPU, bfloat16 elsewhere.
          max_length: most tokens of prompt and answer; None: what the target was made for.
          drafting: how the draft proposes tokens when sampling: `coupled` and `argmax` leave
            the output as it is, `sampled` in distribution only (see `DecodingConfig`).
          lookup: most tokens that a round copies from prompt and answer, with or without a draft;
            0: none. The output stays as it is (see `DecodingConfig`).
          allow_target_mismatch: use a draft made for other weights of the same shape.
          draft_vocabulary: file of the tokens that the draft may propose (see `poss draft-vocab`);
            None: the one tuned with the trees, else the folder's, usually all tokens.
          draft_window: newest tokens that the draft attends; None: its folder's, usually all.
          quantise: round the target's matrices to this type, int8 or fp8; None keeps what its
            folder holds. The layers of a draft are rounded like its target's.
          mesh: grid of devices, which load their own parts (see `MeshConfig`); None: one device.

        Raises:
          UserError: a folder is missing or broken, the target is quantised already, lookup with
            sampled drafts, or something does not fit: draft, vocabulary, mesh, or weights into
            memory.
        """
        mesh, dtype = decoding_mesh(mesh), dtype or default_dtype()
        target = find_bundled(target)
        record, params = load_fused(target, dtype, quantise=quantise, mesh=mesh)
        tokenizer = load_tokenizer(as_path(target)) if record.tokenizer_sha256 is not None else None
        engine = cls(
            record,
            params,
            tokenizer=tokenizer,
            tree=tree,
            max_length=max_length,
            drafting=drafting,
            lookup=lookup,
            mesh=mesh,
        )
        engine.recommended = recommended_sampling(target)
        if draft is None:
            return engine
        return engine.load_draft(
            draft,
            dtype=dtype,
            allow_target_mismatch=allow_target_mismatch,
            vocabulary=draft_vocabulary,
            window=draft_window,
        )

    def load_draft(
        self,
        draft: str | AnyPath,
        *,
        dtype: Any = None,
        allow_target_mismatch: bool = False,
        vocabulary: str | AnyPath | None = None,
        window: int | None = None,
    ) -> "Engine":
        """Returns an engine of the same target with the draft of a model folder (see `load`)."""
        draft = find_bundled(draft)
        record, params = load_draft(
            draft,
            dtype or default_dtype(),
            target=self.record,
            allow_target_mismatch=allow_target_mismatch,
            sharding=self.mesh and place_weights(self.mesh),
        )
        tuned = None if self._given_trees else find_tuned(draft, record, self.mesh)
        if vocabulary is None and tuned is not None:
            vocabulary = tuned.draft_vocabulary
        if vocabulary is not None:
            tokens = read_draft_vocabulary(vocabulary, self.target_config.vocab_size)
            record = with_vocabulary(record, tokens.tolist(), origin=str(draft))
        if window is not None:
            record = replace(record, config=replace(record.draft, window=window))
        return self.with_draft(record, params, tuned=tuned and tuned.trees)

    def with_draft(
        self, record: ModelRecord, params: Params, *, tuned: Trees | None = None
    ) -> "Engine":
        """Returns an engine of the same target with a draft; shares the target's weights.

        Args:
          record: record of the draft.
          params: parameters of the draft.
          tuned: trees tuned for it, used unless this engine was given others.
        """
        engine = copy(self)
        engine.draft_config = record.draft
        engine._own_draft = fuse_own(params, record, self.record.quantised, self.mesh)
        engine.weights = join_weights(self.weights.target, engine._own_draft, self.mesh)
        engine.trees = choose_trees(self._given_trees or tuned, engine.weights.draft)
        return engine

    def with_tree(
        self,
        tree: TreeConfig | Trees,
        *,
        drafting: Drafting | None = None,
        lookup: int | None = None,
    ) -> "Engine":
        """Returns an engine of the same models with another tree; None keeps what is set."""
        engine = copy(self)
        engine.lookup = self.lookup if lookup is None else lookup
        check_lookup(engine.lookup, drafting or self.drafting)
        engine._given_trees = tree
        engine.trees = choose_trees(tree, self.weights.draft)
        engine.drafting = drafting or self.drafting
        return engine

    def update_weights(self, params: Params) -> None:
        """Replaces the target's parameters; nothing is compiled again.

        The draft keeps its parameters and uses the new embedding and head. A request that is being
        streamed ends with the old target, and engines that share it (`with_draft`, `with_tree`)
        keep it. Old and new parameters are both held until this returns, and no array of `params`
        is kept, so a trainer may donate them.

        Args:
          params: parameters of a target of the same shape and dtype, as `__init__` takes them.

        Raises:
          UserError: other names, shapes or dtypes, or the engine's target is quantised.
        """
        old = self.weights.target
        target = replace_target(old, params, self.target_config, self.mesh)
        self.weights = join_weights(target, self._own_draft, self.mesh)
        self.fingerprint = secrets.token_hex(8)  # hashing the weights would be slower

    # ----------------------------------------------------------------------------------------------
    # From prompts to answers

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
          batch_size: number of prompts decoded together.
          sampling: how tokens are chosen, for all prompts (the first gets its seed, the others
            seeds derived from it and their index) or one per prompt; None is greedy.
          stop: strings that end an answer; they are not part of it.

        Raises:
          UserError: a prompt is empty, too long, or holds ids outside the vocabulary; stop strings
            without a tokenizer, or ones that no answer can hold; more than the memory can hold.
        """
        if isinstance(prompts, str):
            raise UserError("prompts: want a list, got one text; put it into a list")
        if batch_size < 1:
            raise UserError(f"batch_size: want at least 1, got {batch_size}")
        settings = sampling_per_prompt(sampling, len(prompts))
        prepared = [
            self.prepare(prompt, max_new_tokens, setting)
            for prompt, setting in zip(prompts, settings, strict=True)
        ]
        self.check_stop(stop, max_new_tokens)
        return self.decode(prepared, batch_size=batch_size, stop=stop)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[Chunk]:
        """Continues one prompt, round by round; gives the text of `generate`.

        Yields:
          A chunk per round; the last one holds the whole answer.

        Raises:
          UserError: as `generate`.
        """
        prepared = self.prepare(prompt, max_new_tokens, sampling)
        self.check_stop(stop, max_new_tokens)
        return self.decode_rounds(prepared, stop=stop)

    def prepare(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: SamplingConfig | None = None,
        *,
        shortens: bool = False,
        max_length: int | None = None,
        stop_ids: Sequence[int] | None = None,
        num_continued: int = 0,
        is_chat: bool | None = None,
        shown_ids: Sequence[int] = (),
        grammar: Grammar | None = None,
        drafts: bool = True,
        lookup: bool | None = None,
    ) -> PreparedPrompt:
        """Tokenises a prompt and checks it, its settings and limit; later code trusts the result.

        Args:
          prompt: text, token ids or chat messages.
          max_new_tokens: most new tokens.
          sampling: how tokens are chosen; None is greedy.
          shortens: lower `max_new_tokens` to the capacity that the prompt leaves.
          max_length: most tokens of prompt and answer together, at most the engine's; None: that.
          stop_ids: tokens that end the answer; None: the engine's.
          num_continued: tokens at the end of the prompt that already belong to the answer.
          is_chat: the answer is decoded alone; None: if the prompt holds messages.
          shown_ids: special tokens whose names belong to the answer's text.
          grammar: what the answer must match; one cut by its limit is only a beginning.
          drafts: False decodes it without drafts and copies.
          lookup: False decodes it without copies, True refuses to; None: as the engine does.

        Raises:
          UserError: what `encode_prompt` refuses, a biased token outside the vocabulary, nothing
            but continued tokens, a grammar that cannot be served or that the continued tokens do
            not match, lookup where the engine has none, or (`PromptTooLong`) prompt and answer
            longer than `max_length`.
        """
        if lookup and not self.lookup:
            raise UserError("lookup: copies want an engine or server with such as --lookup 8")
        sampling, ids = sampling or SamplingConfig(), self.encode(prompt)
        longest = max_length or self.max_length
        limit = limit_answer(len(ids), max_new_tokens, longest, shortens=shortens)
        check_bias(sampling, self.target_config.vocab_size)
        if num_continued >= len(ids):
            raise UserError("continued_tokens: want fewer than the prompt has")
        is_chat = isinstance(prompt[0], dict) if is_chat is None else is_chat
        guide = None
        if grammar is not None:
            continued = ids[len(ids) - num_continued :]
            V = self.target_config.vocab_size
            guide = grammar.compile(self.tokenizer, V, self.stop_ids, continued)
        of_text = num_continued, is_chat, shown_ids, guide, drafts, lookup is not False
        return PreparedPrompt(ids, limit, sampling, stop_ids, *of_text)

    def encode(
        self, prompt: Prompt, rendering: Rendering | None = None, *, is_bare: bool = False
    ) -> list[int]:
        """Turns a prompt into token ids (see `encode_prompt`)."""
        V = self.target_config.vocab_size
        return encode_prompt(prompt, self.tokenizer, V, rendering, is_bare=is_bare)

    def check_stop(self, stop: Sequence[str], max_new_tokens: int) -> None:
        """Refuses stop strings that no answer can hold (see `text.check_stop`)."""
        check_stop(stop, self.tokenizer, max_new_tokens)

    # ----------------------------------------------------------------------------------------------
    # Decoding prepared prompts

    def decode(
        self, prompts: Sequence[PreparedPrompt], *, batch_size: int = 1, stop: Sequence[str] = ()
    ) -> list[Generation]:
        """Answers prepared prompts, on the device, or step by step if their texts need it.

        Args:
          prompts: made by `prepare`.
          batch_size: number of prompts decoded together.
          stop: strings that `check_stop` accepts.

        Raises:
          UserError: more than the memory can hold.
        """
        answers: list[Generation] = []
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            config, request = self.request(batch, batch_size=batch_size)
            if stop or any(prompt.shown_ids or prompt.guide for prompt in batch):
                live = [self.live_answer(prompt, stop) for prompt in batch]
                answers += answer_live(self.weights, config, request, live)
            else:
                output = decode_batch(self.weights, config, request).output  # not the caches
                answers += self.read(batch, output)
        return answers

    def decode_rounds(self, prompt: PreparedPrompt, *, stop: Sequence[str] = ()) -> Iterator[Chunk]:
        """Answers one prepared prompt round by round; yields what `stream` yields."""
        config, request = self.request([prompt])
        live = [self.live_answer(prompt, stop)]
        return (chunk for _, chunk in run_live(self.weights, config, request, live))

    def precompile(self, lengths: Sequence[int], *, batch_size: int = 1) -> None:
        """Compiles the programs for some lengths: greedy and sampled, whole and streamed.

        Args:
          lengths: most tokens of prompt and answer together, one per expected length.
          batch_size: number of prompts decoded together.

        Raises:
          UserError: a length is beyond `max_length`, or more than the memory can hold.
        """
        for length, sampling in product(lengths, (None, SamplingConfig(temperature=1))):
            if not 1 < length <= self.max_length:
                raise UserError(f"precompile: want 2 to {self.max_length} tokens, got {length}")
            prompt = self.prepare([0], length - 1, sampling)
            config, request = self.request([prompt], batch_size=batch_size)
            compile_batch(self.weights, config, request)

    def decode_config(self, length: int, batch_size: int = 1) -> StaticShape:
        """Static settings of a call; `length` holds prompt and answer, see `with_rows`."""
        return self.config_with(tree_for(self.trees, batch_size), length, self.max_length)

    def config_with(self, tree: TreeConfig | None, length: int, max_length: int) -> StaticShape:
        """Static settings of decoding with a tree, or (None) without a draft."""
        draft = self.draft_config if tree else None
        config = StaticShape(
            self.target_config,
            draft and replace(draft, trained_depth=1),  # EAGLE-2 and HASS have the same programs
            tree or TreeConfig(),
            rows=0,
            chunk=prefill_chunks()[0],
            drafting=self.drafting,
            mesh=self.mesh,
            lookup=self.lookup if tree else 0,
        )
        return with_rows(config, length, max_length=max_length)

    def request(
        self, prompts: Sequence[PreparedPrompt], *, batch_size: int = 1
    ) -> tuple[StaticShape, Request]:
        """Lays prompts into arrays with capacity for the answers.

        Args:
          prompts: prepared prompts, at most `batch_size`.
          batch_size: number of sequences, rounded up to a multiple of `mesh.data`; padding
            sequences end at once.

        Returns:
          The static settings of the call, and the batch.

        Raises:
          UserError: more than the memory can hold.
        """
        length = max(len(prompt.ids) + prompt.max_new_tokens for prompt in prompts)
        config = self.decode_config(length, batch_size)
        batch_size += -batch_size % (self.mesh.shape["data"] if self.mesh else 1)
        check_memory(self.weights, config, batch_size=batch_size)
        padding = PreparedPrompt(prompts[0].ids, 1)
        rows = [*prompts, *[padding] * (batch_size - len(prompts))]
        stop_ids = list(map(self.stop_ids_of, rows))
        return config, make_request(lay_out(rows, stop_ids, num_tokens=config.rows))

    def read(self, prompts: Sequence[PreparedPrompt], output: Output) -> list[Generation]:
        """Reads finished sequences to the host."""
        host = jax.device_get(vars(output))
        return [
            read_answer(prompt, host, row, self.stop_ids_of(prompt), self.tokenizer)
            for row, prompt in enumerate(prompts)
        ]

    def stop_ids_of(self, prompt: PreparedPrompt) -> Sequence[int]:
        """Tokens that end the answer to a prompt."""
        return self.stop_ids if prompt.stop_ids is None else prompt.stop_ids

    def live_answer(self, prompt: PreparedPrompt, stop: Sequence[str] = ()) -> LiveAnswer:
        """Begins an answer that grows round by round."""
        return LiveAnswer(prompt, self.stop_ids_of(prompt), self.tokenizer, stop)
