"""Bodies of OpenAI requests, and the jobs that the scheduler gets for them.

Fields that only we have are marked; most have vLLM's names. Unknown fields are ignored, since
clients send many, and logged once each.
"""

import logging
import re
import secrets
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from poss_jax.config.decoding import SamplingConfig, ServeConfig
from poss_jax.config.reading import UserError, cut
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt, Prompt, prompt_seed
from poss_jax.engine.slots import MOST_BIASED, MOST_STOP_IDS
from poss_jax.engine.text import longest_token

_LOG = logging.getLogger(__package__)
_MOST_CHOICES = 128
_MOST_MESSAGES = 4_000
_MOST_LOGPROBS = 200_000  # per reply, unless one full-length choice has more
_LONGEST_STOP = 1000
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_ROLES = ("assistant", "developer", "function", "system", "tool", "user")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # transformers accepts any of them
_READ = re.compile(r"[.'\"](\w+)")  # an attribute, or the beginning of what is quoted
_WORD = re.compile("""['"]([A-Za-z][A-Za-z0-9_-]*)['"]""")  # quoted

Real = Annotated[float, Field(allow_inf_nan=False)]
# A list of a million bad items is one mistake, not a million reports.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
NumTokens = Annotated[int, Field(ge=1, lt=2**31)]  # messages repeat it, so it may not be long

KINDS = {
    "prompt": f"want text, token ids, or a list of up to {_MOST_CHOICES} of either",
    "stop": "want text or a list of texts",
}


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MOST_BIASED:
        raise ValueError(f"want at most {MOST_BIASED}")
    if isinstance(biases, dict) and not all(map(_TOKEN_ID.fullmatch, biases)):
        raise ValueError("want token ids as keys, without spaces or leading zeros")
    return biases


Biases = Annotated[dict[str, Annotated[Real, Field(ge=-100, le=100)]], BeforeValidator(_few)]


