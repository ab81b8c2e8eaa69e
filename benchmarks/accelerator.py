"""All that an 8B pair does on this device, against floors and against the committed report.

Random bfloat16 weights in the shape of Llama-3.1-8B are made on the device, with PosS-3 on EAGLE-2
and on EAGLE-3; nothing is read. Rounds accept the numbers of tokens recorded with a trained draft.

    methods   rounds of every draft and tree; at growing contexts in a cache of large capacity; in a
              batch; with quantised targets
    prefill   prompts
    server    clients that ask again and again, without a draft and with trees by load
    training  a step of each draft

Every row is printed and written as soon as it is measured, with its ratio to the row of the same
name in --baseline. What fails is named at the end, and the rest is measured; after --minutes
nothing more is begun. The last line is one JSON object. All sizes are options, and --tiny runs
everything on a CPU.

    python -m benchmarks.accelerator --output runs/accelerator
    python -m benchmarks.accelerator --only server --clients 1 4 16 64 --minutes 20
    python -m benchmarks.accelerator --only methods --methods poss3 --phases
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.options import TREE, add_numbers, make_parser, read_tree
from benchmarks.random_pair import (
    FAMILIES,
    PLAIN,
    accepted_by,
    at_length,
    draft_shape,
    forced_rounds,
    make_engines,
    random_like,
    random_state,
)
from benchmarks.random_server import measure_load, serving
from infer.bench.costs import Device, cost_card, describe_workload, floors
from infer.bench.phases import measure_card, start
from infer.bench.rates import measure_roofline
from infer.bench.report import format_card, show_report, write_report
from poss_jax.checkpoint.record import provenance
from poss_jax.config.models import LlamaConfig, Quantisation, RopeConfig, TreeConfig
from poss_jax.config.reading import one_line
from poss_jax.config.training import ObjectiveConfig, OptimizerConfig, StepConfig
from poss_jax.engine.device import default_dtype
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.trees import ACCELERATOR_TREES
from poss_jax.learn.state import init_state, make_optimizer
from poss_jax.learn.step import make_draft_step
from poss_jax.learn.task import DraftTask
from poss_jax.model.documents import TrainBatch
from poss_jax.model.families import init_draft
from poss_jax.model.quantise import KINDS
from poss_jax.model.target import init_target, stack_layers
from poss_jax.program.arguments import at_least
from poss_jax.program.running import run_program
from poss_jax.shapes import Params

COMMITTED = Path(__file__).parent.parent / "docs" / "results"
PARTS = {
    "methods": (
        "round_milliseconds",
        "{round_milliseconds:.3f} ms per round (floor {round_floor_milliseconds:.3f}, "
        "{floor_to_round:.0%}), {token_milliseconds:.3f} ms per token, {tokens_per_second:.0f} "
        "tokens/s",
    ),
    "prefill": (
        "milliseconds",
        "prefill {milliseconds:.2f} ms (floor {floor_milliseconds:.2f}, {floor_to_prefill:.0%})",
    ),
    "server": (
        "token_milliseconds",
        "server {tokens_per_second:.0f} tokens/s; p50, p99 of the first token "
        "{first_token_milliseconds[p50]:.1f}, {first_token_milliseconds[p99]:.1f} ms, of each "
        "further one {per_token_milliseconds[p50]:.1f}, {per_token_milliseconds[p99]:.1f} ms",
    ),
    "training": ("step_seconds", "training {step_seconds:.3f} s per step"),
}
"""Parts of the report: what their rows are compared by, and a row as a line."""
TINY: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 300},
    **{"layers": 4, "heads": 2, "kv_heads": 1, "draft_vocabulary": 100, "train_tokens": 32},
    **{"contexts": [8, 16], "batch_sizes": [2], "clients": [1, 2], "rounds": 4, "repeats": 1},
    **{"seconds": 1, "new_tokens": 8, "trees": [read_tree("2/2/5"), read_tree("2/1/3")]},
}
Rows = Iterator[tuple[str, dict[str, Any]]]
"""Names of rows, and what was measured."""


# --------------------------------------------------------------------------------------------------
# Decoding


def time_rounds(
    engine: Engine,
    device: Device,
    contexts: Mapping[str, int],
    args: argparse.Namespace,
    *,
    batch_size: int = 1,
) -> Rows:
    """Times many rounds in one program, in a cache for the longest context.

    Args:
      engine: target, and perhaps a draft.
      device: its rates.
      contexts: committed tokens by the name of their row.
      args: `rounds`, `repeats` and `phases`.
      batch_size: texts decoded together.
    """
    prompt = PreparedPrompt([0] * max(contexts.values()), 8 * args.rounds)
    config, request = engine.request([prompt] * batch_size, batch_size=batch_size)
    state = random_state(engine.weights, config, request)
    accepted = np.resize(accepted_by(config), args.rounds)
    for name, context in contexts.items():
        seconds = []
        for _ in range(args.repeats + 1):
            state = jax.block_until_ready(at_length(state, context))
            began = time.perf_counter()
            state = forced_rounds(engine.weights, config, request, state, args.rounds)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - began)
        middle = context + round((args.rounds + accepted.sum()) / 2)
        work = describe_workload(engine.weights, config, batch=batch_size, context=middle)
        floor = floors(cost_card(work, prompt_tokens=context), device)["round"]
        row = describe_rounds(seconds, accepted, floor, batch_size)
        if args.phases:
            row |= measure_card(engine, prompt, device, num_calls=args.repeats)
        yield name, row


def describe_rounds(
    seconds: Sequence[float], accepted: np.ndarray, floor: float, batch_size: int
) -> dict[str, Any]:
    """Milliseconds per round and per token of a text; the first run compiled."""
    per_round = 1000 * float(np.median(seconds[1:])) / len(accepted)
    num_new = 1 + float(accepted.mean())
    return {
        "compile_seconds": seconds[0],
        "round_milliseconds": per_round,
        "round_floor_milliseconds": floor,
        "floor_to_round": floor / per_round,
        "tokens_per_round": num_new,
        "token_milliseconds": per_round / num_new,
        "tokens_per_second": 1000 * batch_size * num_new / per_round,
    }


def time_prefill(
    name: str, engine: Engine, device: Device, context: int, args: argparse.Namespace
) -> Rows:
    """Times reading one prompt."""
    config, request = engine.request([PreparedPrompt([0] * context, 8)])
    seconds = []
    for _ in range(args.repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(start(engine.weights, config, request))
        seconds.append(time.perf_counter() - began)
    work = describe_workload(engine.weights, config, batch=1, context=context)
    floor = floors(cost_card(work, prompt_tokens=context), device)["prefill"]
    taken = 1000 * float(np.median(seconds[1:]))
    row = {"milliseconds": taken, "floor_milliseconds": floor, "floor_to_prefill": floor / taken}
    yield name, row | {"compile_seconds": seconds[0]}


def time_quantised(
    llama: LlamaConfig, kind: Quantisation, device: Device, args: argparse.Namespace
) -> Rows:
    """Times rounds of a quantised target, alone and with one draft."""
    engines = make_engines(llama, args.methods[:2], args.draft_vocabulary, kind)
    for name, engine in list_methods(engines, args.trees[:1]).items():
        yield from time_rounds(engine, device, {f"{name}, {kind}": args.contexts[0]}, args)


def list_methods(engines: Mapping[str, Engine], trees: Sequence[TreeConfig]) -> dict[str, Engine]:
    """Decoding without a draft, and every draft with every tree."""
    methods = {}
    for method, engine in engines.items():
        for tree in trees[:1] if method == PLAIN else trees:
            methods[method if method == PLAIN else f"{method} {tree.name}"] = engine.with_tree(tree)
    return methods


def time_server(method: str, engine: Engine, args: argparse.Namespace) -> Rows:
    """Serves to some numbers of clients; a draft's tree follows the number of texts."""
    num_prompt, num_new = args.contexts[0], args.new_tokens
    load = {"seconds": args.seconds, "num_prompt": num_prompt, "num_new": num_new}
    load["vocab_size"] = engine.target_config.vocab_size
    with serving(
        engine.with_tree(ACCELERATOR_TREES), max(args.clients), num_prompt + num_new
    ) as url:
        for num_clients in args.clients:
            row = measure_load(url, num_clients=num_clients, **load)
            yield f"{method}, {num_clients} clients", row


