"""Compares this engine with PyTorch on one machine: recorded models, and a larger random pair.

Needs torch and transformers (`pip install 'poss_jax[torch]'`). Each table is timed in one process,
interleaved, on cores that nothing else should use. Our numbers are compared with two:

    torch        a greedy loop over the model of `transformers`, with its cache of keys and values
    generate     `generate` of `transformers`

Recorded models (a folder like `tests/fixtures`): tokens/s, prompt included. Random pair:
milliseconds of an autoregressive step and of a round after the prompt, many in one program, and
time and floor (`infer.bench.costs`) of every phase. Prints Markdown tables, and as its last line
one JSON object.

    python -m benchmarks.pytorch
    python -m benchmarks.pytorch --only recorded --models tests/fixtures --repeats 5
    python -m benchmarks.pytorch --only random --output runs/pytorch
"""

import contextlib
import importlib.util
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.options import add_numbers, add_trees, make_parser, read_shape
from benchmarks.random_pair import interleaved, random_engines, time_rounds
from infer.bench.phases import measure_card
from infer.bench.rates import measure_roofline
from infer.bench.report import format_card, show_report
from poss_jax.checkpoint.record import provenance
from poss_jax.config.models import LlamaConfig, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import main as convert
from poss_jax.decode.metrics import mean_acceptance_length
from poss_jax.engine.engine import Engine
from poss_jax.program.arguments import at_least
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows

if TYPE_CHECKING:
    import transformers

STEP, LOOP, GENERATE = "autoregressive", "torch", "generate"


# --------------------------------------------------------------------------------------------------
# PyTorch


class TorchLoop:
    """Greedy decoding of one prompt with a model of `transformers`."""

    def __init__(self, model: "transformers.PreTrainedModel") -> None:
        self.model = model.eval()

    def decode(
        self, prompt: Sequence[int], num_tokens: int, stop_ids: Sequence[int] = ()
    ) -> list[int]:
        """Continues a prompt, one step after the other, up to a stop token."""
        import torch

        with torch.inference_mode():
            out = self._prefill(prompt)
            tokens = [int(out.logits[0, -1].argmax())]
            while len(tokens) < num_tokens and tokens[-1] not in stop_ids:
                out = self._step(tokens[-1], out.past_key_values)
                tokens.append(int(out.logits[0, -1].argmax()))
        return tokens

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Continues a prompt as users of `transformers` do."""
        import torch

        ids = torch.tensor([prompt], device=self.model.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    def time_steps(self, prompt: Sequence[int], num_steps: int) -> float:
        """Milliseconds per step after the prompt, the median."""
        import torch

        seconds = []
        with torch.inference_mode():
            out = self._prefill(prompt)
            for _ in range(num_steps):
                started = time.perf_counter()
                out = self._step(int(out.logits[0, -1].argmax()), out.past_key_values)
                seconds.append(time.perf_counter() - started)
        return 1000 * float(np.median(seconds))

    def _prefill(self, prompt: Sequence[int]) -> Any:
        import torch

        ids = torch.tensor([prompt], device=self.model.device)
        return self.model(ids, use_cache=True, logits_to_keep=1)

    def _step(self, token: int, cache: Any) -> Any:
        import torch

        ids = torch.tensor([[token]], device=self.model.device)
        return self.model(ids, past_key_values=cache, use_cache=True)


def use_cores(num_threads: int) -> None:
    """Limits this process to `num_threads` cores, and PyTorch to as many threads.

    XLA starts one thread per core that the process may use.

    Raises:
      UserError: torch or transformers is missing, or there are fewer cores.
    """
    need_torch()
    import torch

    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < num_threads:
            raise UserError(f"threads: want at most {len(cores)}, got {num_threads}")
        os.sched_setaffinity(0, cores[:num_threads])
    torch.set_num_threads(num_threads)


def need_torch() -> None:
    """Ends the program where PyTorch is not installed.

    Raises:
      UserError: torch or transformers is missing.
    """
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing; pip install 'poss_jax[torch]'")


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of neighbouring runs."""
    return float(np.median(np.divide(ours, theirs)))


