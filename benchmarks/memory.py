"""Memory of the recipes' training steps on TPU slices, as the TPU compiler plans it.

Compiles the step that `train.main` runs, from shapes alone: needs libtpu (`pip install libtpu`),
but no TPU, no weights and no data. Writes a table to docs/results/memory/report.md and all numbers
to report.json. A row takes one to a few minutes; rows that report.json already has are skipped.

    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python -m benchmarks.memory
    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python -m benchmarks.memory --only depth
"""

import json
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from infer.aot.config import AheadConfig
from poss_jax.config.models import LlamaConfig
from poss_jax.config.reading import load_config
from poss_jax.config.training import TrainConfig
from poss_jax.learn.task import DraftTask, describe_draft
from poss_jax.model.families import find_family
from poss_jax.program.running import Parser, run_program
from poss_jax.program.tables import format_rows
from train.memory import compile_memory, mesh_for, plan_draft_step

ROOT = Path(__file__).parent.parent
GIB = 2**30
EAGLE3_TOKENS = 32000  # that the published drafts can propose
SHAPES = {  # files of configs/aot by folder of recipes
    "llama3-8b-instruct": "llama3-8b",
    "llama3.1-8b-instruct": "llama3-8b",
    "llama2-13b-chat": "llama2-13b",
    "llama3-70b-instruct": "llama3-70b",
}
ONE = ["mesh.data=1"]
RECIPES = [  # recipe, TPU slice, other keys
    ("llama3-8b-instruct/poss3", "v5p:1x1x1", ONE),
    ("llama3-8b-instruct/poss3", "v6e:2x4", ["mesh.data=1", "mesh.fsdp=8"]),
    ("llama3-8b-instruct/eagle", "v5p:1x1x1", ONE),
    ("llama3-8b-instruct/poss1", "v5p:1x1x1", ONE),
    ("llama3.1-8b-instruct/eagle3", "v5p:1x1x1", ONE),
    ("llama3.1-8b-instruct/poss3_e3", "v5p:1x1x1", ONE),
    ("llama3.1-8b-instruct/poss134", "v5p:1x1x1", ONE),
    ("llama3.1-8b-instruct/poss3_e3", "v6e:2x4", ["mesh.data=1", "mesh.fsdp=8"]),
    ("llama2-13b-chat/poss1", "v5p:1x1x1", ONE),
    ("llama3-70b-instruct/poss3", "v5p:2x2x4", []),
]
HASS = "llama3-8b-instruct/hass"
DEPTHS = [(HASS, "v5p:1x1x1", [*ONE, f"specialists.depth={depth}"]) for depth in (2, 8)]
CHAINS = [  # one specialist, so that parameters are the same at every depth
    (
        "llama3.1-8b-instruct/eagle3",
        "v5p:1x1x1",
        [*ONE, f"specialists.depth={depth}", "objective.depth_weights=[]"],
    )
    for depth in (1, 4, 8)
]
LENGTHS = [
    (HASS, "v5p:1x1x1", [*ONE, "specialists.depth=2", f"data.sequence_length={length}"])
    for length in (1024, 4096)
]
ROWS = {"recipes": RECIPES, "depth": DEPTHS, "chains": CHAINS, "length": LENGTHS}


def measure(recipe: str, slice_name: str, overrides: list[str]) -> dict[str, Any]:
    """Compiles the step of one recipe."""
    config = load_config(TrainConfig, ROOT / "configs" / f"{recipe}.yaml", overrides)
    started = time.monotonic()
    mesh = mesh_for(config, slice_name)
    shape = ROOT / "configs" / "aot" / f"{SHAPES[recipe.split('/')[0]]}.yaml"
    target = load_config(AheadConfig, shape).model
    assert target is not None
    memory = compile_memory(plan_draft_step(task_of(config, target), config, jnp.bfloat16, mesh))
    return {
        "recipe": recipe,
        "slice": slice_name,
        "mesh": "x".join(str(size) for size in mesh.devices.shape),
        "depth": config.specialists.depth,
        "sequence_length": config.data.sequence_length,
        "batch_size": config.batch_size,
        "seconds": round(time.monotonic() - started, 1),
        **memory,
    }


def task_of(config: TrainConfig, target: LlamaConfig) -> DraftTask:
    """Describes the run of `train.main` for such a target."""
    wanted = config.specialists
    if not find_family(wanted.family or "eagle").is_trained_in_chains:
        return DraftTask(
            target, describe_draft(wanted, target, target.vocab_size), config.objective, config.step
        )
    vocabulary = tuple(range(EAGLE3_TOKENS))  # which ones does not matter
    draft = describe_draft(wanted, target, EAGLE3_TOKENS)
    return DraftTask(target, draft, config.objective, config.step, vocabulary=vocabulary)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, in GiB per chip."""
    head = ["recipe", "slice", "mesh", "depth", "T", "batch", "kept", "temporary", "total"]
    names = ("recipe", "slice", "mesh", "depth", "sequence_length", "batch_size")
    sizes = ("arguments", "temporaries", "total")
    cells = [
        [*(row[name] for name in names), *(f"{row[size] / GIB:.2f}" for size in sizes)]
        for row in rows
    ]
    return "\n".join(format_rows(head, cells))


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=ROWS, help="one part")
    parser.add_argument("--again", action="store_true", help="measure what is known, too")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "memory")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "report.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for name, rows in ROWS.items():
        for row in rows if args.only in (None, name) else []:
            key = " ".join((*row[:2], *row[2]))
            if args.again or key not in known:
                known[key] = measure(*row)
                path.write_text(json.dumps(known, indent=2) + "\n")
                print(table([known[key]]).splitlines()[-1], flush=True)
    parts = []
    for name, rows in ROWS.items():
        measured = [known.get(" ".join((*row[:2], *row[2]))) for row in rows]
        parts.append(f"## {name}\n\n{table([row for row in measured if row])}\n")
    title = "# Memory of a training step, GiB per chip, as the TPU compiler plans it\n"
    (args.output / "report.md").write_text("\n".join([title, *parts]))
    print(json.dumps(known))


if __name__ == "__main__":
    run_program(main)
