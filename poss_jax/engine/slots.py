"""Slots: a batch whose sequences come and go between rounds, on one device or a group of them.

    begin ─► extend ... extend ─► insert into a slot ─► run ─► run ... until the slot is ended
                                                        draft, walk, verify: with grammars

Prefill takes one prompt at a time, chunk by chunk, so that rounds of other slots run in between.
Its first chunks are copied if the prefix cache has them, and consecutive choices of the same prompt
share one prefill. All shapes are fixed when the slots are made: their number, the length of a
sequence, the number of biased tokens. A slot's tokens depend only on its prompt, settings and seed;
with sampled drafts also on the number of active slots, which chooses the tree.

On several hosts every process makes the same slots and calls them in the same order (`leader.py`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from hashlib import sha256
from itertools import pairwise, takewhile
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.models import TreeConfig
from poss_jax.config.reading import UserError, one_line
from poss_jax.decode.state import Prefill, Request, StaticShape, Weights
from poss_jax.decode.verify import Logprobs
from poss_jax.engine import steps
from poss_jax.engine.batch import Batch, RoundKind, score_chunks
from poss_jax.engine.device import (
    cache_bytes,
    check_memory,
    device_memory,
    least_bytes,
    prefill_chunks,
)
from poss_jax.engine.models import Models
from poss_jax.engine.prompts import (
    MOST_BIASED,
    MOST_STOP_IDS,
    PreparedPrompt,
    PromptTooLong,
    lay_out,
)
from poss_jax.engine.rounds import PackedRounds
from poss_jax.engine.steps import Block
from poss_jax.engine.trees import cover_trees, tree_for
from poss_jax.shapes import Params


class _Prefilling(NamedTuple):
    """A prefill under way, or the last one."""

    prompt: PreparedPrompt
    request: Request
    prefill: Prefill
    block_names: list[bytes]


class Slots(Batch):
    """The slots of an engine; one thread makes all calls.

    Attributes:
      engine: target and draft.
      sizes: batch sizes, ascending; more requests take a larger batch; `size` is the one now.
      max_length: most tokens of prompt and answer together.
      max_logprobs: most log-probabilities per token; 0: none are kept.
      chunk: prompt tokens per step of prefill.
      prefixes: the prefix cache.
    """

    def __init__(
        self,
        engine: Models,
        *,
        sizes: Sequence[int],
        max_length: int | None = None,
        max_logprobs: int = 0,
        max_cache_bytes: int | None = None,
        max_prefix_bytes: int = 0,
    ) -> None:
        """Allocates the slots.

        Args:
          engine: target and draft; its trees give the tree per number of active slots.
          sizes, max_length, max_logprobs: see the attributes; None: the engine's length.
          max_cache_bytes: most bytes of keys and values per device; None: what is needed.
          max_prefix_bytes: most bytes of the prefix cache per device; 0: none.

        Raises:
          UserError: the memory is too small, or the engine's mesh splits the batch.
        """
        if engine.mesh is not None and engine.mesh.shape["data"] > 1:
            raise UserError(
                f"mesh.data {engine.mesh.shape['data']}: a server takes one group of devices; put "
                "all of them in mesh.tensor, and run a server per group"
            )
        self.sizes, self.size = tuple(sorted(sizes)), min(sizes)
        self.max_length = min(max_length or engine.max_length, engine.max_length)
        self.engine, self.weights, self.max_logprobs = engine, engine.weights, max_logprobs
        self._trees = [tree_for(engine.trees, n) for n in range(1, self.sizes[-1] + 1)]
        config = engine.config_with(cover_trees(self._trees), self.max_length, self.max_length)
        self.config, self.chunk = config._replace(num_logprobs=max_logprobs), config.chunk
        # A batch is held twice while its size changes, plus the prompt in prefill.
        self._most = max_slots = max(self.sizes[-1], *map(sum, pairwise((0, *self.sizes)))) + 1
        check_memory(engine.weights, self.config, batch_size=max_slots)
        needed = max_slots * cache_bytes(engine.weights, self.config)
        if max_cache_bytes is not None and needed > max_cache_bytes:
            raise UserError(
                f"batches of {', '.join(map(str, self.sizes))} answers of {self.max_length} tokens "
                f"need {needed / 2**30:.2f} GiB of keys and values, which may take "
                f"{max_cache_bytes / 2**30:.2f}; lower batch_size or max_length, or raise cache_gib"
            )
        self.prefixes = make_prefixes(
            self.weights, self.config, max_prefix_bytes, batch_size=max_slots
        )
        self._prefilling: _Prefilling | None = None
        self._last_prefill: _Prefilling | None = None
        self._scores: Iterator[Logprobs] = iter(())
        self._can_score = False  # compiled
        scoring = engine.config_with(None, self.max_length, engine.max_length)
        self._scoring_config = scoring._replace(num_logprobs=max_logprobs)
        request = self._put(PreparedPrompt([0], 1))
        slots = np.arange(self.size, dtype=np.int32)
        self.request, self.state = steps.allocate(self.weights, self.config, request, slots)

    def check(self, prompt: PreparedPrompt) -> None:
        """Refuses a prompt that exceeds a slot's capacity.

        Raises:
          UserError: too many biases or stop ids, or (`PromptTooLong`) prompt and answer are longer
            than `max_length`, which may be less than the engine's.
        """
        for name, tokens, limit in (
            ("logit_bias", prompt.sampling.logit_bias, MOST_BIASED),
            ("stop_ids", prompt.stop_ids, MOST_STOP_IDS),
        ):
            if len(tokens) > limit:
                raise UserError(f"{name}: want at most {limit} tokens, got {len(tokens)}")
        if len(prompt.ids) + prompt.max_new_tokens > self.max_length:
            raise PromptTooLong(len(prompt.ids), prompt.max_new_tokens, self.max_length)

    def _put(self, prompt: PreparedPrompt) -> Request:
        """Puts a request on the device, in arrays of the same shapes for all requests."""
        host = lay_out([prompt], num_tokens=self.config.rows)
        return steps.put(self.weights, self.config, host)

    def num_chunks(self, prompt: PreparedPrompt) -> int:
        """Chunks of a prompt; the last one may be partial."""
        return -(-len(prompt.ids) // self.chunk)

    def shapes(self) -> "Slots":
        """Slots of the same shapes that hold nothing: their steps compile, and run nothing."""
        shapes = copy(self)
        held = shapes.weights, shapes.request, shapes.state
        shapes.weights, shapes.request, shapes.state = steps.shapes_of(held)
        shapes._prefilling = shapes._last_prefill = None
        shapes.prefixes = Prefixes(self.prefixes.most)
        return shapes

    def samples(self) -> list[PreparedPrompt]:
        """Prompts that cover all of prefill: the last one begins like the one before."""
        lengths = (1, self.chunk + 1, self.chunk + 2)
        return [PreparedPrompt([0] * n, 1, SamplingConfig(temperature=1.0)) for n in lengths]

    def round_kinds(self, size: int) -> list[RoundKind]:
        """All kinds of round that a batch of some size needs, the most frequent first."""
        trees = dict.fromkeys(self._tree(n, size) for n in range(1, size + 1))
        kinds = [(True, False), (False, False)] + ([(True, True)] if self.max_logprobs else [])
        return [RoundKind(tree, *kind) for kind in kinds for tree in trees]

    def rare_kinds(self, size: int) -> list[RoundKind]:
        """Rounds without drafts and rounds with grammars, if there can be any."""
        draftless = [RoundKind(None, is_sampled, is_draftless=True) for is_sampled in (True, False)]
        guided = [
            kind._replace(is_guided=True) for kind in self.round_kinds(size) if kind.is_sampled
        ]
        can_guide = self.engine.tokenizer is not None
        return draftless * self._has_draftless(size) + guided * can_guide

    def _has_draftless(self, size: int) -> bool:
        """True if a batch of some size has rounds without the draft; larger ones do not."""
        return self.config.draft is not None and size == self.sizes[0]

    def choose_kind(self, prompts: Sequence[PreparedPrompt], *, has_logprobs: bool) -> RoundKind:
        """The cheapest round that serves these requests; all but the plainest imply sampling."""
        is_guided = any(prompt.guide for prompt in prompts)
        is_plain = all(prompt.sampling.is_plain for prompt in prompts)
        is_sampled = has_logprobs or is_guided or not is_plain
        wants_drafts = is_guided or any(prompt.drafts for prompt in prompts)
        if self._has_draftless(self.size) and not wants_drafts:
            return RoundKind(None, is_sampled, has_logprobs, is_draftless=True)
        tree = self._tree(len(prompts), self.size)
        return RoundKind(tree, is_sampled, has_logprobs, is_guided)

    def _tree(self, num_active: int, size: int) -> TreeConfig | None:
        """The tree for some active slots; one for more if the batch is about to shrink."""
        fewest = 1 + max((smaller for smaller in self.sizes if smaller < size), default=0)
        return self._trees[max(num_active, fewest) - 1]

    # ----------------------------------------------------------------------------------------------
    # Steps, the same on all processes

    def begin(self, prompt: PreparedPrompt) -> int:
        """Begins the prefill of a prompt; returns how many of its first chunks were cached."""
        self._prefilling = None  # left by a cancelled request
        request = self._put(prompt)
        # The limit counts too: some rotations depend on how long a sequence may become.
        if self._last_prefill is not None and self._last_prefill.prompt[:2] == prompt[:2]:
            self._prefilling = self._last_prefill._replace(prompt=prompt, request=request)
            return self.num_chunks(prompt)
        self._last_prefill = None
        draft, length = self.config.draft, len(prompt.ids) + prompt.max_new_tokens
        ropes = [self.config.target.rope, *([draft.layer.rope] if draft else [])]
        rotations = [rope.rotation(length) for rope in ropes]
        names = name_blocks(prompt.ids, rotations, chunk=self.chunk)
        prefill = steps.begin(self.weights, self.config, request)
        blocks = self.prefixes.find(names)
        for block in blocks:
            prefill = steps.append_block(self.weights, self.config, request, prefill, block)
        self._prefilling = _Prefilling(prompt, request, prefill, names)
        return len(blocks)

    def extend(self, first: int, last: int) -> None:
        """Prefills the chunks of the prompt from `first` up to `last`."""
        assert self._prefilling is not None, "want begin first"
        prompt, request, prefill, names = self._prefilling
        chunk, short_chunk = prefill_chunks()
        num_whole, num_left = divmod(len(prompt.ids), chunk)
        num_whole += num_left > short_chunk
        parts = [(chunk, first, min(last, num_whole))]
        if first <= num_whole < last:  # a short rest begins at a multiple of `chunk`
            index = num_whole * chunk // short_chunk
            parts.append((short_chunk, index, index + 1))
        for size, start, end in parts:
            if start < end:
                config, bounds = self.config._replace(chunk=size), (np.int32(start), np.int32(end))
                prefill = steps.extend(self.weights, config, request, prefill, bounds)
        self._prefilling = self._prefilling._replace(prefill=prefill)

        def cut(index: int) -> Block:
            start = np.int32(index * chunk)
            return steps.cut_block(self.weights, self.config, request, prefill, start)

        self.prefixes.keep(names, range(first, min(last, len(names))), cut)

    def insert(self, slot: int, masks: np.ndarray | None = None) -> PackedRounds:
        """Chooses the first new token, which `masks` may limit, and gives the request a slot."""
        assert self._prefilling is not None, "want begin first"
        _, request, prefill, _ = self._prefilling
        self._prefilling, self._last_prefill = None, self._prefilling
        masks = self.masks({}, 1) if masks is None else masks
        batch = self.request, self.state, request, prefill, np.int32(slot), masks
        self.request, self.state, first = steps.insert(self.weights, self.config, *batch)
        return first

    def compile_scoring(self) -> None:
        """Compiles `score_next`, once; other threads may meanwhile take steps.

        Raises:
          UserError: the memory cannot hold a scored prompt next to all others.
        """
        if not self._can_score:
            check_memory(self.weights, self.config, batch_size=self._most + 1)
            next(score_chunks(steps.shapes_of(self.weights), self._scoring_config, [0, 0]))
            self._can_score = True

    def begin_scores(self, ids: Sequence[int]) -> None:
        """Begins to score the tokens of a prompt; slots may be decoded meanwhile."""
        self._scores = score_chunks(self.weights, self._scoring_config, ids)

    def score_next(self) -> Logprobs:
        """Scores the next chunk of that prompt."""
        return next(self._scores)

    def resize(self, size: int, order: Sequence[int]) -> None:
        """Moves slots of `order`, in this order, into a batch of another size."""
        index = np.zeros(size, np.int32)
        index[: len(order)] = order
        is_kept = np.arange(size) < len(order)
        self.request, self.state = steps.resize(
            self.weights, self.config, self.request, self.state, index, is_kept
        )
        self.size = size

    def update_weights(self, params: Params) -> None:
        """Replaces the target's parameters; if that fails, the old ones and all requests stay."""
        self._last_prefill = None  # computed with the old parameters
        self.prefixes = Prefixes(self.prefixes.most, self.prefixes.most_bytes)
        try:
            self.engine.update_weights(params)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"update_weights: {one_line(error)}; the old weights stay") from error
        self.weights = self.engine.weights


