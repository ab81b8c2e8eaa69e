"""Features from disk: the cache, what it refuses, resuming; rows that come with features."""

import errno
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest
from programs import DRAFT, POSS2, Runs, assert_same_run, config_file, refusal
from self_killing import run_until

from poss_jax.config.models import MeshConfig
from poss_jax.config.reading import UserError, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.data.prepared import Prepared
from poss_jax.data.rows import Rows, batch_at, rows_at
from poss_jax.model.sharding import make_mesh
from train.devices import put_batch
from train.features import (
    FeatureCache,
    RowsWithFeatures,
    fill_cache,
    is_complete,
    join_features,
    open_cache,
)
from train.main import main
from train.training import open_stage

SHAPE = (7, 3, 4)
MADE_FROM = {"target": "a" * 64, "rows": "b" * 64, "computed in": "float32"}
SHORT = ("num_tokens=384", "validate_every=3")


def features_of(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def open_small(folder: Path, **changes: Any) -> FeatureCache:
    """A cache of seven rows, three in a shard."""
    made_from = MADE_FROM | changes.pop("made_from", {})
    return open_cache(folder, made_from, changes.pop("shape", SHAPE), 3 * 3 * 4 * 2)


def written(folder: Path) -> tuple[FeatureCache, np.ndarray]:
    folder.mkdir()
    cache, features = open_small(folder), features_of(SHAPE)
    cache.start()
    for shard in cache.missing:
        rows = features[list(cache.rows_of(shard))]
        cache.write(shard, [rows[:2], rows[2:]])
    return cache, features


def cached(runs: Runs, folder: Path, values: dict[str, Any]) -> str:
    """Config of a run with a cache of several shards, next to it."""
    features = {"cache": str(folder / "cache"), "shard_gib": 2**-12}
    return config_file(runs, folder, values, features=features)


@pytest.mark.optimised  # as users compile: bits of two programs are compared
@pytest.mark.slow
def test_a_cache_killed_while_it_is_written_serves_runs_that_learn_as_online(
    runs, tmp_path, monkeypatch, capsys
):
    narrow = {"dtype": "bfloat16"}  # as a cache keeps features
    config, cache = cached(runs, tmp_path, POSS2 | narrow), tmp_path / "cache"
    run_until("os.rename", r"\.000001\.npy\.partial", "train.main", "--config", config, *SHORT)
    left = {path.name: path.stat().st_mtime_ns for path in cache.glob("*.npy")}
    assert list(left) == ["000000.npy"]
    main(["--config", config, *SHORT])
    said = capsys.readouterr().err
    assert "GiB in 3 shards in" in said and "; 1 of them written" in said
    shards = {path.name: path.stat().st_mtime_ns for path in cache.glob("*.npy")}
    assert shards.items() >= left.items() and len(shards) == 3
    assert not list(cache.glob(".*.partial"))

    main(["--config", config_file(runs, tmp_path / "online", POSS2 | narrow), *SHORT])
    assert_same_run(tmp_path / "run", tmp_path / "online" / "run", runs.model("target"))

    def no_layers(*_: Any) -> None:
        raise AssertionError("layers loaded")

    monkeypatch.setattr("train.stages.load_layers", no_layers)
    config = cached(runs, tmp_path, DRAFT | narrow)
    stage = open_stage(load_config(TrainConfig, config), tmp_path)
    target, batch, _ = stage.plan_step().inputs
    assert "layers" not in target and batch.features.shape == (*batch.tokens.shape, 32)
    stage.load_weights()
    stage.write_features()
    again = {path.name: path.stat().st_mtime_ns for path in cache.glob("*.npy")}
    assert "all of them written" in stage.report["features"] and again == shards

    asked = ("data.sequence_length=16", f"output={tmp_path}/other")
    message = refusal(main, "--config", config, *asked)
    assert "has other features (rows: saved " in message and "; shape: saved [" in message
    assert not (tmp_path / "other").exists()


def test_a_cache_to_be_written_is_planned_and_filled_as_memory_allows(runs, tmp_path, monkeypatch):
    values = DRAFT | {"batch_size": 2, "step": {"accumulation_steps": 2}}
    stage = open_stage(load_config(TrainConfig, cached(runs, tmp_path, values)), tmp_path)
    assert "layers" not in stage.plan_step().inputs[0]
    stage.load_weights()
    rows_at_once = []
    monkeypatch.setattr("train.stages.fill_cache", lambda *args: rows_at_once.append(args[3]))
    stage.write_features()
    assert rows_at_once == [1]


def test_dry_run_tells_the_size_and_a_small_disk_is_refused(runs, tmp_path, monkeypatch, capsys):
    config = cached(runs, tmp_path, DRAFT)
    main(["--config", config, "--dry-run"])
    said = capsys.readouterr().out
    rows = said.partition("features  ")[2].partition(" x 32 x 32 bfloat16, ")[0]
    assert int(rows) > 100 and "3 shards" in said and "; 0 of them written" in said
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 0, 1000))
    message = refusal(main, "--config", config)
    assert "cache wants 0.000" in message and "its disk has 9.31e-07 GiB free; make room" in message
    assert [path.name for path in tmp_path.iterdir()] == ["configs"]


