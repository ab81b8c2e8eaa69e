"""poss_jax: position-specialist speculative decoding in JAX and Flax.

Where things live, each folder importing from those above it:

    config, shapes    settings of models and runs, and how they are read; axis letters
    model             layers, attention, caches, target, sharding; draft families, a file each
    decode            tree, sampling, drafting, verify and accept, the round and its loop
    learn             losses, the recursion over draft depth, training steps, validation
    checkpoint        the model folder: its record, its weights, checksums and locks
    data              records, chats, tokenizer, rows and features for training
    convert           from and to the checkpoints of other programs
    engine            load, generate, stream, schedule: the library's interface
    bundled           the default target, and its drafts
    program           what the command-line programs share
    serving           the OpenAI-compatible server

`train/` makes weights, `infer/` uses them; both are programs around these functions.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from poss_jax.config import __version__

if TYPE_CHECKING:
    from poss_jax.bundled.default import default_drafts, default_target
    from poss_jax.config.decoding import EngineConfig, SamplingConfig
    from poss_jax.config.models import TreeConfig
    from poss_jax.config.reading import UserError
    from poss_jax.engine.answers import Chunk, Generation
    from poss_jax.engine.engine import Engine
    from poss_jax.engine.scheduler import Scheduler
    from poss_jax.engine.slots import Slots

__all__ = [
    "Chunk",
    "Engine",
    "EngineConfig",
    "Generation",
    "SamplingConfig",
    "Scheduler",
    "Slots",
    "TreeConfig",
    "UserError",
    "__version__",
    "default_drafts",
    "default_target",
]

_PLACES = {
    "bundled.default": ["default_drafts", "default_target"],
    "config.decoding": ["EngineConfig", "SamplingConfig"],
    "config.models": ["TreeConfig"],
    "config.reading": ["UserError"],
    "engine.answers": ["Chunk", "Generation"],
    "engine.engine": ["Engine"],
    "engine.scheduler": ["Scheduler"],
    "engine.slots": ["Slots"],
}


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: JAX takes seconds, and `poss --help` needs none."""
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
