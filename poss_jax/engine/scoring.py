"""Log-probabilities of the tokens of a prompt, under the target alone."""

from collections.abc import Sequence

import numpy as np

from poss_jax.engine import steps
from poss_jax.engine.answers import TokenLogprobs
from poss_jax.engine.device import check_memory
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt, lay_out
from poss_jax.engine.rounds import read_scores


def score_prompt(
    engine: Engine, ids: Sequence[int], *, num_logprobs: int = 1, max_length: int | None = None
) -> list[TokenLogprobs]:
    """Scores every token of a prompt but the first, as answers' tokens are scored.

    Other decoding may run meanwhile: each chunk waits for its turn on the device.

    Args:
      engine: holds the target.
      ids: token ids that `Engine.prepare` accepts.
      num_logprobs: most likely tokens to list at each position, at least 1.
      max_length: longest prompt, which one program then serves; None: this one's.

    Raises:
      UserError: more than the memory can hold.
    """
    config = engine.config_with(None, max_length or len(ids) + 1, engine.max_length)
    config = config._replace(num_logprobs=num_logprobs)
    batch = engine.mesh.shape["data"] if engine.mesh else 1
    check_memory(engine.weights, config, batch_size=batch)
    prompts = [PreparedPrompt(list(ids), 1)] * batch
    host = lay_out(prompts, [[]] * batch, num_tokens=config.rows)
    weights, found = engine.weights, list[TokenLogprobs]()
    request = steps.put(weights, config, host)
    prefill = steps.begin(weights, config, request)
    for index in range(-(-(len(ids) - 1) // config.chunk)):
        prefill, scores = steps.score(weights, config, request, prefill, np.int32(index))
        found += read_scores(scores, 0, min(config.chunk, len(ids) - 1 - len(found)))
    return found
