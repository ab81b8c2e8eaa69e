r"""Compares drafts with decoding without a draft, over the same questions.

Takes a target and drafts (model folders), without --target the model that `make chat` fetches.
Answers every question of every set, at every temperature and with every seed, autoregressively and
with each draft. Prints the main numbers on a terminal; elsewhere all tables (acceptance length,
acceptance by position, tokens per second and speed-up with 95 % intervals) and, as the last line,
what was found; with --json everything. --output keeps every answer as it comes, so that the same
command resumes after an interruption, and the report (report.html, .md, .json).

    poss bench --config configs/demo/bench.yaml
    poss bench --target T --draft EAGLE-2=E --draft PosS-3=P \
        --prompts questions.jsonl --output runs/bench
    poss bench --config configs/demo/bench.yaml --phases

--roofline measures the device again, and compares every phase with its floor.
"""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from poss_jax.config.bench import BenchConfig
from poss_jax.program.arguments import read_arguments
from poss_jax.program.output import print_summary, show_rows, waiting
from poss_jax.program.running import run_program

from .settings import read_settings

_ACTIONS = {
    "--overwrite": {"action": "store_true", "help": "Start from scratch where a report is already."}
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints, writes."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--roofline" in arguments:
        compare_with_floor([word for word in arguments if word != "--roofline"])
        return
    config, args = read_arguments(
        BenchConfig, arguments, prog="infer.bench", doc=__doc__, actions=_ACTIONS
    )
    with waiting("importing JAX ..."):
        from .compare import run
    run(config, from_scratch=args.overwrite)


def compare_with_floor(arguments: Sequence[str]) -> None:
    """Measures this device again, and compares every decoding phase with its floor.

    For a target and its drafts it prints bytes, FLOPs, least and measured time of every phase of
    the first prompt; the last line is everything as one JSON object. The rates of the device are
    kept for other programs.

        poss bench --roofline --target DIR --draft PosS-3=DIR
        poss bench --roofline --config configs/demo/bench.yaml
    """
    doc = inspect.getdoc(compare_with_floor)
    config, _ = read_settings(arguments, prog="infer.bench --roofline", doc=doc)
    with waiting("importing JAX ..."):
        from .measure import load_decoders
        from .phases import measure_card
        from .questions import first_prompts, read_questions
        from .rates import measure_roofline
        from .report import format_card, with_provenance
    with waiting("measuring the device ..."):
        roofline = measure_roofline()
    decoders = load_decoders(config)
    prompt = first_prompts(read_questions(config, decoders[0].engine))[0]
    methods = {d.name: measure_card(d.engine, prompt, roofline.device) for d in decoders}
    report = {"prompt_tokens": len(prompt.ids), "roofline": asdict(roofline), "methods": methods}
    print(format_card(report, show_rows))
    print_summary(with_provenance(report, config), "")


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
