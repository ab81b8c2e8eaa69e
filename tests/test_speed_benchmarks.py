"""The benchmarks of speed: options and prices by hand, and whole runs on tiny models."""

import json
from pathlib import Path

import pytest

from benchmarks import accelerator, break_even
from benchmarks.options import read_tree
from infer.bench.costs import DEVICES, Device
from infer.bench.rates import Roofline
from poss_jax.config.models import TreeConfig
from poss_jax.config.reading import UserError

TINY = "--layers 2 --heads 2 --kv-heads 1 --repeats 1".split()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("4/2", "tree '4/2': want depth/top_k/total_tokens, such as 4/2/8"),
        ("4/2/x", "tree '4/2/x': total_tokens: Input should be a valid integer"),
    ],
)
def test_trees_that_are_refused(text: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        read_tree(text)


def test_every_specialist_has_its_price_unless_keys_and_values_are_shared() -> None:
    rows = break_even.measure(TreeConfig(), context=2048)
    assert len(rows) == 4 * 2 * 7 * 8
    by_draft = {row["draft"]: row for row in rows if (row["target"], row["batch"]) == ("8B", 1)}
    prices = [row["break_even_percent"] for row in by_draft.values()]
    assert prices[0] == prices[4] == 0 < prices[1] < prices[2] < prices[3] < 1 < prices[5]
    streams = [row["cache_bytes_per_token"] / 4096 for row in by_draft.values()]
    assert streams == [
        1,
        2,
        3,
        6,
        1,
        8,
        1,
        1,
    ]  # 8 heads x 128 numbers x 2 bytes, of keys and of values


def test_a_wide_layer_is_read_whole_at_every_level() -> None:
    rows = break_even.measure(TreeConfig(), context=2048)
    of = {row["draft"]: row for row in rows if (row["target"], row["batch"]) == ("8B", 1)}
    for wide, specialists in break_even.WIDE.items():
        weights = [of[name]["draft_gigabytes"] for name in (wide, specialists, "EAGLE-2")]
        assert weights[0] == pytest.approx(weights[1], abs=2e-5)  # less than a neuron, 25 kB
        more = of[wide]["round_milliseconds"] - of["EAGLE-2"]["round_milliseconds"]
        bandwidth = DEVICES[of[wide]["device"]].bytes_per_second
        assert more == pytest.approx(
            1e3 * 6 * 1e9 * (weights[0] - weights[2]) / bandwidth, rel=0.01
        )


def test_what_a_larger_first_specialist_must_gain() -> None:
    """A chain of 2 emits 1 + a + a/2 tokens, which must grow by the factor that rounds do."""
    rows = break_even.price_first([0.6, 0.5], context=512)
    assert len(rows) == 4 * 3 * 3 * 5
    for row in rows:
        first = 0.6 + row["break_even_points"] / 100
        longer = 1 + row["longer_percent"] / 100
        assert (1 + first + first / 2) / 1.9 == pytest.approx(longer)
    plain, two, three, *_ = (row["longer_percent"] for row in rows[:5])
    assert plain == 0 < two < three
    of_8b = {row["draft"]: row for row in rows if (row["target"], row["batch"]) == ("8B", 1)}
    deep = of_8b["first of 3 layers"]
    more = deep["round_milliseconds"] - of_8b["PosS-1"]["round_milliseconds"]
    layer = 2 * 4096 * (4096 + 1024 + 3 * 14336 / 2)  # weights: q, o, k, v and the MLP
    bytes_each = DEVICES[deep["device"]].bytes_per_second / 1e3
    assert more == pytest.approx(2 * 2 * layer / bytes_each, rel=0.01)


@pytest.mark.parametrize("share", ["0", "1.5", "half", "nan"])
def test_shares_that_are_refused(share: str) -> None:
    with pytest.raises(UserError, match="want a number above 0 and at most 1, got"):
        break_even.main(["--acceptance", share])


def accelerator_sizes() -> list[str]:
    sizes = "--hidden-size 32 --intermediate-size 64 --head-dim 16 --vocab-size 300 --layers 4"
    options = "--draft-vocabulary 100 --prompt 8 --rounds 4 --train-tokens 32 --trees 2/2/5"
    return [*TINY, *sizes.split(), *options.split()]


@pytest.mark.slow
def test_accelerator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    roofline = Roofline(Device("abacus", 1e9, 1e9, 1e9), {"square": 1e9})
    monkeypatch.setattr(accelerator, "measure_roofline", lambda: roofline)
    arguments = [*accelerator_sizes(), "--batch-size", "2", "--output", str(tmp_path)]
    accelerator.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert list(report["methods"]) == ["autoregressive", "poss3 2/2/5", "poss3_e3 2/2/5"]
    drafted = report["methods"]["poss3 2/2/5"]
    assert drafted["tokens_per_round"] == 1 + (1 + 2 + 2 + 2) / 4  # of 1, 2, 6, 2 at depth 2
    assert list(report["training"]) == ["poss3", "poss3_e3"]
    assert lines[0].startswith("abacus: 1 GB/s")


def test_torch_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"torch and transformers missing; pip install"):
        accelerator.main(["--torch"])


@pytest.mark.torch
@pytest.mark.slow
def test_accelerator_beside_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    roofline = Roofline(Device("abacus", 1e9, 1e9, 1e9), {"square": 1e9})
    monkeypatch.setattr(accelerator, "measure_roofline", lambda: roofline)
    options = "--torch --only decode --methods autoregressive".split()
    accelerator.main([*accelerator_sizes(), *options])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report["methods"]) == ["autoregressive"] and not report["training"]
    assert report["torch"]["loop"] > 0
