"""A batch whose answers grow step by step: one runs while the host reads the one before."""

import time
from collections.abc import Iterator, Sequence

import jax

from poss_jax.decode.state import DecodeConfig, Request, Weights
from poss_jax.engine.answers import Chunk, Generation, LiveAnswer, Round
from poss_jax.engine.guided import first_masks, run_guided
from poss_jax.engine.rounds import Pace, count_rounds, read_rounds, run_step, start


def run_live(
    weights: Weights, config: DecodeConfig, request: Request, answers: Sequence[LiveAnswer]
) -> Iterator[tuple[int, Chunk]]:
    """Decodes a batch step by step, until all answers have ended.

    Args:
      weights: parameters of target and draft.
      config: static settings of decoding.
      request: the batch; sequences beyond `answers` are padding.
      answers: one per sequence; the rounds are added to them.

    Yields:
      The index of an answer, and what a round added to it.
    """
    guides = {index: one.guide for index, one in enumerate(answers) if one.guide is not None}
    masks = first_masks(guides, len(request.limits), config.target.vocab_size)
    state = start(weights, config, request, *([masks] if guides else []))
    roots, is_done = jax.device_get((state.root, state.output.is_done))
    for index, answer in enumerate(answers):
        first = Round([int(roots[index])], None, None, is_done=bool(is_done[index]))
        yield index, answer.add(first)
    pace, under_way = Pace(), None
    while not all(answer.is_ended for answer in answers):
        texts = [index for index, answer in enumerate(answers) if not answer.is_ended]
        guides = {index: guide for index, guide in guides.items() if index in texts}
        # On several hosts every process must run the same number of rounds.
        num_rounds = pace.num_rounds if jax.process_count() == 1 else 1
        if guides:  # their next step depends on all tokens of this one
            state, rounds = run_guided(weights, config, request, state, texts=texts, guides=guides)
            before = rounds, time.monotonic()
        else:
            state, rounds = run_step(
                weights, config, request, state, texts=texts, num_rounds=num_rounds
            )
            before, under_way = under_way, (rounds, time.monotonic())
        if before is None:
            continue
        new = read_rounds(before[0])
        pace.record(count_rounds(new), begun=before[1])
        for index, (answer, rounds) in enumerate(zip(answers, new, strict=False)):
            yield from ((index, answer.add(one)) for one in rounds if not answer.is_ended)


def answer_live(
    weights: Weights, config: DecodeConfig, request: Request, answers: Sequence[LiveAnswer]
) -> list[Generation]:
    """Decodes a batch as `run_live` does, and returns its answers."""
    rounds = run_live(weights, config, request, answers)
    ended = {index: chunk.answer for index, chunk in rounds if chunk.answer}
    return [ended[index] for index in range(len(answers))]
