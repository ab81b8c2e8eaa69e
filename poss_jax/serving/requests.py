"""Bodies of requests -> jobs for the scheduler; unknown fields are logged once each."""

import json
import logging
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from poss_jax.config.decoding import SamplingConfig, ServeConfig
from poss_jax.config.reading import UserError, cut
from poss_jax.engine.engine import Engine
from poss_jax.engine.grammar import Grammar, compiler_of
from poss_jax.engine.guides import GrammarState
from poss_jax.engine.prompts import (
    MOST_STOP_IDS,
    PreparedPrompt,
    Prompt,
    PromptTooLong,
    Rendering,
    fold_seed,
)
from poss_jax.engine.text import longest_token
from poss_jax.serving.bodies import (
    FOREIGN,
    MOST_CHOICES,
    MOST_STOPS,
    ApiError,
    BadField,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
    refusing_values,
)
from poss_jax.serving.chats import read_caller, read_messages, read_rendering
from poss_jax.serving.tools import Caller, marks_of

_LOG = logging.getLogger(__package__)
_MOST_LOGPROBS = 200_000  # per reply, unless one full-length choice has more
_LONGEST_STOP = 1000
_GRAMMAR_FIELDS = ("response_format", "structured_outputs")
_OBJECT = {"type": "object"}


class Job(NamedTuple):
    """One request as the scheduler sees it."""

    prompts: list[PreparedPrompt]  # one per choice, in the order of their indices
    stop: list[str]  # strings that end an answer
    num_logprobs: int | None  # most likely tokens to show at each position; None: no log-prob.
    num_choices: int  # per prompt
    echo: list[str]  # text that stands before each choice
    scores_prompt: bool = False  # log-probabilities of the prompts' tokens are wanted
    num_prompt_logprobs: int | None = None  # likely tokens to show at each of them; None: none
    has_answer: bool = True  # False shows the prompt alone: no token was asked for
    caller: Caller | None = None  # tools that may be called; None: none
    grammar: Grammar | None = None  # what the answers must match; its guides are added last
    is_chat: bool = False  # the reply is a chat's
    is_streamed: bool = False  # it comes in events
    extras: frozenset[str] = frozenset()  # also `usage` (in events), `speculation`, `token_ids`


def read_completion(engine: Engine, config: ServeConfig, body: CompletionRequest) -> Job:
    """Turns a completion request into a job; ApiError: something in it cannot be served."""
    if body.suffix:
        raise BadField("suffix", "not served")
    if body.best_of not in (None, body.n or 1):
        raise BadField("best_of", "want the same as n")
    has_answer = body.max_tokens != 0
    if not (has_answer or body.echo or body.prompt_logprobs is not None):
        raise BadField("max_tokens", "want at least 1, or echo")
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not prompts:
        raise BadField("prompt", "want at least one token")
    if isinstance(prompts[0], int):
        prompts = [prompts]
    limit = body.max_tokens if has_answer else 1  # decoded, and not shown
    job = _make_job(
        engine,
        config,
        body,
        prompts,
        limit=limit,
        logprobs=body.logprobs,
        echoes=bool(body.echo),
        is_bare=body.add_special_tokens is False,
        num_continued=body.continued_tokens or 0,
        is_chat=bool(body.continued_chat),
    )
    job = job._replace(has_answer=has_answer)
    if not body.echo:
        return job
    if engine.tokenizer is None:
        raise BadField("echo", "this model has no tokenizer")
    texts = [
        item if isinstance(item, str) else engine.tokenizer.decode(item, skip_special_tokens=True)
        for item in prompts
    ]
    return job._replace(echo=[text for text in texts for _ in range(body.n or 1)])


def read_chat(engine: Engine, config: ServeConfig, body: ChatRequest) -> Job:
    """Turns a chat request into a job; ApiError: something in it cannot be served."""
    if body.functions:
        raise BadField("functions", "not served")
    if body.modalities not in (None, [], ["text"]):
        raise BadField("modalities", "only text is served")
    if body.top_logprobs is not None and not body.logprobs:
        raise BadField("top_logprobs", "want logprobs to be true")
    messages = read_messages(engine, body.messages)
    rendering = read_rendering(engine, body, messages)
    with _refusing("tools"):
        caller = read_caller(engine, config, body, rendering.tools)
    job = _make_job(
        engine,
        config,
        body,
        [messages],
        limit=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        rendering=rendering,
        caller=caller,
        # Otherwise the answer continues the last message, and is decoded behind it.
        is_chat="continue_final_message" not in rendering.variables,
    )
    return job._replace(is_chat=True)


