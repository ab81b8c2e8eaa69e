"""Damaged runs: what is read again is what was written, or one line says that it is not."""

import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from test_run_folder import config_for, saved_run, start, state_at

from poss_jax.config.reading import UserError
from train.run_folder import RunFolder


@dataclass(frozen=True)
class Damage:
    """Something that happens to a file."""

    file: float  # share of the files, in order, that lie before it
    place: float  # share of its content that lies before the damage
    kind: str  # what happens there
    data: bytes  # bytes that come there

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
def intact_run() -> Path:
    """A copy of a run of two checkpoints, next to its place `a`."""
    folder = Path(tempfile.mkdtemp()) / "a"
    return saved_run(folder, [1.0, 2.0]).rename(folder.with_name("whole"))


@contextmanager
def damaged_run(damage: Damage) -> Iterator[Path]:
    """The run at its place, one file of it damaged."""
    folder = intact_run().with_name("a")
    shutil.copytree(intact_run(), folder)
    try:
        damage.strike(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


@given(DAMAGES)
def test_run(damage: Damage) -> None:
    """Continues from an intact state, and says so if it is not the newest."""

    with redirect_stderr(io.StringIO()) as said, damaged_run(damage) as folder:
        try:
            start(config_for(folder))
            run = RunFolder(config_for(folder))
            state = run.restore(state_at(0))
            run.close()
        except UserError as error:
            assert "\n" not in str(error)
            return
        step = int(state.step)
        assert step == 2 or (step == 1 and "checkpoint 2 is damaged (" in said.getvalue())
        jax.tree.map(np.testing.assert_array_equal, state, state_at(step))
        metrics = folder / "metrics.jsonl"  # which may be what was removed
        for line in metrics.read_text().splitlines() if metrics.exists() else []:
            assert json.loads(line)["step"] <= step
