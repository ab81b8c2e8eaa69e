"""Times the products of a decoding step by number of rows: float32, int8 and fp8 weights.

A loop on the device multiplies rows by the weights of a small target (by default the shape of
SmolLM2-135M), as decoding does; nothing else of a layer is computed. `plain` is `x @ w.T`, which
`poss_jax.model.linear` spells otherwise on CPU. Prints milliseconds per step, the median of
interleaved repeats; the last line is one JSON object.

    python -m benchmarks.linear
    python -m benchmarks.linear --rows 1 4 --repeats 20
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.model.linear import _plain, linear
from poss_jax.model.quantise import KINDS, quantise
from poss_jax.program.running import Parser, run_program

LAYERS, WIDTH, MLP, VOCABULARY, KEYS = 30, 576, 1536, 49152, 384
STEPS = 4  # turns of the loop per call
FORMS: dict[str, Callable] = {"plain": partial(_plain, dtype=jnp.float32), "float32": linear}
FORMS |= dict.fromkeys(KINDS, linear)


def make_weights(form: str) -> Any:
    """Draws the weights of all layers and of the head, in the type of a form."""
    shapes = [(WIDTH + KEYS, WIDTH), (WIDTH, WIDTH), (2 * MLP, WIDTH), (WIDTH, MLP)]
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, int]) -> Any:
        weight = jnp.asarray(rng.normal(size=shape) * shape[1] ** -0.5, jnp.float32)
        return quantise(weight, form) if form in KINDS else weight  # type: ignore[arg-type]

    return [[draw(shape) for shape in shapes] for _ in range(LAYERS)], draw((VOCABULARY, WIDTH))


@partial(jax.jit, static_argnames="form")
def run_steps(weights: Any, rows: jax.Array, *, form: str) -> jax.Array:
    """Multiplies rows by all weights, several times; each product depends on the one before it."""
    product = FORMS[form]

    def step(_: Any, x: jax.Array) -> jax.Array:
        layers, head = weights
        for qkv, output, gate_up, down in layers:
            x = x + product(product(x, qkv)[:, :WIDTH], output)
            gate, up = jnp.split(product(x, gate_up), 2, axis=-1)
            x = x + product(gate * up, down)
            x = x / (1 + jnp.abs(x).max())
        return x + product(x, head).max(-1, keepdims=True)

    return jax.lax.fori_loop(0, STEPS, step, rows)


def milliseconds(weights: Any, rows: jax.Array, form: str) -> float:
    """Time of a step."""
    started = time.perf_counter()
    jax.block_until_ready(run_steps(weights, rows, form=form))
    return 1000 * (time.perf_counter() - started) / STEPS


def measure(num_rows: Sequence[int], repeats: int) -> dict[str, dict[int, float]]:
    """Median time of a step by form and number of rows; forms take turns."""
    weights = {form: make_weights(form) for form in FORMS if form != "plain"}
    weights["plain"] = weights["float32"]
    cases = [(form, count) for count in num_rows for form in FORMS]
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for repeat in range(repeats + 1):
        for form, count in cases:
            taken = milliseconds(weights[form], jnp.ones((count, WIDTH)), form)
            times[form, count] += [taken] if repeat else []  # the first one compiles
    medians = {case: round(float(np.median(taken)), 2) for case, taken in times.items()}
    return {form: {count: medians[form, count] for count in num_rows} for form in FORMS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=7, help="Timed calls of each form.")
    args = parser.parse_args(arguments)
    found = measure(args.rows, args.repeats)
    print("| rows | " + " | ".join(found) + " |\n|" + "---|" * (1 + len(found)))
    for count in args.rows:
        print(
            f"| {count} | " + " | ".join(f"{times[count]:.1f}" for times in found.values()) + " |"
        )
    print(json.dumps({"device": jax.devices()[0].device_kind, "milliseconds": found}))


if __name__ == "__main__":
    run_program(main)
