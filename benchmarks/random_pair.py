"""Pairs with random weights, made on the device, and a server of one.

A random draft is never right, so acceptance is forced: a sequence's rounds accept, one after the
other, as many tokens as the rounds of a trained PosS-3 draft did on one prompt of the tests (number
4 of tests/fixtures/generate_poss3.json, the one nearest to the mean of all with 6/10/60).
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.serving import Answer, Case, ask, describe_answers, run_clients
from poss_jax.checkpoint.record import TargetIdentity, new_record
from poss_jax.config.decoding import ServeConfig
from poss_jax.config.models import DraftConfig, LlamaConfig, Quantisation
from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeState, Request, StaticShape, Weights
from poss_jax.decode.verify import Acceptance
from poss_jax.engine.batch import RoundKind
from poss_jax.engine.device import default_dtype
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.slots import Slots
from poss_jax.model.cache import KVCache
from poss_jax.model.families import init_draft
from poss_jax.model.families.eagle3 import default_fields
from poss_jax.model.quantise import quantise_target
from poss_jax.model.target import init_target
from poss_jax.serving.app import create_app
from poss_jax.serving.server import DrainingServer, listen
from poss_jax.shapes import Params

RECORDED = {
    "6/10/60": "21233202122123466656554",
    "6/4/24": "20113320122200133566666423",
    "4/2/8": "02110310201222000032344443442234",
    "5/1/6": "0200000130001101220000311155555512304",
    "3/1/4": "0200000130001101220000311133333333312303",
    "2/1/3": "020000012000011012200002011120222222222222020021",
}
"""Accepted tokens per round, a digit each, by tree: 4.17 down to 2.00 tokens a round."""
SCALE = 0.02
PLAIN, FAMILIES = "autoregressive", ("poss3", "poss3_e3")


def accepted_by(config: StaticShape) -> list[int]:
    """Recorded numbers for a tree; an unknown one gets 6/10/60's, as far as it reaches."""
    digits = RECORDED.get(config.tree.name, RECORDED["6/10/60"])
    return [min(int(digit), config.max_accepted) for digit in digits]


# --------------------------------------------------------------------------------------------------
# Weights