def read_text(engine: Engine, config: ServeConfig, body: TokenizeRequest) -> list[int]:
    """Token ids of a text or a chat.

    Raises:
      ApiError: both or none, far more text than fits, or what a chat is refused for.
    """
    if (body.prompt is None) == (body.messages is None):
        raise BadField("prompt", "want this or messages")
    if body.messages is None:
        is_bare = body.add_special_tokens is False
        return _encode(engine, config, body.prompt or "", is_bare=is_bare)
    messages = read_messages(engine, body.messages)
    return _encode(engine, config, messages, read_rendering(engine, body, messages))


def read_tokens(engine: Engine, config: ServeConfig, body: DetokenizeRequest) -> str:
    """The text of token ids, special tokens included.

    Raises:
      ApiError: no tokenizer, or ids outside the vocabulary.
    """
    del config
    if engine.tokenizer is None:
        raise BadField("tokens", "this model has no tokenizer")
    _check_ids(engine, "tokens", body.tokens)
    return engine.tokenizer.decode(body.tokens)


def read_tokenizer(engine: Engine) -> dict[str, Any]:
    """The tokenizer as evaluators ask for it: special tokens and the chat template.

    Raises:
      ApiError: the model has none.
    """
    if engine.tokenizer is None:
        raise ApiError(404, "this model has no tokenizer")
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
    return {name: getattr(engine.tokenizer, name) for name in names}


def _make_job(
    engine: Engine,
    config: ServeConfig,
    body: CommonRequest,
    prompts: list[Prompt],
    *,
    limit: int | None,
    logprobs: int | None,
    rendering: Rendering | None = None,
    caller: Caller | None = None,
    echoes: bool = False,
    is_bare: bool = False,
    **settings: Any,
) -> Job:
    """Makes a job of what all requests have; `settings` are further ones of `Engine.prepare`.

    Without a limit, answers get the room there is, up to the default.
    """
    _check_unknown(body)
    num_choices = body.n or 1
    if body.stream and body.prompt_logprobs is not None:
        raise BadField("prompt_logprobs", "not served in streams")
    if len(prompts) * num_choices > MOST_CHOICES:
        raise BadField("n", f"want at most {MOST_CHOICES} choices in all")
    stop = _read_stop(engine, body)
    with _refusing("structured_outputs"):
        grammar = _read_grammar(body, caller and caller.grammar)
    settings |= {
        "shortens": limit is None,
        "max_length": config.max_length,
        "stop_ids": _read_stop_ids(engine, body),
        "shown_ids": list(marks_of(engine.tokenizer, caller.form).values()) if caller else (),
        "drafts": body.draft is not False,
        "lookup": body.lookup,
    }
    sampling = _read_sampling(config.sampling.over(engine.recommended), body)
    prepared: list[PreparedPrompt] = []
    for prompt in prompts:
        ids = _encode(engine, config, prompt, rendering, is_bare=is_bare)
        with _refusing("prompt" if rendering is None else "messages"):
            base = engine.prepare(ids, limit or config.max_new_tokens, sampling, **settings)
        prepared += [base.choice(len(prepared) + choice) for choice in range(num_choices)]
    _check_logprobs(config, body, prepared, logprobs, echoes=echoes)
    options = body.stream_options or StreamOptions()
    extras = {"usage": options.include_usage, "speculation": options.include_speculation}
    extras["token_ids"] = body.return_token_ids
    return Job(
        prepared,
        [*config.stop, *stop],
        logprobs,
        num_choices,
        echo=[""] * len(prepared),
        scores_prompt=body.prompt_logprobs is not None or (echoes and logprobs is not None),
        num_prompt_logprobs=body.prompt_logprobs,
        caller=caller,
        grammar=grammar,
        is_streamed=bool(body.stream),
        extras=frozenset(name for name, is_wanted in extras.items() if is_wanted),
    )


def submit_grammar(engine: Engine, grammar: Grammar) -> "Future[GrammarState]":
    """Begins to compile the grammar of a job; ApiError: the target cannot follow grammars."""
    with _refusing(grammar.name):
        vocab_size = engine.target_config.vocab_size
        return compiler_of(engine.tokenizer, vocab_size, engine.stop_ids).submit(grammar)


