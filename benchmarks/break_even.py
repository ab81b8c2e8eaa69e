"""Prices n specialists: how much longer acceptance must get to pay for them, by the cost card.

Runs nothing: every number follows from shapes and device datasheets (`infer/bench/costs.py`). More
specialists make a round longer: each keeps its own keys and values of the committed text, and
projects a node's again where it takes over. The acceptance length must grow over EAGLE-2's by the
same factor before a token gets any faster. The table also has single layers with as many
parameters; every level of the draft reads all of them. A second table prices larger first
specialists in a chain, and what position 1 alone must gain for them. The last line is one JSON
object; --output keeps report.json, report.md and a plot.

    python -m benchmarks.break_even --output docs/results/break_even
    python -m benchmarks.break_even --context 16384 --tree 6/10/60
    python -m benchmarks.break_even --acceptance 0.9 0.8 0.75
"""

from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import TREE, make_parser, read_tree
from infer.aot.config import AheadConfig
from infer.bench.costs import DEVICES, Workload, cost_card, floors, stored_in
from infer.bench.report import show_report
from poss_jax.checkpoint.record import provenance
from poss_jax.config.models import DraftConfig, LlamaConfig, TreeConfig
from poss_jax.config.reading import load_config, shorten
from poss_jax.model.parameters import count_parameters
from poss_jax.program.arguments import at_least
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows

CONFIGS = Path(__file__).parent.parent / "configs" / "aot"
TARGETS = {"1B": "llama3.2-1b", "8B": "llama3-8b", "13B": "llama2-13b", "70B": "llama3-70b"}
SPANS = {
    "EAGLE-2": (1,),
    "PosS-3": (3, 3),
    "PosS-2": (2, 2, 2),
    "PosS-1": (1,) * 6,
    "PosS-1, kv shared": (1,) * 6,
    "PosS-1, first of 3 layers": (1,) * 6,
}
LAYERS = {"PosS-1, first of 3 layers": (3,)}
WIDE = {f"one layer wide as {name}": name for name in ("PosS-3", "PosS-1")}
DRAFTS = (*SPANS, *WIDE)
FIRST: dict[str, dict[str, Any]] = {
    "PosS-1": {},
    "first of 2 layers": {"layers_per_specialist": (2,)},
    "first of 3 layers": {"layers_per_specialist": (3,)},
    "first 4 times as wide": {"widths_per_specialist": (4,)},
    "MTP": {"family": "mtp"},
}
"""Drafts with a specialist per position, and what differs from PosS-1."""
DRAFTS_ON = ("h100", "v6e")
FIRST_ON = ("h100", "h200", "v6e")
SHOWN = (1, 8, 64)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
BYTES = 2.0  # bfloat16
ACCEPTANCE = (0.625, 0.608, 0.625, 0.642)
"""Share of tokens that PosS-1 for SmolLM2 accepts at each position, given all before."""
PAPER = 4.5
"""Per cent that the paper reports PosS to accept more than the best baseline (arXiv 2506.03566)."""


def measure(tree: TreeConfig, context: int) -> list[dict[str, Any]]:
    """Computes memory and round time of every draft, for every target, device and batch size."""
    rows = []
    for (size, config), device in product(TARGETS.items(), DRAFTS_ON):
        target = _read_target(config)
        for batch in BATCHES:
            rounds = {
                name: _describe(target, draft, tree, batch, context, device)
                for name, draft in drafts_for(target).items()
            }
            least = rounds["EAGLE-2"]["round_milliseconds"]
            rows += [
                {"target": size, "device": device, "batch": batch, "draft": name, **numbers}
                | {"break_even_percent": 100 * (numbers["round_milliseconds"] / least - 1)}
                for name, numbers in rounds.items()
            ]
    return rows


def _read_target(config: str) -> LlamaConfig:
    target = load_config(AheadConfig, CONFIGS / f"{config}.yaml").model
    assert target is not None
    return target


