"""Which clients of OpenAI's API work with a running server: a table, tried one by one.

Needs no poss_jax, so it runs where the clients are installed; those that are not are left out.
The model's chat template must have tools.

    pip install openai litellm langchain-openai instructor llm 'lm-eval[api]'
    python benchmarks/clients.py --url http://127.0.0.1:8000 --output docs/results/clients

With --hf FOLDER (the same weights for transformers, in float32), lm-eval's log-likelihoods are
compared with its `hf` backend's; that needs torch.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.request import urlopen

from poss_jax.config.paths import child_python

QUESTION = "Which city is it, Lisbon or Porto?"
CHAT = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Lisbon", "Porto"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "go_to", "parameters": SCHEMA, "strict": True}}
SHORT = {"max_tokens": 100, "temperature": 0}
QUESTIONS = [
    {"question": f"{a} plus {b} is", "choices": [str(a + b), str(a * b + 7), "blue"], "gold": 0}
    for a in range(1, 5)
    for b in range(2, 5)
]
TASK = """task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list:
  - metric: acc
"""
_SECONDS = 600


class Server(NamedTuple):
    """The server that is tried, and its model."""

    url: str  # ends in /v1
    model: str
    hf: str | None  # folder of the same model for transformers; None: not compared


Try = Callable[[Server], str]
"""Tries something; returns what to remark. Raises if it does not work."""


def openai_client(server: Server) -> Any:
    """The official client."""
    return import_module("openai").OpenAI(base_url=server.url, api_key="none", timeout=_SECONDS)


def openai_streams(server: Server) -> str:
    """A streamed chat with usage."""
    create = openai_client(server).chat.completions.create
    options: Any = {"stream_options": {"include_usage": True}, "stream": True, **SHORT}
    events = list(create(model=server.model, messages=CHAT, **options))
    assert events[-1].usage.completion_tokens > 0
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1])
    return ""


def openai_calls(server: Server) -> str:
    """A forced call, streamed."""
    create = openai_client(server).chat.completions.create
    options: Any = {"tools": [TOOL], "tool_choice": "required", "stream": True, **SHORT}
    events = list(create(model=server.model, messages=CHAT, **options))
    calls = [call for event in events for call in event.choices[0].delta.tool_calls or []]
    check_city(calls[0].function.arguments)
    return ""


def openai_returns_results(server: Server) -> str:
    """A call and its result, answered."""
    create = openai_client(server).chat.completions.create
    options: Any = {"model": server.model, "tools": [TOOL], **SHORT}
    called = create(messages=CHAT, tool_choice="required", **options).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny"}
    chat = [*CHAT, called, result]
    assert create(messages=chat, tool_choice="none", **options).choices[0].message.content
    return ""


def openai_parses(server: Server) -> str:
    """`chat.completions.parse` with a class of pydantic."""
    parse = openai_client(server).chat.completions.parse
    reply = parse(model=server.model, messages=CHAT, response_format=city_class(), **SHORT)
    check_city(reply.choices[0].message.parsed)
    return ""


def openai_responds(server: Server) -> str:
    """`responses.parse`, and a forced call by `responses.stream`."""
    responses = openai_client(server).responses
    options: Any = {"model": server.model, "input": QUESTION, "temperature": 0}
    options |= {"max_output_tokens": SHORT["max_tokens"]}
    check_city(responses.parse(text_format=city_class(), **options).output_parsed)
    tool = {"type": "function", **TOOL["function"]}
    options |= {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with responses.stream(**options) as events:
        (call,) = events.get_final_response().output
    check_city(call.arguments)
    return ""


def litellm_calls(server: Server) -> str:
    """A chat, and a forced call."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
    complete = import_module("litellm").completion
    options: Any = {"model": f"openai/{server.model}", "api_base": server.url, "api_key": "none"}
    options |= {"messages": CHAT, **SHORT}
    assert complete(**options).choices[0].message.content
    called = complete(**options, tools=[TOOL], tool_choice="required").choices[0].message
    check_city(called.tool_calls[0].function.arguments)
    return ""


def langchain(server: Server) -> Any:
    """A chat model of langchain."""
    make = import_module("langchain_openai").ChatOpenAI
    return make(model=server.model, base_url=server.url, api_key="none", **SHORT)


def langchain_streams(server: Server) -> str:
    """`stream`."""
    assert "".join(str(part.content) for part in langchain(server).stream(QUESTION))
    return ""


def langchain_binds(server: Server) -> str:
    """`bind_tools`."""
    bound = langchain(server).bind_tools([TOOL], tool_choice="required")
    check_city(bound.invoke(QUESTION).tool_calls[0]["args"])
    return ""


def langchain_structures(server: Server) -> str:
    """`with_structured_output`, by schema and by call."""
    for method in ("json_schema", "function_calling"):
        made = langchain(server).with_structured_output(city_class(), method=method)
        check_city(made.invoke(QUESTION))
    return ""


