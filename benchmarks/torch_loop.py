"""PyTorch, for comparison: greedy decoding with a random model of `transformers`.

Needs torch and transformers (`pip install 'poss_jax[torch]'`).
"""

import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from poss_jax.config.models import LlamaConfig
from poss_jax.config.reading import UserError


def need_torch() -> None:
    """Ends the program where PyTorch is not installed.

    Raises:
      UserError: torch or transformers is missing.
    """
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing; pip install 'poss_jax[torch]'")


def measure_torch(llama: LlamaConfig, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
    """Times PyTorch on this machine's GPU, or its CPU: milliseconds per token after the prompt.

    Returns:
      `loop`: the model of `transformers`, step by step; `generate`: its own method.
    """
    import torch
    import transformers

    shape = transformers.LlamaConfig(
        vocab_size=llama.vocab_size,
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_hidden_layers=llama.num_layers,
        num_attention_heads=llama.num_heads,
        num_key_value_heads=llama.num_kv_heads,
        head_dim=llama.head_dim,
        max_position_embeddings=llama.max_position_embeddings,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()
        ids = torch.tensor([prompt])
    numbers = {"generate": _time_generate(model, ids, num_tokens)}
    with torch.inference_mode():
        numbers["loop"] = _time_steps(model, ids, num_tokens)
    del model
    torch.cuda.empty_cache()
    return numbers


def _time_generate(model: Any, ids: Any, num_tokens: int) -> float:
    seconds = []
    for count in (4, 1, 1 + num_tokens):  # the first call warms up
        began = time.perf_counter()
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        mask = ids.new_ones(ids.shape)
        model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
        seconds.append(time.perf_counter() - began)
    return 1000 * (seconds[2] - seconds[1]) / num_tokens


def _time_steps(model: Any, ids: Any, num_steps: int) -> float:
    """Times single steps after the prompt; the median."""
    seconds, out = [], model(ids, use_cache=True, logits_to_keep=1)
    for _ in range(num_steps):
        began = time.perf_counter()
        token = ids.new_tensor([[int(out.logits[0, -1].argmax())]])
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        seconds.append(time.perf_counter() - began)
    return 1000 * float(np.median(seconds))
