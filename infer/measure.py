"""Timing for the benchmark: whole prompts, the first token, and a bare decode step."""

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
from poss_jax.decode.ranking import choose
from poss_jax.decode.state import DecodeConfig, DecodeState, Weights
from poss_jax.engine.answers import Generation, decode_batch
from poss_jax.engine.dialogue import Dialogue, answer_all, join_answers
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.model import target

from .costs import Device, decode, describe_workload

_STEP_CALLS = 20
_FIRST_TOKEN_CALLS = 5
_LOG = logging.getLogger(__name__)


@dataclass
class Decoder:
    """A way to decode, and its row in the table.

    Attributes:
      name: name in the table.
      engine: the engine that decodes.
      compile_seconds: seconds that compiling took, with all that was run for it.
      first_token_seconds: seconds from a prompt to its first token: `cold`, the engine's first
        call, and `warm`, the median of later ones.
    """

    name: str
    engine: Engine
    compile_seconds: float = 0.0
    first_token_seconds: dict[str, float] = field(default_factory=dict)

    def compile(self, questions: Sequence[Dialogue]) -> None:
        """Decodes prompts of every shape, so that later calls compile nothing.

        The first prompt's first token is timed before that, cold, and after it, warm.

        A question of one turn is skipped if one of its shape was decoded already. The shapes of a
        conversation follow from its answers, so it is played as a whole.
        """
        first = next(one.prompt for one in questions if one.prompt is not None)
        started = time.monotonic()
        cold = time_first_token(self.engine, first)
        shapes = set()
        for question in questions:
            shape = None
            if question.prompt is not None and len(question.left) == 1:
                shape = self.engine.request([question.prompt])[1].tokens.shape
            if shape is None or shape not in shapes:
                play(self.engine, question)
                shapes.add(shape)
        self.compile_seconds = time.monotonic() - started
        warm = [time_first_token(self.engine, first) for _ in range(_FIRST_TOKEN_CALLS)]
        self.first_token_seconds = {"cold": cold, "warm": float(np.median(warm))}


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


def time_batches(
    engine: Engine, prompts: Sequence[PreparedPrompt], batch_size: int
) -> tuple[list[Generation], float]:
    """Decodes all prompts; times prefill and all rounds up to the finished outputs."""
    answers, seconds = [], 0.0
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        config, request = engine.request(batch, batch_size=batch_size)
        request = jax.block_until_ready(request)
        started = time.perf_counter()
        state = jax.block_until_ready(decode_batch(engine.weights, config, request))
        seconds += time.perf_counter() - started
        answers += engine.read(batch, state.output)
    return answers, seconds


def time_first_token(engine: Engine, prompt: PreparedPrompt) -> float:
    """Seconds until a stream shows the first token of an answer."""
    started = time.perf_counter()
    next(engine.decode_rounds(prompt))
    return time.perf_counter() - started


def measure_steps(engine: Engine, prompt: PreparedPrompt, device: Device) -> dict[str, float]:
    """Times the autoregressive loop against plain decode steps, interleaved, without the prompt.

    The plain program takes a step and the argmax, and knows nothing of trees, rounds or stop
    tokens; if the loop is much slower, the baseline of every speed-up is too.

    Args:
      engine: an engine without a draft.
      prompt: the prompt to continue.
      device: rates of this device.

    Returns:
      Median milliseconds per token of `plain` and `loop`, and of their ratio `loop_to_plain`; the
      `floor` of a step in the middle, and `floor_to_loop`.
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
    seconds = np.array([[_seconds(run) for run in programs] for _ in range(_STEP_CALLS + 1)])[1:]
    plain, whole = 1000 * np.median(seconds, axis=0) / num_steps
    ratio = np.median(seconds[:, 1] / seconds[:, 0])
    context = len(prompt.ids) + num_steps // 2
    work = describe_workload(engine.weights, config, batch=1, context=context)
    floor = decode(work).milliseconds(device)
    return {
        "plain": float(plain),
        "loop": float(whole),
        "loop_to_plain": float(ratio),
        "floor": floor,
        "floor_to_loop": floor / float(whole),
    }


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
