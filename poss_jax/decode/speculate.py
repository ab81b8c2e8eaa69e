"""The decoding round, and the on-device loop around it; without a draft, its autoregressive twin.

    draft (specialists) ─► verify (target, one pass) ─► accept ─► commit (both caches)

Autoregressive decoding is the same round with a tree of only the root, so both share the prefill,
the choice of tokens and the commit.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from poss_jax.config.models import DraftConfig
from poss_jax.decode import drafting, rejection
from poss_jax.decode.lookup import copy_chain, draft_unless_copied, merge
from poss_jax.decode.sampling import History, draw, draw_noise, forbid, shift_logits
from poss_jax.decode.state import (
    DecodeState,
    DraftState,
    Output,
    Prefill,
    Prefilled,
    Request,
    StaticShape,
    Weights,
)
from poss_jax.decode.tree import Candidates, Tree, root_tree, select
from poss_jax.decode.verify import (
    Acceptance,
    Logprobs,
    accept,
    append_logprobs,
    first_logprobs,
    path_logprobs,
)
from poss_jax.model import target as targets
from poss_jax.model.cache import KVCache, commit_rows, init_cache, take_rows, write_rows
from poss_jax.model.ranking import choose
from poss_jax.model.sharding import highest_of_groups
from poss_jax.shapes import Array, Bool, Float, Int, UInt


def start(
    weights: Weights,
    config: StaticShape,
    request: Request,
    allowed: UInt[Array, "B words"] | None = None,
) -> DecodeState:
    """Runs the prompts through target and draft, and chooses the first token."""
    return first_state(weights, config, request, prefill(weights, config, request), allowed)


def first_state(
    weights: Weights,
    config: StaticShape,
    request: Request,
    out: Prefilled,
    allowed: UInt[Array, "B words"] | None = None,
) -> DecodeState:
    """Chooses the first token after prompts already run through target and draft (`prefill`).

    `allowed` are the tokens that a grammar allows (see `sampling.forbid`); None: all.
    """
    B, V, logits = len(request.tokens), config.target.vocab_size, forbid(out.logits, allowed)
    if request.sampling is None:
        root = choose(logits)
    else:
        noise = draw_noise(request.sampling, request.lengths, num_positions=1, vocab_size=V)
        history = prompt_history(request)
        scores = shift_logits(logits[:, None], request.sampling, history, vocab_size=V)
        root = draw(scores, noise, request.sampling)[:, 0]
    output = Output(
        tokens=jnp.zeros((B, config.rows), jnp.int32).at[:, 0].set(root),
        num_tokens=jnp.ones(B, jnp.int32),
        num_accepted=jnp.zeros((B, config.rows), jnp.int32),
        num_offered=jnp.zeros((B, config.rows), jnp.int32),
        num_copied=jnp.zeros((B, config.rows), jnp.int32),
        num_certain=jnp.zeros((B, config.rows), jnp.int32),
        num_rounds=jnp.zeros(B, jnp.int32),
        is_done=_is_stop(root[:, None], request)[:, 0] | (request.max_new_tokens == 1),
        logprobs=first_logprobs(out.logits, root, count=config.num_logprobs, rows=config.rows),
    )
    draft = None
    if config.draft is not None and out.draft_cache is not None:
        cache, num_pairs = out.draft_cache.replace(length=request.lengths - 1), jnp.ones_like(root)
        draft = _commit_draft(weights, config.draft, cache, root[:, None], out.features, num_pairs)
    return DecodeState(out.cache, draft, root, output)


def prefill(weights: Weights, config: StaticShape, request: Request) -> Prefilled:
    """The target's pass over the prompts; fills the draft's cache with all pairs but the last.

    The last pair of a prompt needs the first chosen token.
    """
    num_chunks = (highest_of_groups(request.lengths.max()) + config.chunk - 1) // config.chunk
    begun = begin_prefill(weights, config, request)
    state = run_chunks(weights, config, request, begun, (0, num_chunks))
    return end_prefill(weights, request, state)


def begin_prefill(weights: Weights, config: StaticShape, request: Request) -> Prefill:
    """The state before the first chunk: empty caches for target and draft."""
    target, draft = config.target, config.draft
    dtype = targets.compute_dtype(weights.target)
    make_cache = partial(
        init_cache,
        size=config.rows,
        rope_length=request.lengths + request.max_new_tokens,
        dtype=dtype,
    )
    hidden = jnp.zeros((len(request.lengths), 1, target.hidden_size), dtype)
    return Prefill(
        cache=make_cache(target, num_layers=target.num_layers),
        hidden=hidden,
        features=jnp.concatenate([hidden] * max(len(config.aux_layers), 1), axis=-1),
        draft_cache=make_cache(draft.layer, num_layers=config.num_streams) if draft else None,
    )


@jax.named_scope("prefill")
def run_chunks(
    weights: Weights,
    config: StaticShape,
    request: Request,
    prefill: Prefill,
    chunks: tuple[Array | int, Array | int],
) -> Prefill:
    """Runs chunks of the prompts through target and draft and commits them.

    `prefill` has all chunks before; `chunks` are the first to run, and one past the last.
    """
    size = config.chunk
    padding = -request.tokens.shape[1] % size
    tokens = jnp.pad(request.tokens, ((0, 0), (0, padding)))
    following = jnp.pad(request.tokens[:, 1:], ((0, 0), (0, padding + 1)))
    depths = jnp.broadcast_to(jnp.arange(size)[None], (len(tokens), size))

    def run(index: Array, state: Prefill) -> Prefill:
        first = index * size
        new = lax.dynamic_slice_in_dim(tokens, first, size, axis=1)
        hidden, features, rows = targets.run_layers(
            weights.target, config.target, state.cache, new, depths, None, config.aux_layers
        )
        num_rows, last = jnp.full_like(request.lengths, size), request.lengths - 1 - first
        cache = commit_rows(state.cache, rows, num_rows)
        hidden = _last_row(state.hidden, hidden, last)
        last_features = _last_row(state.features, features, last)
        draft_cache = state.draft_cache
        if config.draft is not None and draft_cache is not None:
            new = lax.dynamic_slice_in_dim(following, first, size, axis=1)
            x = drafting.join_pairs(weights.draft, config.draft, new, features)
            draft_cache, _ = drafting.commit_pairs(
                weights.draft, config.draft, draft_cache, x, num_rows
            )
        return Prefill(cache, hidden, last_features, draft_cache)

    return lax.fori_loop(*chunks, run, prefill)


def end_prefill(weights: Weights, request: Request, prefill: Prefill) -> Prefilled:
    """Finishes prompts whose chunks have all run."""
    logits = targets.read_logits(weights.target, prefill.hidden)[:, 0]
    cache = prefill.cache.replace(length=request.lengths)
    return Prefilled(logits, prefill.features, cache, prefill.draft_cache)


def run_round(
    weights: Weights, config: StaticShape, request: Request, state: DecodeState
) -> DecodeState:
    """Drafts, verifies, accepts and commits once; finished sequences stay unchanged."""
    noise = round_noise(config, request, state)
    tree = draft_tree(weights, config, request, state, noise)
    return finish_round(weights, config, request, state, tree, noise)


def finish_round(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    tree: Tree,
    noise: Float[Array, "B positions V"] | None,
    allowed: UInt[Array, "B M words"] | None = None,
) -> DecodeState:
    """The round after drafting: verify, accept, commit; `allowed` after every node, None: all."""
    out = verify_tree(weights, config, state, tree)
    with jax.named_scope("accept"):
        if request.drafts is not None:  # a node that is its own parent is on no path
            nodes = jnp.arange(tree.tokens.shape[1])[None]
            tree = tree.replace(parents=jnp.where(request.drafts[:, None], tree.parents, nodes))
        chosen = choose_tokens(request, state, tree, forbid(out.logits, allowed), noise)
        acceptance = accept(tree, chosen, max_accepted=config.max_accepted)
        logprobs = path_logprobs(out.logits, acceptance, count=config.num_logprobs)
    return commit(weights, config, request, state, out, acceptance, logprobs)


def round_noise(
    config: StaticShape, request: Request, state: DecodeState, *, is_guided: bool = False
) -> Float[Array, "B positions V"] | None:
    """Noise of every position a round can choose a token for; None decodes greedily.

    Without a grammar (`is_guided`) only copies are deeper than the draft's tree, so that noise is 0
    there in rounds that copy nothing.
    """
    if request.sampling is None:
        return None
    num_positions = config.max_accepted + 1
    depth = config.tree.depth if config.is_drafting else 0
    num_first = num_positions if is_guided else min(depth + 1, num_positions)
    draw_from = partial(draw_noise, request.sampling, vocab_size=config.target.vocab_size)
    position = state.target_cache.length + 1
    noise = draw_from(position, num_positions=num_first)
    if num_first == num_positions:
        return noise
    num_deeper = num_positions - num_first
    has_copies = copy_chain(request, state.output, config.num_copied).scores[:, 0] > -jnp.inf
    deeper = lax.cond(
        highest_of_groups(has_copies.any()),
        lambda: draw_from(position + num_first, num_positions=num_deeper),
        lambda: jnp.zeros((len(noise), num_deeper, noise.shape[2]), noise.dtype),
    )
    return jnp.concatenate([noise, deeper], axis=1)


def draft_tree(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    noise: Float[Array, "B positions V"] | None,
    allowed: UInt[Array, "B words"] | None = None,
) -> Tree:
    """First part of a round: drafts the tree to verify; `allowed` after its root, None: all."""
    if not config.max_accepted:
        return root_tree(state.root)
    if config.children is None and config.drafting == "sampled" and request.sampling:
        history = history_before(request, state.output, root_tree(state.root))
        return rejection.draw_tree(weights, config, state, request.sampling, history, allowed)
    draft = partial(draft_candidates, weights, config, request, state, noise, allowed)
    if config.num_copied:
        with jax.named_scope("lookup"):
            chain = copy_chain(request, state.output, config.num_copied, allowed)
        candidates = chain
        if config.is_drafting:
            drafted = draft_unless_copied(draft, chain, state.output.is_done)
            candidates = merge(drafted, chain, depth=config.tree.depth)
    else:
        candidates = draft()
    with jax.named_scope("select"):
        return select(state.root, candidates, config.tree)


def draft_candidates(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    noise: Float[Array, "B positions V"] | None,
    allowed: UInt[Array, "B words"] | None = None,
) -> Candidates:
    """All nodes a draft proposes, before the tree is selected."""
    assert config.draft is not None and state.draft is not None, "want a draft"
    children = config.children or drafting.top_children
    vocabulary = weights.draft["vocabulary"]
    is_coupled = config.children is None and config.drafting == "coupled"
    if is_coupled and request.sampling and noise is not None:
        children = partial(
            drafting.coupled_children,
            sampling=request.sampling,
            history=history_before(request, state.output, root_tree(state.root)),
            noise=noise,
            vocabulary=vocabulary,
        )
    children = drafting.allow(children, allowed, vocabulary, config.target.vocab_size)
    pairs = state.draft.cache, state.draft.root_input
    return drafting.draft(weights.draft, config.draft, config.tree, *pairs, children)


@jax.named_scope("verify")
def verify_tree(
    weights: Weights, config: StaticShape, state: DecodeState, tree: Tree
) -> targets.Verified:
    """Runs the target's one pass over the tree."""
    nodes, aux_layers = (tree.tokens, tree.depths, tree.ancestors), config.aux_layers
    cache = state.target_cache
    return targets.verify(weights.target, config.target, cache, *nodes, aux_layers=aux_layers)