def test_rows_are_read_as_written_in_any_order(tmp_path):
    cache, features = written(tmp_path / "cache")
    assert [len(cache.rows_of(shard)) for shard in range(cache.num_shards)] == [3, 3, 1]
    order = np.array([6, 0, 4, 4, 2])
    np.testing.assert_array_equal(cache.read(order), features[order])
    again = open_small(tmp_path / "cache")
    assert again.missing == [] and again == cache
    manifest = tmp_path / "cache" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text())))  # in other words
    again.start()
    sizes = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.npy"))
    assert cache.num_bytes(range(3)) == sizes


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"made_from": {"target": "c" * 64}}, "target: saved aaaaaaaaaaaa, asked cccccccccccc"),
        ({"made_from": {"computed in": "bfloat16"}}, "computed in: saved float32, asked bfloat16"),
        ({"shape": (7, 3, 8)}, "shape: saved [7, 3, 4], asked [7, 3, 8]"),
    ],
)
def test_a_cache_of_something_else_is_refused(tmp_path, changes, difference):
    written(tmp_path / "cache")
    with pytest.raises(UserError) as caught:
        open_small(tmp_path / "cache", **changes)
    assert f"has other features ({difference}); name another folder" in str(caught.value)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"made_from": 3}'])
def test_a_damaged_manifest_is_refused(tmp_path, content):
    written(tmp_path / "cache")
    (tmp_path / "cache" / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json: want the manifest of a cache"):
        open_small(tmp_path / "cache")


def test_folder_of_another_run_or_of_other_files_is_refused(tmp_path):
    cache = open_cache(tmp_path, MADE_FROM, SHAPE, 5 * 3 * 4 * 2)
    open_small(tmp_path).start()
    with pytest.raises(UserError, match="was begun by another run meanwhile"):
        cache.start()
    (tmp_path / "manifest.json").rename(tmp_path / "notes.txt")
    with pytest.raises(UserError, match="holds something else"):
        open_small(tmp_path)


def test_a_folder_that_other_hosts_do_not_see_is_refused_before_anything_is_encoded(
    tmp_path, monkeypatch
):
    encode = MagicMock(side_effect=AssertionError("features are computed"))
    rows = Rows(*(np.zeros((7, 3), kind) for kind in (np.int32, bool, np.int32)))
    monkeypatch.setattr("train.features._SEEN_SECONDS", 0)
    monkeypatch.setattr("train.features.broadcast_from_first", lambda _: True)  # each asks its own
    cache, not_seen = open_small(tmp_path / "cache"), "cache: this process does not see the folder"
    for ask in (
        is_complete,
        lambda _: fill_cache(cache, [rows], encode, 1, make_mesh(MeshConfig())),
    ):
        with pytest.raises(UserError, match=not_seen):
            ask(cache)
    monkeypatch.setattr("train.features._SEEN_SECONDS", 60)
    monkeypatch.setattr("train.features.time.sleep", lambda _: written(tmp_path / "cache"))
    cache.check_seen()  # it came late


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 130),
        Path.unlink,
        lambda path: path.write_bytes(b"PK\3\4"),  # a zip file's
    ],
)
def test_a_damaged_shard_is_named_and_written_again(tmp_path, damage):
    cache, features = written(tmp_path / "cache")
    path = tmp_path / "cache" / "000001.npy"
    damage(path)
    np.testing.assert_array_equal(cache.read(np.array([0])), features[:1])
    with pytest.raises(UserError, match=r"000001\.npy: want a shard .*; remove it") as caught:
        cache.read(np.arange(7))
    assert "\n" not in str(caught.value)
    path.unlink(missing_ok=True)
    cache.write(1, [features[3:6]])
    np.testing.assert_array_equal(cache.read(np.arange(7)), features)


def test_a_disk_that_fills_up_leaves_whole_shards(tmp_path):
    cache, features = written(tmp_path / "cache")
    (tmp_path / "cache" / "000002.npy").unlink()

    def parts() -> Iterator[np.ndarray]:
        yield features[6:7, :1]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: .*000002\.npy"):
        cache.write(2, parts())
    names = {path.name for path in (tmp_path / "cache").iterdir()}
    assert names == {"manifest.json", "000000.npy", "000001.npy"} and cache.missing == [2]


def test_a_device_reads_its_own_rows_and_no_others():
    features, reads = features_of((20, 3, 4)), []

    class Recording(FeatureCache):
        def read(self, rows: np.ndarray) -> np.ndarray:
            reads.append(rows.tolist())
            return features[rows]

    tokens = np.arange(60, dtype=np.int32).reshape(20, 3)
    rows = Rows(tokens, tokens > 3, np.ones_like(tokens))
    joined = join_features(
        Prepared(rows[:14], rows[14:], {}), Recording(Path(), {}, (20, 3, 4), 20)
    )
    train, held_out = joined.train, joined.validation
    assert "20 x 3 x 4" in joined.report["features"] and isinstance(held_out, RowsWithFeatures)
    assert len(train) == 14 and held_out.features.shape == (6, 3, 4)
    index = rows_at(14, 2, 8, seed=0)
    batch = put_batch(batch_at(train, 2, 8, 0), make_mesh(MeshConfig(data=8)))
    assert sorted(reads) == sorted([row] for row in index.tolist())
    np.testing.assert_array_equal(batch.features, features[index])
    np.testing.assert_array_equal(batch.tokens, tokens[index])
    np.testing.assert_array_equal(held_out[2:4].features[:, 1:], features[16:18, 1:])
