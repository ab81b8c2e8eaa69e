"""The recursive training step: against the same written plainly, and on a larger pair.

Needs nothing but time (5 minutes on 2 CPU cores); with PyTorch installed it also times one decode
step of the same larger target there, so that the machine can be told from the program. Passes
alternate; the fastest counts. Prints a table, then one line of JSON.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --length 512 --only plain
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from plain_step import PlainBatch, plain_gradients

from poss_jax.config import (
    DraftConfig,
    LlamaConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RopeConfig,
    StepConfig,
)
from poss_jax.learn.state import init_state, make_optimizer
from poss_jax.learn.step import DraftTask, draft_gradients, make_draft_step, prepare_draft_data
from poss_jax.model.documents import TrainBatch
from poss_jax.model.families import init_draft
from poss_jax.model.target import init_target, stack_layers

POSS3 = {"positions_per_specialist": (3, 3), "trained_depth": 6}
SMALL = LlamaConfig(  # the recorded model
    vocab_size=260,
    hidden_size=128,
    intermediate_size=352,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope=RopeConfig(theta=5e5),
)
LARGE = LlamaConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=8,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
)
# Of the original in PyTorch, on the larger pair: seconds of a training step (batch 2, length 256),
# and of decoding one token on the same machine.
ORIGINAL_STEP, ORIGINAL_DECODE = 4.46, 0.0243


def make_task(llama: LlamaConfig, step: StepConfig) -> DraftTask:
    layer = dataclasses.replace(llama, num_layers=1)
    return DraftTask(llama, DraftConfig(layer=layer, **POSS3), ObjectiveConfig(), step)


@partial(jax.jit, static_argnums=0)
def make_draft(task: DraftTask) -> Any:
    draft = init_draft(task.draft, jax.random.key(1))
    return draft | {"specialists": stack_layers(draft["specialists"])}


def make_batch(task: DraftTask, batch_size: int, length: int) -> TrainBatch:
    """Random text, with random features of the size of real ones."""
    rng, shape = np.random.default_rng(0), (batch_size, length)
    return TrainBatch(
        tokens=jnp.asarray(rng.integers(0, task.target.vocab_size, shape), jnp.int32),
        loss_mask=jnp.ones(shape, bool),
        documents=jnp.ones(shape, jnp.int32),
        features=jnp.asarray(rng.standard_normal((*shape, task.target.hidden_size)), jnp.float32),
    )


def fastest(passes: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of the fastest of some alternating passes, after one that does not count.

    A pass that returns a number says itself how long it took.
    """
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for index in range(repeats + 1):
        for name, run in passes.items():
            start = time.perf_counter()
            result = jax.block_until_ready(run())
            spent = result if isinstance(result, float) else time.perf_counter() - start
            if index:
                seconds[name].append(spent)
    return {name: min(values) for name, values in seconds.items()}


def against_plain(batch_size: int, length: int, repeats: int) -> dict[str, Any]:
    """Gradients of PosS-3 at depth 6 on the recorded model, this package's and plain ones."""
    task = make_task(SMALL, StepConfig())
    target, draft = init_target(SMALL, jax.random.key(0)), make_draft(task)
    head = target["head"]["weight"]
    data = jax.jit(prepare_draft_data, static_argnums=1)(
        target, task, make_batch(task, batch_size, length)
    )
    batch = PlainBatch(
        data.inputs.features, data.inputs.embedded, data.targets.features, data.loss_mask
    )
    ours = jax.jit(lambda *args: draft_gradients(*args[:2], task, args[2])[0])
    plain = jax.jit(
        lambda *args: plain_gradients(*args[:2], task.draft, task.objective, args[2])[1]
    )
    calls = {"ours": (ours, (draft, head, data)), "plain": (plain, (draft, head, batch))}
    compiled = {name: f.lower(*args).compile() for name, (f, args) in calls.items()}
    results = {name: compiled[name](*args) for name, (_, args) in calls.items()}
    memory = {name: c.memory_analysis().temp_size_in_bytes for name, c in compiled.items()}
    seconds = fastest(
        {name: partial(compiled[name], *args) for name, (_, args) in calls.items()}, repeats
    )
    return {
        "batch_size": batch_size,
        "length": length,
        "largest_relative_difference": _difference(results["ours"], results["plain"]),
        "seconds": seconds,
        "temporary_bytes": memory,
        "times_faster": seconds["plain"] / seconds["ours"],
        "share_of_memory": memory["ours"] / memory["plain"],
    }


def _difference(ours: Any, plain: Any) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


def larger_pair(repeats: int) -> dict[str, Any]:
    """A whole step, optimizer included, on the larger pair; features given, batch 2, length 256."""
    task = make_task(LARGE, StepConfig())
    optimizer = make_optimizer(OptimizerConfig(), 1000)
    target = init_target(LARGE, jax.random.key(0))
    shared = {name: target[name] for name in ("embed", "head")}
    batch, step, key = make_batch(task, 2, 256), make_draft_step(task, optimizer), jax.random.key(2)
    holder = [init_state(make_draft(task), optimizer)]

    def run() -> Any:
        holder[0], losses = step(holder[0], shared, batch, key)
        return losses

    passes = {"step": run}
    decode = _torch_decode()
    if decode is not None:
        passes["torch_decode"] = decode
    seconds = fastest(passes, repeats)
    result: dict[str, Any] = {"seconds": seconds, "original": [ORIGINAL_STEP, ORIGINAL_DECODE]}
    if decode is not None:
        ours, theirs = seconds["step"] / seconds["torch_decode"], ORIGINAL_STEP / ORIGINAL_DECODE
        result |= {"in_decode_steps": ours, "original_in_decode_steps": theirs}
        result["times_original"] = ours / theirs
    return result


def _torch_decode() -> Callable[[], Any] | None:
    """One decode step of the larger target in PyTorch; None where it is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        return None
    config = transformers.LlamaConfig(
        vocab_size=LARGE.vocab_size,
        hidden_size=LARGE.hidden_size,
        intermediate_size=LARGE.intermediate_size,
        num_hidden_layers=LARGE.num_layers,
        num_attention_heads=LARGE.num_heads,
        num_key_value_heads=LARGE.num_kv_heads,
    )
    torch.set_num_threads(2)
    model = transformers.LlamaForCausalLM(config).eval()

    def steps() -> Any:
        """Ten tokens after a prompt of 64."""
        with torch.no_grad():
            tokens = torch.ones((1, 64), dtype=torch.long)
            cache = model(tokens, use_cache=True).past_key_values
            start = time.perf_counter()
            for _ in range(10):
                model(tokens[:, :1], past_key_values=cache, use_cache=True)
        return (time.perf_counter() - start) / 10

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2048, help="rows (default: 2048)")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes (default: 3)")
    parser.add_argument("--only", choices=["plain", "large"], help="one of the two comparisons")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    if args.only != "large":
        report["plain"] = result = against_plain(args.batch_size, args.length, args.repeats)
        for name, seconds in result["seconds"].items():
            memory = result["temporary_bytes"][name] / 2**20
            print(f"{name:6} {seconds:8.2f} s {memory:9.1f} MiB of temporaries")
        print(
            f"{result['times_faster']:.1f} times faster, {result['share_of_memory']:.3f} of memory"
        )
    if args.only != "plain":
        report["large"] = result = larger_pair(args.repeats)
        print("larger pair: " + ", ".join(f"{k} {v:.3f} s" for k, v in result["seconds"].items()))
        if "times_original" in result:
            print(f"{result['times_original']:.2f} times the original's, in decode steps")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