def choose_tokens(
    request: Request,
    state: DecodeState,
    tree: Tree,
    logits: Float[Array, "B M V"],
    noise: Float[Array, "B positions V"] | None,
) -> Int[Array, "B M"]:
    """Chooses the target's token after every node."""
    if request.sampling is None or noise is None:
        return choose(logits)
    history = history_before(request, state.output, tree)
    scores = shift_logits(logits, request.sampling, history, vocab_size=logits.shape[-1])
    noise = jnp.take_along_axis(noise, tree.depths[:, :, None], axis=1)
    chosen = draw(scores, noise, request.sampling)
    if isinstance(tree, rejection.DrawnTree):
        return rejection.choose_drawn(tree, chosen, logits, noise, request.sampling, history)
    return chosen


@jax.named_scope("commit")
def commit(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    out: targets.Verified,
    acceptance: Acceptance,
    logprobs: Logprobs | None = None,
) -> DecodeState:
    """Last part of a round: adds the accepted path to output, statistics and both caches."""
    num_new = jnp.where(state.output.is_done, 0, acceptance.num_accepted + 1)
    root = jnp.take_along_axis(acceptance.emitted, acceptance.num_accepted[:, None], axis=1)
    path = acceptance.path
    kept = take_rows(out.rows, path) if config.max_accepted else out.rows
    cache, draft = state.target_cache, state.draft
    # Adds 0. Without this dependency XLA on CPU copies the caches of a single row: it must know
    # that the row is written after all that is read to choose its token.
    cache = cache.replace(length=cache.length + jnp.minimum(root[:, 0], 0))
    cache = commit_rows(cache, kept, num_new)
    output = _write_output(request, state.output, acceptance, logprobs)
    if config.draft is not None and draft is not None:
        features = jnp.take_along_axis(out.features, path[:, :, None], axis=1)
        draft = _commit_draft(
            weights, config.draft, draft.cache, acceptance.emitted, features, num_new
        )
    return DecodeState(cache, draft, root[:, 0], output)


