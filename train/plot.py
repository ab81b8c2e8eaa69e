r"""Compares training runs: a plot, and a table of their validation.

Needs folders of runs, finished or not; writes an image (matplotlib: pip install 'poss-jax[plots]'),
prints the table as Markdown and one JSON line at the end.

    poss plot runs/demo/eagle runs/demo/poss3 --output drift.png
    poss plot runs/demo/poss3 --table
"""

import importlib.util
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from poss_jax.config.paths import as_path, local_path, read_text, real_path
from poss_jax.config.reading import UserError, parse_yaml
from poss_jax.program.arguments import describe
from poss_jax.program.output import add_json, print_summary, show_rows
from poss_jax.program.running import Parser, run_program

_BY_DEPTH = {
    "validation_loss": "loss",
    "feature_loss": "feature",
    "probability_loss": "probability",
    "top_k_loss": "top-k",
    "agreement": "agreement",
    "feature_cosine": "cosine",
    "cumulative_acceptance": "accepted so far",
}


@dataclass(frozen=True)
class RunMetrics:
    """Logged metrics of a run."""

    name: str  # name of its folder
    losses: list[tuple[int, float]]  # step and loss of logged steps
    validation_losses: list[tuple[int, float]]  # likewise of validations
    lengths: list[tuple[int, float]]  # likewise, acceptance lengths; none for a target
    best: dict[str, Any]  # line of the validation with the highest score
    spans: list[int]  # positions that each specialist serves

    @property
    def specialists(self) -> list[int]:
        """The specialist of each validated depth; none for a target."""
        depth = len(self.best.get("agreement", ()))
        served = [index for index, span in enumerate(self.spans) for _ in range(span)]
        return served[:depth] + served[-1:] * (depth - len(served))


def read_run(folder: str) -> RunMetrics:
    """Reads the metrics of a run, which may still be running but has validated."""
    path = as_path(folder)
    try:
        config = parse_yaml(read_text(path / "config.yaml"))
        text = read_text(path / "metrics.jsonl")
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        validations = [line for line in lines if "validation_loss" in line]
        if not validations:
            raise UserError(f"{folder} has no validation yet; wait for one")
        return RunMetrics(
            name=real_path(path).name,
            losses=[(line["step"], line["loss"]) for line in lines if "loss" in line],
            validation_losses=[
                (line["step"], _mean(line["validation_loss"])) for line in validations
            ],
            lengths=[(line["step"], _score(line)) for line in validations if "agreement" in line],
            # On ties the newest, as the run itself chooses.
            best=max(reversed(validations), key=_score),
            spans=config["specialists"]["positions_per_specialist"],
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder} holds no metrics of a training run; give its folder") from error


def format_table(runs: list[RunMetrics]) -> str:
    """Formats the best validation of every run as a table, drafts by depth."""
    table, by_depth = [], []
    for run in runs:
        length = run.best.get("simulated_acceptance_length")
        cells = [f"{_mean(run.best['validation_loss']):.3f}", f"{length:.3f}" if length else ""]
        table.append([run.name, run.best["step"], *cells])
        metrics = [run.best.get(key) for key in _BY_DEPTH]  # not every family has a feature loss
        for depth, specialist in enumerate(run.specialists):
            cells = ["" if values is None else f"{values[depth]:.3f}" for values in metrics]
            by_depth.append([run.name, depth, specialist, *cells])
    lines = show_rows(["run", "step", "validation loss", "simulated acceptance length"], table)
    if by_depth:
        lines += ["", *show_rows(["run", "depth", "specialist", *_BY_DEPTH.values()], by_depth)]
    return "\n".join(lines)


def plot_runs(runs: list[RunMetrics], path: Path) -> None:
    """Draws losses and acceptance over steps; for drafts agreement and cosine over depths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drafts = [run for run in runs if run.specialists]
    depths = range(max((len(run.specialists) for run in drafts), default=0))
    size = 2 if drafts else 1
    figure, grid = pyplot.subplots(
        size, size, figsize=(5 * size, 3.5 * size), layout="constrained", squeeze=False
    )
    for index, run in enumerate(runs):
        color, points = f"C{index}", zip(*run.validation_losses, strict=True)
        grid[0, 0].plot(*zip(*run.losses, strict=True), color=color, alpha=0.5)
        grid[0, 0].plot(*points, "o-", color=color, label=run.name)
    grid[0, 0].set(xlabel="step", ylabel="loss (dots: validation)", yscale="log")
    for run in drafts:
        grid[0, 1].plot(*zip(*run.lengths, strict=True), "o-", label=run.name)
        for axes, key in zip(grid[1], ("agreement", "feature_cosine"), strict=True):
            if key in run.best:
                axes.plot(range(len(run.specialists)), run.best[key], "o-", label=run.name)
    if drafts:
        grid[0, 1].set(xlabel="step", ylabel="simulated acceptance length")
        grid[1, 0].set(xlabel="depth", ylabel="top-1 agreement with the target", xticks=depths)
        grid[1, 1].set(xlabel="depth", ylabel="cosine with the target's feature", xticks=depths)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UserError(f"cannot draw {path}: {error}; name a .png or .pdf") from error
    finally:
        pyplot.close(figure)


def _score(validation: dict[str, Any]) -> float:
    """The acceptance length or, of a target, the loss, so that the best validation has the most."""
    length = validation.get("simulated_acceptance_length")
    return -validation["validation_loss"] if length is None else length


def _mean(loss: float | list[float]) -> float:
    return sum(loss) / len(loss) if isinstance(loss, list) else loss


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, reads the runs, prints and draws."""
    parser = Parser(
        module="train.plot",
        description=describe(__doc__, shows_all=False),
        usage="%(prog)s RUN [RUN ...] [options]",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Folder of a training run.")
    parser.add_argument(
        "--output", metavar="FILE", help="Image to write. (default: training.png in the first run)"
    )
    parser.add_argument("--table", action="store_true", help="Print the table, draw nothing.")
    add_json(parser)
    args = parser.parse_args(arguments)
    if not args.table and importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "a plot needs matplotlib, which is not installed; pip install 'poss-jax[plots]', or "
            "print the table alone with --table"
        )
    runs = [read_run(folder) for folder in args.runs]
    if len({run.name for run in runs}) < len(runs):
        places = [real_path(folder) for folder in args.runs]
        names = [f"{folder.parent.name}/{folder.name}" for folder in places]
        runs = [replace(run, name=name) for name, run in zip(names, runs, strict=True)]
    print(format_table(runs))
    output = None
    if not args.table:
        output = local_path(args.output or f"{args.runs[0]}/training.png", "output")
        output = output if output.suffix else output.with_name(f"{output.name}.png")
        plot_runs(runs, output)
    print_summary({"runs": len(runs), "plot": output and str(output)})


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