# --------------------------------------------------------------------------------------------------
# Recorded models


def measure_recorded(
    folder: Path, trees: Sequence[TreeConfig], num_tokens: int, repeats: int
) -> dict[str, Any]:
    """Times all drafts of a folder of recorded models, and the torch loop.

    Raises:
      UserError: the folder holds no recorded models.
    """
    import torch
    import transformers

    methods, prompts = read_recorded(folder)
    loop = TorchLoop(
        transformers.AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    )
    baseline, drafts = load_recorded(folder, methods)
    ours = {(STEP, ""): baseline} | {
        (tree.name, name): drafts[name].with_tree(tree) for tree in trees for name in methods
    }
    race = Race(prompts, num_tokens)
    runs = {
        LOOP: partial(race.run, LOOP, loop.decode),
        GENERATE: partial(race.run, GENERATE, loop.generate),
        **{" ".join(key): partial(race.run_engine, " ".join(key), ours[key]) for key in ours},
    }
    speeds = interleaved(runs, repeats, "recorded models")
    return {
        "prompts": len(prompts),
        "new_tokens": num_tokens,
        "tokens_per_second": {name: float(np.median(speeds[name])) for name in (LOOP, GENERATE)},
        "generate_equal_outputs": race.count_equal(GENERATE),
        "rows": [
            _recorded_row(tree, method, speeds)
            | {
                "acceptance_length": race.accepted[f"{tree} {method}"],
                "equal_outputs": race.count_equal(f"{tree} {method}"),
            }
            for tree, method in ours
        ],
    }


def read_recorded(folder: Path) -> tuple[list[str], list[list[int]]]:
    """Reads the names of the drafts in a folder of recorded models, and the prompts.

    Raises:
      UserError: the folder holds no recorded models.
    """
    methods = sorted(path.name for path in folder.glob("draft/*"))
    recordings = sorted(folder.glob("generate_*.json"))
    if not (methods and recordings and (folder / "target").is_dir()):
        raise UserError(f"{folder}: want target/, draft/ and generate_*.json of recorded models")
    return methods, [case["prompt"] for case in json.loads(recordings[0].read_text())["cases"]]


class Race:
    """Prompts that are decoded in several ways, by name.

    Attributes:
      accepted: acceptance length of every engine.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        self._prompts, self._num_tokens = prompts, num_tokens
        self._outputs: dict[str, list[list[int]]] = {}
        self.accepted: dict[str, float] = {}

    def run(self, name: str, decode: Callable[[Sequence[int], int], list[int]]) -> float:
        """Decodes all prompts; returns tokens per second."""
        started = time.perf_counter()
        self._outputs[name] = [decode(prompt, self._num_tokens) for prompt in self._prompts]
        seconds = time.perf_counter() - started
        return self._num_tokens * len(self._prompts) / seconds

    def run_engine(self, name: str, engine: Engine) -> float:
        """Decodes all prompts with an engine; returns tokens per second."""
        accepted: list[Sequence[int]] = []

        def decode(prompt: Sequence[int], num_tokens: int) -> list[int]:
            (answer,) = engine.generate([prompt], max_new_tokens=num_tokens)
            accepted.append(answer.accepted_per_round)
            return answer.output_ids

        speed = self.run(name, decode)
        self.accepted[name] = mean_acceptance_length(accepted)
        return speed

    def count_equal(self, name: str) -> int:
        """Counts outputs equal to the torch loop's."""
        return sum(map(list.__eq__, self._outputs[name], self._outputs[LOOP]))


