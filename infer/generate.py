r"""Continues prompts with a target, speculatively if a draft is given.

Takes model folders (see `poss convert`), without --target the model that `make chat`
fetches. Prints the texts, or writes one JSON line per answer to --output; the last line printed is
a summary, as JSON if not on a terminal. An interrupted run keeps its finished answers.

    poss generate --question "How do I poach an egg?" --stream
    poss generate --target DIR --draft DIR --prompt Once
    poss generate --target DIR --prompts FILE --output FILE
    poss generate --target DIR --draft DIR --precompile 512 --precompile 4096

A line of --prompts holds one of `prompt` (text), `prompt_ids`, `messages` (chat), or `turns` (user
messages, answered one after another: one line per answer, numbered by `turn`). Its `sampling` (such
as {"temperature": 1, "seed": 7}) overrides the options. Its other keys are copied to the answer.
"""

import signal
import sys
from collections.abc import Sequence

from poss_jax.config.decoding import GenerateConfig
from poss_jax.program.arguments import read_arguments
from poss_jax.program.output import waiting
from poss_jax.program.running import run_program


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, decodes, prints; without arguments shows how to start."""
    words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    config, _ = read_arguments(GenerateConfig, words, prog="infer.generate", doc=__doc__)
    with waiting("importing JAX ..."):
        from .generate_run import answer_prompts
    answer_prompts(config)


def cli() -> None:
    """Entry point of `poss-generate`; SIGTERM keeps finished answers, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_program(main)


if __name__ == "__main__":
    cli()
