"""Options that several programs share, and what they check."""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from poss_jax.config import TreeConfig, UserError
from poss_jax.engine import default_tree


def at_least(least: int) -> Callable[[str], int]:
    """Type of an option: a whole number, and not a smaller one."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"want a number, at least {least}, got {text!r}")
        return int(text)

    return parse


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
    return replace(tree or default_tree(), **given) if given else tree


def check_writable(path: Path) -> None:
    """Raises UserError where no output can be made, before any work is spent on it."""
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise UserError(f"output {path}: {place} is no writable folder; choose another place")
