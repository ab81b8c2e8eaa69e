r"""Talks with a chat model in the terminal, speculatively if there is a draft.

Takes model folders (see `poss convert`), without --target the model that `make chat`
fetches. Answers appear as they are written, accepted drafts tinted; a line below says how fast they
came. Ctrl-C stops an answer, Ctrl-D leaves.

    poss chat
    poss chat --target DIR --draft DIR --temperature 0.7
    printf 'Why is the sky blue?\n/compare\n' | poss chat
"""

from collections.abc import Sequence
from functools import partial

from poss_jax.config.decoding import ChatConfig
from poss_jax.program.arguments import read_arguments
from poss_jax.program.output import waiting
from poss_jax.program.running import run_program


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, and talks until the user leaves."""
    config, _ = read_arguments(ChatConfig, arguments, prog="infer.chat", doc=__doc__)
    with waiting("importing JAX ..."):
        from .chat_session import talk
    talk(config)


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
