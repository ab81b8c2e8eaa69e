"""Times whole prompts, the first token, and a bare decode step."""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.bundled.default import default_drafts, with_bundled
from poss_jax.checkpoint.record import provenance, read_record
from poss_jax.config.bench import BenchConfig
from poss_jax.config.decoding import SMOLLM2
from poss_jax.config.models import Quantisation
from poss_jax.config.reading import UserError
from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeState, Request, StaticShape, Weights
from poss_jax.engine.answers import Generation
from poss_jax.engine.batch import FixedBatch
from poss_jax.engine.dialogue import Dialogue, answer_all
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.steps import on_mesh
from poss_jax.model import target
from poss_jax.model.parameters import count_parameters
from poss_jax.model.ranking import choose
from poss_jax.model.sharding import highest_of_groups
from poss_jax.model.target import compute_dtype
from poss_jax.program.output import waiting

from .costs import Device, decode, describe_workload, num_parts
from .phases import run_rounds, time_in_turn
from .rates import device_name

AUTOREGRESSIVE = "autoregressive"
_STEP_CALLS = 20
_FIRST_TOKEN_CALLS = 5
_LOG = logging.getLogger(__name__)


def with_default_models(config: BenchConfig) -> BenchConfig:
    """Names the folders of bundled models; the default target comes with all its drafts."""
    if config.target == SMOLLM2 and not config.drafts:
        config = replace(config, drafts={name: name for name in default_drafts()})
    return with_bundled(config)


@waiting("loading the models ...")
def load_engines(config: BenchConfig) -> dict[str, Engine]:
    """Loads every target once; makes the autoregressive engine, then one per method, by name."""
    methods = config.all_methods
    if AUTOREGRESSIVE in methods:
        raise UserError(f"drafts: {AUTOREGRESSIVE} is the baseline's name; choose another")

    @cache
    def load_target(quantise: Quantisation | None) -> Engine:
        settings = config.for_engine(quantise=quantise, lookup=0)
        return Engine.load(config.target, settings=settings, mesh=config.mesh)

    engines = {AUTOREGRESSIVE: load_target(config.quantise)}
    for name, method in methods.items():
        overrides = {key: value for key, value in vars(method).items() if value is not None}
        draft = overrides.pop("draft", None)
        engine = load_target(method.quantise or config.quantise)
        settings = replace(engine.settings, **{"lookup": config.lookup} | overrides)
        engine = engine.with_settings(settings)
        engines[name] = engine if draft is None else engine.load_draft(draft)
    return engines


def compile_programs(
    engine: Engine, dialogues: Sequence[Dialogue], *, batch_size: int = 1
) -> dict[str, Any]:
    """Compiles the programs of all capacities that dialogues can need; runs a round of each.

    Returns:
      `compile_seconds`, these runs included; and `first_token_seconds` of the first prompt: `cold`,
      the engine's first call, and `warm`, the median of later ones.
    """
    first = next(dialogue.prompt for dialogue in dialogues if dialogue.prompt is not None)
    started = time.monotonic()
    cold = time_first_token(engine, first)
    compiled = set()
    for prompt in _prompts_of_all_capacities(engine, dialogues):
        batch = FixedBatch(engine, [prompt], batch_size=batch_size)
        program = batch.config, jax.tree.structure(batch.request)
        if program not in compiled:
            limits = jnp.minimum(batch.request.max_new_tokens, 2)
            batch.request = batch.request.replace(max_new_tokens=limits)
            batch.start()
            jax.block_until_ready(run_rounds(*batch.arguments))
            compiled.add(program)
    seconds = time.monotonic() - started
    warm = [time_first_token(engine, first) for _ in range(_FIRST_TOKEN_CALLS)]
    first_token_seconds = {"cold": cold, "warm": float(np.median(warm))}
    return {"compile_seconds": seconds, "first_token_seconds": first_token_seconds}


def identify(config: BenchConfig, engines: Mapping[str, Engine]) -> dict[str, Any]:
    """What decides answers and times besides settings and questions, JSON-compatible.

    `weights`, `trees` and `draft_vocabularies` are by the name of the method.
    """
    folders = {name: m.draft or config.target for name, m in config.all_methods.items()}
    folders[AUTOREGRESSIVE] = config.target
    of_process = provenance()
    return {
        "weights": {name: read_record(folder).fingerprint for name, folder in folders.items()},
        "trees": {name: str(engine.trees) for name, engine in engines.items()},
        "draft_vocabularies": {name: digest_vocabulary(e) for name, e in engines.items()},
        "device": device_name(),
        "int8_products": of_process["int8_products"],
        "versions": {name: of_process["versions"][name] for name in ("jax", "poss_jax")},
    }


def digest_vocabulary(engine: Engine) -> str:
    """Digest of the tokens that a draft may propose."""
    tokens = engine.weights.draft.get("vocabulary")
    return digest(None if tokens is None else np.asarray(tokens).tolist())


def digest(value: Any) -> str:
    """Digest of what JSON can hold; other values count as their text."""
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def _prompts_of_all_capacities(
    engine: Engine, dialogues: Sequence[Dialogue]
) -> Iterator[PreparedPrompt]:
    """Yields a prompt for every capacity that a dialogue can need, from first to last turn."""
    for dialogue in dialogues:
        if (prompt := dialogue.prompt) is None:
            continue
        yield prompt
        length = len(prompt.ids) + dialogue.max_new_tokens
        while length < dialogue.most_tokens:
            length = min(2 * length, dialogue.most_tokens)
            yield engine.prepare(prompt.ids, length - len(prompt.ids), prompt.sampling)