def add_guides(job: Job, compiled: "Future[GrammarState]") -> Job:
    """A job whose answers follow its grammar, which is compiled.

    Raises:
      ApiError: the grammar cannot be served, or the continued tokens do not match.
    """
    assert job.grammar is not None
    prompts = []
    with _refusing(job.grammar.name):
        for first in range(0, len(job.prompts), job.num_choices):
            choices = job.prompts[first : first + job.num_choices]
            ids, num_continued = choices[0].ids, choices[0].num_continued
            guide = compiled.result().copy()
            guide.advance(ids[len(ids) - num_continued :])
            prompts += [choice._replace(guide=guide) for choice in choices]
    return job._replace(prompts=prompts)


def _check_logprobs(
    config: ServeConfig,
    body: CommonRequest,
    prompts: list[PreparedPrompt],
    logprobs: int | None,
    *,
    echoes: bool,
) -> None:
    """Refuses a reply that would hold too many log-probabilities, of a token or in all."""
    requested = {"logprobs": logprobs, "prompt_logprobs": body.prompt_logprobs}
    max_logprobs = config.max_logprobs
    for name, num_listed in requested.items():
        if num_listed is not None and (not max_logprobs or num_listed > max_logprobs):
            raise BadField(name, f"want at most {max_logprobs}" if max_logprobs else "not served")
    per_token, per_prompt_token = (0 if n is None else 1 + n for n in requested.values())
    per_prompt_token += per_token if echoes else 0
    limit = max(_MOST_LOGPROBS, (config.max_length or 0) * (1 + max_logprobs))
    got = per_token * sum(prompt.max_new_tokens for prompt in prompts)
    got += per_prompt_token * sum(len(prompt.ids) for prompt in prompts)
    if got > limit:
        message = f"want at most {limit:,} in all choices, got up to {got:,}"
        raise BadField("logprobs", f"{message}; ask for fewer choices or tokens")


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    """Turns what the engine refuses into an error of the API; `param` unless it names another."""
    try:
        yield
    except PromptTooLong as error:
        message, _, _ = str(error).partition(";")  # the advice is for the library's users
        param = "prompt" if error.leaves_no_room else "max_tokens"
        raise ApiError(400, message, param=param, code="context_length_exceeded") from error
    except UserError as error:
        named = str(error).partition(":")[0]
        is_other = named in ("logit_bias", "continued_tokens", "lookup", "tools", *_GRAMMAR_FIELDS)
        raise ApiError(400, str(error), param=named if is_other else param) from error


def _encode(
    engine: Engine,
    config: ServeConfig,
    prompt: Prompt,
    rendering: Rendering | None = None,
    *,
    is_bare: bool = False,
) -> list[int]:
    """Token ids of a prompt; far more text than fits is refused before it is rendered."""
    param = "prompt" if rendering is None else "messages"
    max_length = config.max_length or engine.max_length
    num_tokens = len(prompt) if prompt and isinstance(prompt[0], int) else 0
    length = _num_characters([prompt, rendering and [rendering.tools, rendering.variables]])
    got = f"{num_tokens:,} tokens" if num_tokens > max_length else ""
    # Tokenising megabytes takes seconds. (A tokenizer that folds spaces could fit more.)
    if engine.tokenizer is not None and length > max_length * longest_token(engine.tokenizer):
        got = f"{length:,} characters"
    if got:
        message = f"prompt of {got} does not fit a length of {max_length:,} tokens"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    with _refusing(param):
        return engine.encode(prompt, rendering, is_bare=is_bare)