# --------------------------------------------------------------------------------------------------
# Training


def time_training(family: str, llama: LlamaConfig, args: argparse.Namespace) -> Rows:
    """Times a training step of one draft, the frozen target inside it."""
    draft = draft_shape(family, llama, args.draft_vocabulary)
    vocabulary = None if draft.head_size is None else tuple(range(draft.head_size))
    task = DraftTask(llama, draft, ObjectiveConfig(), StepConfig(), vocabulary=vocabulary)

    def stacked(init: Callable[[Any], Params], name: str) -> Callable[[Any], Params]:
        return lambda key: (params := init(key)) | {name: stack_layers(params[name])}

    target = random_like(stacked(partial(init_target, llama), "layers"), 0, default_dtype())
    params = random_like(stacked(partial(init_draft, draft), "specialists"), 1, jnp.float32)
    optimizer = make_optimizer(OptimizerConfig(), 1000)
    state = init_state(params, optimizer)
    shape = args.train_batch, args.train_tokens
    tokens = jax.random.randint(jax.random.key(2), shape, 0, llama.vocab_size)
    ones = jnp.ones_like(tokens)
    batch = TrainBatch(tokens=tokens, documents=ones, loss_mask=ones.astype(bool))
    step, seconds = make_draft_step(task, optimizer), []
    for _ in range(args.repeats + 1):
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, target, batch, jax.random.key(3)))
        seconds.append(time.perf_counter() - began)
    median = float(np.median(seconds[1:]))
    row = {"compile_seconds": seconds[0], "step_seconds": median}
    row |= {"tokens_per_second": tokens.size / median, "loss": float(metrics["loss"])}
    yield family, row


