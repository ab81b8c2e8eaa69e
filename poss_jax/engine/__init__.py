"""What users of the library hold: a loaded target, perhaps a draft; `generate` and `stream`.

engine.py     Engine: loading, prompts, decoding on the device or round by round
prompts.py    text, token ids or chat messages -> token ids
answers.py    Generation and Chunk: what comes out
live.py       decoding round by round from the host
memory.py     what a batch needs at least, against what the device has
text.py       tokens -> text that may be shown; stop strings
settings.py   defaults of the device; trees per batch size; sampling settings as arrays
"""

from poss_jax.engine.answers import Chunk, Generation
from poss_jax.engine.engine import Engine, generate_jit
from poss_jax.engine.memory import device_memory
from poss_jax.engine.prompts import Prompt
from poss_jax.engine.settings import (
    Trees,
    check_bias,
    default_dtype,
    default_tree,
    fit_tree,
    prompt_seed,
)
from poss_jax.engine.text import Piece

__all__ = [
    "Chunk",
    "Engine",
    "Generation",
    "Piece",
    "Prompt",
    "Trees",
    "check_bias",
    "default_dtype",
    "default_tree",
    "device_memory",
    "fit_tree",
    "generate_jit",
    "prompt_seed",
]