def run_rounds(
    weights: Weights, config: StaticShape, request: Request, state: DecodeState
) -> DecodeState:
    """Runs rounds until every sequence is done."""
    return lax.while_loop(
        lambda state: highest_of_groups(~state.output.is_done.all()),
        lambda state: run_round(weights, config, request, state),
        state,
    )


def _write_output(
    request: Request, output: Output, acceptance: Acceptance, logprobs: Logprobs | None
) -> Output:
    """Appends the tokens a round emitted, cut exactly at a stop token or at the limit."""
    # Differs from PosS: PosS keeps a round whole, so sequences run past limit and stop token.
    emitted = acceptance.emitted
    column = jnp.arange(emitted.shape[1])[None]
    num_emitted = acceptance.num_accepted + 1
    is_end = _is_stop(emitted, request) & (column < num_emitted[:, None])
    until_stop = jnp.where(is_end, column + 1, emitted.shape[1]).min(axis=1)
    remaining = request.max_new_tokens - output.num_tokens
    num_written = jnp.minimum(jnp.minimum(num_emitted, until_stop), remaining)
    active = ~output.is_done
    num_tokens = output.num_tokens + jnp.where(active, num_written, 0)

    def recorded(record: Array, count: Array) -> Array:
        return write_rows(record, count[:, None], output.num_rounds, axis=1)

    def cut(count: Array) -> Array:
        # A cut round neither accepted nor refused anything beyond the cut.
        return jnp.where(num_written < num_emitted, jnp.minimum(count, num_written), count)

    # The cut takes certain tokens first, then copies.
    num_accepted = cut(acceptance.num_accepted)
    num_proposed = acceptance.num_accepted - acceptance.num_certain
    num_certain = jnp.maximum(num_accepted - num_proposed, 0)
    num_drafted = num_proposed - acceptance.num_copied
    num_copied = jnp.maximum(num_accepted - num_certain - num_drafted, 0)

    return Output(
        tokens=write_rows(output.tokens, emitted, output.num_tokens, axis=1),
        num_tokens=num_tokens,
        num_accepted=recorded(output.num_accepted, num_accepted),
        num_offered=recorded(output.num_offered, cut(acceptance.num_offered)),
        num_copied=recorded(output.num_copied, num_copied),
        num_certain=recorded(output.num_certain, num_certain),
        num_rounds=output.num_rounds + active.astype(jnp.int32),
        is_done=output.is_done | is_end.any(axis=1) | (num_tokens >= request.max_new_tokens),
        logprobs=append_logprobs(output.logprobs, logprobs, output.num_tokens),
    )


