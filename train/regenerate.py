r"""Lets a target answer the questions of a data set itself.

A draft learns best from the target's own words. Needs a model folder and a data set of chats or
questions; writes chats that `data.source` reads, and next to them the questions that failed
(NAME.failed.jsonl). A draft makes it faster and changes nothing else. Run the command again to
resume. A server with OpenAI's chat interface can replace the loaded target; its key is read from
OPENAI_API_KEY.

    poss regenerate --target DIR --draft DIR --temperature 0.7 \
        --source sharegpt.json --output answers.jsonl --batch-size 16
    poss regenerate --server http://localhost:8000/v1 \
        --source questions.jsonl --output answers.jsonl --concurrency 64

Without a data set, a chat model writes the questions, too:

    poss regenerate --target DIR --self-prompt 20000 \
        --output chats.jsonl --batch-size 16 'temperatures=[0, 0.7, 1]'
"""

from collections.abc import Sequence
from functools import partial

from poss_jax.config.regenerate import RegenerateConfig
from poss_jax.program.arguments import read_arguments
from poss_jax.program.output import print_summary, waiting
from poss_jax.program.running import run_program

_DATA_OPTIONS = ("source", "subset", "split", "template", "system_prompt", "max_documents")
_ACTIONS = {
    "--overwrite": {
        "action": "store_true",
        "help": "Start from the beginning if the output exists.",
    }
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, answers, prints a summary."""
    config, args = read_arguments(
        RegenerateConfig,
        arguments,
        prog="train.regenerate",
        doc=__doc__,
        also=[f"data.{name}" for name in _DATA_OPTIONS],
        actions=_ACTIONS,
    )
    with waiting("importing JAX ..."):
        from poss_jax.bundled.default import with_bundled

        from .regeneration import regenerate
    config = with_bundled(config)
    print_summary(regenerate(config, overwrite=args.overwrite))


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