# --------------------------------------------------------------------------------------------------
# The prefix cache: keys and values of prompts' beginnings, for later prompts that begin alike
#
#     prompt   [ block 0 | block 1 | block 2 | suffix ]
#     later    [ block 0 | block 1 | another one ... ]     reads from block 2 on
#
# A block is a whole chunk of a prompt. Its rows are copied from the prompt that computed them, and
# copied to the same place in a later one, whose caches then hold, bit for bit, what its own chunks
# would have written. Rows that rounds wrote equal those only up to rounding, so none are kept: an
# answer is read with the next turn of its chat.
#
# The least recently used block goes first, and the end of a prompt before its beginning. What is
# kept depends on the prompts and their order alone, so all processes of a model keep the same.


def name_blocks(ids: Sequence[int], rotations: Sequence[int], *, chunk: int) -> list[bytes]:
    """Names the blocks of a prompt by all that their rows depend on.

    That is every token up to the block's end and the one after it, with which the draft's last row
    is paired; so the last token of a prompt, which must be read, is in no block.

    Args:
      rotations: `RopeConfig.rotation` of target and draft.
      chunk: tokens per block.
    """
    names, name = [], str(rotations).encode()
    for end in range(chunk, len(ids), chunk):
        name = sha256(name + np.asarray(ids[end - chunk : end + 1], np.int32).tobytes()).digest()
        names.append(name)
    return names


