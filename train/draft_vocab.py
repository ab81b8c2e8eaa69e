r"""Makes draft vocabularies: the tokens of a target that a draft may propose.

A smaller head makes drafting faster; tokens outside it are never proposed, and texts stay the same.
`count` reads the data of a draft's training run as training does, counts the trained tokens, prints
the coverage of several sizes, and writes the most frequent tokens as a JSON file. Ties go to the
lowest ids. `apply` writes a copy of a draft with such a vocabulary. The last line printed is one
JSON object.

    python -m train.draft_vocab count --config configs/llama3-8b-instruct/poss3.yaml \
        data.source=sharegpt.json --size 32000 --output vocabulary.json
    python -m train.draft_vocab count --config configs/demo/poss3.yaml --coverage 0.98
    python -m train.draft_vocab apply --draft models/poss3 --vocabulary vocabulary.json \
        --output models/poss3-32000
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from poss_jax.checkpoint.draft_vocabulary import (
    SMALLEST,
    DraftVocabulary,
    read_draft_vocabulary,
    write_draft_vocabulary,
)
from poss_jax.checkpoint.folder import load_item, read_target, write_model
from poss_jax.checkpoint.record import provenance, read_record, with_vocabulary
from poss_jax.checkpoint.whole import refuse_irreplaceable
from poss_jax.config.paths import as_path
from poss_jax.config.reading import UserError, config_to_dict, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.data.prepared import make_prepared
from poss_jax.data.rows import Rows
from poss_jax.data.sources import load_documents
from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.program.arguments import describe
from poss_jax.program.options import at_least, check_new_file
from poss_jax.program.output import add_json, print_summary
from poss_jax.program.running import Parser, run_program
from poss_jax.program.tables import format_rows

_SMALLEST_SHOWN = 16
_PARTS = ("training", "held out")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command.

    Args:
      arguments: the command line without the program's name; None: the process's.

    Raises:
      UserError: wrong arguments, or data or a draft that cannot be used.
    """
    parser = _parser(__doc__)
    parser.add_argument(
        "command", choices=list(_COMMANDS), metavar="COMMAND",
        help="count or apply; continue with COMMAND --help.",
    )  # fmt: skip
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    _COMMANDS[args.command](args.arguments)


def cli() -> None:
    """Entry point of `poss-draft-vocab`."""
    run_program(main)


# --------------------------------------------------------------------------------------------------
# count