def _num_characters(value: Any) -> int:
    """Characters of all texts in a prompt, at any depth; a template may write any of them."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_characters, (*value, *value.values())))
    return sum(map(_num_characters, value)) if isinstance(value, list) else 0


def _read_stop(engine: Engine, body: CommonRequest) -> list[str]:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > MOST_STOPS or any(len(string) > _LONGEST_STOP for string in stop):
        message = f"want at most {MOST_STOPS} strings of at most {_LONGEST_STOP:,} characters"
        raise BadField("stop", message)
    with _refusing("stop"):
        engine.check_stop(stop)
    return stop


def _read_stop_ids(engine: Engine, body: CommonRequest) -> list[int]:
    stop_ids, more = [] if body.ignore_eos else engine.stop_ids, body.stop_token_ids or []
    if len(more) > (room := MOST_STOP_IDS - len(stop_ids)):
        raise BadField("stop_token_ids", f"want at most {room}")
    _check_ids(engine, "stop_token_ids", more)
    return [*stop_ids, *more]


def _check_ids(engine: Engine, name: str, ids: Sequence[int]) -> None:
    if any(not 0 <= token < engine.target_config.vocab_size for token in ids):
        raise BadField(name, "want ids of the vocabulary")


def _read_sampling(defaults: SamplingConfig, body: CommonRequest) -> SamplingConfig:
    names = [field.name for field in fields(SamplingConfig)]
    requested = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        requested["top_k"] = max(body.top_k, 0)  # -1 is vLLM's value for all
    requested["seed"] = secrets.randbits(32) if body.seed is None else fold_seed(body.seed)
    with refusing_values():
        return SamplingConfig(**asdict(defaults) | requested)


def _check_unknown(body: CommonRequest) -> None:
    """Refuses other engines' fields that would change the text; logs up to ten unknown ones."""
    unknown = body.model_extra or {}
    for name in unknown.keys() & FOREIGN.keys():
        if unknown[name] not in (None, FOREIGN[name]):
            raise BadField(name, "not served")
    for name in islice(unknown, 10):
        _warn_of_unknown(cut(ascii(name)))


@lru_cache(maxsize=256)  # once per field, unless there are many
def _warn_of_unknown(name: str) -> None:
    _LOG.warning("the field %s of a request is not known; it is ignored", name)


# --------------------------------------------------------------------------------------------------
# Fields that constrain an answer: OpenAI's `response_format`, vLLM's `structured_outputs`


def _read_grammar(body: CommonRequest, of_calls: Grammar | None) -> Grammar | None:
    """Reads what the answer of a request must match; None: any text.

    Args:
      of_calls: what its tools demand, with which it has no other field.

    Raises:
      UserError: both fields, ones that cannot be served, or `ignore_eos`, since EOS ends a match.
    """
    candidates = [_read_response_format(body), _read_structured_outputs(body), of_calls]
    grammars = [grammar for grammar in candidates if grammar is not None]
    if of_calls and len(grammars) > 1:
        message = "not served together with strict tools or a forced call"
        raise UserError(f"{grammars[0].name}: {message}")
    if len(grammars) > 1:
        raise UserError("structured_outputs: want this or response_format, got both")
    if grammars and body.ignore_eos:
        raise UserError(f"{grammars[0].name}: not served together with ignore_eos")
    return grammars[0] if grammars else None


def _read_response_format(body: CommonRequest) -> Grammar | None:
    name, fields = "response_format", body.response_format
    if fields is None:
        return None
    match fields.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar.json_schema(_OBJECT, name)
        case "json_schema":
            schema = fields.get("json_schema")
            return Grammar.json_schema(_read_schema(schema, "schema", name), name)
    raise UserError(f"{name}: want a type of text, json_object, json_schema")


def _read_structured_outputs(body: CommonRequest) -> Grammar | None:
    name, fields = "structured_outputs", body.structured_outputs or {}
    # Empty values say something: any JSON, no choice, the empty text.
    fields = {key: value for key, value in fields.items() if value is not None}
    fields.pop("disable_any_whitespace", None)  # white space between parts of JSON is fixed
    if fields.get("json_object") is False:
        del fields["json_object"]
    if not fields:
        return None
    if len(fields) > 1:
        raise UserError(f"{name}: want one of them, got {cut(ascii(sorted(fields)))}")
    match fields:
        case {"json": _}:
            return Grammar.json_schema(_read_schema(fields, "json", name), name)
        case {"json_object": True}:
            return Grammar.json_schema(_OBJECT, name)
        case {"regex": str(pattern)}:
            return Grammar.regex(pattern, name)
        case {"choice": [*texts]} if all(isinstance(text, str) for text in texts):
            return Grammar.choice(texts, name)
        case {"grammar": str(text)}:
            return Grammar.lark(text, name)
    raise UserError(f"{name}: want json, json_object, regex, choice (texts) or grammar")


def _read_schema(fields: Any, key: str, name: str) -> dict[str, Any]:
    """Reads a JSON schema, which may be text."""
    schema = fields.get(key) if isinstance(fields, dict) else None
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}: want a JSON schema, got other text") from error
    if not isinstance(schema, dict):
        raise UserError(f"{name}: want a JSON schema in {key}")
    return schema
