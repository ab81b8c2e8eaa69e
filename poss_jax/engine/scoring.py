"""Log-probabilities of the tokens of a prompt, under the target alone."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from poss_jax.decode.state import StaticShape, Weights
from poss_jax.decode.verify import Logprobs
from poss_jax.engine import steps
from poss_jax.engine.answers import TokenLogprobs
from poss_jax.engine.device import check_memory
from poss_jax.engine.models import Models
from poss_jax.engine.prompts import PreparedPrompt, lay_out
from poss_jax.engine.rounds import read_scores


def score_chunks(
    weights: Weights, config: StaticShape, ids: Sequence[int], *, batch_size: int = 1
) -> Iterator[Logprobs]:
    """Scores a prompt chunk by chunk, each when it is asked for (see `steps.score`).

    Args:
      config: without a draft; its `num_logprobs` are listed per token.
      batch_size: sequences that the devices take; all get this prompt.
    """
    prompts = [PreparedPrompt(list(ids), 1)] * batch_size
    host = lay_out(prompts, [[]] * batch_size, num_tokens=config.rows)
    request, num_chunks = steps.put(weights, config, host), -(-(len(ids) - 1) // config.chunk)
    prefill = steps.begin(weights, config, request) if num_chunks else None
    for index in range(num_chunks):
        prefill, scores = steps.score(weights, config, request, prefill, np.int32(index))
        if index + 1 == num_chunks:
            prefill = None  # frees the cache
        yield scores


def read_all_scores(score_next: Callable[[], Logprobs], num_tokens: int) -> list[TokenLogprobs]:
    """Brings the scores of a prompt to the host, chunk by chunk."""
    scores = list[TokenLogprobs]()
    while (num_left := num_tokens - 1 - len(scores)) > 0:
        scores += read_scores(score_next(), num_left)
    return scores


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
    return read_all_scores(partial(next, chunks), len(ids))