def count_tokens(config: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
    """Counts the tokens that a draft's run trains on.

    Args:
      config: the run.

    Returns:
      How often each token occurs in the training rows and in the held-out rows, [V] int64 each.

    Raises:
      UserError: the run trains no draft, or training refuses its data.
    """
    if config.stage != "draft" or config.target is None:
        raise UserError("want the config of a draft (stage: draft), got one of a target")
    llama = read_target(config.target).llama
    vocab_size, stop_ids = llama.vocab_size, llama.eos_token_ids
    tokenizer = load_tokenizer(as_path(config.target))
    rows = make_prepared(load_documents(config.data), config.data, tokenizer, vocab_size, stop_ids)
    return count_trained(rows.train, vocab_size), count_trained(rows.validation, vocab_size)


def count_trained(rows: Rows, vocab_size: int) -> np.ndarray:
    """Counts how often each token occurs as a trained token.

    Args:
      rows: rows of a run.
      vocab_size: number of tokens of the target.

    Returns:
      [V] int64.
    """
    return np.bincount(rows.tokens[rows.loss_mask], minlength=vocab_size)


def choose_tokens(counts: np.ndarray, size: int) -> np.ndarray:
    """Chooses the most frequent tokens (EAGLE-3's rule); ties go to the lowest ids.

    So tokens that never occur fill the vocabulary from the lowest id.

    Args:
      counts: [V] from `count_trained`.
      size: number of tokens to choose.

    Returns:
      [size] int32, ascending ids.

    Raises:
      UserError: the size is below 2 or above the number of tokens.
    """
    if not SMALLEST <= size <= len(counts):
        raise UserError(
            f"draft vocabulary: want a size of {SMALLEST} to {len(counts)}, the number of tokens "
            f"of the target, got {size}"
        )
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def size_for_coverage(counts: np.ndarray, coverage: float) -> int:
    """Finds the smallest size whose tokens cover a share of the counted ones."""
    shares = np.cumsum(np.sort(counts)[::-1]) / counts.sum()
    return max(SMALLEST, int(np.argmax(shares >= coverage)) + 1)


def coverage_of(counts: np.ndarray, tokens: np.ndarray) -> float:
    """Share of the counted tokens that are in a vocabulary."""
    return float(counts[tokens].sum() / counts.sum())


def make_vocabulary(config: TrainConfig, counts: np.ndarray, size: int) -> DraftVocabulary:
    """Makes the vocabulary of the most frequent tokens.

    Args:
      config: the run whose tokens were counted.
      counts: [V] how often each token occurs in its training rows.
      size: number of tokens to choose.

    Raises:
      UserError: what `choose_tokens` refuses.
    """
    tokens = choose_tokens(counts, size)
    return DraftVocabulary(
        vocab_size=len(counts),
        tokens=tuple(tokens.tolist()),
        coverage=coverage_of(counts, tokens),
        source={
            "target": config.target,
            "data": config_to_dict(config.data),
            "trained_tokens": int(counts.sum()),
        },
    )


def _count(arguments: Sequence[str]) -> None:
    args = _count_parser().parse_intermixed_args(arguments)
    if args.output is not None:
        _check_output(args)
    config = load_config(TrainConfig, args.config, args.overrides)
    counts = count_tokens(config)
    size = _size(counts[0], args)
    summary: dict[str, Any] = {"vocab_size": len(counts[0]), "output": None}
    if size is not None:
        vocabulary = make_vocabulary(config, counts[0], size)
        summary |= {"size": size, "coverage": vocabulary.coverage}
        if args.output is not None:
            write_draft_vocabulary(args.output, vocabulary)
            summary["output"] = str(args.output)
    print("\n".join(_format_counts(config, counts, size)))
    print_summary(summary)


def _check_output(args: argparse.Namespace) -> None:
    """Checks the output before anything is read."""
    if args.size is None and args.coverage is None:
        raise UserError("--output wants a draft vocabulary; add --size or --coverage")
    check_new_file(args.output)


def _size(counts: np.ndarray, args: argparse.Namespace) -> int | None:
    """Requested number of tokens; None prints only the table."""
    if args.coverage is not None:
        return size_for_coverage(counts, args.coverage)
    return args.size


def _format_counts(
    config: TrainConfig, counts: tuple[np.ndarray, np.ndarray], size: int | None
) -> list[str]:
    """Describes the counts and tabulates the coverage of several sizes."""
    trained = counts[0]
    vocab_size, num_seen = len(trained), int((trained > 0).sum())
    sizes = {1 << power for power in range(vocab_size.bit_length())}
    sizes = {one for one in sizes if one >= _SMALLEST_SHOWN} | {vocab_size, size or vocab_size}
    lines = [
        f"{config.data.source}: {trained.sum():,} tokens are trained on, {num_seen:,} of "
        f"{vocab_size:,} different ones occur",
        "",
    ]
    table = []
    for shown in sorted(sizes):
        tokens = choose_tokens(trained, shown)
        table.append([shown, *(f"{coverage_of(part, tokens):.2%}" for part in counts)])
    lines += format_rows(["size", *(f"coverage, {part}" for part in _PARTS)], table)
    if size is not None and size > num_seen:
        lines += ["", f"{size - num_seen:,} of the {size:,} tokens never occur: the lowest ids"]
    return lines


def _count_parser() -> argparse.ArgumentParser:
    text = "Count the tokens that a draft's run trains on, and choose the most frequent."
    parser = _parser(text, "count")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="Set a key of the config."
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="Config of a draft's training run; only `target` and `data` are used.",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--size", type=at_least(2), metavar="N", help="Choose this number of tokens."
    )
    choice.add_argument(
        "--coverage",
        type=_parse_share,
        metavar="X",
        help="Choose as many tokens as cover this share of the trained ones, such as 0.98.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file to write the vocabulary to; it must not exist yet.",
    )
    return parser


def _parse_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"want a share above 0 and up to 1, got {text[:40]!r}")
    return share


# --------------------------------------------------------------------------------------------------
# apply


def _apply(arguments: Sequence[str]) -> None:
    args = _apply_parser().parse_args(arguments)
    refuse_irreplaceable(args.output)
    record = read_record(args.draft)
    if record.family != "draft":
        raise UserError(f"{args.draft}: want a draft, got a target; give the folder of a draft")
    tokens = read_draft_vocabulary(args.vocabulary, record.draft.layer.vocab_size)
    limited = with_vocabulary(record, tokens.tolist(), origin=str(args.draft))
    items = ((name, load_item(args.draft, record, name)) for name in record.items)
    new = replace(limited, provenance=provenance())
    write_model(args.output, new, items, tokenizer_from=args.draft)
    print_summary({"output": str(args.output), "size": len(tokens)})


def _apply_parser() -> argparse.ArgumentParser:
    text = "Write a copy of a draft that proposes the tokens of a vocabulary only."
    parser = _parser(text, "apply")
    for flag, metavar, text in (
        ("--draft", "DIR", "Model folder of a draft that uses the target's head."),
        ("--vocabulary", "FILE", "JSON file that `count` wrote."),
        ("--output", "DIR", "Folder to write. It is created; if it exists, it must be empty."),
    ):
        parser.add_argument(flag, type=as_path, required=True, metavar=metavar, help=text)
    return parser


def _parser(description: str | None, command: str = "") -> Parser:
    parser = Parser(
        module="train.draft_vocab",
        description=describe(description, shows_all=False),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if command:
        parser.prog += f" {command}"
        add_json(parser)
    return parser


_COMMANDS = {"count": _count, "apply": _apply}


if __name__ == "__main__":
    cli()
