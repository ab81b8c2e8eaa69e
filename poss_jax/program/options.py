"""Options that several programs have, and what they check."""

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from poss_jax.config import (
    SamplingConfig,
    TreeConfig,
    UserError,
    build_config,
    read_yaml,
    shorten,
)
from poss_jax.engine import Engine, Trees, default_tree

_LOG = logging.getLogger(__name__)

_SAMPLING_OPTIONS = {
    "temperature": "divides the scores; 0 is greedy (the default)",
    "top_p": "only the likeliest tokens that together have this probability",
    "min_p": "only tokens at least this likely, relative to the likeliest",
    "repetition_penalty": "lowers the scores of tokens that are in the text already, if above 1",
}


_MOST = 2**31 - 1  # numbers become int32 on the device
_ANY_SEED = 10**18  # its bound is that of SamplingConfig


def at_least(least: int, most: int = _MOST) -> Callable[[str], int]:
    """Type of an option: a whole number within bounds."""

    def parse(text: str) -> int:
        number = _whole_number(text)
        if number is None or not least <= number <= most:
            wanted = f"at least {least}" if number is None or number < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"want a number, {wanted}, got {shorten(text)}")
        return number

    return parse


def _whole_number(text: str) -> int | None:
    """The number that a text of digits says; beyond 20 digits, one that is too large as well."""
    return int(text.lstrip("0")[:20] or "0") if text.isdecimal() else None


def add_decoding_options(
    parser: argparse.ArgumentParser, *, max_new_tokens: int, batch_size: int
) -> None:
    """Adds the models, how answers are decoded, and where they end; numbers are defaults."""
    parser.add_argument("--target", required=True, metavar="DIR", help="model folder of the target")
    parser.add_argument(
        "--draft", metavar="DIR", help="model folder of a draft (default: autoregressive)"
    )
    for name, default, text in (
        ("--max-new-tokens", max_new_tokens, "limit"),
        ("--batch-size", batch_size, "decoded together"),
    ):
        text = f"{text} (default: {default})"
        parser.add_argument(name, type=at_least(1), default=default, metavar="N", help=text)
    parser.add_argument(
        "--max-length",
        type=at_least(1),
        metavar="N",
        help="most tokens of prompt and answer (default: what the target was made for)",
    )
    add_sampling_options(parser)
    add_tree_options(parser)
    add_trees_option(parser)
    add_mismatch_option(parser)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends an answer, and is not part of it; may be repeated",
    )


def load_engine(args: argparse.Namespace) -> Engine:
    """Loads the models that `add_decoding_options` names.

    Raises:
      UserError: what `Engine.load` or `read_trees` refuses.
    """
    return Engine.load(
        args.target,
        args.draft,
        tree=read_trees(args),
        max_length=args.max_length,
        is_coupled=not args.no_coupling,
        allow_target_mismatch=bool(args.allow_target_mismatch),
    )


def add_tree_options(parser: argparse.ArgumentParser) -> None:
    """Adds the three numbers of a draft tree."""
    parser.add_argument("--tree-depth", type=at_least(1), metavar="N", help="drafted positions")
    parser.add_argument(
        "--tree-top-k", type=at_least(1), metavar="N", help="beam width of the tree"
    )
    parser.add_argument(
        "--tree-total-tokens",
        type=at_least(2),
        metavar="N",
        help="nodes verified, root included (default tree: 6/10/60, on CPU 4/4/16)",
    )


def add_mismatch_option(parser: argparse.ArgumentParser) -> None:
    """Adds the permission to use a draft of another target."""
    parser.add_argument(
        "--allow-target-mismatch",
        action="store_true",
        default=None,
        help="use a draft that was made for other weights of the same shape",
    )


def read_tree(args: argparse.Namespace, tree: TreeConfig | None = None) -> TreeConfig | None:
    """The tree asked for: the options, the rest from `tree` (None: the device's default)."""
    given = {
        "depth": args.tree_depth,
        "top_k": args.tree_top_k,
        "total_tokens": args.tree_total_tokens,
    }
    given = {name: value for name, value in given.items() if value is not None}
    values = asdict(tree or default_tree()) | given
    return build_config(TreeConfig, values, origin="tree") if given else tree


def add_trees_option(parser: argparse.ArgumentParser) -> None:
    """Adds the file of trees per batch size."""
    parser.add_argument(
        "--trees",
        metavar="FILE",
        type=Path,
        help="YAML file: batch size -> {depth, top_k, total_tokens}, or null for no draft",
    )


def read_trees(args: argparse.Namespace) -> TreeConfig | Trees | None:
    """The trees asked for: of the file, or the one tree of the options.

    Raises:
      UserError: both are given, or what the file holds are no trees.
    """
    tree = read_tree(args)
    if args.trees is None:
        return tree
    if tree is not None:
        raise UserError("--trees: want it alone, got --tree-* options too; leave out one of them")
    trees: dict[int, TreeConfig | None] = {}
    for size, values in read_yaml(args.trees).items():
        where = f"{args.trees}: {str(size)[:40]}"
        if type(size) is not int or not 1 <= size <= _MOST:
            raise UserError(f"{where}: want a batch size, a whole number from 1 on")
        if not isinstance(values, dict | None):
            raise UserError(
                f"{where}: want depth, top_k and total_tokens, or null; got {shorten(values)}"
            )
        trees[size] = None
        if values is not None:
            values = asdict(default_tree()) | values
            trees[size] = build_config(TreeConfig, values, origin=where)
    if not trees:
        raise UserError(f"{args.trees}: want batch sizes and their trees, got none")
    return trees


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Adds how tokens are chosen (fields of `SamplingConfig`)."""
    for name, text in _SAMPLING_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help=text)
    parser.add_argument(
        "--top-k", type=at_least(0), metavar="N", help="only the N likeliest tokens"
    )
    parser.add_argument(
        "--logit-bias",
        action="append",
        metavar="ID=VALUE",
        help="added to the logit of a token; may be repeated",
    )
    parser.add_argument(
        "--seed", type=at_least(0, _ANY_SEED), metavar="N", help="of every draw (default: 0)"
    )
    parser.add_argument(
        "--no-coupling",
        action="store_true",
        help="drafts do not look at the sampler's noise: the same text, more slowly",
    )


def read_sampling(
    args: argparse.Namespace, sampling: SamplingConfig | None = None
) -> SamplingConfig:
    """The settings asked for: the options, the rest from `sampling` (None: the defaults).

    Raises:
      UserError: a value that is out of bounds.
    """
    given = {name: getattr(args, name) for name in (*_SAMPLING_OPTIONS, "top_k", "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.logit_bias is not None:
        given["logit_bias"] = _read_bias(args.logit_bias)
    values = asdict(sampling or SamplingConfig()) | given
    settings = build_config(SamplingConfig, values, origin="sampling")
    idle = [name for name in ("top_k", "top_p", "min_p") if name in given]
    if idle and settings.temperature == 0:
        _LOG.warning("at temperature 0, %s changes nothing; give --temperature", idle[0])
    return settings


def _read_bias(texts: Sequence[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        where, token = f"--logit-bias {shorten(text)}", _whole_number(name)
        try:
            number = float(value)
        except ValueError as error:
            raise UserError(f"{where}: want ID=VALUE, such as 42=-1.5") from error
        if token is None or token in bias:
            raise UserError(f"{where}: want a token id that is not named already")
        bias[token] = number
    return bias


def check_writable(path: Path) -> None:
    """Raises UserError where no output can be made, before any work is spent on it."""
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise UserError(f"output {path}: {place} is no writable folder; choose another place")