def _recorded_row(tree: str, method: str, speeds: dict[str, list[float]]) -> dict[str, Any]:
    ours = speeds[f"{tree} {method}"]
    return {
        "tree": tree,
        "draft": method,
        "tokens_per_second": float(np.median(ours)),
        "to_torch": ratio(ours, speeds[LOOP]),
        "to_generate": ratio(ours, speeds[GENERATE]),
    }


def load_recorded(folder: Path, methods: Sequence[str]) -> tuple[Engine, dict[str, Engine]]:
    """Converts and loads the target and all drafts."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()):
        target = Path(temporary) / "target"
        convert(["target", "--source", str(folder / "target"), "--output", str(target)])
        baseline = Engine.load(target)
        engines = {}
        for name in methods:
            draft = Path(temporary) / name
            spans, depth = recorded_spans(name)
            arguments = ["--source", str(folder / "draft" / name), "--target", str(target)]
            arguments += ["--positions-per-specialist", spans, "--trained-depth", str(depth)]
            convert(["draft", *arguments, "--output", str(draft)])
            engines[name] = baseline.load_draft(draft)
    return baseline, engines


def recorded_spans(method: str) -> tuple[str, int]:
    """Positions per specialist and trained depth of a draft, which its files do not say."""
    if not method.startswith("poss"):
        return "1", 3 if method == "hass" else 1
    span = int(method.removeprefix("poss"))
    return ",".join([str(span)] * (6 // span)), 6


# --------------------------------------------------------------------------------------------------
# A larger random pair


def measure_random(
    llama: LlamaConfig,
    trees: Sequence[TreeConfig],
    *,
    num_draft_tokens: int,
    prompt_tokens: int,
    num_steps: int,
    repeats: int,
) -> dict[str, Any]:
    """Times steps and rounds of a random pair, and the torch loop.

    Args:
      llama: shape of the target, and of a specialist of its PosS-3 draft.
      trees: trees to time.
      num_draft_tokens: size of the reduced draft vocabulary, which is timed as well.
      prompt_tokens: length of the prompt.
      num_steps: autoregressive steps per run, and a quarter as many rounds.
      repeats: runs that are timed.
    """
    import transformers

    baseline, drafted, reduced = random_engines(llama, num_draft_tokens)
    prompt = np.random.default_rng(0).integers(0, llama.vocab_size, prompt_tokens).tolist()
    loop = TorchLoop(transformers.LlamaForCausalLM(torch_shape(llama)))
    runs: dict[str, Callable[[], float]] = {LOOP: lambda: loop.time_steps(prompt, num_steps)}
    runs[STEP] = time_rounds(baseline, prompt, num_steps)
    vocabularies = {llama.vocab_size: drafted, num_draft_tokens: reduced}
    for tree in trees:
        for size, engine in vocabularies.items():
            rounds = time_rounds(engine.with_tree(tree), prompt, -(-num_steps // 4))
            runs[f"{tree.name} {size}"] = rounds
    milliseconds = interleaved(runs, repeats, "random pair")
    step = milliseconds.pop(LOOP)
    engines = {STEP: baseline} | {tree.name: drafted.with_tree(tree) for tree in trees}
    roofline, prepared = measure_roofline(), baseline.prepare(prompt, num_steps)
    return {
        "prompt_tokens": prompt_tokens,
        "torch_milliseconds": float(np.median(step)),
        "rows": [_random_row(name, ours, step) for name, ours in milliseconds.items()],
        "roofline": asdict(roofline),
        "methods": {
            name: measure_card(engine, prepared, roofline.device)
            for name, engine in engines.items()
        },
    }


def _random_row(name: str, ours: list[float], step: list[float]) -> dict[str, Any]:
    tree, _, size = name.partition(" ")
    return {
        "tree": tree,
        "draft_vocabulary": int(size or 0),
        "milliseconds": float(np.median(ours)),
        "to_torch": ratio(ours, step),
    }


def torch_shape(llama: LlamaConfig) -> "transformers.LlamaConfig":
    """The same shape for `transformers`."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=llama.vocab_size,
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_hidden_layers=llama.num_layers,
        num_attention_heads=llama.num_heads,
        num_key_value_heads=llama.num_kv_heads,
        head_dim=llama.head_dim,
        max_position_embeddings=llama.max_position_embeddings,
    )