def price_first(acceptance: Sequence[float], context: int) -> list[dict[str, Any]]:
    """Computes what larger first specialists cost in a chain, and what they must gain.

    A round emits L = 1 + a_1 + a_1 a_2 + ... tokens. If only position 1 changes, L - 1 changes by
    the factor that a_1 does. So where rounds take r times as long, a_1 must grow by the factor
    (r L - 1) / (L - 1).

    Args:
      acceptance: a, by position.
      context: tokens of context.
    """
    tree = TreeConfig(depth=len(acceptance), top_k=1, total_tokens=len(acceptance) + 1)
    length, rows = 1 + np.cumprod(acceptance).sum(), []
    for (size, config), device, batch in product(TARGETS.items(), FIRST_ON, SHOWN):
        target = _read_target(config)
        rounds = {}
        for name, changed in FIRST.items():
            spans = (1,) * len(acceptance)
            plain = DraftConfig(
                layer=replace(target, num_layers=1),
                positions_per_specialist=spans,
                trained_depth=len(spans),
            )
            draft = replace(plain, **changed)
            times = _describe(target, draft, tree, batch, context, device)
            rounds[name] = times["round_milliseconds"]
        for name, time in rounds.items():
            longer = time / rounds["PosS-1"] - 1
            gain = acceptance[0] * longer * length / (length - 1)
            rows.append(
                {"target": size, "device": device, "batch": batch, "draft": name}
                | {"round_milliseconds": time, "longer_percent": 100 * longer}
                | {"break_even_points": 100 * float(gain)}
            )
    return rows


def drafts_for(target: LlamaConfig) -> dict[str, DraftConfig]:
    """Shapes of the drafts that are compared, each for six positions."""
    layer = replace(target, num_layers=1)
    drafts = {
        name: DraftConfig(
            layer=layer,
            positions_per_specialist=spans,
            layers_per_specialist=LAYERS.get(name, (1,)),
            trained_depth=6,
            kv="shared" if "shared" in name else "per_specialist",
        )
        for name, spans in SPANS.items()
    }
    one = drafts["EAGLE-2"]
    for name, other in WIDE.items():
        missing = count_parameters(drafts[other]) - count_parameters(one)
        neurons = round(missing / (3 * layer.hidden_size))  # a row of gate and up, a column of down
        wide = replace(layer, intermediate_size=layer.intermediate_size + neurons)
        drafts[name] = replace(one, layer=wide)
    return drafts


def _describe(
    target: LlamaConfig, draft: DraftConfig, tree: TreeConfig, batch: int, context: int, device: str
) -> dict[str, float]:
    work = Workload(target=target, draft=draft, tree=tree, batch=batch, context=context)
    times = floors(cost_card(stored_in(work, BYTES), prompt_tokens=1), DEVICES[device])
    row = 2 * draft.layer.num_kv_heads * draft.layer.head_dim * BYTES
    return {
        "draft_gigabytes": count_parameters(draft) * BYTES / 1e9,
        "cache_bytes_per_token": draft.num_streams(draft.trained_depth) * row,
        "draft_milliseconds": times["draft"],
        "round_milliseconds": times["round"],
    }


def format_report(rows: Sequence[dict[str, Any]], tree: TreeConfig, context: int) -> str:
    """Writes the report in Markdown."""
    lines = [
        "# What a specialist must earn",
        "",
        f"Floors of the cost card in bfloat16, tree {tree.name}, {context:,} tokens of "
        "context per sequence; a target that one device cannot hold is cut over several, which "
        "divides all times alike. Break-even: how much longer than EAGLE-2's the acceptance "
        "must be.",
        "",
        "![break-even over batch sizes](break_even.svg)",
        "",
    ]
    table = []
    by_case = {(r["target"], r["device"], r["draft"], r["batch"]): r for r in rows}
    for target, device, draft in product(TARGETS, DRAFTS_ON, DRAFTS):
        few = [by_case[target, device, draft, batch] for batch in SHOWN]
        cells = (
            f"{few[0]['draft_gigabytes']:.2f}",
            f"{few[0]['cache_bytes_per_token']:,.0f}",
            f"{few[0]['round_milliseconds']:.2f}",
        )
        shares = (f"{row['break_even_percent']:.2f} %" for row in few)
        table.append([target, device, draft, *cells, *shares])
    head = ["target", "device", "draft", "draft GB", "draft K/V bytes per token"]
    head += ["round ms, batch 1", "break-even, batch 1", "batch 8", "batch 64"]
    return "\n".join([*lines, *format_rows(head, table)])


