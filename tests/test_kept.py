"""Results that an interrupted measurement has kept."""

import json
from pathlib import Path

import pytest

from infer.kept import Kept


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path))
    return tmp_path


def never() -> None:
    pytest.fail("what was kept is not measured again")


def test_kept_results_are_not_measured_again(cache: Path) -> None:
    first = Kept("tune", {"prompts": [1]})
    assert first.get("a", lambda: {"sizes": {1: 2.5}}) == {"sizes": {"1": 2.5}}
    again = Kept("tune", {"prompts": [1]})
    assert again.get("a", never) == {"sizes": {"1": 2.5}}
    assert again.get("b", lambda: None) is None
    again.finish()
    assert not list(cache.rglob("*.jsonl"))


@pytest.mark.usefixtures("cache")
def test_other_settings_begin_anew() -> None:
    Kept("tune", {"prompts": [1]}).get("a", lambda: 1)
    assert Kept("tune", {"prompts": [2]}).get("a", lambda: 2) == 2
    assert Kept("lossless", {"prompts": [1]}).get("a", lambda: 3) == 3


@pytest.mark.usefixtures("cache")
def test_line_that_was_being_written_is_measured_again() -> None:
    kept = Kept("tune", {})
    kept.get("a", lambda: 1)
    with kept.path.open("a") as file:
        file.write(json.dumps({"b": 2}))  # without its end
    again = Kept("tune", {})
    assert again.get("b", lambda: 3) == 3
    assert Kept("tune", {}).get("b", never) == 3