# --------------------------------------------------------------------------------------------------
# The report


def list_jobs(
    llama: LlamaConfig, device: Device, args: argparse.Namespace
) -> Iterator[tuple[str, Rows]]:
    """Everything to measure, by part, the most telling first."""
    engines = make_engines(llama, args.methods, args.draft_vocabulary)
    methods, first_tree = list_methods(engines, args.trees), list_methods(engines, args.trees[:1])
    first, *longer = args.contexts
    for name, engine in methods.items():
        yield "methods", time_rounds(engine, device, {name: first}, args)
    for name, engine in first_tree.items() if longer else ():
        rows = {f"{name}, {context} of {longer[-1]}": context for context in args.contexts}
        yield "methods", time_rounds(engine, device, rows, args)
    for name, engine in first_tree.items():
        for context in args.contexts[:2]:
            yield "prefill", time_prefill(f"{name}, {context}", engine, device, context, args)
    for method, engine in engines.items():
        yield "server", time_server(method, engine, args)
    for name, engine in first_tree.items():
        for size in args.batch_sizes:
            row = {f"{name}, batch {size}": first}
            yield "methods", time_rounds(engine, device, row, args, batch_size=size)
    del engines, methods, first_tree, engine
    for kind in args.quantise:
        yield "methods", time_quantised(llama, kind, device, args)
    for family in FAMILIES:
        if family in args.methods:
            yield "training", time_training(family, llama, args)


def describe(section: str, name: str, row: dict[str, Any], baseline: float | None) -> str:
    """A row as a line."""
    key, form = PARTS[section]
    text = form.format(**row)
    if "compile_seconds" in row:
        text += f", compiled in {row['compile_seconds']:.0f} s"
    if baseline is not None:
        change = row[key] / baseline
        text += f"; {change:.2f} x the time of --baseline"
        text += "" if 0.97 < change < 1.03 else " (better)" if change < 1 else " (WORSE)"
    return f"{name}: {text}"