def format_first(rows: Sequence[dict[str, Any]], acceptance: Sequence[float]) -> str:
    """Writes the prices of larger first specialists in Markdown."""
    accepted = ", ".join(f"{share:.1%}" for share in acceptance)
    lines = [
        "",
        "## A larger first specialist",
        "",
        f"A chain of {len(acceptance)} with a specialist per position; PosS-1 accepts {accepted}. "
        "How much longer a round is than PosS-1's, and by how many points position 1 must accept "
        "more to pay for it.",
        "",
    ]
    by_case = {(r["target"], r["device"], r["draft"], r["batch"]): r for r in rows}
    table = []
    for case in product(TARGETS, FIRST_ON, list(FIRST)[1:]):
        few = [by_case[*case, batch] for batch in SHOWN]
        cells = [f"{r['longer_percent']:.2f} % / {r['break_even_points']:.1f}" for r in few]
        table.append([*case, f"{few[0]['round_milliseconds']:.2f}", *cells])
    head = ["target", "device", "draft", "round ms, batch 1", "longer / points, batch 1"]
    head += ["batch 8", "batch 64"]
    return "\n".join([*lines, *format_rows(head, table)])


def _with_a_price(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Drafts whose rounds take longer than EAGLE-2's."""
    return [
        draft
        for draft in DRAFTS
        if any(r["break_even_percent"] for r in rows if r["draft"] == draft)
    ]


def plot(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draws the break-even over batch sizes, a panel per target."""
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "poss_jax"}):
        figure, panels = pyplot.subplots(
            1, len(TARGETS), figsize=(16, 3.6), sharey=True, layout="constrained"
        )
        for panel, target in zip(panels, TARGETS, strict=True):
            for number, draft in enumerate(_with_a_price(rows)):
                for device, style in zip(DRAFTS_ON, ("-", "--"), strict=True):
                    few = [
                        row["break_even_percent"]
                        for row in rows
                        if (row["target"], row["device"], row["draft"]) == (target, device, draft)
                    ]
                    label = f"{draft}, {device}"
                    panel.plot(BATCHES, few, style, color=f"C{number}", label=label)
            panel.axhline(PAPER, color="grey", linewidth=1)
            panel.set(title=target, xlabel="batch size", xscale="log", yscale="log")
            panel.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("longer acceptance needed, %")
        panels[0].annotate(f"gain in the paper, {PAPER} %", (1, PAPER), va="bottom", fontsize=8)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
        figure.savefig(folder / "break_even.svg", metadata={"Date": None})
        pyplot.close(figure)


def read_share(text: str) -> float:
    """Reads a share of tokens."""
    with suppress(ValueError):
        if 0 < float(text) <= 1:
            return float(text)
    raise ArgumentTypeError(f"want a number above 0 and at most 1, got {shorten(text)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, computes, prints."""
    parser = make_parser(__doc__)
    parser.add_argument("--tree", type=read_tree, default=TreeConfig(), metavar=TREE)
    parser.add_argument("--context", type=at_least(1), default=2048, metavar="N")
    parser.add_argument("--acceptance", type=read_share, nargs="+", default=ACCEPTANCE,
                        metavar="A", help="share accepted at each position of a chain")  # fmt: skip
    args = parser.parse_args(arguments)
    rows, first = measure(args.tree, args.context), price_first(args.acceptance, args.context)
    about = {"tree": asdict(args.tree), "context": args.context, "provenance": provenance()}
    text = (
        format_report(rows, args.tree, args.context) + "\n" + format_first(first, args.acceptance)
    )
    report = {**about, "rows": rows, "acceptance": list(args.acceptance), "first": first}
    show_report(report, text, args.output, plot=partial(plot, rows))


if __name__ == "__main__":
    run_program(main)
