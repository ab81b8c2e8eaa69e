"""The server as clients see it: the official client, texts equal to `Engine.generate`, errors."""

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice, product
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from programs import Runs
from serving import MODEL, Served, decode_each, serving, until

from poss_jax import Engine, Generation, SamplingConfig, TreeConfig
from poss_jax.checkpoint.folder import load_target
from poss_jax.config.decoding import EngineConfig, SamplingOptions
from poss_jax.engine.prompts import fold_seed, prompt_seed
from poss_jax.model.documents import encode
from poss_jax.model.target import stack_layers
from poss_jax.serving.service import Service

LEAST_ROWS = 256  # one program decodes all prompts offline
N = 24
PROMPTS = ["def area_7", "def area_1_1(width, heig"]
CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "def area_7"}]
SEED = 11
KEYWORDS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed")
SETTINGS = [
    {},
    {"temperature": 1.0, "seed": SEED},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 2**40 + 5},
    {"temperature": 1.2, "min_p": 0.02, "seed": 3},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"temperature": 1.0, "frequency_penalty": 0.7, "seed": 4},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"5": 1.5, "60": -100.0}, "temperature": 1.0, "seed": 5},
    {"min_tokens": 9, "logit_bias": {"1": 100.0}, "temperature": 1.0, "seed": 6},  # 1 ends a text
]


TREE = TreeConfig(depth=2, top_k=2, total_tokens=6)


