"""Results that an interrupted measurement has kept."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infer.bench import measure
from infer.bench.compare import settings_of
from infer.bench.journal import Kept, describe
from infer.bench.measure import AUTOREGRESSIVE, Decoder
from poss_jax.config.bench import BenchConfig


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
def test_other_settings_and_half_a_line_are_measured_anew() -> None:
    kept = Kept("tune", {"prompts": [1]})
    kept.get("a", lambda: 1)
    assert Kept("tune", {"prompts": [2]}).get("a", lambda: 2) == 2
    assert Kept("lossless", {"prompts": [1]}).get("a", lambda: 3) == 3
    with kept.path.open("a") as file:
        file.write(json.dumps({"b": 2}))  # without its end
    assert Kept("tune", {"prompts": [1]}).get("b", lambda: 4) == 4
    assert Kept("tune", {"prompts": [1]}).get("b", never) == 4


@pytest.mark.parametrize("changed", ["vocabulary", "trees", "weights", "device", "int8_products"])
def test_what_decides_results_is_known_by_its_content(changed, monkeypatch) -> None:
    of_run = {"vocabulary": (1, 2), "trees": {1: None}, "weights": "a"}
    of_run |= {"device": "cpu", "int8_products": "integer"}

    def identify(**fields: Any) -> list[Any]:
        draft = {"vocabulary": np.array(fields["vocabulary"])}
        weights = SimpleNamespace(draft=draft)
        engine: Any = SimpleNamespace(trees=fields["trees"], weights=weights)
        record = SimpleNamespace(fingerprint=fields["weights"])
        process = {"int8_products": fields["int8_products"], "versions": versions}
        monkeypatch.setattr(measure, "read_record", lambda folder: record)
        monkeypatch.setattr(measure, "provenance", lambda: process)
        monkeypatch.setattr(measure, "device_name", lambda: fields["device"])
        decoders = [Decoder(AUTOREGRESSIVE, engine), Decoder("P", engine)]
        return [describe(config, decoders, []), settings_of(config, decoders, {})]

    versions = {"jax": "1", "poss_jax": "2", "python": "3"}
    config = BenchConfig(target="t", drafts={"P": "d"}, draft_vocabulary="v.json")
    before = identify(**of_run)
    assert identify(**of_run) == before
    for old, new in zip(before, identify(**of_run | {changed: (3,)}), strict=True):
        assert old != new