def instructor_makes(server: Server) -> str:
    """`response_model`, by call and by schema."""
    instructor = import_module("instructor")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai_client(server), mode=mode)
        create = client.chat.completions.create
        options = {"model": server.model, "response_model": city_class(), **SHORT}
        check_city(create(messages=CHAT, **options))
    return ""


def llm_prompts(server: Server) -> str:
    """`llm -m`."""
    with tempfile.TemporaryDirectory() as folder:
        about = {"model_id": "here", "model_name": server.model, "api_base": server.url}
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([about]))
        words = ["-m", "here", "-o", "max_tokens", "16", "--key", "none", QUESTION]
        assert run("llm", *words, LLM_USER_PATH=folder, LLM_LOAD_PLUGINS="").strip()
    return ""


def lm_eval_chooses(server: Server) -> str:
    """A task of multiple choice, by `local-completions`."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "sums.jsonl")
        data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
        Path(folder, "sums.yaml").write_text(TASK.format(data=data))
        args = f"model={server.model},base_url={server.url}/completions,num_concurrent=2"
        ours = evaluate(folder, "local-completions", f"{args},max_length=1024")
        remark = f"{len(ours)} log-likelihoods"
        if server.hf is None:
            return remark
        # PyTorch's log_softmax in float32 adds 3e-5 per token on CPU.
        precise = f"pretrained={server.hf},dtype=float32,softmax_dtype=float64"
        theirs = evaluate(folder, "hf", precise)
        most = max(abs(own - other) for own, other in zip(ours, theirs, strict=True))
        assert most < 1e-4, f"differs from hf by {most:.2g}"
        return f"{remark}, at most {most:.1e} from hf's"


def evaluate(folder: str, model: str, args: str) -> list[float]:
    """Log-likelihoods of all choices, by lm-eval."""
    output = Path(folder, model)
    words = ["run", "--model", model, "--model_args", args, "--tasks", "sums", "--log_samples"]
    words += ["--include_path", folder, "--output_path", str(output)]
    run("lm_eval", *words, HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=folder)
    (samples,) = output.rglob("samples_sums_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    found.sort(key=lambda one: one["doc_id"])
    return [float(answer[0][0]) for one in found for answer in one["resps"]]


def run(program: str, *words: str, **environment: str) -> str:
    """Runs a client's program; returns what it prints."""
    command, inherited = child_python("-m", program, *words)
    options: Any = {"env": inherited | environment, "timeout": _SECONDS, "text": True}
    done = subprocess.run(command, capture_output=True, check=False, **options)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1:]
    return done.stdout


def check_city(found: Any) -> None:
    """Checks an answer: JSON, fields, or an object of `city_class`."""
    found = json.loads(found) if isinstance(found, str) else found
    city = found["city"] if isinstance(found, dict) else found.city
    assert city in ("Lisbon", "Porto"), city


def city_class() -> Any:
    """A class of pydantic with the fields of `SCHEMA`."""
    fields: Any = {"city": (Literal["Lisbon", "Porto"], ...)}
    return import_module("pydantic").create_model("City", **fields)


TRIES: dict[str, Sequence[Try]] = {
    "openai": (
        *(openai_streams, openai_calls, openai_returns_results, openai_parses),
        openai_responds,
    ),
    "litellm": (litellm_calls,),
    "langchain-openai": (langchain_streams, langchain_binds, langchain_structures),
    "instructor": (instructor_makes,),
    "llm": (llm_prompts,),
    "lm-eval": (lm_eval_chooses,),
}


def try_all(server: Server, clients: Sequence[str]) -> list[str]:
    """Lines of the table."""
    lines = ["| client | what | works |", "|---|---|---|"]
    for client in clients:
        try:
            name = f"{client} {version(client)}"
        except PackageNotFoundError:
            continue
        for one in TRIES[client]:
            try:
                remark = one(server)
                works = f"yes{': ' + remark if remark else ''}"
            except Exception as error:  # clients raise all kinds
                works = f"no: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            lines.append(f"| {name} | {(one.__doc__ or '').rstrip('.')} | {works} |")
            print(lines[-1], flush=True)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Tries the clients, and prints and keeps the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--hf", metavar="FOLDER", help="the same model for transformers")
    parser.add_argument("--clients", nargs="+", choices=TRIES, default=list(TRIES))
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for report.md")
    given = parser.parse_args(arguments)
    with urlopen(f"{given.url}/v1/models", timeout=_SECONDS) as reply:
        model = json.load(reply)["data"][0]["id"]
    lines = try_all(Server(f"{given.url}/v1", model, given.hf), given.clients)
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        title = "# Clients of the server\n\nBy `python benchmarks/clients.py`:\n\n"
        (given.output / "report.md").write_text(title + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