@pytest.fixture(scope="module")
def served(runs: Runs) -> Iterator[Served]:
    engine = Engine.load(runs.model("target"), runs.model("poss2"), EngineConfig(tree=TREE))
    with serving(engine, sampling=SamplingOptions(temperature=0.0), max_queue=300) as served:
        until(lambda: served.service.is_compiled, seconds=300)
        ready = served.get("/ready")
        assert ready.status_code == 200 and ready.json()["is_compiled"]
        yield served
        assert served.scheduler.error is None


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def keywords(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the official client takes them: those that only we have in `extra_body`."""
    known = {*KEYWORDS, "max_tokens", "n", "stop", "echo", "logprobs", "stream", "stream_options"}
    own = {name: value for name, value in options.items() if name not in known}
    return {name: options[name] for name in options if name in known} | {"extra_body": own}


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    options = {"max_tokens": N} | options
    return client.completions.create(model=MODEL, prompt=prompt, **keywords(options))


def ask(client: openai.OpenAI, messages: Any = CHAT, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def texts(reply: Any) -> list[str]:
    events = reply if isinstance(reply, openai.Stream) else [reply]
    found: dict[int, str] = {}
    for choice in (choice for event in events for choice in event.choices):
        found[choice.index] = found.get(choice.index, "") + choice.text
    return [found[index] for index in range(len(found))]


def offline(engine: Engine, prompts: list[Any], options: Any = ()) -> list[Generation]:
    given = dict(options)
    settings = SamplingConfig(**given | {"seed": fold_seed(given.get("seed", 0))})
    seeds = [prompt_seed(settings.seed, index) for index in range(len(prompts))]
    chosen = [replace(settings, seed=seed) for seed in seeds]
    pairs = zip(prompts, chosen, strict=True)
    return decode_each(engine, [engine.prepare(prompt, N, sampling) for prompt, sampling in pairs])


# --------------------------------------------------------------------------------------------------
# Before anything else is compiled in this process


@pytest.mark.parametrize("num_requests", [90, pytest.param(560, marks=pytest.mark.slow)])
def test_requests_of_all_kinds_compile_nothing(served, client, num_requests) -> None:
    others = [{}, {"stop": ["width"]}, {"n": 3}, {"logprobs": 3}, {"ignore_eos": True}]
    kinds = list(product(SETTINGS, [*others, {"draft": False}], [False, True]))

    def send(index: int) -> int:
        sampling, other, is_streamed = kinds[index % len(kinds)]
        options = {**sampling, **other, "max_tokens": 1 + index % 60, "stream": is_streamed}
        return len(texts(complete(client, PROMPTS[index % 2] * (1 + index % 7), **options)))

    stats = served.scheduler.stats
    before = sum(stats.finished.values())
    with ThreadPoolExecutor(8) as pool:
        num_texts = sum(pool.map(send, range(num_requests)))
    asked = islice(cycle(kinds), num_requests)
    assert num_texts == sum(other.get("n", 1) for _, other, _ in asked)
    assert sum(stats.finished.values()) == before + num_texts and stats.compilations == 0


@pytest.mark.parametrize("error", [None, MemoryError("no memory")])
def test_a_service_that_failed_is_not_ready(error: Exception | None) -> None:
    service: Any = object.__new__(Service)
    service.is_draining = False
    service.scheduler = SimpleNamespace(error=error, compilation=SimpleNamespace(sizes=(1,)))
    assert service.is_ready == (error is None)
    service.scheduler.compilation = None  # nothing is compiled yet
    assert not service.is_ready


# --------------------------------------------------------------------------------------------------
# Texts


@pytest.mark.quick
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_texts_are_those_of_generate(served, client, options, is_streamed) -> None:
    expected = offline(served.engine, PROMPTS[:1], options)
    assert texts(complete(client, PROMPTS[0], stream=is_streamed, **options)) == [expected[0].text]


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_choices_have_seeds_of_their_own(served, client, num_prompts) -> None:
    prompts, options = PROMPTS[:num_prompts], {"temperature": 1.0, "seed": SEED}
    each = [prompt for prompt in prompts for _ in range(3)]
    expected = [answer.text for answer in offline(served.engine, each, options)]
    assert len(set(expected)) == len(expected)
    ids = [served.engine.encode(prompt) for prompt in prompts]
    for asked in (prompts, ids, *((prompts[0], ids[0]) if num_prompts == 1 else ())):
        assert texts(complete(client, asked, n=3, **options)) == expected
    assert texts(complete(client, ids, n=3, stream=True, **options)) == expected


def test_without_a_seed_texts_differ(client: openai.OpenAI) -> None:
    found = {texts(complete(client, PROMPTS[0], temperature=1.5))[0] for _ in range(3)}
    assert len(found) == 3


def test_chats(served: Served, client: openai.OpenAI) -> None:
    (expected,) = offline(served.engine, [CHAT])
    undrafted = ask(client, max_tokens=N, extra_body={"draft": False})
    assert undrafted.choices[0].message.content == expected.text
    assert undrafted.usage.speculation["accepted_tokens"] == 0
    whole = ask(client, max_completion_tokens=N)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert (whole.object, whole.model) == ("chat.completion", MODEL)
    assert whole.id.startswith("chatcmpl-") and whole.usage.completion_tokens == N
    assert whole.system_fingerprint == served.engine.fingerprint
    parts = [{"type": "text", "text": "def a"}, {"type": "text", "text": "rea_7"}]
    in_parts = [CHAT[0], {"role": "user", "content": parts}]
    assert ask(client, in_parts, max_tokens=N).choices[0].message.content == expected.text
    events = list(ask(client, stream=True, n=2, max_tokens=N))
    assert [event.choices[0].delta.role for event in events[:2]] == ["assistant"] * 2
    assert {event.object for event in events} == {"chat.completion.chunk"}
    for index in range(2):
        mine = [event.choices[0] for event in events if event.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == expected.text
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]


def test_a_response_is_the_answer_to_a_chat(served: Served, client: openai.OpenAI) -> None:
    (expected,) = offline(served.engine, [CHAT])
    options: Any = {"model": MODEL, "input": CHAT, "max_output_tokens": N}
    whole = client.responses.create(**options)
    *_, last = client.responses.create(stream=True, **options)
    assert whole.output_text == last.response.output_text == expected.text
    assert whole.usage.output_tokens == N and whole.status == "incomplete"


def test_stop_strings(served: Served, client: openai.OpenAI) -> None:
    (whole,) = offline(served.engine, PROMPTS[:1])
    assert whole.text is not None
    stop = whole.text[9:12]
    for is_streamed in (False, True):
        reply = complete(client, PROMPTS[0], stop=[stop, "\n\n\n\n"], stream=is_streamed)
        events = list(reply) if is_streamed else [reply]
        found = "".join(choice.text for event in events for choice in event.choices)
        assert found == whole.text[: whole.text.index(stop)] != whole.text
        assert events[-1].choices[0].finish_reason == "stop"
    assert texts(complete(client, PROMPTS[0], stop=stop)) == [found]


def test_stop_tokens(served: Served, client: openai.OpenAI) -> None:
    (eos,) = served.engine.stop_ids
    options = {"logit_bias": {str(eos): 100}}
    reply = complete(client, PROMPTS[0], **options)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("", "stop")
    assert reply.usage.completion_tokens == 1
    further = complete(client, PROMPTS[0], ignore_eos=True, **options)
    assert (further.usage.completion_tokens, further.choices[0].finish_reason) == (N, "length")
    (whole,) = offline(served.engine, PROMPTS[:1])
    own = whole.output_ids[6]
    reply = complete(client, PROMPTS[0], stop_token_ids=[own], return_token_ids=True)
    expected = whole.output_ids[: whole.output_ids.index(own) + 1]
    assert reply.choices[0].token_ids == expected and reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].prompt_token_ids == served.engine.encode(PROMPTS[0])


def test_a_least_number_of_tokens(served: Served, client: openai.OpenAI) -> None:
    """Continued tokens count, and nothing stops an answer before."""
    (eos,) = served.engine.stop_ids
    prompt = served.engine.encode(PROMPTS[0]) + [5] * 3
    options = {"min_tokens": 7, "continued_tokens": 3, "return_token_ids": True}
    reply = complete(client, prompt, logit_bias={str(eos): 100}, **options)
    assert reply.usage.completion_tokens == 7 - 3 + 1
    assert reply.choices[0].finish_reason == "stop"
    (whole,) = offline(served.engine, [prompt])
    stop = served.engine.tokenizer.decode(whole.output_ids[:1])
    found = complete(client, prompt, stop=stop, **options).choices[0]
    assert len(found.token_ids) > 7 - 3
    assert found.token_ids == whole.output_ids[: len(found.token_ids)]


def test_echo(served: Served, client: openai.OpenAI) -> None:
    (answer,) = offline(served.engine, PROMPTS[:1])
    expected = PROMPTS[0] + (answer.text or "")
    for is_streamed in (False, True):
        for prompt in (PROMPTS[0], answer.prompt_ids):
            assert texts(complete(client, prompt, echo=True, stream=is_streamed)) == [expected]


def assert_places(choice: Any, engine: Engine) -> None:
    """Every whole token ends the text up to the place of the next; special ones are not shown."""
    places = [*choice.logprobs.text_offset, len(choice.text)]
    assert places[0] == 0 and places == sorted(places)
    for token, first, last in zip(choice.logprobs.tokens, places, places[1:], strict=False):
        if token in engine.tokenizer.all_special_tokens:
            assert first == last
        elif not token.startswith("bytes:"):  # a part of a character
            assert choice.text[first:last].endswith(token)


# --------------------------------------------------------------------------------------------------
# Continuation


def test_a_stop_string_across_the_cut(served: Served, client: openai.OpenAI) -> None:
    (whole,) = offline(served.engine, PROMPTS[:1])
    assert whole.text is not None
    starts = np.cumsum([0, *(len(served.engine.tokenizer.decode([t])) for t in whole.output_ids)])
    cut = next(i for i in range(8, N) if starts[i + 1] - starts[i] > 1)  # a token of two or more
    stop = whole.text[starts[cut] - 2 : starts[cut] + 1]
    assert whole.text.index(stop) == starts[cut] - 2
    prompt = whole.prompt_ids + whole.output_ids[:cut]
    options = {"stop": stop, "max_tokens": N - cut, "return_token_ids": True}
    rest = complete(client, prompt, continued_tokens=cut, **options).choices[0]
    assert (rest.finish_reason, rest.text) == ("stop", "")
    assert rest.token_ids == whole.output_ids[cut : cut + 1]
    unaware = complete(client, prompt, **options).choices[0]
    assert unaware.token_ids != rest.token_ids


# --------------------------------------------------------------------------------------------------
# Log-probabilities, usage


@pytest.fixture(scope="module")
def target(runs: Runs) -> Any:
    _, params = load_target(runs.model("target"), jnp.float32)
    return params | {"layers": stack_layers(params["layers"])}


def forward(served: Served, target: Any, ids: list[int], num_prompt: int) -> np.ndarray:
    features = encode(target, served.engine.target_config, jnp.asarray([ids]))
    logits = features[0, num_prompt - 1 : -1] @ target["head"]["weight"].T
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))


def test_logprobs_of_a_chat(served: Served, client: openai.OpenAI, target: Any) -> None:
    options = {"logprobs": True, "top_logprobs": 4, "temperature": 1.0, "seed": SEED}
    options |= {"max_tokens": N, "extra_body": {"return_token_ids": True, "top_k": 3}}
    choice = ask(client, **options).choices[0]
    ids = choice.prompt_token_ids + choice.token_ids
    expected = forward(served, target, ids, len(choice.prompt_token_ids))
    decode = served.engine.tokenizer.decode
    for row, token, shown in zip(expected, choice.token_ids, choice.logprobs.content, strict=True):
        best = np.argsort(-row, kind="stable")[:4]
        names = [shown.token, *(top.token for top in shown.top_logprobs)]
        assert names == [decode([candidate]) for candidate in (token, *best)]
        values = [shown.logprob, *(top.logprob for top in shown.top_logprobs)]
        np.testing.assert_allclose(values, row[[token, *best]], atol=1e-4)
    events = [event.choices[0] for event in ask(client, stream=True, **options)]
    streamed = [token for event in events if event.logprobs for token in event.logprobs.content]
    assert streamed == choice.logprobs.content and len(streamed) == N


def test_logprobs_of_a_completion(served: Served, client: openai.OpenAI, target: Any) -> None:
    options = {"temperature": 1.0, "seed": SEED, "logprobs": 5, "return_token_ids": True}
    choice = complete(client, PROMPTS[0], **options).choices[0]
    ids, found = choice.prompt_token_ids + choice.token_ids, choice.logprobs
    expected = forward(served, target, ids, len(choice.prompt_token_ids))
    chosen, best = expected[np.arange(N), choice.token_ids], np.sort(expected)[:, :-6:-1]
    np.testing.assert_allclose(found.token_logprobs, chosen, atol=1e-4)
    np.testing.assert_allclose([[*top.values()] for top in found.top_logprobs], best, atol=1e-4)
    assert_places(choice, served.engine)
    events = complete(client, PROMPTS[0], stream=True, **options)
    streamed = [event.choices[0].logprobs for event in events]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        parts = [getattr(logprobs, name) for logprobs in streamed if logprobs]
        assert [value for part in parts for value in part] == getattr(found, name)


def test_logprobs_of_an_echo_are_those_of_the_answer(served, client) -> None:
    """Evaluators ask for prompts alone; the first token has no log-probability."""
    options = {"logprobs": 3, "temperature": 1.0, "seed": SEED, "return_token_ids": True}
    answer = complete(client, PROMPTS[0], **options).choices[0]
    ids, begin = answer.prompt_token_ids + answer.token_ids, len(answer.prompt_token_ids)
    for count, is_streamed in product((0, 1), (False, True)):
        asked = {"max_tokens": count, "echo": True, "logprobs": 3, "stream": is_streamed}
        reply = complete(client, ids, **asked)
        events = list(reply) if is_streamed else [reply]
        choices = [choice for event in events for choice in event.choices]
        shown = [choice.logprobs for choice in choices if choice.logprobs]
        tokens, values, best = (
            [value for logprobs in shown for value in getattr(logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs")
        )
        assert len(tokens) == len(ids) + count and (values[0], best[0]) == (None, None)
        expected = answer.logprobs
        assert tokens[begin : len(ids)] == expected.tokens
        np.testing.assert_allclose(values[begin : len(ids)], expected.token_logprobs, atol=1e-5)
        for own, other in zip(best[begin : len(ids)], expected.top_logprobs, strict=True):
            assert own == pytest.approx(other, abs=1e-5) and list(own) == list(other)
        text = "".join(choice.text for choice in choices)
        assert text.startswith(PROMPTS[0] + answer.text) and choices[-1].finish_reason == "length"
        if not is_streamed:
            assert reply.usage.completion_tokens == count
            assert_places(choices[0], served.engine)


def test_prompt_logprobs(served: Served, client: openai.OpenAI, target: Any) -> None:
    options = {"prompt_logprobs": 2, "max_tokens": 1, "n": 2}
    reply = complete(client, PROMPTS, **options)
    for choice, prompt in zip(reply.choices[::2], PROMPTS, strict=True):
        ids = served.engine.encode(prompt)
        first, *others = choice.prompt_logprobs
        assert first is None
        rows = forward(served, target, ids, 1)
        for row, token, listed in zip(rows, ids[1:], others, strict=True):
            best = np.argsort(-row, kind="stable")[:2].tolist()
            assert listed.keys() == {str(token), *map(str, best)}
            assert [listed[str(one)]["rank"] for one in best] == [1, 2]
            for name, one in listed.items():
                assert one["logprob"] == pytest.approx(row[int(name)], abs=1e-4)
    chat = ask(client, max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_usage(served: Served, client: openai.OpenAI) -> None:
    num_prompt = sum(len(served.engine.encode(prompt)) for prompt in PROMPTS)
    options = {"n": 2, "max_tokens": N}
    whole = complete(client, PROMPTS, **options).usage
    counts = (whole.prompt_tokens, whole.completion_tokens, whole.total_tokens)
    assert counts == (num_prompt, 4 * N, num_prompt + 4 * N)
    positions = whole.speculation["accepted_per_position"]
    assert whole.speculation["accepted_tokens"] == sum(positions) > 0
    options["stream"] = True
    *events, last = complete(client, PROMPTS, stream_options={"include_usage": True}, **options)
    assert last.choices == [] and last.usage.model_dump() == whole.model_dump()
    assert all(event.usage is None for event in events)
    assert not any(getattr(event, "usage", None) for event in complete(client, PROMPTS, **options))


def test_an_answer_carries_its_acceptance_as_in_vllm(served: Served, client: openai.OpenAI) -> None:
    """Also in the last event of a stream that shows its usage, and in responses."""
    names = [f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens")]
    names.append("vllm:spec_decode_num_accepted_tokens_total")
    names = [f'{name}{{engine="0",model_name="tiny"}}' for name in names]
    before = [served.metric(name) for name in names]
    options: Any = {"max_tokens": N, "temperature": 0}
    found = ask(client, **options).metrics["speculative_decoding"]
    after = [served.metric(name) for name in names]
    keys = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    assert np.subtract(after, before).tolist() == [found[key] for key in keys]
    assert found["num_accepted_draft_tokens"] > 0
    assert found["num_spec_tokens"] == served.engine.max_accepted
    streamed = ask(client, stream=True, stream_options={"include_usage": True}, **options)
    *events, last = streamed
    assert last.metrics["speculative_decoding"] == found
    assert not any(hasattr(event, "metrics") for event in events)
    body = {"input": CHAT, "max_output_tokens": N, "temperature": 0}
    response = served.post("/v1/responses", body).json()
    assert response["metrics"]["speculative_decoding"] == found
    assert not hasattr(complete(client, PROMPTS, max_tokens=N), "metrics")
    alone = ask(client, extra_body={"draft": False}, **options)
    assert alone.metrics["speculative_decoding"]["num_spec_steps"] == 0


def test_usage_counts_what_was_cached(served: Served, client: openai.OpenAI) -> None:
    names = [f"poss:prefix_cache_{name}_total" for name in ("queries", "hits")]
    before = [served.metric(name) for name in names]
    begin = list(range(3, 83))
    usages = [complete(client, [*begin, *end], n=2).usage for end in ([5], [6, 7])]
    assert [one.prompt_tokens_details.cached_tokens for one in usages] == [0, 64]
    num_tokens = sum(one.prompt_tokens for one in usages)
    after = [served.metric(name) for name in names]
    assert np.subtract(after, before).tolist() == [2 * num_tokens, 64 + num_tokens]


# --------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("temperature", {"prompt": "x", "temperature": 3}),
        ("logit_bias", {"logit_bias": {"300": 1}}),
    ],
)
def test_what_is_refused_names_the_field(client, param: str, options: Any) -> None:
    api = client.completions if "prompt" in options else client.chat.completions
    with pytest.raises(openai.BadRequestError, match=f"{param}: ") as caught:
        api.create(model=MODEL, **({} if "prompt" in options else {"messages": CHAT}) | options)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="another", prompt="def")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("owner/another")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_unknown_fields_are_ignored(client, caplog) -> None:
    (plain,) = texts(complete(client, PROMPTS[0]))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert texts(complete(client, PROMPTS[0], **{"guided_\u00e4": [1, {"a": None}]})) == [
                plain
            ]
    assert [one.message for one in caplog.records if "guided" in one.message] == [
        "the field 'guided_\\xe4' of a request is not known; it is ignored"
    ]


# --------------------------------------------------------------------------------------------------
# The other endpoints


def test_endpoints_that_say_how_the_server_is(served: Served, client: openai.OpenAI) -> None:
    assert served.get("/health").json() == {"status": "ok"}
    assert set(served.get("/version").json()) == {"version"}
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_extra == {"max_model_len": 256, "has_chat_template": True}
    assert client.models.retrieve(MODEL) == model
    found = served.post("/tokenize", {"prompt": PROMPTS[0]}).json()
    ids = served.engine.encode(PROMPTS[0])
    assert found == {"tokens": ids, "count": len(ids), "max_model_len": 256}
    assert served.post("/detokenize", {"tokens": ids}).json() == {"prompt": f"<s>{PROMPTS[0]}"}
    too_long = "x " * 200  # to be answered, not to be counted
    assert served.post("/tokenize", {"prompt": too_long}).json()["count"] > 256
    page = served.get("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert served.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert served.get("/v1/completions").status_code == 405


def test_metrics(served: Served, client: openai.OpenAI) -> None:
    def counts() -> dict[str, float]:
        lines = served.get("/metrics").text.splitlines()
        split = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in split}

    before = counts()
    reply = complete(client, PROMPTS[0])
    after = counts()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["poss:generation_tokens_total"] == reply.usage.completion_tokens
    assert grown["poss:prompt_tokens_total"] == reply.usage.prompt_tokens
    assert grown["poss:spec_decode_num_drafts_total"] == reply.usage.speculation["rounds"]
    by_position = reply.usage.speculation["accepted_per_position"]
    name = 'poss:spec_decode_num_accepted_tokens_per_pos_total{position="%d"}'
    assert [grown[name % i] for i in range(len(by_position))] == by_position
    assert grown['poss:request_success_total{finished_reason="length"}'] == 1
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert grown[f"poss:{name}_seconds_count"] == 1
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert after[f"poss:{name}"] == 0
    labels = 'engine="0",model_name="tiny"'
    for name in ("generation_tokens_total", "time_to_first_token_seconds_count"):
        assert after[f"vllm:{name}{{{labels}}}"] == after[f"poss:{name}"]
    renamed = after[f"vllm:request_time_per_output_token_seconds_count{{{labels}}}"]
    assert renamed == after["poss:time_per_output_token_seconds_count"]


def test_errors_name_no_paths(runs: Runs, served: Served) -> None:
    bodies = [{}, {"prompt": 1}, {"prompt": "x", "model": "/etc"}, {"prompt": [10**30]}]
    told = "".join(served.post("/v1/completions", body).text for body in bodies)
    told += served.get("/v1/../../etc/passwd").text + json.dumps(served.get("/v1/models").json())
    assert str(runs.root) not in told and "poss_jax/" not in told and "weight" not in told
