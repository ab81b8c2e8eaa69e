"""Fuzzes for a while: every property of this folder in turn, with new seeds in each pass.

    make fuzz SECONDS=600
    python tests/fuzz/run.py --seconds 600 --seed 7 --only trees

A property is a function `test_*` of a file `test_*.py` without fixtures. Prints the seed of every
pass, and for a property that fails the smallest case and the command that repeats it. Exit code 1:
something was found.
"""

import argparse
import importlib
import itertools
import logging
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import hypothesis

FOLDER = Path(__file__).parent
Property = Callable[[], None]


def find_properties(only: str) -> dict[str, Property]:
    """Properties by name (`file.function`), those whose name holds `only`."""
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parent.parent)]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    importlib.import_module("conftest")  # registers the profiles
    hypothesis.settings.load_profile("fuzz")
    found: dict[str, Property] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        module = importlib.import_module(path.stem)
        for name, test in vars(module).items():
            label = f"{path.stem.removeprefix('test_')}.{name.removeprefix('test_')}"
            if name.startswith("test_") and hasattr(test, "hypothesis") and only in label:
                found[label] = test
    return found


def count_cases(label: str, test: Property, counts: Counter[str]) -> None:
    """Makes a property count its cases."""
    inner = test.hypothesis.inner_test

    def counted(*args: object, **kwargs: object) -> None:
        counts[label] += 1
        inner(*args, **kwargs)

    test.hypothesis.inner_test = counted


def fuzz(properties: dict[str, Property], seconds: float, first_seed: int) -> bool:
    """Runs passes until the time is used; returns whether every property held."""
    end = time.monotonic() + seconds
    counts, failed = Counter[str](), dict[str, int]()
    for label, test in properties.items():
        count_cases(label, test, counts)
    for seed in itertools.count(first_seed):
        print(f"seed {seed}: {sum(counts.values())} cases so far", flush=True)
        for label, test in properties.items():
            if time.monotonic() > end:
                break
            if label in failed:
                continue
            try:
                hypothesis.seed(seed)(test)()
            except Exception:
                failed[label] = seed
                traceback.print_exc()
                print(f"FAILED {label}; repeat: --seed {seed} --only {label}", flush=True)
        if time.monotonic() > end or len(failed) == len(properties):
            break
    for label in properties:
        state = f"FAILED at seed {failed[label]}" if label in failed else "held"
        print(f"{label}: {counts[label]} cases, {state}")
    return not failed


def main() -> None:
    """Parses arguments and fuzzes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600, help="time for all of it")
    parser.add_argument("--seed", type=int, default=None, help="of the first pass")
    parser.add_argument("--only", default="", help="properties whose name holds this text")
    args = parser.parse_args()
    properties = find_properties(args.only)
    if not properties:
        sys.exit(f"no property of {FOLDER} is named like {args.only!r}")
    logging.disable(logging.WARNING)  # drawn inputs cause thousands
    seed = int(time.time()) if args.seed is None else args.seed
    sys.exit(not fuzz(properties, args.seconds, seed))


if __name__ == "__main__":
    main()
