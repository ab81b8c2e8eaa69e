"""Options that benchmarks have."""

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infer.bench.report import check_output
from poss_jax.config.models import TreeConfig
from poss_jax.config.reading import build_config
from poss_jax.program.arguments import at_least
from poss_jax.program.running import Parser

TREE = "DEPTH/TOP_K/TOTAL"
Schema = dict[str, Any]


def read_schemas() -> list[tuple[str, Schema]]:
    """Kind and content of 200 JSON schemas such as clients send, eight of each kind."""
    lines = Path(__file__).with_name("schemas.jsonl").read_text().splitlines()
    return [(row["kind"], row["schema"]) for row in map(json.loads, lines)]


def resident_bytes(process: int | str = "self") -> float:
    """Resident memory of a process, NaN if the system does not say."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, ValueError):
        return float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE")


def make_parser(doc: str | None) -> Parser:
    """Makes the parser of a benchmark; --output may hold an older report, which is replaced."""
    parser = Parser(description=doc)
    parser.add_argument("--output", type=report_folder, metavar="DIR", help="folder for the report")
    return parser


def report_folder(text: str) -> Path:
    """Reads --output, and refuses a folder that no report can be written to."""
    folder = Path(text)
    check_output(folder, overwrite=True)
    return folder


def read_tree(text: str) -> TreeConfig:
    """Reads depth/top_k/total_tokens; argparse tells of a ValueError where there are not three."""
    names = "depth", "top_k", "total_tokens"
    sizes: dict[str, Any] = dict(zip(names, text.split("/"), strict=True))
    return build_config(TreeConfig, sizes, origin=f"tree {text!r}")


def add_numbers(parser: argparse.ArgumentParser, defaults: Mapping[str, int]) -> None:
    """Adds options that are whole numbers from 1 on."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=at_least(1), default=default, metavar="N")
