"""A drafter that knows the future, so that every acceptance length occurs.

It is put in place of the draft's own choice of children: with probability 0.7 per position it
plants the token the target will choose among the children of every node, as a certain one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from models import decode_all, random_draft, random_target
from watch import Watch

from poss_jax.config.models import DraftConfig, LlamaConfig, TreeConfig
from poss_jax.decode.drafting import Level, top_children
from poss_jax.decode.sampling import Sampling
from poss_jax.decode.state import Output, Request, StaticShape, Weights
from poss_jax.model.specialists import borrow_from_target
from poss_jax.shapes import Array, Params

PROMPT_SIZE, MAX_NEW, ROWS = 16, 32, 128
TEMPERATURES = (0, 1e-6, 0.01, 0.02, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2)  # half below 0.3


def plant(future: Array, is_planted: Array, logits: Array, level: Level, top_k: int):
    """Children of every node: the most likely ones, and sometimes the true token.

    Args:
      future: [B positions] the draft's id of the token the target chooses at every position.
      is_planted: [B positions] where it is planted.
      logits: [B rows V] of the draft.
      level: where the children stand.
      top_k: how many children.
    """
    ids, log_probs = top_children(logits, level, top_k)
    position = level.position
    token = jnp.take_along_axis(future, position[:, None], axis=1)[:, :, None]
    here = jnp.take_along_axis(is_planted, position[:, None], axis=1)[:, :, None]
    is_token = ids == token
    last = jnp.arange(top_k)[None, None] == top_k - 1
    slot = jnp.where(is_token.any(axis=-1, keepdims=True), is_token, last) & here
    return jnp.where(slot, token, ids), jnp.where(slot, 0.0, log_probs)


def draw_sampling(llama: LlamaConfig, batch: int, rng: np.random.Generator) -> Sampling:
    """Settings of every kind, each sequence with its own; some are greedy."""

    def column(dtype, *choices) -> Array:
        return jnp.asarray(rng.choice(choices, batch), dtype)

    return Sampling(
        seed=jnp.asarray(rng.integers(0, 2**32, batch), jnp.uint32),
        temperature=column(jnp.float32, *TEMPERATURES),
        top_k=column(jnp.int32, 0, 0, 3, 20),
        top_p=column(jnp.float32, 1, 1, 0.9, 0.5),
        min_p=column(jnp.float32, 0, 0, 0.1),
        repetition_penalty=column(jnp.float32, 1, 1, 1.3),
        bias_ids=jnp.asarray(rng.integers(-1, llama.vocab_size, (batch, 2)), jnp.int32),
        bias=jnp.asarray(rng.normal(size=(batch, 2)), jnp.float32),
        frequency_penalty=column(jnp.float32, 0, 0, 1.5),
        presence_penalty=column(jnp.float32, 0, 0, -0.8),
        min_tokens=column(jnp.int32, 0, 0, MAX_NEW // 2),
    )


def greedy_request(*prompts: list[int], limit: int) -> Request:
    """A greedy request for each prompt, which no token ends."""
    tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return Request(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
        max_new_tokens=jnp.full(len(prompts), limit, jnp.int32),
        stop_ids=jnp.asarray([[-1]], jnp.int32),
    )


def draw_request(
    llama: LlamaConfig, batch: int, rng: np.random.Generator, *, is_sampled: bool
) -> Request:
    """Prompts of unequal length, unequal limits, and sometimes a token that ends a text."""
    stop = int(rng.integers(0, llama.vocab_size)) if rng.random() < 0.5 else -1
    return Request(
        tokens=jnp.asarray(rng.integers(0, llama.vocab_size, (batch, PROMPT_SIZE)), jnp.int32),
        lengths=jnp.asarray(rng.integers(1, PROMPT_SIZE + 1, batch), jnp.int32),
        max_new_tokens=jnp.asarray(rng.integers(MAX_NEW // 2, MAX_NEW + 1, batch), jnp.int32),
        stop_ids=jnp.asarray([[stop]], jnp.int32),
        sampling=draw_sampling(llama, batch, rng) if is_sampled else None,
    )


@partial(jax.jit, static_argnums=1)
def _alone(weights: Weights, llama: LlamaConfig, request: Request) -> Output:
    """Autoregressive text; one program serves every tree."""
    config = StaticShape(llama, None, TreeConfig(depth=1, top_k=1, total_tokens=2), ROWS)
    return decode_all(weights, config, request).output


class Shape:
    """A compiled speculative program with the oracle, compared with autoregressive decoding."""

    def __init__(
        self,
        llama: LlamaConfig,
        draft: DraftConfig,
        tree: TreeConfig,
        batch: int,
        *,
        is_sampled: bool,
        vocabulary: Sequence[int] | None = None,
        lookup: int = 0,
    ):
        self.llama, self.draft, self.tree = llama, draft, tree
        self.batch, self.is_sampled = batch, is_sampled
        self.vocabulary = np.asarray(
            range(llama.vocab_size) if vocabulary is None else vocabulary, np.int32
        )
        self.lengths_seen: set[int] = set()  # accepted counts of all rounds that were not cut
        self.num_copied = 0  # accepted tokens that only lookup proposed
        self._max_accepted = StaticShape(llama, draft, tree, ROWS, lookup=lookup).max_accepted
        self._watch = Watch()

        def with_oracle(weights: Weights, request: Request, future: Array, planted: Array):
            children = partial(plant, future, planted)
            config = StaticShape(
                llama, draft, tree, ROWS, chunk=8, children=children, lookup=lookup
            )
            with self._watch.tracing():
                return decode_all(weights, config, request)

        self._with_oracle = jax.jit(with_oracle)

    def check(self, target: Params, draft: Params, rng: np.random.Generator) -> None:
        """Decodes one drawn request both ways and compares token for token."""
        request = draw_request(self.llama, self.batch, rng, is_sampled=self.is_sampled)
        expected = _fetch(_alone(Weights(target, {}), self.llama, request))
        planted = rng.random((self.batch, PROMPT_SIZE + MAX_NEW + 16)) < 0.7
        future = self._draft_ids(_future(request, expected, planted.shape))
        planted = jnp.asarray(planted & (future >= 0))
        weights = Weights(target, borrow_from_target(draft, target, jnp.asarray(self.vocabulary)))
        state = self._with_oracle(weights, request, jnp.asarray(future), planted)
        self._compare(request, expected, _fetch(state.output))
        self._watch.check()

    def check_pairs(
        self, cases: int = 12, *, seed: int = 0, change: Callable[[Params], Params] = lambda x: x
    ) -> None:
        """Checks drafts, five per target, that must show every acceptance length.

        Args:
          cases: how many drafts.
          seed: seed of the models and of the requests.
          change: what is done to a drawn target.
        """
        rng = np.random.default_rng(seed)
        for case in range(cases):
            target = change(random_target(self.llama, seed=1000 * seed + case // 5))
            self.check(target, random_draft(self.draft, seed=case), rng)
        assert self.lengths_seen == set(range(self._max_accepted + 1))

    def _draft_ids(self, tokens: np.ndarray) -> np.ndarray:
        """The draft's own ids of target ids; -1 for those it cannot propose."""
        ids = np.full(self.llama.vocab_size, -1, np.int32)
        ids[self.vocabulary] = np.arange(len(self.vocabulary))
        return ids[tokens]

    def _compare(
        self, request: Request, expected: SimpleNamespace, output: SimpleNamespace
    ) -> None:
        np.testing.assert_array_equal(output.num_tokens, expected.num_tokens)
        for row, count in enumerate(expected.num_tokens):
            np.testing.assert_array_equal(output.tokens[row, :count], expected.tokens[row, :count])
            accepted = output.num_accepted[row, : output.num_rounds[row]]
            self.lengths_seen |= set(accepted[:-1].tolist())
            self.num_copied += int(output.num_copied[row, : output.num_rounds[row]].sum())
            # The first token comes from the prompt; a cut last round emits no bonus token.
            emitted = 1 + int(accepted.sum()) + len(accepted)
            assert count in (emitted, emitted - 1)
            assert count <= request.max_new_tokens[row]


def _fetch(output: Output) -> SimpleNamespace:
    """The same fields as NumPy arrays."""
    return SimpleNamespace(**jax.device_get(vars(output)))


def _future(request: Request, expected: SimpleNamespace, shape: tuple[int, ...]) -> np.ndarray:
    """The target's choice at every position of prompt and answer."""
    future = np.zeros(shape, np.int32)
    for row, length in enumerate(np.array(request.lengths)):
        answer = expected.tokens[row][: expected.num_tokens[row]]
        future[row, length : length + len(answer)] = answer
    return future
