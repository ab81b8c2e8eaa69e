"""Timing for the benchmark: whole prompts, the phases of a round, and a bare decode step."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeConfig, DecodeState, Request, Weights
from poss_jax.decode.tree import Tree, root_tree
from poss_jax.decode.verify import accept, choose
from poss_jax.engine.answers import Generation, decode_batch
from poss_jax.engine.dialogue import Dialogue, answer_all, join_answers
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.model import target

_PHASE_CALLS = 20
_LOG = logging.getLogger(__name__)


@dataclass
class Decoder:
    """A way to decode, and its row in the table.

    Attributes:
      name: name in the table.
      engine: the engine that decodes.
      compile_seconds: seconds that compiling took.
    """

    name: str
    engine: Engine
    compile_seconds: float = 0.0

    def compile(self, questions: Sequence[Dialogue]) -> None:
        """Decodes prompts of every shape, so that later calls compile nothing.

        A question of one turn is skipped if one of its shape was decoded already. The shapes of a
        conversation follow from its answers, so it is played as a whole.
        """
        started = time.monotonic()
        shapes = set()
        for question in questions:
            shape = None
            if question.prompt is not None and len(question.left) == 1:
                shape = self.engine.request([question.prompt])[1].tokens.shape
            if shape is None or shape not in shapes:
                play(self.engine, question)
                shapes.add(shape)
        self.compile_seconds = time.monotonic() - started


@dataclass
class Run:
    """One pass over all questions: the answer to each, and the seconds it took.

    The answers to the turns of a conversation are added up.
    """

    answers: list[Generation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def play(engine: Engine, question: Dialogue) -> tuple[list[Generation], float]:
    """Answers every turn of a question, alone in its batch.

    Args:
      engine: the engine that decodes.
      question: is left as it is.

    Returns:
      The answers, and the seconds of prefill and all rounds up to each finished output.
    """
    dialogue, seconds = replace(question), [0.0]

    def decode(prompts: Sequence[PreparedPrompt]) -> list[Generation]:
        config, request = engine.request(prompts)
        request = jax.block_until_ready(request)
        started = time.perf_counter()
        state = jax.block_until_ready(decode_batch(engine.weights, config, request))
        seconds[0] += time.perf_counter() - started
        return engine.read(prompts, state.output)

    answers = [answer for _, answer in answer_all(engine, [dialogue], decode, batch_size=1)]
    if dialogue.ended:
        turn = dialogue.num_answered + 1
        _LOG.warning("a question ends before turn %d: %s", turn, dialogue.ended)
    return answers, seconds[0]


def time_questions(decoder: Decoder, questions: Sequence[Dialogue], progress: tqdm) -> Run:
    """Answers every question; times prefill and all rounds up to the finished outputs.

    Args:
      decoder: a decoder that is compiled already.
      questions: dialogues that are checked; they are left as they are.
      progress: bar that is advanced by one per question.
    """
    run = Run()
    for question in questions:
        answers, seconds = play(decoder.engine, question)
        run.answers.append(join_answers(answers))
        run.seconds.append(seconds)
        progress.update()
    return run


def measure_phases(engine: Engine, prompt: PreparedPrompt) -> dict[str, float]:
    """Times draft, verify and commit as programs of their own, on the state after the prompt.

    Returns:
      Median milliseconds of each; their sum is more than a round, which is one program.
    """
    config, request = engine.request([prompt])
    start = jax.jit(speculate.start, static_argnums=1)
    state = start(engine.weights, config, request)
    # A sequence that is done is computed like any other, but its caches do not grow.
    done = state.output.replace(is_done=state.output.is_done | True)
    state = state.replace(output=done)
    phases: dict[str, float] = {}
    tree = root_tree(state.root)
    if config.draft is not None:
        phases["draft"], tree = _timed(
            lambda _: _draft(engine.weights, config, request, state), tree
        )
    phases["verify"], out = _timed(lambda _: _verify(engine.weights, config, state, tree), None)
    phases["commit"], _ = _timed(
        lambda previous: _commit(engine.weights, config, request, previous, out, tree), state
    )
    return {name: 1000 * seconds for name, seconds in phases.items()}


def measure_steps(engine: Engine, prompt: PreparedPrompt) -> dict[str, float]:
    """Times the autoregressive loop against plain decode steps, interleaved, without the prompt.

    The plain program takes a step and the argmax, and knows nothing of trees, rounds or stop
    tokens; if the loop is much slower, the baseline of every speed-up is too.

    Returns:
      Median milliseconds per token of `plain` and `loop`, and of their ratio `loop_to_plain`.
    """
    num_steps = max(prompt.max_new_tokens, 32) - 1  # so that there are steps
    config, request = engine.request([PreparedPrompt(prompt.ids, num_steps + 1)])
    request = request.replace(stop_ids=jnp.full_like(request.stop_ids, -1))
    state = jax.jit(speculate.start, static_argnums=1)(engine.weights, config, request)
    loop = jax.jit(speculate.run_rounds, static_argnums=1)
    programs = (
        lambda: _plain_steps(engine.weights, config, num_steps, state),
        lambda: loop(engine.weights, config, request, state),
    )
    seconds = np.array([[_seconds(run) for run in programs] for _ in range(_PHASE_CALLS + 1)])[1:]
    plain, whole = 1000 * np.median(seconds, axis=0) / num_steps
    ratio = np.median(seconds[:, 1] / seconds[:, 0])
    return {"plain": float(plain), "loop": float(whole), "loop_to_plain": float(ratio)}


@partial(jax.jit, static_argnums=(1, 2))
def _plain_steps(
    weights: Weights, config: DecodeConfig, num_steps: int, state: DecodeState
) -> jax.Array:
    def step(carry: tuple[Any, Any], _: None) -> tuple[Any, None]:
        cache, token = carry
        logits, cache = target.decode(weights.target, config.target, cache, token)
        return (cache, choose(logits)), None

    (_, token), _ = jax.lax.scan(step, (state.target_cache, state.root), length=num_steps)
    return token


def _seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - started


@partial(jax.jit, static_argnums=1)
def _draft(weights: Weights, config: DecodeConfig, request: Request, state: DecodeState) -> Tree:
    noise = speculate.round_noise(config, request, state)
    return speculate.draft_tree(weights, config, request, state, noise)


_verify = jax.jit(speculate.verify_tree, static_argnums=1)


@partial(jax.jit, static_argnums=1, donate_argnums=3)
def _commit(
    weights: Weights,
    config: DecodeConfig,
    request: Request,
    state: DecodeState,
    out: target.Verified,
    tree: Tree,
) -> DecodeState:
    noise = speculate.round_noise(config, request, state)
    chosen = speculate.choose_tokens(request, state, tree, out.logits, noise)
    acceptance = accept(tree, chosen, max_accepted=config.max_accepted)
    return speculate.commit(weights, config, request, state, out, acceptance)


def _timed(function: Callable[[Any], Any], first: Any) -> tuple[float, Any]:
    """Median seconds of calls that each take what the one before returned."""
    result = jax.block_until_ready(function(first))
    seconds = []
    for _ in range(_PHASE_CALLS):
        started = time.perf_counter()
        result = jax.block_until_ready(function(result))
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds)), result
