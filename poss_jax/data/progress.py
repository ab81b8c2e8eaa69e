"""Progress bars: on a terminal, and nowhere else."""

import shutil
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(items: Iterable[Any] | None = None, **settings: Any) -> tqdm:
    """Makes tqdm's bar; without a terminal, or with `disable`, it shows nothing."""
    settings["disable"] = settings.get("disable") or None  # None asks for a terminal
    # A terminal of unknown height, as in containers, has 0 lines: tqdm would hide the bar.
    return tqdm(items, nrows=shutil.get_terminal_size().lines, **settings)
