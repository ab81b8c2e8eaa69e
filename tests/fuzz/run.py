"""Fuzzes for a while: every property of this folder in turn, with new seeds in each pass.

    make fuzz SECONDS=600
    python tests/fuzz/run.py --seconds 600 --seed 7 --only trees

Stops at a property that fails, and prints the smallest case and the command that repeats it. Exit
code 1: something was found.
"""

import argparse
import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=600, help="time for all of it")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first pass")
    parser.add_argument("--only", default="", help="properties whose name holds this text")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    command = [sys.executable, "-m", "pytest", "-v", "-x", "--hypothesis-profile=fuzz"]
    command += ["-p", "no:unraisableexception"]  # reads of damaged arrays, which Orbax abandons
    command += ["-m", "not device", "-k", args.only, str(Path(__file__).parent)]
    for seed in itertools.count(args.seed):
        print(f"seed {seed}", flush=True)
        try:
            seconds = end - time.monotonic()
            result = subprocess.run([*command, f"--hypothesis-seed={seed}"], timeout=seconds)
        except subprocess.TimeoutExpired:
            return
        if result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
            sys.exit(f"no property is named like {args.only!r}")
        if result.returncode:
            sys.exit(f"FAILED; repeat: --seed {seed} --only {args.only!r}")


if __name__ == "__main__":
    main()