class Timed(NamedTuple):
    """An answer, its share of the seconds of its batch, and the seconds to the first token."""

    answer: Generation
    seconds: float
    first_token_seconds: float


def play(
    engine: Engine, dialogues: Sequence[Dialogue], *, batch_size: int = 1
) -> list[list[Timed]]:
    """Answers every turn of questions, which are not changed, and times each.

    Questions of a batch are answered together, and its seconds are shared equally among answers.

    Returns:
      Answers by question and turn.
    """
    copies, timed = [replace(dialogue) for dialogue in dialogues], list[Timed]()

    def decode(prompts: Sequence[PreparedPrompt]) -> list[Generation]:
        timed.extend(time_batches(engine, prompts, batch_size))
        return [answer for answer, _, _ in timed[-len(prompts) :]]

    turns: list[list[Timed]] = [[] for _ in copies]
    answers = answer_all(engine, copies, decode, batch_size=batch_size)
    for number, (index, _) in enumerate(answers):
        turns[index].append(timed[number])
    for dialogue in copies:
        if dialogue.ended:
            turn = dialogue.num_answered + 1
            _LOG.warning("a question ends before turn %d: %s", turn, dialogue.ended)
    return turns


def count_memory(engine: Engine) -> dict[str, int]:
    """Counts parameters of target and draft, bytes they hold, and bytes of cache per token.

    Parameters are those of the model folder; what a draft borrows from its target as it is, such
    as the embedding, holds no bytes, a copy of some rows of the head does.
    """
    config, size = engine.decode_config(2), compute_dtype(engine.weights.target).itemsize
    target, draft = (
        {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(params)} for params in engine.weights
    )
    draft_layer = config.draft.layer if config.draft else config.target
    target_row, draft_row = (
        2 * size * layer.num_kv_heads * layer.head_dim for layer in (config.target, draft_layer)
    )
    return {
        "target_parameters": count_parameters(config.target),
        "target_bytes": sum(target.values()),
        "draft_parameters": count_parameters(config.draft) if config.draft else 0,
        "draft_bytes": sum(num_bytes for key, num_bytes in draft.items() if key not in target),
        "target_cache_bytes_per_token": config.target.num_layers * target_row,
        "draft_cache_bytes_per_token": config.num_streams * draft_row,
    }


def time_answer(engine: Engine, prompt: PreparedPrompt) -> float:
    """Seconds of one answer, without compilation."""
    for _ in range(2):  # the first compiles
        started = time.perf_counter()
        engine.decode([prompt])
    return time.perf_counter() - started


def time_batches(engine: Engine, prompts: Sequence[PreparedPrompt], batch_size: int) -> list[Timed]:
    """Decodes all prompts; times prefill and all rounds up to the finished outputs."""
    timed = []
    for first in range(0, len(prompts), batch_size):
        batch = FixedBatch(engine, prompts[first : first + batch_size], batch_size=batch_size)
        jax.block_until_ready(batch.request)
        started = time.perf_counter()
        batch.start()
        jax.block_until_ready(batch.state)
        first_token = time.perf_counter() - started
        batch.state = jax.block_until_ready(run_rounds(*batch.arguments))
        seconds, answers = time.perf_counter() - started, batch.read()
        timed += [Timed(answer, seconds / len(answers), first_token) for answer in answers]
    return timed


def time_first_token(engine: Engine, prompt: PreparedPrompt) -> float:
    """Seconds until a stream shows the first token of an answer."""
    started = time.perf_counter()
    next(engine.decode_rounds(prompt))
    return time.perf_counter() - started


def measure_steps(engine: Engine, prompt: PreparedPrompt, device: Device) -> dict[str, float]:
    """Times the autoregressive loop against plain decode steps, interleaved, without the prompt.

    The plain program takes a step and the argmax, and knows nothing of trees, rounds or stop
    tokens; if the loop is much slower, the baseline of every speed-up is too. The engine has no
    draft.

    Returns:
      Median milliseconds per token of `plain` and `loop`, and of their ratio `loop_to_plain`; the
      `floor` of a step in the middle, and `floor_to_loop`.
    """
    num_steps = max(prompt.max_new_tokens, 32) - 1  # so that there are steps
    batch = FixedBatch(engine, [PreparedPrompt(prompt.ids, num_steps + 1)])
    batch.start()
    programs = {run: partial(run, *batch.arguments) for run in (_plain_steps, _loop)}
    seconds = time_in_turn(programs, _STEP_CALLS)
    plain, loop = (1000 * np.median(calls) / num_steps for calls in seconds.values())
    ratio = np.median(seconds[_loop] / seconds[_plain_steps])
    context = len(prompt.ids) + num_steps // 2
    work = describe_workload(engine.weights, batch.config, batch=1, context=context)
    floor = (decode(work) / num_parts(engine.mesh)).milliseconds(device)
    return {
        "plain": float(plain),
        "loop": float(loop),
        "loop_to_plain": float(ratio),
        "floor": floor,
        "floor_to_loop": floor / float(loop),
    }


@partial(jax.jit, static_argnums=1)
@on_mesh
def _plain_steps(
    weights: Weights, config: StaticShape, request: Request, state: DecodeState
) -> jax.Array:
    def step(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        cache, token = carry
        logits, cache = target.decode(weights.target, config.target, cache, token)
        return cache, choose(logits)

    num_steps = highest_of_groups(request.max_new_tokens.max()) - 1
    return jax.lax.fori_loop(0, num_steps, step, (state.target_cache, state.root))[1]


_loop = jax.jit(on_mesh(speculate.run_rounds), static_argnums=1)  # donates nothing
