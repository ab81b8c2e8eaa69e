"""Compares an int8 or fp8 target with itself in full precision: perplexity, tokens, texts.

Both read the same English prose, Python's own manual (`pydoc_data`), in windows of --length tokens,
and continue the questions greedily. A draft changes no text of the target it is verified with; this
says what quantising that target changes. Prints a table, and as its last line one JSON object;
--output keeps report.json and report.md.

    python -m poss_jax.convert target --source MODEL.gguf --output runs/full --dtype float32
    python -m benchmarks.agreement --target runs/full --output docs/results/agreement
"""

from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.options import add_numbers, make_parser
from infer.bench.report import show_report
from poss_jax.checkpoint.record import provenance
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.paths import as_path
from poss_jax.engine.dialogue import check_dialogues, read_dialogues, read_prompts
from poss_jax.engine.engine import Engine
from poss_jax.engine.scoring import score_prompt
from poss_jax.model.quantise import KINDS
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows

_QUESTIONS = "configs/smollm2/questions.jsonl"


def read_windows(engine: Engine, length: int) -> Iterator[list[int]]:
    """Yields the manual's topics as token ids, cut to a length; shorter ones are left out."""
    for text in topics.values():
        ids = engine.encode(text)[:length]
        if len(ids) == length:
            yield ids


def score(engine: Engine, windows: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the windows' tokens, and the most likely tokens at their places."""
    rows = [row for ids in tqdm(windows, unit="window") for row in score_prompt(engine, ids)]
    return np.array([row.chosen for row in rows]), np.array([row.ids[0] for row in rows])


def answer(engine: Engine, records: Sequence[dict[str, Any]], most: int) -> list[list[int]]:
    """Greedy answers to the first turns of questions, as token ids."""
    dialogues = read_dialogues(records, SamplingConfig(), most)
    check_dialogues(engine, dialogues)
    prompts = [one.prompt for one in dialogues if one.prompt is not None]
    return [one.output_ids for one in engine.decode(prompts)]


def num_alike(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the beginning that two texts share."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def measure(engines: dict[str, Engine], args: Any) -> dict[str, dict[str, float]]:
    """Compares every engine with the first."""
    full = next(iter(engines.values()))
    windows = list(islice(read_windows(full, args.length), args.windows))
    records = read_prompts(as_path(args.prompts))
    rows, reference = {}, None
    for name, engine in engines.items():
        found = *score(engine, windows), answer(engine, records, args.max_new_tokens)
        (_, likeliest, texts), (logprobs, tokens, answers) = reference or found, found
        reference = reference or found
        alike = [num_alike(*pair) for pair in zip(texts, answers, strict=True)]
        whole = [mine == theirs for mine, theirs in zip(answers, texts, strict=True)]
        rows[name] = {
            "perplexity": float(np.exp(-logprobs.mean())),
            "same_likeliest": float((tokens == likeliest).mean()),
            "same_tokens": float(np.mean(alike)),
            "same_texts": sum(whole),
        }
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", required=True, help="model folder that is not quantised")
    parser.add_argument("--prompts", default=_QUESTIONS, help="questions (default: SmolLM2's)")
    add_numbers(parser, {"windows": 24, "length": 512, "max-new-tokens": 64})
    args = parser.parse_args(arguments)
    engines = {"full": Engine.load(args.target)}
    engines |= {kind: Engine.load(args.target, quantise=kind) for kind in KINDS}
    rows = measure(engines, args)
    head = ["target", "perplexity", "same likeliest token", "tokens alike", "same texts"]
    cells = [
        (name, f"{row['perplexity']:.3f}", f"{row['same_likeliest']:.1%}",
         f"{row['same_tokens']:.1f}", row["same_texts"])
        for name, row in rows.items()
    ]  # fmt: skip
    report = {"rows": rows, "provenance": provenance()}
    show_report(report, "\n".join(format_rows(head, cells)), args.output)


if __name__ == "__main__":
    run_program(main)
