"""Times a round of several draft trees against an autoregressive step, on this device.

Uses random weights in the shape of the demo's models, since the cost of a round does not depend on
what is accepted. Prints milliseconds per round and the ratio to one autoregressive step: a tree
pays if its acceptance length is above its ratio. The last line is one JSON object.

    python -m benchmarks.trees
    python -m benchmarks.trees --trees 6/10/60 4/4/16 --layers 32 --hidden-size 1024
    python -m benchmarks.trees --trees 6/10/60 --spans 1 1 1 1 1 1 --kv per_specialist shared
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.options import read_tree
from poss_jax.config.models import DraftConfig, LlamaConfig, TreeConfig
from poss_jax.decode import speculate
from poss_jax.decode.drafting import num_streams
from poss_jax.decode.state import DecodeConfig, Request, Weights
from poss_jax.model.families import init_draft
from poss_jax.model.specialists import attach, fuse_draft
from poss_jax.model.target import fuse_target, init_target

TREES = ("6/10/60", "4/4/16", "5/2/8", "4/2/8", "3/2/8", "6/1/7")
NEW, REPEATS = 96, 10


def demo_shape(layers: int, hidden_size: int) -> LlamaConfig:
    """The demo's target with another depth and width."""
    return LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 14 // 5,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden_size // 4,
    )


def rows_of(prompt: int) -> int:
    """Room for a prompt and its answer."""
    return -(-(prompt + NEW + 32) // 128) * 128


def compile_round(
    llama: LlamaConfig, draft: DraftConfig | None, tree: TreeConfig, prompt: int
) -> Callable[[], float]:
    """Returns a function that generates once and gives milliseconds per round."""
    target = fuse_target(init_target(llama, jax.random.key(0)), llama)
    specialists = {}
    if draft:
        fused = fuse_draft(init_draft(draft, jax.random.key(1)), draft)
        specialists = attach(fused, target)
    config = DecodeConfig(llama, draft, tree, rows_of(prompt))
    request = Request(
        tokens=jnp.full((1, prompt), 5, jnp.int32),
        lengths=jnp.asarray([prompt], jnp.int32),
        limits=jnp.asarray([NEW], jnp.int32),
        stop_ids=jnp.asarray([[-1]], jnp.int32),
    )
    generate = jax.jit(speculate.generate, static_argnums=1)

    def run() -> float:
        started = time.perf_counter()
        state = jax.block_until_ready(generate(Weights(target, specialists), config, request))
        return 1000 * (time.perf_counter() - started) / int(state.output.num_rounds[0])

    run()
    return run


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trees", nargs="+", default=TREES, metavar="DEPTH/TOP_K/TOTAL")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=160)
    parser.add_argument("--spans", nargs="+", type=int, default=(3, 3), metavar="POSITIONS")
    parser.add_argument("--kv", nargs="+", default=["per_specialist"], metavar="KV")
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS")
    args = parser.parse_args()
    llama = demo_shape(args.layers, args.hidden_size)
    names, runs = ["autoregressive"], [compile_round(llama, None, TreeConfig(), args.prompt)]
    cache_bytes = [0]
    for kv, tree in itertools.product(args.kv, map(read_tree, args.trees)):
        draft = DraftConfig(layer=llama, positions_per_specialist=tuple(args.spans), kv=kv)
        rows = rows_of(args.prompt)
        names.append(f"{tree.depth}/{tree.top_k}/{tree.total_tokens} {kv}")
        cache_bytes.append(
            8 * num_streams(draft, tree.depth) * llama.num_kv_heads * llama.head_dim * rows
        )
        runs.append(compile_round(llama, draft, tree, args.prompt))
    table = np.array([[run() for run in runs] for _ in range(REPEATS)])
    results = {
        name: {
            "milliseconds": round(float(np.median(table[:, i])), 3),
            "ratio": round(float(np.median(table[:, i] / table[:, 0])), 2),
            "draft_cache_bytes": cache_bytes[i],
        }
        for i, name in enumerate(names)
    }
    print("| tree (depth/top_k/total_tokens) | ms per round | ratio | draft cache, bytes |")
    print("|---|---|---|---|")
    for name, row in results.items():
        print(f"| {name} | {' | '.join(str(value) for value in row.values())} |")
    print(json.dumps({"device": jax.devices()[0].device_kind, "results": results}))


if __name__ == "__main__":
    main()
