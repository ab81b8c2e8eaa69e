"""The engine of the library's users: a target, optionally a draft; `generate` and `stream`.

engine.py     Engine: loading, preparing prompts, decoding on the device or round by round
prompts.py    text, token ids or chat messages -> PreparedPrompt; settings of a batch as arrays
answers.py    Generation and Chunk; decoding round by round from the host
text.py       tokens -> text that may be shown; stop strings
dialogue.py   prompt files, and conversations whose every turn the target answers
device.py     defaults of the device; draft trees per batch size; memory
"""

from poss_jax.engine.answers import Chunk, Generation
from poss_jax.engine.device import (
    Trees,
    default_dtype,
    default_tree,
    device_memory,
    fit_tree,
)
from poss_jax.engine.dialogue import (
    PROMPT_KEYS,
    Dialogue,
    answer_all,
    check_dialogues,
    join_answers,
    read_dialogues,
    read_prompts,
)
from poss_jax.engine.engine import Engine, generate_jit
from poss_jax.engine.prompts import PreparedPrompt, Prompt, check_bias, prompt_seed, with_seed
from poss_jax.engine.text import Piece

__all__ = [
    "PROMPT_KEYS",
    "Chunk",
    "Dialogue",
    "Engine",
    "Generation",
    "Piece",
    "PreparedPrompt",
    "Prompt",
    "Trees",
    "answer_all",
    "check_bias",
    "check_dialogues",
    "default_dtype",
    "default_tree",
    "device_memory",
    "fit_tree",
    "generate_jit",
    "join_answers",
    "prompt_seed",
    "read_dialogues",
    "read_prompts",
    "with_seed",
]
