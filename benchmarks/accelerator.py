"""Prefill, decoding and training of an 8B pair on this device, against the floors of its cost card.

Random bfloat16 weights in the shape of Llama-3.1-8B are made on the device, with PosS-3 on EAGLE-2
and on EAGLE-3; nothing is read. A random draft is never right, so acceptance is forced: rounds
replay the accepted lengths recorded with a trained PosS-3 draft. With --torch, a greedy loop over
the model of `transformers` and its `generate` are timed first. Every part is printed and written as
soon as it is measured; the last line is one JSON object. All sizes are options, so it runs on
small machines too.

    python -m benchmarks.accelerator --output docs/results/accelerator
    python -m benchmarks.accelerator --only decode --methods poss3 --batch-size 8
    python -m benchmarks.accelerator --only decode --room 8192  # caches that are mostly unused
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.options import add_numbers, add_trees, make_parser, read_shape
from benchmarks.torch_loop import TorchLoop, need_torch, torch_shape
from infer.bench.costs import Device, cost_card, describe_workload, floors
from infer.bench.phases import measure_card, start
from infer.bench.rates import measure_roofline
from infer.bench.report import format_card, show_report, write_report
from poss_jax.checkpoint.record import TargetIdentity, new_record, provenance
from poss_jax.config.models import DraftConfig, LlamaConfig, RopeConfig
from poss_jax.config.training import ObjectiveConfig, OptimizerConfig, StepConfig
from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeConfig, DecodeState, Request, Weights
from poss_jax.decode.verify import Acceptance
from poss_jax.engine.device import default_dtype
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.learn.state import init_state, make_optimizer
from poss_jax.learn.step import make_draft_step
from poss_jax.learn.task import DraftTask
from poss_jax.model.documents import TrainBatch
from poss_jax.model.families import init_draft
from poss_jax.model.families.eagle3 import settle
from poss_jax.model.target import init_target, stack_layers
from poss_jax.program.running import run_program
from poss_jax.shapes import Params

ACCEPTED = (1, 2, 6, 2, 6, 3, 6, 5, 6, 6, 5, 6, 5, 6, 6, 4, 6)
"""Accepted tokens per round of PosS-3 on one recorded prompt of the tests, tree 6/10/60."""
SCALE = 0.02
PLAIN, FAMILIES = "autoregressive", ("poss3", "poss3_e3")


# --------------------------------------------------------------------------------------------------
# Random models, made on the device


def random_like(init: Callable[[Any], Params], seed: int, dtype: Any) -> Params:
    """Draws parameters of the shapes that `init` gives, one array at a time."""
    leaves, treedef = jax.tree.flatten(jax.eval_shape(init, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    pairs = zip(keys, leaves, strict=True)
    return treedef.unflatten([_draw(key, leaf.shape, dtype) for key, leaf in pairs])


@partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if len(shape) == 1:  # scale of a norm
        return jnp.ones(shape, dtype)
    return SCALE * jax.random.normal(key, shape, dtype)


def draft_shape(family: str, llama: LlamaConfig, num_draft_tokens: int) -> DraftConfig:
    """PosS-3 for six positions, on EAGLE-2 or on EAGLE-3."""
    layer = replace(llama, num_layers=1)
    spans = {"positions_per_specialist": (3, 3), "trained_depth": 6}
    if family == "poss3":
        return DraftConfig(layer=layer, **spans)
    return DraftConfig(layer=layer, family="eagle3", **spans, **settle(llama, num_draft_tokens))


def make_engines(
    llama: LlamaConfig, methods: Sequence[str], num_draft_tokens: int
) -> dict[str, Engine]:
    """One target, alone and with drafts."""
    dtype = default_dtype()
    identity = TargetIdentity(
        name="random", revision=None, embedding_sha256="0" * 64, head_sha256="0" * 64
    )
    record = new_record(llama, identity, tokenizer_from=None)
    engine = Engine(record, random_like(partial(init_target, llama), 0, dtype))
    engines = {PLAIN: engine}
    for seed, family in enumerate(FAMILIES, start=1):
        if family not in methods:
            continue
        config = draft_shape(family, llama, num_draft_tokens)
        tokens = None if config.head_size is None else tuple(range(config.head_size))
        record = new_record(config, identity, tokenizer_from=None, draft_vocabulary=tokens)
        draft = random_like(partial(init_draft, config), seed, dtype)
        engines[family] = engine.with_draft(record, draft)
    return {method: engines[method] for method in methods}


# --------------------------------------------------------------------------------------------------
# Decoding


@partial(jax.jit, static_argnums=1, donate_argnums=3)
def forced_rounds(
    weights: Weights,
    config: DecodeConfig,
    request: Request,
    state: DecodeState,
    accepted: jax.Array,
) -> DecodeState:
    """Runs rounds that accept the given numbers of tokens, ignoring the target's choice."""

    def body(index: jax.Array, state: DecodeState) -> DecodeState:
        noise = speculate.round_noise(config, request, state)
        tree = speculate.draft_tree(weights, config, request, state, noise)
        out = speculate.verify_tree(weights, config, state, tree)
        chosen = speculate.choose_tokens(request, state, tree, out.logits, noise)
        path = jnp.arange(config.max_accepted + 1, dtype=jnp.int32)
        path = jnp.broadcast_to(path[None], (len(chosen), len(path)))
        num_accepted = jnp.full(len(chosen), jnp.minimum(accepted[index], config.max_accepted))
        acceptance = Acceptance(
            path=path,
            num_accepted=num_accepted,
            num_offered=num_accepted,
            emitted=jnp.take_along_axis(chosen, path, axis=1),
        )
        return speculate.commit(weights, config, request, state, out, acceptance)

    return jax.lax.fori_loop(0, len(accepted), body, state)


