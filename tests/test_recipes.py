"""Every config in configs/ is read, and the recipes are the methods they say they are."""

from pathlib import Path

import pytest
from models import tiny_llama

from benchmarks.study import StudyConfig
from poss_jax.config.bench import AheadConfig, BenchConfig
from poss_jax.config.models import DraftConfig
from poss_jax.config.reading import load_config, read_yaml
from poss_jax.config.training import OptimizerConfig, TrainConfig
from poss_jax.model.families import method_of

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
DEPTHS = {  # published
    "llama3-8b-instruct": {"eagle": 1, "hass": 3, "poss1": 7, "poss2": 8, "poss3": 12},
    "llama2-13b-chat": {"eagle": 1, "hass": 3, "poss1": 6, "poss2": 6, "poss3": 6},
    "llama3-70b-instruct": {"poss3": 12},
}
RECIPES = [(folder, name) for folder, names in DEPTHS.items() for name in names]


def header(path: Path) -> str:
    lines = path.read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_config_is_read_and_its_header_gives_its_command(path):
    by_key = {"stage": TrainConfig, "variants": StudyConfig}
    kinds = [kind for key, kind in by_key.items() if key in read_yaml(path)]
    kinds += [AheadConfig if path.parent.name == "aot" else BenchConfig]
    load_config(kinds[0], path)
    assert f"--config {path.relative_to(CONFIGS.parent)}" in header(path)
    assert "# Hardware: " in header(path)


@pytest.mark.parametrize(("folder", "name"), RECIPES)
def test_recipe_is_the_published_method(folder, name):
    path = CONFIGS / folder / f"{name}.yaml"
    run = load_config(TrainConfig, path)
    depth = DEPTHS[folder][name]
    spans = run.specialists.positions_per_specialist
    draft = DraftConfig(layer=tiny_llama(), positions_per_specialist=spans, trained_depth=depth)
    assert run.specialists.depth == depth
    assert method_of(draft) == {"eagle": "eagle2"}.get(name, name)
    assert sum(spans) == (depth if name.startswith("poss") else 1)
    assert run.objective.top_k_weight == (1.0 if name == "hass" else 0.0)
    assert run.optimizer == OptimizerConfig(
        learning_rate=3e-5, warmup_fraction=0.01, b1=0.9, b2=0.95, weight_decay=0.01, clip_value=0.5
    )
    assert (run.num_epochs, run.data.sequence_length, run.batch_size) == (20, 2048, 8)
    assert run.init_draft is not None and run.output == f"runs/{folder}/{name}"
    assert all(f"# {said}:" in header(path) for said in ("Memory", "Expect", "Needs"))