class Prefixes:
    """The blocks that are kept: `most` of them, which take `most_bytes` of each device."""

    def __init__(self, max_blocks: int, most_bytes: int = 0) -> None:
        self.most, self.most_bytes = max_blocks, most_bytes
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, names: Sequence[bytes]) -> list[Block]:
        """Finds the blocks that a prompt begins with."""
        self._renew(names)
        return [self._blocks[name] for name in takewhile(self._blocks.__contains__, names)]

    def keep(self, names: Sequence[bytes], new: range, cut: Callable[[int], Block]) -> None:
        """Keeps the `new` blocks of a prompt while blocks of other prompts can be dropped."""
        for index in new:
            if names[index] in self._blocks:
                continue
            if len(self._blocks) == self.most:
                oldest = next(iter(self._blocks), names[index])
                if oldest in names:
                    break
                del self._blocks[oldest]
            self._blocks[names[index]] = cut(index)
        self._renew(names)

    def _renew(self, names: Sequence[bytes]) -> None:
        """Marks the blocks of a prompt as just used, the first one last."""
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)


def make_prefixes(
    weights: Weights, config: StaticShape, most_bytes: int, *, batch_size: int
) -> Prefixes:
    """Makes a prefix cache; takes at most half the memory beside `batch_size` sequences."""
    if (available := device_memory()) is not None:
        free = available - least_bytes(weights, config, batch_size=batch_size)
        most_bytes = max(min(most_bytes, free // 2), 0)
    block_bytes = cache_bytes(weights, config._replace(rows=config.chunk))
    max_blocks = most_bytes // block_bytes
    if jax.process_count() > 1:
        max_blocks = multihost_utils.process_allgather(np.int32(max_blocks)).min()
    return Prefixes(int(max_blocks), int(max_blocks) * block_bytes)