def prompt_history(request: Request) -> History:
    """Tokens before the first choice."""
    B = len(request.tokens)
    return History(
        tokens=request.tokens,
        is_token=_are_first(request.tokens, request.lengths),
        path=jnp.zeros((B, 0), jnp.int32),
        on_path=jnp.zeros((B, 1, 0), bool),
        is_output=_are_continued(request),
        stop_ids=request.stop_ids,
    )


def history_before(request: Request, output: Output, tree: Tree) -> History:
    """Tokens before the choice at each node: the prompt, the output, and the path from the root."""
    in_prompt = _are_first(request.tokens, request.lengths)
    in_output = _are_first(output.tokens, output.num_tokens)
    return History(
        tokens=jnp.concatenate([request.tokens, output.tokens], axis=1),
        is_token=jnp.concatenate([in_prompt, in_output], axis=1),
        path=tree.tokens,
        on_path=tree.ancestors.at[:, :, 0].set(False),  # the root is in the output
        is_output=jnp.concatenate([_are_continued(request), in_output], axis=1),
        stop_ids=request.stop_ids,
    )


def _are_first(tokens: Int[Array, "B T"], count: Int[Array, " B"]) -> Bool[Array, "B T"]:
    """Marks the first `count` tokens of every sequence."""
    return jnp.arange(tokens.shape[1])[None] < count[:, None]


