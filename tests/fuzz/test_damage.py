"""Damaged files: what is read again is what was written, or one line says that it is not."""

import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import random_target, tiny_llama
from test_run_folder import config_for, saved_run, start, state_at

from poss_jax.checkpoint.folder import load_target
from poss_jax.checkpoint.record import new_record
from poss_jax.checkpoint.sums import write_sums
from poss_jax.checkpoint.writing import target_identity, verify_model, write_model
from poss_jax.config.reading import UserError
from poss_jax.model.parameters import split_items
from train.run_folder import RunFolder


@dataclass(frozen=True)
class Damage:
    """Something that happens to a file.

    Attributes:
      file: share of the files, in order, that lie before it.
      place: share of its content that lies before the damage.
      kind: what happens there.
      data: bytes that come there.
    """

    file: float
    place: float
    kind: str
    data: bytes

    def strike(self, folder: Path) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        path = files[int(self.file * len(files))]
        if self.kind == "remove":
            path.unlink()
            return
        content = path.read_bytes()
        place = int(self.place * len(content))
        bit = bytes([content[place] ^ 1 << self.data[0] % 8]) if content else b""
        changed = {
            "cut": content[:place],
            "insert": content[:place] + self.data + content[place:],
            "overwrite": content[:place] + self.data + content[place + len(self.data) :],
            "flip": content[:place] + bit + content[place + 1 :],
        }
        path.write_bytes(changed[self.kind])


SHARES = st.floats(0, 1, exclude_max=True)
DAMAGES = st.builds(
    Damage,
    file=SHARES,
    place=SHARES,
    kind=st.sampled_from(["remove", "cut", "insert", "overwrite", "flip"]),
    data=st.binary(min_size=1, max_size=8),
)


@cache
def made(make: Callable[[Path], object]) -> Path:
    """Copies what a function writes into a folder `a`, next to the original."""
    root = Path(tempfile.mkdtemp())
    make(root / "a")
    return (root / "a").rename(root / "whole")


@contextmanager
def damaged(make: Callable[[Path], object], damage: Damage) -> Iterator[Path]:
    """The same folder at the same place, one file of it damaged."""
    folder = made(make).parent / "a"
    shutil.copytree(made(make), folder)
    try:
        damage.strike(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def refused(read: Callable[[], None]) -> str | None:
    """The one line that reading says, if it says one."""
    try:
        read()
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


def make_run(folder: Path) -> None:
    saved_run(folder, [1.0, 2.0])


@given(DAMAGES)
def test_run(damage: Damage) -> None:
    """Continues from an intact state, and says so if it is not the newest."""

    def go_on() -> None:
        start(config_for(folder))
        run = RunFolder(config_for(folder))
        state = run.restore(state_at(0))
        run.close()
        step = int(state.step)
        assert step == 2 or (step == 1 and "checkpoint 2 is damaged (" in said.getvalue())
        jax.tree.map(np.testing.assert_array_equal, state, state_at(step))
        metrics = folder / "metrics.jsonl"  # which may be what was removed
        for line in metrics.read_text().splitlines() if metrics.exists() else []:
            assert json.loads(line)["step"] <= step

    with redirect_stderr(io.StringIO()) as said, damaged(make_run, damage) as folder:
        refused(go_on)


def make_model(folder: Path) -> None:
    config = tiny_llama(num_layers=1, vocab_size=7)
    params = random_target(config)
    identity = target_identity("tiny", None, params["embed"]["weight"], params["head"]["weight"])
    record = new_record(config, identity, tokenizer_from=None)
    write_model(folder, record, split_items(config, params), tokenizer_from=None)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    write_sums(folder, ["model.json", "tokenizer.json"])


@cache
def intact_model() -> tuple[object, bytes]:
    folder = made(make_model)
    return load_target(folder), (folder / "tokenizer.json").read_bytes()


# Orbax closes its event loop at the first damaged file, while others are still being read.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@given(DAMAGES)
def test_model(damage: Damage) -> None:
    def verify() -> None:
        verify_model(folder)
        loaded, tokenizer = intact_model()
        jax.tree.map(np.testing.assert_array_equal, load_target(folder), loaded)
        if (folder / "tokenizer.json").exists():  # or every file of its own is gone
            assert (folder / "tokenizer.json").read_bytes() == tokenizer

    with damaged(make_model, damage) as folder:
        refused(verify)
