"""The commands of `poss`: which program each of them runs."""

import sys
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """One command of `poss`."""

    module: str  # of the program, as in a checkout
    summary: str  # what it does, in a line
    words: tuple[str, ...] = ()  # arguments that the command stands for


COMMANDS = {
    "generate": Command("infer.generate", "Continue texts and answer files of prompts."),
    "chat": Command("infer.chat", "Talk with a chat model."),
    "serve": Command("infer.serve", "Serve a model with OpenAI's interface."),
    "convert": Command("poss_jax.convert", "Convert checkpoints into model folders and back."),
    "inspect": Command("poss_jax.convert", "Say what a checkpoint or folder holds.", ("inspect",)),
    "train": Command("train.main", "Train a draft, or a target."),
    "plot": Command("train.plot", "Show how training runs went."),
    "regenerate": Command("train.regenerate", "Let a target write the answers to train on."),
    "draft-vocab": Command("train.draft_vocab", "Choose the tokens that a draft may propose."),
    "bench": Command("infer.bench", "Compare drafts in speed and acceptance."),
    "tune": Command("infer.tune", "Find the fastest tree on this device."),
    "lossless": Command("infer.lossless", "Check that drafts change no text."),
}
"""Name -> command, in the order of the help. A program's own name comes before its variants."""

PACKAGE = Path(__file__).parents[1]


def installed_name(module: str) -> str:
    """Returns the name of a program's module here: the wheel has programs inside of poss_jax."""
    return f"poss_jax.{module}" if (PACKAGE / module.partition(".")[0]).is_dir() else module


def umbrella_name() -> str:
    """Returns how `poss` itself was started."""
    return "python -m poss_jax" if Path(sys.argv[0]).name == "__main__.py" else "poss"


def started_as(module: str) -> str:
    """Returns how the user started a program: `poss NAME`, a script, or `python -m MODULE`."""
    typed = sys.argv[0]
    if typed.split(" ")[0] in ("poss", "python"):  # `poss` leaves its name and the command's
        return typed
    name = Path(typed).name
    return name if name.startswith("poss-") else f"python -m {installed_name(module)}"
