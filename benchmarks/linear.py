"""Times the two spellings of a product with few rows, side by side, on this machine's CPU.

`poss_jax.model.linear` takes `(w @ x.T).T` for 2 to 64 rows on CPU and `x @ w.T` elsewhere.
Prints milliseconds per stack of 8 square matrices and the ratio, by width and number of rows; the
last line is one JSON object.

    python -m benchmarks.linear
"""

import argparse
import json
import time
from collections.abc import Callable

import jax
import numpy as np

from poss_jax.model.linear import _few_rows_on_cpu, _plain
from poss_jax.program.running import Parser, run_program

WIDTHS, ROWS = (128, 512, 2048), (2, 4, 8, 16, 24, 32, 40, 48, 60, 64)
MATRICES, CALLS, REPEATS = 8, 10, 5


def stack_of(spelling: Callable) -> Callable:
    """A program that multiplies rows by several matrices in turn."""

    @jax.jit
    def run(rows: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for weight in weights:
            rows = spelling(rows, weight)
        return rows

    return run


def milliseconds(run: Callable, rows: jax.Array, weights: list[jax.Array]) -> float:
    """Time of one call, averaged over a few."""
    started = time.perf_counter()
    for _ in range(CALLS):
        jax.block_until_ready(run(rows, weights))
    return 1000 * (time.perf_counter() - started) / CALLS


def compare(width: int, num_rows: int) -> dict[str, float]:
    """Medians of interleaved repeats, and the median of their ratios."""
    keys = jax.random.split(jax.random.key(0), MATRICES + 1)
    weights = [jax.random.normal(key, (width, width)) * width**-0.5 for key in keys[1:]]
    rows = jax.random.normal(keys[0], (num_rows, width))
    plain, transposed = stack_of(_plain), stack_of(_few_rows_on_cpu)
    for run in (plain, transposed):
        milliseconds(run, rows, weights)
    pairs = np.array(
        [[milliseconds(run, rows, weights) for run in (plain, transposed)] for _ in range(REPEATS)]
    )
    return {
        "width": width,
        "rows": num_rows,
        "plain_ms": round(float(np.median(pairs[:, 0])), 3),
        "transposed_ms": round(float(np.median(pairs[:, 1])), 3),
        "ratio": round(float(np.median(pairs[:, 0] / pairs[:, 1])), 2),
    }


def main() -> None:
    """Prints the table."""
    Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    results = [compare(width, num_rows) for width in WIDTHS for num_rows in ROWS]
    print("| width | rows | x @ w.T ms | (w @ x.T).T ms | ratio |\n|---|---|---|---|---|")
    for row in results:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    print(json.dumps({"device": jax.devices()[0].device_kind, "results": results}))


if __name__ == "__main__":
    run_program(main)
