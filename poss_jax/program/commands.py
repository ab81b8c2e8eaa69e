"""The commands of `poss`: which program each of them runs."""

import re
import sys
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """One command of `poss`.

    Attributes:
      module: module of the program, as in a checkout.
      about: what it does, in a line.
      words: arguments that the command stands for.
    """

    module: str
    about: str
    words: tuple[str, ...] = ()


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

_UMBRELLAS = ("poss", "python -m poss_jax")


def started_as(module: str) -> str:
    """Returns how the user started a program: `poss NAME`, a script, or `python -m MODULE`."""
    typed = sys.argv[0]
    if umbrella := _umbrella():  # a parser of several commands adds `inspect` itself
        name = typed.removeprefix(f"{umbrella} ")
        return umbrella if COMMANDS[name].words == (name,) else typed
    name = Path(typed).name
    return name if name.startswith("poss-") else f"python -m {module}"


def name_programs(text: str) -> str:
    """Names programs in a help text so that they run where the user is.

    `python -m infer.generate` is right in a checkout; who typed `poss` or a script has `poss
    generate`.
    """
    umbrella = _umbrella() or ("poss" if Path(sys.argv[0]).name.startswith("poss-") else None)
    if umbrella is None:
        return text
    names = {one.module: name for name, one in reversed(COMMANDS.items())}

    def rename(found: re.Match[str]) -> str:
        name = names.get(found[1])
        return found[0] if name is None else f"{umbrella} {name}"

    return re.sub(r"python -m\s+([\w.]*\w)", rename, text)


def umbrella_name() -> str:
    """Returns how `poss` itself was started."""
    return "python -m poss_jax" if Path(sys.argv[0]).name == "__main__.py" else "poss"


def _umbrella() -> str | None:
    """`poss` as it was typed, if it started this program: it leaves its name in sys.argv."""
    umbrella = sys.argv[0].rpartition(" ")[0]
    return umbrella if umbrella in _UMBRELLAS else None
