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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
OTHER: dict[str, dict[str, Any]] = {
    "PosS-1, kv shared": {"kv": "shared"},
    "PosS-1, first of 3 layers": {"layers_per_specialist": (3,)},
}
WIDE = {f"one layer wide as {name}": name for name in ("PosS-3", "PosS-1")}
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
    return [
        row | {"break_even_percent": row["longer_percent"]}
        for row in _compare_rounds(drafts_for, DRAFTS_ON, BATCHES, tree, context)
    ]


def drafts_for(target: LlamaConfig) -> dict[str, DraftConfig]:
    """Shapes of the drafts that are compared, each for six positions."""
    drafts = {
        name: _shape(target, spans, 6, **OTHER.get(name, {})) for name, spans in SPANS.items()
    }
    one = drafts["EAGLE-2"]
    for name, other in WIDE.items():
        missing = count_parameters(drafts[other]) - count_parameters(one)
        # A neuron is a row of gate, one of up, and a column of down.
        neurons = round(missing / (3 * target.hidden_size))
        wide = replace(one.layer, intermediate_size=target.intermediate_size + neurons)
        drafts[name] = replace(one, layer=wide)
    return drafts


def price_first(acceptance: Sequence[float], context: int) -> list[dict[str, Any]]:
    """Computes what larger first specialists cost in a chain, and what they must gain.

    A round emits L = 1 + a_1 + a_1 a_2 + ... tokens. If only position 1 changes, L - 1 changes by
    the factor that a_1 does. So where rounds take r times as long, a_1 must grow by the factor
    (r L - 1) / (L - 1).

    Args:
      acceptance: a, by position.
      context: tokens of context.
    """
    depth = len(acceptance)
    tree = TreeConfig(depth=depth, top_k=1, total_tokens=depth + 1)

    def drafts_of(target: LlamaConfig) -> dict[str, DraftConfig]:
        return {
            name: _shape(target, (1,) * depth, depth, **changed) for name, changed in FIRST.items()
        }

    length = float(1 + np.cumprod(acceptance).sum())
    points = acceptance[0] * length / (length - 1)  # for every per cent of time
    return [
        row | {"break_even_points": row["longer_percent"] * points}
        for row in _compare_rounds(drafts_of, FIRST_ON, SHOWN, tree, context)
    ]


def _shape(target: LlamaConfig, spans: tuple[int, ...], depth: int, **fields: Any) -> DraftConfig:
    layer = replace(target, num_layers=1)
    return DraftConfig(layer=layer, positions_per_specialist=spans, trained_depth=depth, **fields)


def _compare_rounds(
    drafts_of: Callable[[LlamaConfig], dict[str, DraftConfig]],
    devices: Sequence[str],
    batches: Sequence[int],
    tree: TreeConfig,
    context: int,
) -> Iterator[dict[str, Any]]:
    """Yields the price of every draft; rounds are compared with the first draft's."""
    for (size, config), device in product(TARGETS.items(), devices):
        target = load_config(AheadConfig, CONFIGS / f"{config}.yaml").model
        assert target is not None
        drafts = drafts_of(target)
        for batch in batches:
            work = Workload(target=target, tree=tree, batch=batch, context=context)
            prices = {name: _price(work, draft, device) for name, draft in drafts.items()}
            least = next(iter(prices.values()))["round_milliseconds"]
            for name, price in prices.items():
                longer = 100 * (price["round_milliseconds"] / least - 1)
                about = {"target": size, "device": device, "batch": batch, "draft": name}
                yield about | price | {"longer_percent": longer}


def _price(work: Workload, draft: DraftConfig, device: str) -> dict[str, float]:
    work = stored_in(replace(work, draft=draft), BYTES)
    times = floors(cost_card(work, prompt_tokens=1), DEVICES[device])
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
    head = ["target", "device", "draft", "draft GB", "draft K/V bytes per token"]
    head += ["round ms, batch 1", "break-even, batch 1", "batch 8", "batch 64"]
    table = []
    for case, few in _by_case(rows).items():
        cells = [f"{few[0]['draft_gigabytes']:.2f}", f"{few[0]['cache_bytes_per_token']:,.0f}"]
        cells += [f"{few[0]['round_milliseconds']:.2f}"]
        table.append([*case, *cells, *(f"{row['break_even_percent']:.2f} %" for row in few)])
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
    head = ["target", "device", "draft", "round ms, batch 1", "longer / points, batch 1"]
    table = []
    for case, few in _by_case([row for row in rows if row["draft"] != "PosS-1"]).items():
        prices = [f"{r['longer_percent']:.2f} % / {r['break_even_points']:.1f}" for r in few]
        table.append([*case, f"{few[0]['round_milliseconds']:.2f}", *prices])
    return "\n".join([*lines, *format_rows([*head, "batch 8", "batch 64"], table)])


def _by_case(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Rows at the shown batch sizes, by target, device and draft."""
    found = defaultdict(list)
    for row in rows:
        if row["batch"] in SHOWN:
            found[row["target"], row["device"], row["draft"]].append(row)
    return found


def plot(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draws the break-even over batch sizes, a panel per target."""
    from matplotlib import pyplot

    priced = dict.fromkeys(row["draft"] for row in rows if row["break_even_percent"])
    with pyplot.rc_context({"svg.hashsalt": "poss_jax"}):
        figure, panels = pyplot.subplots(
            1, len(TARGETS), figsize=(16, 3.6), sharey=True, layout="constrained"
        )
        for panel, target in zip(panels, TARGETS, strict=True):
            for number, draft in enumerate(priced):
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
    tables = format_report(rows, args.tree, args.context), format_first(first, args.acceptance)
    report = {"tree": asdict(args.tree), "context": args.context, "provenance": provenance()}
    report |= {"rows": rows, "acceptance": list(args.acceptance), "first": first}
    show_report(report, "\n".join(tables), args.output, plot=partial(plot, rows))


if __name__ == "__main__":
    run_program(main)
