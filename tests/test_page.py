"""The chat page: what a model writes is never read as HTML, and nothing comes from elsewhere."""

import re
from pathlib import Path

from poss_jax.serving import app

PAGE = (Path(app.__file__).parent / "chat.html").read_text()


def test_text_is_never_read_as_html() -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|DOMParser|document\.write"
    assert not re.search(ways, PAGE) and "textContent" in PAGE


def test_nothing_comes_from_elsewhere() -> None:
    assert not re.search(r"https?://|\bsrc=|@import|url\(", PAGE)
