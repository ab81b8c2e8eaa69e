"""Tries clients of OpenAI's API against a running server, in an environment that has them.

    python tests/peers/clients.py http://127.0.0.1:8000

Prints a JSON list of rows: `client` with its version, `what` was tried, `result`: `works`, or why
not. The model's chat template must have tools.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.request import urlopen

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


Try = Callable[[Server], None]
"""Tries something; raises if it does not work."""


def openai_client(server: Server) -> Any:
    """The official client."""
    return import_module("openai").OpenAI(base_url=server.url, api_key="none", timeout=_SECONDS)


def openai_streams(server: Server) -> None:
    """A streamed chat with usage."""
    create = openai_client(server).chat.completions.create
    options: Any = {"stream_options": {"include_usage": True}, "stream": True, **SHORT}
    events = list(create(model=server.model, messages=CHAT, **options))
    assert events[-1].usage.completion_tokens > 0
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1])


def openai_calls(server: Server) -> None:
    """A forced call, streamed."""
    create = openai_client(server).chat.completions.create
    options: Any = {"tools": [TOOL], "tool_choice": "required", "stream": True, **SHORT}
    events = list(create(model=server.model, messages=CHAT, **options))
    calls = [call for event in events for call in event.choices[0].delta.tool_calls or []]
    check_city(calls[0].function.arguments)


def openai_returns_results(server: Server) -> None:
    """A call and its result, answered."""
    create = openai_client(server).chat.completions.create
    options: Any = {"model": server.model, "tools": [TOOL], **SHORT}
    called = create(messages=CHAT, tool_choice="required", **options).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny"}
    chat = [*CHAT, called, result]
    assert create(messages=chat, tool_choice="none", **options).choices[0].message.content


def openai_parses(server: Server) -> None:
    """`chat.completions.parse` with a class of pydantic."""
    parse = openai_client(server).chat.completions.parse
    reply = parse(model=server.model, messages=CHAT, response_format=city_class(), **SHORT)
    check_city(reply.choices[0].message.parsed)


def openai_responds(server: Server) -> None:
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


def litellm_calls(server: Server) -> None:
    """A chat, and a forced call."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
    complete = import_module("litellm").completion
    options: Any = {"model": f"openai/{server.model}", "api_base": server.url, "api_key": "none"}
    options |= {"messages": CHAT, **SHORT}
    assert complete(**options).choices[0].message.content
    called = complete(**options, tools=[TOOL], tool_choice="required").choices[0].message
    check_city(called.tool_calls[0].function.arguments)


def langchain(server: Server) -> Any:
    """A chat model of langchain."""
    make = import_module("langchain_openai").ChatOpenAI
    return make(model=server.model, base_url=server.url, api_key="none", **SHORT)


def langchain_streams(server: Server) -> None:
    """`stream`."""
    assert "".join(str(part.content) for part in langchain(server).stream(QUESTION))


def langchain_binds(server: Server) -> None:
    """`bind_tools`."""
    bound = langchain(server).bind_tools([TOOL], tool_choice="required")
    check_city(bound.invoke(QUESTION).tool_calls[0]["args"])


def langchain_structures(server: Server) -> None:
    """`with_structured_output`, by schema and by call."""
    for method in ("json_schema", "function_calling"):
        made = langchain(server).with_structured_output(city_class(), method=method)
        check_city(made.invoke(QUESTION))


def instructor_makes(server: Server) -> None:
    """`response_model`, by call and by schema."""
    instructor = import_module("instructor")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai_client(server), mode=mode)
        create = client.chat.completions.create
        options = {"model": server.model, "response_model": city_class(), **SHORT}
        check_city(create(messages=CHAT, **options))


def llm_prompts(server: Server) -> None:
    """`llm -m`."""
    with tempfile.TemporaryDirectory() as folder:
        about = {"model_id": "here", "model_name": server.model, "api_base": server.url}
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([about]))
        words = ["-m", "here", "-o", "max_tokens", "16", "--key", "none", QUESTION]
        assert run("llm", *words, LLM_USER_PATH=folder, LLM_LOAD_PLUGINS="").strip()


def lm_eval_chooses(server: Server) -> None:
    """A task of multiple choice, by `local-completions`."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "sums.jsonl")
        data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
        Path(folder, "sums.yaml").write_text(TASK.format(data=data))
        args = f"model={server.model},base_url={server.url}/completions,num_concurrent=2"
        scores = evaluate(folder, "local-completions", f"{args},max_length=1024")
        assert len(scores) == sum(len(one["choices"]) for one in QUESTIONS)


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
    command = [sys.executable, "-m", program, *words]
    options: Any = {"env": os.environ | environment, "timeout": _SECONDS, "text": True}
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


def try_one(attempt: Try, server: Server) -> str:
    """Says `works`, or why it does not."""
    try:
        attempt(server)
    except Exception as error:  # clients raise all kinds
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "works"


def main(url: str) -> None:
    """Tries all clients."""
    with urlopen(f"{url}/v1/models", timeout=_SECONDS) as reply:
        server = Server(f"{url}/v1", json.load(reply)["data"][0]["id"])
    rows = [
        {
            "client": f"{client} {version(client)}",
            "what": (attempt.__doc__ or "").rstrip("."),
            "result": try_one(attempt, server),
        }
        for client, attempts in TRIES.items()
        for attempt in attempts
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1])