class ApiError(Exception):
    """An error reported to the client.

    Attributes:
      status: HTTP status.
      message: one line.
      param: field of the request that is wrong.
      code: name of the error, for programs.
      retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code, self.retry_after = code, retry_after

    def body(self) -> dict[str, Any]:
        """The error as the API writes it."""
        kinds = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else kinds[400])
        about = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


class StreamOptions(BaseModel):
    """Extras of a stream besides the text.

    Attributes:
      include_usage: a last event with the usage.
      include_speculation: the depth at which each piece of text was drafted (ours).
    """

    include_usage: bool | None = None
    include_speculation: bool | None = None


class CommonRequest(BaseModel):
    """Fields that completions and chats share; null stands for the default."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Texts | None = None
    seed: int | None = None
    temperature: Annotated[Real, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases | None = None
    max_tokens: NumTokens | None = None
    user: str | None = None
    # Ours, with vLLM's names.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Real, Field(gt=1e-6, le=1e6)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    return_token_ids: bool | None = None


class CompletionRequest(CommonRequest):
    """Body of /v1/completions.

    `continued_tokens` (ours): this many tokens at the end of the prompt belong to an answer that is
    continued; the penalties of the output count them, and stop strings may begin in them.
    `continued_chat` (ours): the prompt is a chat's, whose answers are decoded alone.
    """

    prompt: (
        str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True, max_length=_MOST_CHOICES)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: int | None = None
    suffix: str | None = None
    continued_tokens: Annotated[int, Field(ge=0)] | None = None
    continued_chat: bool | None = None


class ContentPart(BaseModel):
    """Part of a message; text alone is served."""

    type: str
    text: str | None = None


class Message(BaseModel):
    """One message of a chat; all its fields reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None


class ChatRequest(CommonRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None  # has no effect without `tools`, which are refused
    modalities: Texts | None = None


class TokenizeRequest(BaseModel):
    """Body of /tokenize."""

    prompt: str


class Job(NamedTuple):
    """One request as the scheduler sees it.

    Attributes:
      prompts: one per choice, in the order of their indices.
      stop: strings that end an answer.
      num_logprobs: most likely tokens to show at each position; None: no log-probabilities.
      num_prompt_tokens: tokens of all prompts, each counted once.
      echo: text that stands before each choice.
    """

    prompts: list[PreparedPrompt]
    stop: list[str]
    num_logprobs: int | None
    num_prompt_tokens: int
    echo: list[str]


def read_completion(engine: Engine, config: ServeConfig, body: CompletionRequest) -> Job:
    """Turns a completion request into a job.

    Raises:
      ApiError: something in it cannot be served.
    """
    _refuse(body, "suffix")
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of: want the same as n", param="best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "logprobs: not served together with echo", param="logprobs")
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not prompts:
        raise ApiError(400, "prompt: want at least one token", param="prompt")
    if isinstance(prompts[0], int):
        prompts = [prompts]
    job = _make_job(engine, config, body, prompts, limit=body.max_tokens, logprobs=body.logprobs)
    if not body.echo:
        return job
    if engine.tokenizer is None:
        raise ApiError(400, "echo: this model has no tokenizer", param="echo")
    texts = [
        one if isinstance(one, str) else engine.tokenizer.decode(one, skip_special_tokens=True)
        for one in prompts
    ]
    return job._replace(echo=[text for text in texts for _ in range(body.n or 1)])


def read_chat(engine: Engine, config: ServeConfig, body: ChatRequest) -> Job:
    """Turns a chat request into a job.

    Raises:
      ApiError: something in it cannot be served.
    """
    _refuse(body, "tools", "functions")
    if (body.response_format or {}).get("type", "text") != "text":
        raise ApiError(400, "response_format: only text is served", param="response_format")
    if body.modalities not in (None, [], ["text"]):
        raise ApiError(400, "modalities: only text is served", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: want logprobs to be true", param="top_logprobs")
    messages = [_read_message(message) for message in body.messages]
    if engine.tokenizer is not None:
        template = str(engine.tokenizer.chat_template or "")
        _check_roles(template, messages)
        _log_unused(template, messages)
    limit = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _make_job(engine, config, body, [messages], limit=limit, logprobs=logprobs)


def read_text(engine: Engine, config: ServeConfig, body: TokenizeRequest) -> list[int]:
    """Token ids of a text.

    Raises:
      ApiError: far more text than fits.
    """
    return _encode(engine, config, body.prompt)


def _read_message(message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        if any(part.type != "text" for part in content):
            raise ApiError(400, "messages: only content of type text is served", param="messages")
        content = "".join(part.text or "" for part in content)
    others = {key: value for key, value in (message.model_extra or {}).items() if value is not None}
    # With tool calls, templates treat missing content differently from an empty one.
    return {"role": message.role, "content": content if others else content or "", **others}


def _check_roles(template: str, messages: list[dict[str, Any]]) -> None:
    """Refuses roles that are neither the API's nor named in the chat template.

    Raises:
      ApiError: such a role.
    """
    known = {*_ROLES, *_WORD.findall(template)}
    for message in messages:
        if message["role"] not in known:
            wanted, got = ", ".join(_ROLES), cut(ascii(message["role"]))
            raise ApiError(400, f"messages: want a role of {wanted}, got {got}", param="messages")


def _log_unused(template: str, messages: list[dict[str, Any]]) -> None:
    """Logs the first message field that the chat template does not read."""
    known = _fields_read_by(template)
    for name in (name for message in messages for name, value in message.items() if value):
        if name not in known:
            _warn_of_unused(cut(ascii(name)))
            return


@lru_cache(maxsize=8)
def _fields_read_by(template: str) -> frozenset[str]:
    names = {*_READ.findall(template), *_WORD.findall(template)}
    return frozenset(names if names.isdisjoint(_REASONING) else names.union(_REASONING))


@lru_cache(maxsize=256)  # once per field
def _warn_of_unused(name: str) -> None:
    _LOG.warning("the chat template does not read the field %s of a message", name)


def _refuse(body: CommonRequest, *names: str) -> None:
    for name in names:
        if getattr(body, name):
            raise ApiError(400, f"{name}: not served", param=name)


def _make_job(
    engine: Engine,
    config: ServeConfig,
    body: CommonRequest,
    prompts: list[Prompt],
    *,
    limit: int | None,
    logprobs: int | None,
) -> Job:
    _log_unknown(body)
    if logprobs is not None and not config.max_logprobs:
        raise ApiError(400, "logprobs: not served", param="logprobs")
    if logprobs is not None and logprobs > config.max_logprobs:
        raise ApiError(400, f"logprobs: want at most {config.max_logprobs}", param="logprobs")
    if len(prompts) * (body.n or 1) > _MOST_CHOICES:
        raise ApiError(400, f"n: want at most {_MOST_CHOICES} choices in all", param="n")
    stop = _read_stop(engine, config, body)
    sampling, stop_ids = _read_sampling(config.sampling, body), _read_stop_ids(engine, body)
    num_continued, is_chat = 0, True
    if isinstance(body, CompletionRequest):  # a chat may hold anything under these names
        num_continued, is_chat = body.continued_tokens or 0, bool(body.continued_chat)
    prepared = []
    for index, prompt in enumerate(prompts):
        ids = _encode(engine, config, prompt)
        if num_continued and num_continued >= len(ids):
            message = "continued_tokens: want fewer than the prompt has"
            raise ApiError(400, message, param="continued_tokens")
        one = _prepare(engine, config, ids, sampling, limit)
        one = one._replace(stop_ids=stop_ids, num_continued=num_continued, is_chat=is_chat)
        for choice in range(body.n or 1):
            seed = prompt_seed(sampling.seed, index * (body.n or 1) + choice)
            prepared.append(one._replace(sampling=replace(sampling, seed=seed)))
    if logprobs is not None:
        _check_logprobs(config, prepared, 1 + logprobs)
    num_tokens = sum(len(one.ids) for one in prepared[:: body.n or 1])
    return Job(prepared, [*config.stop, *stop], logprobs, num_tokens, [""] * len(prepared))


def _check_logprobs(config: ServeConfig, prompts: list[PreparedPrompt], per_token: int) -> None:
    """Refuses a reply that would hold too many log-probabilities."""
    most = max(_MOST_LOGPROBS, (config.max_length or 0) * (1 + config.max_logprobs))
    if (got := per_token * sum(prompt.max_new_tokens for prompt in prompts)) > most:
        message = f"logprobs: want at most {most:,} in all choices, got up to {got:,}"
        raise ApiError(400, f"{message}; ask for fewer choices or tokens", param="logprobs")


def _encode(engine: Engine, config: ServeConfig, prompt: Prompt) -> list[int]:
    param = "messages" if prompt and isinstance(prompt[0], dict) else "prompt"
    most = config.max_length or engine.max_length
    if isinstance(prompt, list) and len(prompt) > most and isinstance(prompt[0], int):
        message = f"prompt of {len(prompt):,} tokens does not fit a length of {most:,}"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    length = _num_characters(prompt)
    # Tokenising megabytes takes seconds. (A tokenizer that folds spaces could fit more.)
    if engine.tokenizer is not None and length > most * longest_token(engine.tokenizer):
        message = f"prompt of {length:,} characters does not fit a length of {most:,} tokens"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    try:
        return engine.encode(prompt)
    except UserError as error:
        raise ApiError(400, str(error), param=param) from error


def _num_characters(value: Any) -> int:
    """Characters of all texts in a prompt, at any depth; a template may write any of them."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_characters, (*value, *value.values())))
    return sum(map(_num_characters, value)) if isinstance(value, list) else 0


def _prepare(
    engine: Engine,
    config: ServeConfig,
    ids: list[int],
    sampling: SamplingConfig,
    limit: int | None,
) -> PreparedPrompt:
    room = (config.max_length or engine.max_length) - len(ids)
    if room < 1 or (limit is not None and limit > room):
        wanted = f"prompt of {len(ids)} tokens and {limit or 1} new ones"
        message = f"{wanted} do not fit a length of {room + len(ids)}"
        param = "prompt" if room < 1 else "max_tokens"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    try:
        return engine.prepare(ids, limit or min(config.max_new_tokens, room), sampling)
    except UserError as error:
        raise ApiError(400, str(error), param="logit_bias") from error


def _read_stop(engine: Engine, config: ServeConfig, body: CommonRequest) -> list[str]:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > 4 or any(len(string) > _LONGEST_STOP for string in stop):
        message = f"stop: want at most 4 strings of at most {_LONGEST_STOP:,} characters"
        raise ApiError(400, message, param="stop")
    try:
        engine.check_stop(stop, config.max_length or engine.max_length)
    except UserError as error:
        raise ApiError(400, str(error), param="stop") from error
    return stop


def _read_stop_ids(engine: Engine, body: CommonRequest) -> list[int]:
    own, more = [] if body.ignore_eos else engine.stop_ids, body.stop_token_ids or []
    if len(more) > (room := MOST_STOP_IDS - len(own)):
        raise ApiError(400, f"stop_token_ids: want at most {room}", param="stop_token_ids")
    if any(not 0 <= token < engine.target_config.vocab_size for token in more):
        raise ApiError(400, "stop_token_ids: want ids of the vocabulary", param="stop_token_ids")
    return [*own, *more]


def _read_sampling(defaults: SamplingConfig, body: CommonRequest) -> SamplingConfig:
    names = ("temperature", "top_p", "min_p", "repetition_penalty")
    names += ("frequency_penalty", "presence_penalty")
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)  # -1 is vLLM's value for all
    if body.logit_bias:
        given["logit_bias"] = body.logit_bias
    seed = secrets.randbits(32) if body.seed is None else body.seed % 2**32
    try:
        values: dict[str, Any] = asdict(defaults) | given | {"seed": seed}
        return SamplingConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else None
        raise ApiError(400, f"{param}: {explain(first)}", param=param) from error


def explain(error: Any) -> str:
    """Pydantic's message about a field."""
    return error["msg"].removeprefix("Value error, ")


def _log_unknown(body: CommonRequest) -> None:
    """Logs unknown fields, at most ten per request."""
    for name in islice(body.model_extra or {}, 10):
        _warn_of_unknown(cut(ascii(name)))


@lru_cache(maxsize=256)  # once per field, unless there are many
def _warn_of_unknown(name: str) -> None:
    _LOG.warning("the field %s of a request is not known; it is ignored", name)
