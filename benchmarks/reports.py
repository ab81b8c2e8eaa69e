"""The files of a benchmark's report, and the names of trees."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from poss_jax.config.models import TreeConfig


def write_report(
    report: dict[str, Any], table: str, folder: Path, *, plot: Callable[[], None] | None = None
) -> None:
    """Writes report.json and report.md.

    Args:
      report: numbers.
      table: the same as Markdown.
      folder: folder of the files.
      plot: draws a picture; called where matplotlib is installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "report.md").write_text(table + "\n")
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    if plot is not None:
        plot()


def tree_name(tree: TreeConfig) -> str:
    """Names a tree as options do."""
    return f"{tree.depth}/{tree.top_k}/{tree.total_tokens}"
