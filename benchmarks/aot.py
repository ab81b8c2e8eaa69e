r"""Compiles decoding for a TPU slice or GPU that this machine need not have.

Needs no weights and no accelerator, only shapes. TPUs need libtpu (pip install libtpu; one process
at a time), GPUs the wheels of jax[cuda13]. Prints for every program its compile time, its memory
and the device's, the bytes it accesses and the bytes it must move, and how many kernels it starts;
as its last line one JSON object, unless a terminal shows it.

    python -m benchmarks.aot --config configs/aot/llama3-8b.yaml \
        --topology v6e:1x1 programs=[step,round]
    python -m benchmarks.aot --config configs/aot/llama3-8b.yaml --gpu h100
    python -m benchmarks.aot --target DIR --draft DIR --gpu h200
"""

from collections.abc import Sequence
from pathlib import Path

from poss_jax.config.bench import AheadConfig
from poss_jax.config.reading import UserError
from poss_jax.program.arguments import read_arguments
from poss_jax.program.output import waiting
from poss_jax.program.running import run_program

_ACTIONS = {
    "--topology": {"metavar": "SLICE", "help": "TPU slice, such as v6e:1x1."},
    "--gpu": {"metavar": "NAME", "help": "h100 or h200; one device."},
    "--output": {"metavar": "FILE", "type": Path, "help": "JSON file for the report."},
    "--dump": {"metavar": "FOLDER", "type": Path, "help": "Folder for optimised HLO."},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, compiles, prints, writes."""
    config, args = read_arguments(
        AheadConfig, arguments, prog="benchmarks.aot", doc=__doc__, actions=_ACTIONS
    )
    if (args.topology is None) == (args.gpu is None):
        raise UserError("want either --topology SLICE or --gpu NAME; see --help")
    with waiting("importing JAX ..."):
        from benchmarks.aot_programs import run
        from poss_jax.bundled.default import with_bundled
    run(with_bundled(config), args)


if __name__ == "__main__":
    run_program(main)