def _are_continued(request: Request) -> Bool[Array, "B P"]:
    """Marks prompt tokens that are output of a continued answer."""
    in_prompt = _are_first(request.tokens, request.lengths)
    if request.output_starts is None:
        return jnp.zeros_like(in_prompt)
    return in_prompt & ~_are_first(request.tokens, request.output_starts)


def _commit_draft(
    weights: Weights,
    config: DraftConfig,
    cache: KVCache,
    tokens: Array,
    features: Array,
    num_pairs: Int[Array, " B"],
) -> DraftState:
    """Commits the new pairs to every specialist, and keeps the input of the last one."""
    x = drafting.join_pairs(weights.draft, config, tokens, features)
    cache, x = drafting.commit_pairs(weights.draft, config, cache, x, num_pairs)
    last = jnp.take_along_axis(x, jnp.maximum(num_pairs - 1, 0)[:, None, None], axis=1)
    return DraftState(cache=cache, root_input=last)


def _last_row(
    last: Float[Array, "B 1 F"], rows: Float[Array, "B T F"], index: Int[Array, " B"]
) -> Float[Array, "B 1 F"]:
    """Picks each sequence's row if this chunk has it; else keeps the old one."""
    T = rows.shape[1]
    taken = jnp.take_along_axis(rows, jnp.clip(index, 0, T - 1)[:, None, None], axis=1)
    return jnp.where(((index >= 0) & (index < T))[:, None, None], taken, last)


def _is_stop(tokens: Int[Array, "B A"], request: Request) -> Bool[Array, "B A"]:
    return (tokens[..., None] == request.stop_ids[:, None]).any(axis=-1)