def random_like(init: Callable[[Any], Params], seed: int, dtype: Any) -> Params:
    """Draws parameters of the shapes that `init` gives, one array at a time."""
    leaves, treedef = jax.tree.flatten(jax.eval_shape(init, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    pairs = zip(keys, leaves, strict=True)
    return treedef.unflatten([_draw(key, leaf.shape, dtype) for key, leaf in pairs])


@partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if len(shape) == 1:  # scale of a norm
        return jnp.ones(shape, dtype)
    return SCALE * jax.random.normal(key, shape, dtype)


def draft_shape(family: str, llama: LlamaConfig, num_draft_tokens: int) -> DraftConfig:
    """PosS-3 for six positions, on EAGLE-2 or on EAGLE-3."""
    layer = replace(llama, num_layers=1)
    draft = DraftConfig(layer=layer, positions_per_specialist=(3, 3), trained_depth=6)
    if family == "poss3":
        return draft
    return replace(draft, family="eagle3", **default_fields(llama, num_draft_tokens))


def make_engines(
    llama: LlamaConfig,
    methods: Sequence[str],
    num_draft_tokens: int,
    quantise: Quantisation | None = None,
) -> dict[str, Engine]:
    """One target, alone and with drafts."""
    dtype = default_dtype()
    identity = TargetIdentity(name="random", embedding_sha256="0" * 64, head_sha256="0" * 64)
    record = new_record(llama, identity, tokenizer_from=None, quantised=quantise)
    params = random_like(partial(init_target, llama), 0, dtype)
    engine = Engine(record, quantise_target(params, quantise) if quantise else params)
    engines = {PLAIN: engine}
    for seed, family in enumerate(FAMILIES, start=1):
        if family not in methods:
            continue
        config = draft_shape(family, llama, num_draft_tokens)
        tokens = None if config.head_size is None else tuple(range(config.head_size))
        record = new_record(config, identity, tokenizer_from=None, draft_vocabulary=tokens)
        draft = random_like(partial(init_draft, config), seed, dtype)
        engines[family] = engine.with_draft(record, draft)
    return {method: engines[method] for method in methods}


# --------------------------------------------------------------------------------------------------
# Rounds


def forced_round(
    weights: Weights, config: StaticShape, request: Request, state: DecodeState
) -> DecodeState:
    """`speculate.run_round`, but accepts the recorded number of tokens."""
    noise = speculate.round_noise(config, request, state)
    tree = speculate.draft_tree(weights, config, request, state, noise)
    out = speculate.verify_tree(weights, config, state, tree)
    chosen = speculate.choose_tokens(request, state, tree, out.logits, noise)
    path = jnp.arange(config.max_accepted + 1, dtype=jnp.int32)
    path = jnp.broadcast_to(path[None], (len(chosen), len(path)))
    recorded = jnp.array(accepted_by(config), jnp.int32)
    num_accepted = recorded[state.output.num_rounds % len(recorded)]
    none = jnp.zeros_like(num_accepted)
    acceptance = Acceptance(
        path=path,
        num_accepted=num_accepted,
        num_offered=num_accepted,
        num_copied=none,
        num_certain=none,
        emitted=jnp.take_along_axis(chosen, path, axis=1),
    )
    return speculate.commit(weights, config, request, state, out, acceptance)


@partial(jax.jit, static_argnums=(1, 4), donate_argnums=3)
def forced_rounds(
    weights: Weights, config: StaticShape, request: Request, state: DecodeState, num_rounds: int
) -> DecodeState:
    """Runs forced rounds in one program."""
    return jax.lax.fori_loop(
        0, num_rounds, lambda _, state: forced_round(weights, config, request, state), state
    )


def random_state(weights: Weights, config: StaticShape, request: Request) -> DecodeState:
    """A state whose caches hold random rows; `at_length` says how many count."""
    shapes = jax.eval_shape(partial(speculate.start, config=config), weights, request=request)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def filled(cache: KVCache) -> KVCache:
        def draw(rows: list[jax.Array]) -> list[jax.Array]:
            keys = jax.random.split(jax.random.key(2), len(rows))
            return [_draw(key, row.shape, row.dtype) for key, row in zip(keys, rows, strict=True)]

        return cache.replace(k=draw(cache.k), v=draw(cache.v))

    draft = state.draft and state.draft.replace(cache=filled(state.draft.cache))
    return state.replace(target_cache=filled(state.target_cache), draft=draft)


def at_length(state: DecodeState, length: int) -> DecodeState:
    """Begins the same texts again, with `length` committed tokens."""

    def cut(cache: KVCache) -> KVCache:
        return cache.replace(length=jnp.full_like(cache.length, length))

    draft = state.draft and state.draft.replace(cache=cut(state.draft.cache))
    output = jax.tree.map(jnp.zeros_like, state.output)
    state = state.replace(target_cache=cut(state.target_cache), draft=draft, output=output)
    return jax.device_put(state, jax.devices()[0])  # committed, as the rounds return it


# --------------------------------------------------------------------------------------------------
# The server, on this device, and closed-loop clients in another process; prompts are random, so the
# prefix cache, which is off, would not help


class GreedySlots(Slots):
    """Slots whose clients never sample, so that half of the rounds need not be compiled."""

    def round_kinds(self, size: int) -> list[RoundKind]:
        return [program for program in super().round_kinds(size) if not program.is_sampled]

    def rare_kinds(self, size: int) -> list[RoundKind]:
        del size
        return []


@contextmanager
def serving(engine: Engine, num_slots: int, max_length: int) -> Iterator[str]:
    """Serves from a thread of this process, all programs compiled; gives the address."""
    slots = GreedySlots(engine, sizes=[num_slots], max_length=max_length)
    config = ServeConfig(target="random", batch_size=num_slots, max_length=max_length)
    app = create_app(config, slots=slots)
    server = DrainingServer(app, config, api_key=None)
    patch = mock.patch.object(speculate, "run_round", forced_round)
    with closing(listen("127.0.0.1", 0)) as sock, patch:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            while not (server.started and app.state.service.is_compiled):
                if server.error is not None or not thread.is_alive():
                    raise RuntimeError("the server ended while it compiled") from server.error
                time.sleep(0.1)
            yield "http://{}:{}".format(*sock.getsockname()[:2])
        finally:
            server.should_exit = True
            thread.join()


def ask_all(
    url: str, *, num_clients: int, seconds: float, num_prompt: int, num_new: int, vocab_size: int
) -> dict[str, Any]:
    """Streams to clients that ask again and again until the time is over; `describe_answers`."""
    rng = np.random.default_rng(num_clients)
    answers: list[Answer] = []

    async def run_client(client: Any, begun: float) -> None:
        while True:
            ids = rng.integers(0, vocab_size, num_prompt).tolist()
            answers.append(await ask(client, Case(PreparedPrompt(ids, num_new), None, [])))
            if time.monotonic() >= begun + seconds:
                return

    elapsed = asyncio.run(run_clients(url, num_clients, run_client))
    return describe_answers(answers, elapsed)
