"""Measures this device again, and compares every decoding phase with its floor.

For a target and its drafts it prints bytes, FLOPs, least and measured time of every phase; the last
line is everything as one JSON object. The rates of the device are kept for other programs.

    poss bench --roofline --target DIR --draft PosS-3=DIR
    poss bench --roofline --config configs/demo/bench.yaml
"""

from collections.abc import Sequence
from dataclasses import asdict

from poss_jax.program.output import print_summary, show_rows, waiting

from .settings import read_settings


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures the device and every method on the first prompt, prints."""
    config, _ = read_settings(arguments, prog="infer.bench --roofline", doc=__doc__)
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
