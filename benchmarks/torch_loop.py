"""PyTorch, for comparison: greedy decoding with a model of `transformers`, on as many cores.

Needs torch and transformers (`pip install 'poss_jax[torch]'`).
"""

import importlib.util
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from poss_jax.config.models import LlamaConfig
from poss_jax.config.reading import UserError

if TYPE_CHECKING:
    import transformers


class TorchLoop:
    """Greedy decoding of one prompt with a model of `transformers`."""

    def __init__(self, model: "transformers.PreTrainedModel") -> None:
        self.model = model.eval()

    def decode(
        self, prompt: Sequence[int], num_tokens: int, stop_ids: Sequence[int] = ()
    ) -> list[int]:
        """Continues a prompt, one step after the other, up to a stop token."""
        import torch

        with torch.inference_mode():
            out = self._prefill(prompt)
            tokens = [int(out.logits[0, -1].argmax())]
            while len(tokens) < num_tokens and tokens[-1] not in stop_ids:
                out = self._step(tokens[-1], out.past_key_values)
                tokens.append(int(out.logits[0, -1].argmax()))
        return tokens

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Continues a prompt as users of `transformers` do."""
        import torch

        ids = torch.tensor([prompt], device=self.model.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    def time_steps(self, prompt: Sequence[int], num_steps: int) -> float:
        """Milliseconds per step after the prompt, the median."""
        import torch

        seconds = []
        with torch.inference_mode():
            out = self._prefill(prompt)
            for _ in range(num_steps):
                started = time.perf_counter()
                out = self._step(int(out.logits[0, -1].argmax()), out.past_key_values)
                seconds.append(time.perf_counter() - started)
        return 1000 * float(np.median(seconds))

    def _prefill(self, prompt: Sequence[int]) -> Any:
        import torch

        ids = torch.tensor([prompt], device=self.model.device)
        return self.model(ids, use_cache=True, logits_to_keep=1)

    def _step(self, token: int, cache: Any) -> Any:
        import torch

        ids = torch.tensor([[token]], device=self.model.device)
        return self.model(ids, past_key_values=cache, use_cache=True)


def use_cores(num_threads: int) -> None:
    """Limits this process to `num_threads` cores, and PyTorch to as many threads.

    XLA starts one thread per core that the process may use.

    Raises:
      UserError: torch or transformers is missing, or there are fewer cores.
    """
    need_torch()
    import torch

    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < num_threads:
            raise UserError(f"threads: want at most {len(cores)}, got {num_threads}")
        os.sched_setaffinity(0, cores[:num_threads])
    torch.set_num_threads(num_threads)


def need_torch() -> None:
    """Ends the program where PyTorch is not installed.

    Raises:
      UserError: torch or transformers is missing.
    """
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing; pip install 'poss_jax[torch]'")


def torch_shape(llama: LlamaConfig) -> "transformers.LlamaConfig":
    """The same shape for `transformers`."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=llama.vocab_size,
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_hidden_layers=llama.num_layers,
        num_attention_heads=llama.num_heads,
        num_key_value_heads=llama.num_kv_heads,
        head_dim=llama.head_dim,
        max_position_embeddings=llama.max_position_embeddings,
    )


def measure_torch(llama: LlamaConfig, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
    """Times PyTorch on this machine's GPU, or its CPU: milliseconds per token after the prompt.

    Returns:
      `loop`: the model of `transformers`, step by step; `generate`: its own method.

    Raises:
      UserError: torch is missing.
    """
    need_torch()
    import torch
    import transformers

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        shape = torch_shape(llama)
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    numbers = _time_torch(TorchLoop(model), prompt, num_tokens)
    del model
    torch.cuda.empty_cache()
    return numbers


def _time_torch(loop: TorchLoop, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
    seconds = []
    for count in (4, 1, 1 + num_tokens):  # the first call warms up
        began = time.perf_counter()
        loop.generate(prompt, count)
        seconds.append(time.perf_counter() - began)
    generate = 1000 * (seconds[2] - seconds[1]) / num_tokens
    return {"loop": loop.time_steps(prompt, num_tokens), "generate": generate}
