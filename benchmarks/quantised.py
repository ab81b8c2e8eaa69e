"""Compares a target with itself in int8 and fp8: speed, memory, acceptance length, and its texts.

Needs a target and drafts that were made for it (model folders; by default bundled ones). All ways
of decoding take each prompt in turn, and the fastest of several repeats counts. Prints a table, and
as its last line one JSON object; --output keeps report.json and report.md.

    python -m benchmarks.quantised --output runs/quantised
    python -m benchmarks.quantised --target T --draft PosS-3=P --prompts questions.jsonl
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.draft_vocabulary import (
    add_timing,
    check_equal,
    format_cells,
    num_different,
    summarise,
    time_in_turn,
)
from benchmarks.options import add_questions, bench_config, make_parser
from infer.bench.measure import count_memory, load_decoders
from infer.bench.questions import read_questions
from infer.bench.report import show_report
from poss_jax.checkpoint.folder import load_target
from poss_jax.checkpoint.record import provenance
from poss_jax.config.decoding import BenchConfig
from poss_jax.config.models import Quantisation
from poss_jax.config.reading import config_to_dict
from poss_jax.engine.answers import Generation
from poss_jax.engine.device import default_dtype
from poss_jax.model.linear import linear
from poss_jax.model.quantise import KINDS
from poss_jax.model.target import encode, stack_layers
from poss_jax.program.running import run_program
from poss_jax.shapes import Params

DRAFTS = {"EAGLE-2": "eagle", "PosS-3": "poss3", "EAGLE-3": "eagle3"}


def measure(config: BenchConfig) -> dict[str, Any]:
    """Decodes everything with the target as it is stored and with both of its quantisations."""
    decoders = [
        (kind, decoder)
        for kind in (None, *KINDS)
        for decoder in load_decoders(replace(config, quantise=kind))
    ]
    questions = read_questions(config, decoders[0][1].engine)
    runs = time_in_turn([decoder for _, decoder in decoders], questions, config.repeats)
    texts, rows = runs[0].answers, []
    per_kind = len(config.drafts) + 1
    for index, ((kind, decoder), run) in enumerate(zip(decoders, runs, strict=True)):
        alone = runs[index - index % per_kind]
        if run is alone:
            agreement = share_of_same_tokens(config.target, kind, texts)
            before = share_before_difference(run.answers, texts)
        memory = count_memory(decoder.engine)
        rows.append(
            {
                "target": kind or jnp.dtype(default_dtype()).name,
                "decoding": decoder.name,
                **{name: memory[name] for name in ("target_bytes", "draft_bytes")},
                **summarise(run, alone),
                "same_next_token": agreement,
                "same_before_difference": before,
            }
        )
    return {
        "prompts": len(questions),
        "config": config_to_dict(config),
        "rows": rows,
        "provenance": provenance(),
    }


def share_of_same_tokens(
    folder: str, kind: Quantisation | None, texts: Sequence[Generation]
) -> float:
    """Share of the tokens of greedy texts that a target would also choose after what precedes them.

    Args:
      folder: model folder of the target.
      kind: its quantisation.
      texts: answers of the target as it is stored.
    """
    record, params = load_target(folder, default_dtype(), quantise=kind)
    params = params | {"layers": stack_layers(params["layers"])}

    @jax.jit
    def choose(params: Params, tokens: jax.Array) -> jax.Array:
        features = encode(params, record.llama, tokens)
        return linear(features, params["head"]["weight"]).argmax(axis=-1)

    length = max(len(text.prompt_ids) + len(text.output_ids) for text in texts)
    same = []
    for text in texts:
        ids = np.array([*text.prompt_ids, *text.output_ids], np.int32)
        padded = np.pad(ids, (0, length - len(ids)))
        chosen = np.asarray(choose(params, jnp.asarray(padded[None])))[0]
        start = len(text.prompt_ids)
        same.append(chosen[start - 1 : len(ids) - 1] == ids[start:])
    return float(np.concatenate(same).mean())


def share_before_difference(answers: Sequence[Generation], texts: Sequence[Generation]) -> float:
    """Share of the tokens of texts that stand before the first one another target chose."""
    kept = 0
    for answer, text in zip(answers, texts, strict=True):
        pairs = list(zip(answer.output_ids, text.output_ids, strict=False))
        kept += next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
    return kept / sum(len(text.output_ids) for text in texts)


def format_table(report: dict[str, Any]) -> str:
    """The report as a Markdown table."""
    return "\n".join(
        [
            *format_cells(report, _CELLS),
            "",
            "Speed-up: over the same target alone. Same next token: share of the tokens in the "
            "unquantised target's texts that the target also chooses after what precedes them. "
            "Same text: share of them before the first difference between the texts.",
            "",
            f"Outputs that differ from those of the same target alone: {num_different(report)}",
        ]
    )


_CELLS = {
    "target": ("target", "{}"),
    "decoding": ("decoding", "{}"),
    "target bytes": ("target_bytes", "{:,}"),
    "draft bytes": ("draft_bytes", "{:,}"),
    "acceptance length": ("acceptance_length", "{:.2f}"),
    "round ms": ("round_milliseconds", "{:.2f}"),
    "tokens/s": ("tokens_per_second", "{:.0f}"),
    "speed-up": ("speed_up", "{:.2f}"),
    "same next token": ("same_next_token", "{:.1%}"),
    "same text": ("same_before_difference", "{:.1%}"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints, writes."""
    parser = make_parser(__doc__)
    add_questions(parser, num_prompts=16, max_new_tokens=64)
    add_timing(parser)
    args = parser.parse_args(arguments)
    report = measure(bench_config(args, DRAFTS, tree=args.tree, repeats=args.repeats))
    show_report(report, format_table(report), args.output)
    check_equal(report)


if __name__ == "__main__":
    run_program(main)