def measure_rounds(
    engine: Engine, prompts: Sequence[PreparedPrompt], num_rounds: int, repeats: int
) -> dict[str, float]:
    """Seconds of compiling, and milliseconds per round and per token of many rounds in a program.

    Without a draft a round is an autoregressive step.
    """
    config, request = engine.request(prompts, batch_size=len(prompts))
    accepted = jnp.asarray(np.resize(ACCEPTED, num_rounds), jnp.int32)
    seconds, compile_seconds = [], 0.0
    for repeat in range(repeats + 1):
        state = jax.block_until_ready(start(engine.weights, config, request))
        began = time.perf_counter()
        state = forced_rounds(engine.weights, config, request, state, accepted)
        jax.block_until_ready(state)
        taken = time.perf_counter() - began
        if repeat:
            seconds.append(taken)
        else:
            compile_seconds = taken
    per_round = 1000 * float(np.median(seconds)) / num_rounds
    num_new = 1 + float(jnp.minimum(accepted, config.max_accepted).mean())
    return {
        "compile_seconds": compile_seconds,
        "round_milliseconds": per_round,
        "tokens_per_round": num_new,
        "token_milliseconds": per_round / num_new,
        "tokens_per_second": 1000 * len(prompts) * num_new / per_round,
    }


def measure_decoding(
    engine: Engine,
    device: Device,
    prompts: Sequence[PreparedPrompt],
    *,
    num_rounds: int,
    repeats: int,
) -> dict[str, Any]:
    """Times one way of decoding; the phases are timed on the first prompt."""
    rounds = measure_rounds(engine, prompts, num_rounds, repeats)
    config = engine.request(prompts, batch_size=len(prompts))[0]
    num_tokens = len(prompts[0].ids)
    context = num_tokens + round(num_rounds * rounds["tokens_per_round"] / 2)
    work = describe_workload(engine.weights, config, batch=len(prompts), context=context)
    floor = floors(cost_card(work, prompt_tokens=num_tokens), device)["round"]
    return {
        **rounds,
        "round_floor_milliseconds": floor,
        "floor_to_round": floor / rounds["round_milliseconds"],
        **measure_card(engine, prompts[0], device, num_calls=repeats),
    }


def measure_torch(llama: LlamaConfig, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
    """Times PyTorch on this machine's GPU, or its CPU: milliseconds per token after the prompt.

    Returns:
      `loop`: the model of `transformers`, step by step; `generate`: its own method.

    Raises:
      UserError: torch is missing.
    """
    need_torch()
    import torch
    import transformers

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        shape = torch_shape(llama)
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    numbers = _time_torch(TorchLoop(model), prompt, num_tokens)
    del model
    torch.cuda.empty_cache()
    return numbers


def _time_torch(loop: TorchLoop, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
    seconds = []
    for count in (4, 1, 1 + num_tokens):  # the first call warms up
        began = time.perf_counter()
        loop.generate(prompt, count)
        seconds.append(time.perf_counter() - began)
    generate = 1000 * (seconds[2] - seconds[1]) / num_tokens
    return {"loop": loop.time_steps(prompt, num_tokens), "generate": generate}


# --------------------------------------------------------------------------------------------------
# Training


def measure_training(
    family: str,
    llama: LlamaConfig,
    *,
    num_draft_tokens: int,
    batch_size: int,
    num_tokens: int,
    repeats: int,
) -> dict[str, float]:
    """Seconds of a training step of one draft, the frozen target inside it."""
    draft = draft_shape(family, llama, num_draft_tokens)
    vocabulary = None if draft.head_size is None else tuple(range(draft.head_size))
    task = DraftTask(llama, draft, ObjectiveConfig(), StepConfig(), vocabulary=vocabulary)

    def stacked(init: Callable[[Any], Params], name: str) -> Callable[[Any], Params]:
        return lambda key: (params := init(key)) | {name: stack_layers(params[name])}

    target = random_like(stacked(partial(init_target, llama), "layers"), 0, default_dtype())
    params = random_like(stacked(partial(init_draft, draft), "specialists"), 1, jnp.float32)
    optimizer = make_optimizer(OptimizerConfig(), 1000)
    state = init_state(params, optimizer)
    tokens = jax.random.randint(jax.random.key(2), (batch_size, num_tokens), 0, llama.vocab_size)
    ones = jnp.ones_like(tokens)
    batch = TrainBatch(tokens=tokens, documents=ones, loss_mask=ones.astype(bool))
    step, seconds = make_draft_step(task, optimizer), []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, target, batch, jax.random.key(3)))
        seconds.append(time.perf_counter() - began)
    median = float(np.median(seconds[1:]))
    return {
        "compile_seconds": seconds[0],
        "step_seconds": median,
        "tokens_per_second": batch_size * num_tokens / median,
        "loss": float(metrics["loss"]),
    }


