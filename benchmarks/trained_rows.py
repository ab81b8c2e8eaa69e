"""Does the draft learn an answer's first drafted token? Trains on rows by label and by token.

Writes questions with short answers, trains a small target and, for every seed and value of
`objective.trained_rows`, an EAGLE-2 for it. Then decodes questions drawn the same way (many of them
repeat) greedily with chains. Complete runs are skipped. Prints a table, and as its last line one
JSON object.

    python -m benchmarks.trained_rows --output docs/results/trained_rows
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import make_parser
from infer.bench.report import show_report
from infer.bench.statistics import compare, estimate_mean, format_estimate
from infer.drift.study import Answers, decode
from poss_jax.config.decoding import DriftConfig
from poss_jax.config.reading import load_config
from poss_jax.config.training import TrainConfig
from poss_jax.program.arguments import at_least
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows
from train import main as training

FOLDER, DEPTH = Path("runs/rows"), 4
RULES = "token", "label"
COLOURS = "red", "green", "blue", "black", "white", "yellow"
THINGS = "apple", "boat", "chair", "door", "engine", "flower", "garden", "house", "island", "lamp"


def make_questions(count: int, seed: int) -> list[dict[str, str]]:
    """Draws questions whose answers repeat in a few words what was asked."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(count):
        number, colour, thing = rng.randint(2, 99), rng.choice(COLOURS), rng.choice(THINGS)
        drawn += rng.sample(
            [
                {"question": f"Is the {thing} {colour}?", "answer": f"{colour} {thing}"},
                {"question": f"How many {thing}s?", "answer": f"{number} {thing}s"},
                {"question": f"A {thing}, {number} of them", "answer": f"{thing} {number}"},
            ],
            k=1,
        )
    return drawn


def train_all(seeds: Sequence[int]) -> dict[str, str]:
    """Trains what is not trained yet; returns the drafts' folders by rule and seed."""
    training.main(["--config", "configs/rows/target.yaml"])
    drafts = {f"{rule} {seed}": FOLDER / f"{rule}_{seed}" for seed in seeds for rule in RULES}
    for name, folder in drafts.items():
        rule, seed = name.split()
        changes = f"output={folder}", f"objective.trained_rows={rule}", f"seed={seed}"
        training.main(["--config", "configs/rows/draft.yaml", *changes])
    return {name: str(folder / "model") for name, folder in drafts.items()}


def measure(seeds: Sequence[int], num_prompts: int) -> dict[str, Any]:
    """Trains and decodes; numbers by rule, averaged over seeds and then over questions."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    asked = [{"turns": [one["question"]]} for one in make_questions(num_prompts, seed=1)]
    for name, lines in (("questions", make_questions(4000, seed=0)), ("asked", asked)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (FOLDER / f"{name}.jsonl").write_text(text)
    drafts = train_all(seeds)
    target = load_config(TrainConfig, "configs/rows/target.yaml").output
    _, _, decoded = decode(
        DriftConfig(
            target=f"{target}/model",
            drafts=drafts,
            prompts=str(FOLDER / "asked.jsonl"),
            num_prompts=num_prompts,
            max_new_tokens=24,
            depth=DEPTH,
        )
    )
    columns = {rule: [per_question(decoded[f"{rule} {seed}"]) for seed in seeds] for rule in RULES}
    return {
        "seeds": list(seeds),
        "questions": len(asked),
        "numbers": {name: summarise(columns, name) for name in per_question([])},
    }


def per_question(answers: Answers) -> dict[str, np.ndarray]:
    """Averages what each question's rounds accept, by the names that the report shows."""
    rounds = [[turn.accepted_per_round for turn in turns] for turns in answers]
    first = [np.mean([any(one[:1]) for one in turns]) for turns in rounds]
    whole = [[count for one in turns for count in one] for turns in rounds]
    return {
        "position 1 of the first round": np.array(first),
        "position 1 of all rounds": np.array([np.mean(np.array(one) > 0) for one in whole]),
        "tokens per round": np.array([np.mean(one) + 1 for one in whole]),
    }


def summarise(columns: dict[str, list[dict[str, np.ndarray]]], name: str) -> dict[str, Any]:
    """Means of one number by rule, of every seed, and the difference of the rules."""
    token, label = (np.stack([one[name] for one in columns[rule]], axis=1) for rule in RULES)
    means = {"token": token, "label": label}
    return {
        rule: estimate_mean(values.mean(axis=1)) | {"of_seeds": values.mean(axis=0).tolist()}
        for rule, values in means.items()
    } | compare(token, label)


def format_table(report: dict[str, Any]) -> str:
    """The report as a Markdown table."""
    rows = []
    for name, number in report["numbers"].items():
        rules = [format_estimate(number[rule], digits=3) for rule in RULES]
        difference = format_estimate(number["difference"], digits=3)
        rows.append([name, *rules, difference, f"{number['p_value']:.4f}"])
    head = [f"{report['questions']} questions, seeds {report['seeds']}", *RULES, "difference", "p"]
    return "\n".join(format_rows(head, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help="of training")
    parser.add_argument("--num-prompts", type=at_least(8), default=100, metavar="N")
    args = parser.parse_args(arguments)
    report = measure(range(args.seeds), args.num_prompts)
    show_report(report, format_table(report), args.output)


if __name__ == "__main__":
    run_program(main)
