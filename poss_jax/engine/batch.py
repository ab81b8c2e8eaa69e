"""A batch of sequences over the steps of the devices; the host decides nothing here.

    FixedBatch   prompts prefilled together; decoded until the last of them ends
    Slots        sequences that come and go between rounds (`slots.py`)

A step is a few rounds; with grammars, one round with the host in between:

    draft (device) ─► walk the trees (host) ─► verify (device)
                      masks of all nodes       accept, commit

The draft knows what a grammar allows after the root; `guides.Walk` mends the deeper nodes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.config.models import TreeConfig
from poss_jax.decode.rejection import DrawnTree
from poss_jax.decode.sampling import OF_OUTPUT
from poss_jax.decode.state import DecodeState, Request, StaticShape, Weights
from poss_jax.decode.verify import Logprobs
from poss_jax.engine import steps
from poss_jax.engine.answers import Generation, LiveAnswer, TokenLogprobs
from poss_jax.engine.device import check_memory
from poss_jax.engine.guides import GrammarState, Walk
from poss_jax.engine.models import Models
from poss_jax.engine.prompts import PreparedPrompt, lay_out
from poss_jax.engine.rounds import PackedRounds, read_output, read_scores
from poss_jax.engine.steps import Drafted, Plan
from poss_jax.engine.trees import tree_for
from poss_jax.shapes import Array

_WALK_SECONDS = 0.05  # per tree; a harmless grammar takes 2 ms for 60 nodes
_WALKERS = ThreadPoolExecutor(thread_name_prefix="poss-grammar")


class RoundKind(NamedTuple):
    """One kind of round, compiled once."""

    tree: TreeConfig | None  # size of the draft tree; None decodes autoregressively
    is_sampled: bool = False  # any slot has sampling settings
    has_logprobs: bool = False  # any slot wants log-probabilities
    is_guided: bool = False  # any slot has a grammar
    # No slot wants drafts, so the draft is left out; after a round with no tree it may be needed
    # again, and follows along.
    is_draftless: bool = False


class Batch:
    """The rounds of a batch."""

    weights: Weights  # of target and draft
    config: StaticShape  # static settings of all its steps
    request: Request  # the sequences, on the device
    state: DecodeState
    size: int  # number of sequences
    max_logprobs: int = 0  # most log-probabilities per token; 0: none are kept
    _drafted: Drafted | None = None
    _all_walk = False  # every process walks, not only the first

    def run(self, kind: RoundKind, active: Sequence[int], num_rounds: int = 1) -> PackedRounds:
        """Runs up to `MOST_ROUNDS` rounds, fewer if a sequence ends; returns before they are done.

        Sequences that are not active end.
        """
        draft = self.state.draft
        is_active = np.isin(np.arange(self.size), active)
        counts = np.full(self.size, num_rounds, np.int32)
        state, rounds = steps.run(*self._arguments(kind), is_active, counts)
        self.state = state.replace(draft=draft) if kind.is_draftless else state
        return rounds

    # ----------------------------------------------------------------------------------------------
    # Rounds with grammars

    def masks(self, guides: Mapping[int, GrammarState], num_active: int) -> np.ndarray:
        """Masks of the next token of some sequences; one in `guides` follows its grammar."""
        masks = no_masks(self.config.target.vocab_size, num_active)
        for index, guide in guides.items():
            guide.fill(masks[index])
        return masks

    def draft(self, kind: RoundKind, active: Sequence[int], masks: np.ndarray) -> None:
        """Drafts the trees of a round with grammars; sequences that are not active end."""
        is_active = np.isin(np.arange(self.size), active)
        self.state, self._drafted = steps.draft(*self._arguments(kind), is_active, masks)

    def walk(self, kind: RoundKind, guides: Mapping[int, GrammarState]) -> Plan:
        """Walks the trees that `draft` drafted, in parallel; `guides` stay as they are."""
        assert self._drafted is not None, "want draft first"
        _, config, *_ = self._arguments(kind)
        tree, _ = self._drafted
        tokens, parents = _read(tree.tokens), _read(tree.parents)
        plan = Plan(tokens, parents, no_masks(config.target.vocab_size, *tokens.shape))
        # A drawn child that the target accepts is kept, so all nodes of drawn trees need masks.
        has_time = self._all_walk or isinstance(tree, DrawnTree)
        seconds = math.inf if has_time else _WALK_SECONDS

        def walk(index: int) -> None:
            row = (array[index] for array in plan)
            Walk(guides[index], *row).mend(depth=config.max_accepted, seconds=seconds)

        list(_WALKERS.map(walk, guides))
        return plan

    def verify(self, kind: RoundKind, plan: Plan) -> PackedRounds:
        """Ends a round that `draft` began, as one process walked; returns before it is done."""
        self.state, rounds = steps.verify(*self._arguments(kind), self._drafted, plan)
        self._drafted = None
        return rounds

    def _arguments(self, kind: RoundKind) -> tuple[Weights, StaticShape, Request, DecodeState]:
        """The arguments of all rounds of some kind."""
        tree, logprobs = kind.tree, self.max_logprobs if kind.has_logprobs else 0
        config = self.config._replace(num_logprobs=logprobs, drafts=tree is not None)
        if tree is not None:
            config = config._replace(tree=tree)
        request = self.request
        if not kind.is_sampled:
            request = request.replace(sampling=None)
        state = self.state
        if kind.is_draftless:
            config, state = config._replace(draft=None), state.replace(draft=None)
        return self.weights, config, request, state


class FixedBatch(Batch):
    """Prompts that begin together, padded to a size; all their rounds are of one kind."""

    def __init__(
        self, models: Models, prompts: Sequence[PreparedPrompt], *, batch_size: int = 1
    ) -> None:
        """Lays prompts into arrays with capacity for the answers; runs nothing yet.

        Args:
          prompts: prepared prompts, at most `batch_size`.
          batch_size: number of sequences, rounded up to a multiple of `mesh.data`; padding
            sequences end at once.

        Raises:
          UserError: more than the memory can hold.
        """
        length = max(len(prompt.ids) + prompt.max_new_tokens for prompt in prompts)
        self.models, self.prompts, self.weights = models, prompts, models.weights
        self.config = models.decode_config(length, batch_size)
        self.size = batch_size + -batch_size % (models.mesh.shape["data"] if models.mesh else 1)
        self.sizes = (self.size,)
        check_memory(self.weights, self.config, batch_size=self.size)
        padding = PreparedPrompt(prompts[0].ids, 1)
        rows = [*prompts, *[padding] * (self.size - len(prompts))]
        host = lay_out(rows, num_tokens=self.config.rows)
        # Settings that no prompt has would take the compiler an eighth of its time.
        columns, settings = host["sampling"], [prompt.sampling for prompt in prompts]
        if not any(sampling.reads_output for sampling in settings):
            columns |= dict.fromkeys(OF_OUTPUT)
        if not any(sampling.logit_bias for sampling in settings):
            columns |= {name: columns[name][:, :0] for name in ("bias_ids", "bias")}
        self.request = steps.put(self.weights, self.config, host)
        if all(sampling.is_plain for sampling in settings):
            self.request = self.request.replace(sampling=None)
        self._num_chunks = -(-max(len(prompt.ids) for prompt in prompts) // self.config.chunk)
        # Processes that all walk must find the same, and may differ in speed.
        self._all_walk = jax.process_count() > 1
        tree = tree_for(models.trees, batch_size)
        self.kind = RoundKind(tree, is_sampled=self.request.sampling is not None)

    def start(self, masks: np.ndarray | None = None) -> PackedRounds:
        """Prefills the prompts and chooses their first tokens, which `masks` may limit.

        Returns before this is done.
        """
        # However tokens are chosen, the same programs do the prefill.
        config = self.config._replace(drafting="coupled")
        request = self.request.replace(sampling=None)
        prefill = steps.begin(self.weights, config, request)
        chunks = np.int32(0), np.int32(self._num_chunks)
        prefill = steps.extend(self.weights, config, request, prefill, chunks)
        caches, last = (prefill.cache, prefill.draft_cache), (prefill.hidden, prefill.features)
        allowed = [] if masks is None else [masks]
        batch = self.weights, self.config, self.request
        self.state, rounds = steps.choose_first(*batch, caches, last, *allowed)
        return rounds

    def compile(self) -> None:
        """Compiles the steps of the batch, by answers of one token."""
        limits = jnp.ones_like(self.request.max_new_tokens)
        self.request = self.request.replace(max_new_tokens=limits)
        self.start()
        jax.block_until_ready(self.run(self.kind, ()))

    @property
    def arguments(self) -> tuple[Weights, StaticShape, Request, DecodeState]:
        """What a program of the devices takes, after `start`."""
        return self.weights, self.config, self.request, self.state

    def read(self) -> list[Generation]:
        """Reads the answers once all sequences have ended, by `run` or another program."""
        answers = []
        for prompt, rounds in zip(self.prompts, read_output(self.state.output), strict=False):
            answer = LiveAnswer(prompt, self.models.tokenizer)
            *_, last = map(answer.add, rounds)
            answers.append(last.answer)
        return answers

    def choose_kind(self, prompts: Sequence[PreparedPrompt], *, has_logprobs: bool) -> RoundKind:
        """The kind of all rounds, whichever sequences have ended, so that one is compiled."""
        del prompts, has_logprobs
        return self.kind


def run_guided_round(
    batch: Any, kind: RoundKind, active: Sequence[int], guides: Mapping[int, GrammarState]
) -> PackedRounds:
    """Runs a round with grammars, of a `Batch` or its `Leader`; returns before it is verified."""
    batch.draft(kind, active, batch.masks(guides, batch.size))
    return batch.verify(kind, batch.walk(kind, guides))


def _read(numbers: Array) -> np.ndarray:
    """Numbers on the host, to be changed; of a shape, which only compiles, any."""
    is_shape = isinstance(numbers, jax.ShapeDtypeStruct)
    return np.zeros(numbers.shape, numbers.dtype) if is_shape else np.array(numbers)


def no_masks(vocab_size: int, *shape: int) -> np.ndarray:
    """Masks that allow all tokens (see `sampling.unpack`), [*shape words] uint32."""
    return np.full((*shape, -(-vocab_size // 32)), 2**32 - 1, np.uint32)


# --------------------------------------------------------------------------------------------------
# Scores: log-probabilities of the tokens of a prompt, under the target alone


def score_chunks(
    weights: Weights, config: StaticShape, ids: Sequence[int], *, batch_size: int = 1
) -> Iterator[Logprobs]:
    """Scores a prompt chunk by chunk, each when it is asked for (see `steps.score`).

    Args:
      config: without a draft; its `num_logprobs` are listed per token.
      batch_size: sequences that the devices take; all get this prompt.
    """
    prompts = [PreparedPrompt(list(ids), 1)] * batch_size
    host = lay_out(prompts, num_tokens=config.rows)
    request, num_chunks = steps.put(weights, config, host), -(-(len(ids) - 1) // config.chunk)
    prefill = steps.begin(weights, config, request) if num_chunks else None
    for index in range(num_chunks):
        prefill, scores = steps.score(weights, config, request, prefill, np.int32(index))
        if index + 1 == num_chunks:
            prefill = None  # frees the cache
        yield scores


def score_prompt(
    engine: Models, ids: Sequence[int], *, num_logprobs: int = 1, max_length: int | None = None
) -> list[TokenLogprobs]:
    """Scores every token of a prompt but the first, as answers' tokens are scored.

    Args:
      ids: token ids that `Engine.prepare` accepts.
      num_logprobs: most likely tokens to list at each position, at least 1.
      max_length: longest prompt, which one program then serves; None: this one's.

    Raises:
      UserError: more than the memory can hold.
    """
    weights = engine.weights
    config = engine.config_with(None, max_length or len(ids) + 1, engine.max_length)
    config = config._replace(num_logprobs=num_logprobs)
    batch_size = engine.mesh.shape["data"] if engine.mesh else 1
    check_memory(weights, config, batch_size=batch_size)
    chunks = score_chunks(weights, config, ids, batch_size=batch_size)
    return read_scores(partial(next, chunks), len(ids))
