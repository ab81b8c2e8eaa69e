"""Answers prompts greedily with vLLM, in vLLM's own environment: reads jobs, prints results.

Standard input is a JSON object of jobs by name: `model` (folder), `prompts` (token ids),
`max_tokens`, and optionally `speculative`, vLLM's `speculative_config`, and `poss`: whether the
plugin of examples/vllm is loaded, and texts are written together; it stays for later jobs. The last
line of the output is a JSON object of results by name: `texts` (token ids), and with a draft
`rounds` and `accepted` (rounds that accepted each position), as vLLM counts them; or `error`, why
vLLM refused.
"""

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the counters can be read here
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}


def answer(
    model: str,
    prompts: list[list[int]],
    max_tokens: int,
    speculative: dict[str, Any] | None = None,
    poss: bool = False,
) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    if poss:
        from poss_vllm import register

        register()
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        max_num_seqs=len(prompts) if poss else 1,
        speculative_config=speculative,
    )
    before = read_counters(llm)
    settings = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
    counters = read_counters(llm)
    result = {"texts": [list(one.outputs[0].token_ids) for one in answers]}
    return result | {name: minus(counters[name], before[name]) for name in counters}


def read_counters(llm: Any) -> dict[str, Any]:
    """Rounds, and rounds that accepted each position; all drafts of a process share them."""
    counters = {metric.name: metric for metric in llm.get_metrics()}
    if (rounds := counters.get("vllm:spec_decode_num_drafts")) is None:
        return {}
    accepted = counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return {"rounds": rounds.value, "accepted": accepted}


def minus(after: Any, before: Any) -> Any:
    if isinstance(after, list):
        return [minus(*pair) for pair in zip(after, before, strict=True)]
    return after - before


def main() -> None:
    import vllm

    results: dict[str, Any] = {"vllm": vllm.__version__}
    for name, job in json.load(sys.stdin).items():
        try:
            results[name] = answer(**job)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