def read_baselines(files: Sequence[Path], device: str) -> dict[str, dict[str, float]]:
    """What rows of earlier reports on the same kind of device are compared by, by part and name."""
    baselines: dict[str, dict[str, float]] = {section: {} for section in PARTS}
    for file in files:
        report = json.loads(file.read_text())
        if report["roofline"]["device"]["name"] == device:
            for section, (key, _) in PARTS.items():
                rows = report.get(section, {})
                baselines[section] |= {name: row[key] for name, row in rows.items()}
    return baselines


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures and prints row after row, writes."""
    args = _parse(arguments)
    llama, lines, began = _shape(args), [], time.monotonic()
    roofline = measure_roofline()
    device, baselines = roofline.device, read_baselines(args.baseline, roofline.device.name)
    options = {name: str(value) for name, value in vars(args).items()}
    report: dict[str, Any] = {"roofline": asdict(roofline), "options": options, "failed": []}
    report |= {"provenance": provenance()} | {section: {} for section in PARTS}

    def table() -> str:
        timed = {name: row for name, row in report["methods"].items() if "costs" in row}
        card = "\n\n" + format_card(report | {"methods": timed}) if timed else ""
        return "\n".join(f"- {line}" for line in lines) + card

    def show(line: str) -> None:
        lines.append(line)
        print(f"{line}  [{time.monotonic() - began:.0f} s]", flush=True)
        if args.output is not None:
            write_report(report, table(), args.output)

    show(f"{device.name}: {device.bytes_per_second / 1e9:.0f} GB/s, "
         f"{device.flops_per_second / 1e12:.2f} TFLOP/s")  # fmt: skip
    for section, rows in list_jobs(llama, device, args):
        if section not in args.only:
            continue
        if time.monotonic() - began > 60 * args.minutes:
            show(f"{args.minutes} minutes are over; --minutes and --only measure the rest")
            break
        try:
            for name, row in rows:
                report[section][name] = row
                show(describe(section, name, row, baselines[section].get(name)))
        except Exception as error:  # such as too little memory for this part
            report["failed"].append(f"{section}: {type(error).__name__}: {one_line(error)}")
            show(f"failed: {report['failed'][-1]}")
    show_report(report, table(), args.output)
    if report["failed"]:
        raise SystemExit(1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=at_least(1), default=8, metavar="N")
    parser.add_argument("--phases", action="store_true", help="time the phases of rounds, too")
    parser.add_argument("--tiny", action="store_true", help="a pair of a few thousand weights")
    methods = PLAIN, *FAMILIES
    parser.add_argument("--methods", nargs="+", choices=methods, default=list(methods))
    parser.add_argument("--quantise", nargs="*", choices=KINDS, default=list(KINDS))
    committed = [COMMITTED / name / "report.json" for name in ("accelerator", "accelerator_e3")]
    parser.add_argument("--baseline", nargs="*", type=Path, metavar="FILE", default=committed)
    trees = [read_tree("6/10/60"), read_tree("5/1/6")]
    parser.add_argument("--trees", nargs="+", type=read_tree, default=trees, metavar=TREE)
    for name, default in {
        "contexts": [512, 4096, 16384], "batch-sizes": [8], "clients": [1, 16, 64],
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=at_least(1), nargs="+", default=default, metavar="N")
    sizes = {
        "hidden-size": 4096,
        "intermediate-size": 14336,
        "layers": 32,
        "heads": 32,
        "kv-heads": 8,
        "head-dim": 128,
        "vocab-size": 128256,
        "draft-vocabulary": 32000,
        "rounds": 32,
        "repeats": 3,
        "seconds": 8,
        "new-tokens": 128,
        "train-batch": 1,
        "train-tokens": 2048,
    }
    add_numbers(parser, sizes)
    args = parser.parse_args(arguments)
    if args.tiny:
        parser.set_defaults(**TINY)
        args = parser.parse_args(arguments)
    args.contexts.sort()
    return args


def _shape(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=131072,
        rope=RopeConfig(theta=5e5, type="llama3", factor=8.0),
    )


if __name__ == "__main__":
    run_program(main)
