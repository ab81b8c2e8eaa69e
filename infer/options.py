"""Options that several programs share."""

import argparse
from dataclasses import replace

from poss_jax.config import TreeConfig, UserError
from poss_jax.engine import default_tree


def add_tree_options(parser: argparse.ArgumentParser) -> None:
    """Adds the three numbers of a draft tree."""
    parser.add_argument("--tree-depth", type=int, metavar="N", help="drafted positions")
    parser.add_argument("--tree-top-k", type=int, metavar="N", help="beam width of the tree")
    parser.add_argument(
        "--tree-total-tokens",
        type=int,
        metavar="N",
        help="nodes verified, root included (default tree: 6/10/60, on CPU 4/4/16)",
    )


def read_tree(args: argparse.Namespace) -> TreeConfig | None:
    """The tree asked for; what is not given is the device's default. None: nothing is given.

    Raises:
      UserError: a number is too small.
    """
    given = {
        "depth": args.tree_depth,
        "top_k": args.tree_top_k,
        "total_tokens": args.tree_total_tokens,
    }
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        least = 2 if name == "total_tokens" else 1
        if value < least:
            option = "--tree-" + name.replace("_", "-")
            raise UserError(f"{option}: want at least {least}, got {value}")
    return replace(default_tree(), **given) if given else None