# --------------------------------------------------------------------------------------------------
# The report


def format_recorded(report: dict[str, Any]) -> str:
    """Tokens per second as a Markdown table."""
    speeds = report["tokens_per_second"]
    lines = [
        f"Recorded models, {report['prompts']} prompts x {report['new_tokens']} tokens. Tokens/s: "
        f"torch loop {speeds[LOOP]:.0f}, transformers' generate {speeds[GENERATE]:.0f} "
        f"({report['generate_equal_outputs']} outputs equal the loop's).",
        "",
    ]
    head = ["tree", "draft", "tokens/s", "x torch", "x generate", "acceptance length", "equal"]
    table = []
    for row in report["rows"]:
        cells = [row["tree"], row["draft"]]
        cells += [f"{row['tokens_per_second']:.0f}", f"{row['to_torch']:.2f}"]
        cells += [f"{row['to_generate']:.2f}", f"{row['acceptance_length']:.2f}"]
        table.append([*cells, row["equal_outputs"]])
    return "\n".join([*lines, *format_rows(head, table)])


def format_random(report: dict[str, Any]) -> str:
    """Milliseconds as a Markdown table."""
    lines = [
        f"Random pair, prompt of {report['prompt_tokens']} tokens; a step of the torch loop takes "
        f"{report['torch_milliseconds']:.1f} ms.",
        "",
    ]
    head = ["tree", "draft vocabulary", "ms", "torch steps"]
    table = []
    for row in report["rows"]:
        cells = [row["tree"], row["draft_vocabulary"] or "", f"{row['milliseconds']:.1f}"]
        table.append([*cells, f"{row['to_torch']:.2f}"])
    return "\n".join([*lines, *format_rows(head, table), "", format_card(report)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints, writes."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=("recorded", "random"), help="one of the two tables")
    parser.add_argument("--models", type=Path, default=Path("tests/fixtures"), metavar="DIR")
    add_trees(parser, "6/10/60", "4/4/16")
    parser.add_argument("--new-tokens", type=at_least(1), default=128, metavar="N")
    parser.add_argument("--repeats", type=at_least(1), default=5, metavar="N")
    parser.add_argument("--threads", type=at_least(1), default=2, metavar="N", help="and cores")
    sizes = {"hidden-size": 1024, "intermediate-size": 2816, "layers": 8, "heads": 16}
    sizes |= {"kv-heads": 8, "vocab-size": 32000, "draft-vocabulary": 8000, "prompt": 64}
    add_numbers(parser, sizes)
    parser.add_argument("--steps", type=at_least(1), default=16, metavar="N", help="per run")
    args = parser.parse_args(arguments)
    use_cores(args.threads)
    report: dict[str, Any] = {"threads": args.threads, "load_average": os.getloadavg()[0]}
    tables = [
        f"{args.threads} threads, load average before: {report['load_average']:.1f} (want 0: "
        "other programs slow PyTorch's threads down more than XLA's)."
    ]
    if args.only != "random":
        report["recorded"] = measure_recorded(
            args.models, args.trees, args.new_tokens, args.repeats
        )
        tables.append(format_recorded(report["recorded"]))
    if args.only != "recorded":
        report["random"] = measure_random(
            read_shape(args),
            args.trees,
            num_draft_tokens=args.draft_vocabulary,
            prompt_tokens=args.prompt,
            num_steps=args.steps,
            repeats=args.repeats,
        )
        tables.append(format_random(report["random"]))
    report["provenance"] = provenance()
    show_report(report, "\n\n".join(tables), args.output)


if __name__ == "__main__":
    run_program(main)
