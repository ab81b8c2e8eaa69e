"""All that an 8B pair does on this device, against floors.

Random bfloat16 weights in the shape of Llama-3.1-8B are made on the device, with PosS-3 on EAGLE-2
and on EAGLE-3; nothing is read. Rounds accept the numbers of tokens recorded with a trained draft.

    methods   rounds of every draft and tree at some lengths; 512/8192: 512 tokens in a cache for
              8,192
    prefill   prompts of these lengths
    server    clients that ask again and again, without a draft and with trees by load, or with
              --fixed-tree the first tree alone
    training  a step of each draft

Every row is printed and written as soon as it is measured; rows that the report in --output holds
already, of the same options and device, are not measured again. The last line is one JSON object.
All sizes are options, and --tiny runs everything on a CPU. `benchmarks.device` measures all.

    python -m benchmarks.accelerator --output runs/accelerator
    python -m benchmarks.accelerator --only methods --contexts 512/8192 --trees 6/10/60 5/1/6
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.options import TREE, add_numbers, make_parser, read_tree
from benchmarks.random_pair import (
    FAMILIES,
    PLAIN,
    accepted_by,
    ask_all,
    at_length,
    draft_shape,
    forced_rounds,
    make_engines,
    random_like,
    random_state,
    serving,
)
from infer.bench.costs import Device, cost_card, describe_workload, floors
from infer.bench.rates import find_roofline
from infer.bench.report import show_report, write_report
from poss_jax.checkpoint.record import provenance
from poss_jax.config.models import LlamaConfig, RopeConfig, TreeConfig
from poss_jax.config.training import ObjectiveConfig, OptimizerConfig, StepConfig
from poss_jax.engine.batch import FixedBatch
from poss_jax.engine.device import default_dtype
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.trees import ACCELERATOR_TREES
from poss_jax.learn.step import init_state, make_draft_step, make_optimizer
from poss_jax.learn.task import DraftTask
from poss_jax.model.documents import TrainBatch
from poss_jax.model.families import init_draft
from poss_jax.model.quantise import KINDS
from poss_jax.model.target import init_target, stack_layers
from poss_jax.program.arguments import at_least
from poss_jax.program.running import run_program
from poss_jax.shapes import Params

PARTS = {
    "methods": "{round_milliseconds:.3f} ms per round (floor {round_floor_milliseconds:.3f}, "
    "{floor_to_round:.0%}), {token_milliseconds:.3f} ms per token, {tokens_per_second:.0f} "
    "tokens/s, compiled in {compile_seconds:.0f} s",
    "prefill": "prefill {milliseconds:.2f} ms (floor {floor_milliseconds:.2f}, "
    "{floor_to_prefill:.0%}), compiled in {compile_seconds:.0f} s",
    "server": "server {tokens_per_second:.0f} tokens/s; p50, p99 of the first token "
    "{first_token_milliseconds[p50]:.1f}, {first_token_milliseconds[p99]:.1f} ms, of each "
    "further one {per_token_milliseconds[p50]:.1f}, {per_token_milliseconds[p99]:.1f} ms",
    "training": "training {step_seconds:.3f} s per step, compiled in {compile_seconds:.0f} s",
}
"""Parts of the report, and a row of each as a line."""
TINY: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 300},
    **{"layers": 4, "heads": 2, "kv_heads": 1, "draft_vocabulary": 100, "train_tokens": 32},
    **{"clients": [1, 2], "rounds": 4, "repeats": 1, "seconds": 1, "new_tokens": 8},
    **{"trees": [read_tree("2/2/5"), read_tree("2/1/3")]},
}
Rows = Iterator[tuple[str, dict[str, Any]]]
"""Names of rows, and what was measured."""
Jobs = Iterator[tuple[str, Sequence[str], Rows]]
"""Section, names of rows, and the rows, measured when asked for."""


class Context(NamedTuple):
    """Committed tokens, and how many the cache is made for; None: the rounds that are timed."""

    length: int
    room: int | None = None

    def __str__(self) -> str:
        return f"{self.length} of {self.room}" if self.room else str(self.length)


def read_context(text: str) -> Context:
    """Reads LENGTH or LENGTH/ROOM."""
    return Context(*map(at_least(1), text.split("/")))


# --------------------------------------------------------------------------------------------------
# Decoding


def time_rounds(
    name: str, engine: Engine, device: Device, context: Context, args: argparse.Namespace
) -> Rows:
    """Times many rounds in one program."""
    length, new_tokens = context.length, 8 * args.rounds
    room = max(context.room or 0, length + new_tokens)
    prompts = [PreparedPrompt([0] * (room - new_tokens), new_tokens)] * args.batch_size
    batch = FixedBatch(engine, prompts, batch_size=args.batch_size)
    config, request = batch.config, batch.request
    state = random_state(engine.weights, config, request)
    seconds = []
    for _ in range(args.repeats + 1):
        state = jax.block_until_ready(at_length(state, length))
        began = time.perf_counter()
        state = forced_rounds(engine.weights, config, request, state, args.rounds)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - began)
    accepted = np.resize(accepted_by(config), args.rounds)
    middle = length + round((args.rounds + accepted.sum()) / 2)
    work = describe_workload(engine.weights, config, batch=args.batch_size, context=middle)
    floor = floors(cost_card(work, prompt_tokens=length), device)["round"]
    per_round = 1000 * float(np.median(seconds[1:])) / args.rounds  # the first run compiled
    num_new = 1 + float(accepted.mean())
    row = {
        "compile_seconds": seconds[0],
        "round_milliseconds": per_round,
        "round_floor_milliseconds": floor,
        "floor_to_round": floor / per_round,
        "tokens_per_round": num_new,
        "token_milliseconds": per_round / num_new,
        "tokens_per_second": 1000 * args.batch_size * num_new / per_round,
    }
    yield name, row


def time_prefill(
    name: str, engine: Engine, device: Device, length: int, args: argparse.Namespace
) -> Rows:
    """Times reading one prompt."""
    batch = FixedBatch(engine, [PreparedPrompt([0] * length, 8)])
    seconds = []
    for _ in range(args.repeats + 1):
        began = time.perf_counter()
        batch.start()
        jax.block_until_ready(batch.state)
        seconds.append(time.perf_counter() - began)
    work = describe_workload(engine.weights, batch.config, batch=1, context=length)
    floor = floors(cost_card(work, prompt_tokens=length), device)["prefill"]
    taken = 1000 * float(np.median(seconds[1:]))
    row = {"milliseconds": taken, "floor_milliseconds": floor, "floor_to_prefill": floor / taken}
    yield name, row | {"compile_seconds": seconds[0]}


def time_server(names: Sequence[str], engine: Engine, args: argparse.Namespace) -> Rows:
    """Serves to each number of clients."""
    num_prompt, num_new = args.contexts[0].length, args.new_tokens
    load = {"seconds": args.seconds, "num_prompt": num_prompt, "num_new": num_new}
    load["vocab_size"] = engine.target_config.vocab_size
    with (
        serving(engine, max(args.clients), num_prompt + num_new) as url,
        # Clients in another process leave this one's interpreter to the server.
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        for name, num_clients in zip(names, args.clients, strict=True):
            yield name, pool.submit(ask_all, url, num_clients=num_clients, **load).result()


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


def list_jobs(llama: LlamaConfig, device: Device, args: argparse.Namespace) -> Jobs:
    """Everything to measure; engines are freed before training makes its weights."""
    if args.only != ["training"]:
        yield from list_decoding(llama, device, args)
    if "training" in args.only:
        for family in FAMILIES:
            if family in args.methods:
                yield "training", [family], time_training(family, llama, args)


def list_decoding(llama: LlamaConfig, device: Device, args: argparse.Namespace) -> Jobs:
    """Rounds, prompts and servers."""
    engines = make_engines(llama, args.methods, args.draft_vocabulary, args.quantise)
    suffix = f", {args.quantise}" if args.quantise else ""
    suffix += f", batch {args.batch_size}" if args.batch_size > 1 else ""
    for context in args.contexts if "methods" in args.only else ():
        for method, engine in list_methods(engines, args.trees):
            name = f"{method}, {context}{suffix}"
            yield "methods", [name], time_rounds(name, engine, device, context, args)
    for context in args.contexts if "prefill" in args.only else ():
        for method, engine in list_methods(engines, args.trees[:1]):
            name = f"{method}, {context}{suffix}"
            yield "prefill", [name], time_prefill(name, engine, device, context.length, args)
    trees, tree_name = ACCELERATOR_TREES, ""
    if args.fixed_tree:
        trees, tree_name = args.trees[0], f" {args.trees[0].name}"
    for method, engine in engines.items() if "server" in args.only else ():
        names = [f"{method}{tree_name}, {number} clients{suffix}" for number in args.clients]
        yield "server", names, time_server(names, engine.with_tree(trees), args)


def list_methods(
    engines: Mapping[str, Engine], trees: Sequence[TreeConfig]
) -> Iterator[tuple[str, Engine]]:
    """Decoding without a draft, and every draft with every tree."""
    for method, engine in engines.items():
        if method == PLAIN:
            yield method, engine
        else:
            yield from ((f"{method} {tree.name}", engine.with_tree(tree)) for tree in trees)


def begin_report(device: Device, args: argparse.Namespace) -> dict[str, Any]:
    """Resumes the report in --output if device and options are the same, else begins one."""
    options = {name: str(value) for name, value in vars(args).items() if name != "output"}
    report = {"device": asdict(device), "options": options, "provenance": provenance()}
    with suppress(OSError, ValueError, KeyError):
        old = json.loads((args.output / "report.json").read_text()) if args.output else {}
        if old["options"] == options and old["device"]["name"] == device.name:
            return old
    return report | {section: {} for section in PARTS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures and prints row after row, writes."""
    args = _parse(arguments)
    llama = LlamaConfig(
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
    device = find_roofline().device
    report = begin_report(device, args)

    def table() -> str:
        rows = ((section, *item) for section in PARTS for item in report[section].items())
        return "\n".join(f"- {name}: {PARTS[section].format(**row)}" for section, name, row in rows)

    print(f"{device.name}: {device.bytes_per_second / 1e9:.0f} GB/s, "
          f"{device.flops_per_second / 1e12:.2f} TFLOP/s", flush=True)  # fmt: skip
    for section, names, rows in list_jobs(llama, device, args):
        if set(names) <= set(report[section]):
            continue
        for name, row in rows:
            report[section][name] = row
            print(f"{name}: {PARTS[section].format(**row)}", flush=True)
            if args.output is not None:
                write_report(report, table(), args.output)
    show_report(report, table(), args.output)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="a pair of a few thousand weights")
    methods = PLAIN, *FAMILIES
    parser.add_argument("--methods", nargs="+", choices=methods, default=list(methods))
    parser.add_argument("--quantise", choices=KINDS)
    trees = [read_tree("6/10/60"), read_tree("5/1/6")]
    parser.add_argument("--trees", nargs="+", type=read_tree, default=trees, metavar=TREE)
    parser.add_argument("--fixed-tree", action="store_true", help="serve with the first tree alone")
    contexts = [Context(512), Context(512, 8192)]
    parser.add_argument(
        "--contexts", nargs="+", type=read_context, default=contexts, metavar="LENGTH[/ROOM]"
    )
    clients = [1, 8, 32]
    parser.add_argument("--clients", type=at_least(1), nargs="+", default=clients, metavar="N")
    sizes = {
        "hidden-size": 4096,
        "intermediate-size": 14336,
        "layers": 32,
        "heads": 32,
        "kv-heads": 8,
        "head-dim": 128,
        "vocab-size": 128256,
        "draft-vocabulary": 32000,
        "batch-size": 1,
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
    return args


if __name__ == "__main__":
    run_program(main)
