"""Decoding of Llama models on TPU slices and GPUs, as their compilers plan it.

Runs `infer.aot` once per row, one row after the other, each in a new process. Needs libtpu for the
TPU rows and jax[cuda13] for the GPU rows, but no accelerator and no weights. Writes
docs/results/aot/report.md and report.json. A row takes minutes; rows that report.json already has
are skipped.

    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python -m benchmarks.aot
    JAX_PLATFORMS=cpu python -m benchmarks.aot --only "llama3-8b h100"
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poss_jax.config.paths import child_python
from poss_jax.program.running import Parser, run_program
from poss_jax.program.tables import format_rows

ROOT = Path(__file__).parent.parent
SHORT = ("step", "round")  # programs
ALL = ("prefill", *SHORT, "rounds")
ROWS: list[tuple[str, str, list[str], tuple[str, ...]]] = [  # config, device, changes, programs
    ("llama3-8b", "v6e:1x1", [], ALL),
    ("llama3-8b", "h100", [], ALL),
    ("llama3-8b", "v5e:2x4", [], ALL),
    ("llama3-70b", "v5p:2x2x2", [], SHORT),
    ("llama3-8b", "v6e:1x1", ["batch_size=8"], SHORT),
    ("llama3-8b", "v6e:1x1", ["context=8192", "max_new_tokens=1024"], ("prefill", *SHORT)),
    ("llama3-8b_e3", "v6e:1x1", [], SHORT),
    ("llama3-8b_e3", "h100", [], SHORT),
    ("llama3-8b", "v5p:1x1x1", [], SHORT),
    ("llama2-13b", "v5p:1x1x1", [], SHORT),
    ("llama2-13b", "h100", [], SHORT),
    ("llama3-8b", "h200", [], SHORT),
    ("llama3-70b_e3", "v5p:2x2x2", [], SHORT),
    ("llama3-8b_e3", "v5e:2x4", [], SHORT),
    ("llama2-13b_e3", "v5p:1x1x1", [], SHORT),
    ("llama3-70b", "h200", [], SHORT),
]
COLUMNS = (
    *("models", "device", "batch", "context", "program", "compile CPU s", "GiB", "of", "GB moved"),
    *("GB floor", "est ms", "floor ms", "est/floor", "kernels", "relayouts MB", "collectives MB"),
)


def measure(config: str, device: str, changes: list[str], program: str) -> dict[str, Any]:
    """Compiles one program in a new process: libtpu serves one at a time."""
    kind = "--topology" if ":" in device else "--gpu"
    words = ["-m", "infer.aot", "--config", f"configs/aot/{config}.yaml", kind, device]
    words += [*changes, f"programs=[{program}]"]
    command, environment = child_python(*words)
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise SystemExit(run.returncode)
    report = json.loads(run.stdout.splitlines()[-1])
    report["provenance"]["command"] = ["python", *words]  # without folders of this machine
    return report


def cells_of(name: str, program: str, report: dict[str, Any]) -> list[Any]:
    """Cells of a row of the table."""
    found, config = report["programs"][program], report["config"]
    time, floor = found.get("estimated_ms"), found["floor_ms"]
    memory = found["memory"]
    cells = [name, report["device"], config["batch_size"], config["context"], program]
    cells += [
        f"{found.get('compile_cpu_seconds', found['compile_seconds']):.0f}",
        f"{memory['total'] / 2**30:.2f}",
    ]
    cells += [f"{memory['available'] / 2**30:.0f}", f"{found['moved_bytes'] / 1e9:.2f}"]
    cells += [f"{found['floor_bytes'] / 1e9:.2f}", "-" if time is None else f"{time:.2f}"]
    cells += [f"{floor:.2f}", "-" if time is None else f"{time / floor:.2f}", found["kernels"]]
    return cells + [f"{found[key]['bytes'] / 1e6:.1f}" for key in ("relayouts", "collectives")]


def list_rows() -> Iterator[tuple[str, str, list[str], str]]:
    """Config, device, changes and program of every row."""
    for *row, programs in ROWS:
        yield from ((*row, program) for program in programs)


def key_of(config: str, device: str, changes: list[str], program: str) -> str:
    return " ".join((config, device, *changes, program))


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="rows that begin like this, such as 'llama3-8b h100'")
    parser.add_argument("--again", action="store_true", help="compile what is known, too")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "aot")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "report.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for row in list_rows():
        key = key_of(*row)
        if key.startswith(args.only or "") and (args.again or key not in known):
            report = measure(*row)
            known = json.loads(path.read_text()) if path.exists() else {}
            known[key] = report
            path.write_text(json.dumps(known, indent=1) + "\n")
            write_table(known, args.output)
    write_table(known, args.output)


def write_table(known: dict[str, Any], folder: Path) -> None:
    """Writes all rows as Markdown."""
    rows = [(row, known.get(key_of(*row))) for row in list_rows()]
    table = format_rows(COLUMNS, [cells_of(row[0], row[-1], one) for row, one in rows if one])
    title = "# Decoding on devices that were not there, per device, as their compilers plan it\n"
    (folder / "report.md").write_text("\n".join([title, *table]) + "\n")


if __name__ == "__main__":
    run_program(main)