# --------------------------------------------------------------------------------------------------
# The report


def describe_decoding(name: str, tree: str, row: dict[str, Any]) -> str:
    """One way of decoding as a line."""
    return (
        f"{name} {tree}: {row['round_milliseconds']:.3f} ms per round (floor "
        f"{row['round_floor_milliseconds']:.3f}, {row['floor_to_round']:.0%}), "
        f"{row['token_milliseconds']:.3f} ms per token, {row['tokens_per_second']:.0f} tokens/s, "
        f"phases / round {row['phases_to_round']:.2f}, compiled in {row['compile_seconds']:.0f} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures and prints part after part, writes."""
    args = _parse(arguments)
    llama, lines, began = _shape(args), [], time.monotonic()
    given = vars(args) | {"trees": [tree.name for tree in args.trees]}
    options = {key: str(value) for key, value in given.items()}
    tokens = np.random.default_rng(0).integers(0, llama.vocab_size, args.prompt).tolist()
    torch = measure_torch(llama, tokens, args.rounds) if args.torch else None
    roofline = measure_roofline()
    report: dict[str, Any] = {"roofline": asdict(roofline), "methods": {}, "training": {}}
    report |= {"torch": torch, "options": options, "provenance": provenance()}

    def table() -> str:
        return "\n".join(f"- {line}" for line in lines) + "\n\n" + format_card(report)

    def show(line: str) -> None:
        lines.append(line)
        print(f"{line}  [{time.monotonic() - began:.0f} s]", flush=True)
        if args.output is not None:
            write_report(report, table(), args.output)

    device = roofline.device
    show(f"{device.name}: {device.bytes_per_second / 1e9:.0f} GB/s, "
         f"{device.flops_per_second / 1e12:.2f} TFLOP/s")  # fmt: skip
    if torch is not None:
        show("PyTorch, ms per token: " + ", ".join(f"{k} {v:.2f}" for k, v in torch.items()))
    if args.only != "train":
        engines = make_engines(llama, args.methods, args.draft_vocabulary)
        num_new = max(8 * args.rounds, args.room - args.prompt)
        prompts = [PreparedPrompt(tokens, num_new)] * args.batch_size
        for name, engine in engines.items():
            for tree in args.trees if name != PLAIN else args.trees[:1]:
                row = measure_decoding(
                    engine.with_tree(tree), device, prompts,
                    num_rounds=args.rounds, repeats=args.repeats,
                )  # fmt: skip
                label = tree.name if name != PLAIN else ""
                report["methods"][f"{name} {label}".strip()] = row
                show(describe_decoding(name, label, row))
        del engines, engine
    trained = () if args.only == "decode" else FAMILIES
    for family in (one for one in trained if one in args.methods):
        row = measure_training(
            family, llama, num_draft_tokens=args.draft_vocabulary, batch_size=args.train_batch,
            num_tokens=args.train_tokens, repeats=args.repeats,
        )  # fmt: skip
        report["training"][family] = row
        show(f"training {family}: {row['step_seconds']:.3f} s per step of {args.train_batch} x "
             f"{args.train_tokens} tokens, compiled in {row['compile_seconds']:.0f} s")  # fmt: skip
    show_report(report, table(), args.output)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=("decode", "train"), help="one part")
    parser.add_argument("--torch", action="store_true", help="time PyTorch, too")
    methods = PLAIN, *FAMILIES
    parser.add_argument("--methods", nargs="+", choices=methods, default=list(methods))
    add_trees(parser, "6/10/60")
    sizes = {
        "hidden-size": 4096,
        "intermediate-size": 14336,
        "layers": 32,
        "heads": 32,
        "kv-heads": 8,
        "head-dim": 128,
        "vocab-size": 128256,
        "draft-vocabulary": 32000,
        "prompt": 512,
        "room": 1,
        "batch-size": 1,
        "rounds": 32,
        "repeats": 3,
        "train-batch": 1,
        "train-tokens": 2048,
    }
    add_numbers(parser, sizes)
    return parser.parse_args(arguments)


def _shape(args: argparse.Namespace) -> LlamaConfig:
    rope = RopeConfig(theta=5e5, type="llama3", factor=8.0)
    return read_shape(args, max_position_embeddings=131072, rope=rope)


if __name__ == "__main__":
    run_program(main)
