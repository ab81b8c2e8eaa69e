"""Bodies of OpenAI requests: bytes -> what pydantic makes of them, with limits on time and memory.

Fields that only we have are marked; most have vLLM's names. Unknown fields are ignored, since
clients send many, unless another engine's field of this name would change the text (`FOREIGN`).
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from poss_jax.config.numbers import Bias, OutputPenalty, Penalty, Probability, Temperature, TopP
from poss_jax.engine.prompts import MOST_BIASED

BodyT = TypeVar("BodyT", bound=BaseModel)

MOST_CHOICES = 128
MOST_MESSAGES = 4_000
MOST_STOPS = 16
FOREIGN: dict[str, Any] = dict.fromkeys(
    (
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("structural_tag", "grammar", "json_schema", "regex", "ebnf", "allowed_token_ids"),
        *("logit_processor", "custom_logit_processor", "thinking_token_budget"),
        *("chat_template", "truncate_prompt_tokens", "lora_path"),
    )
)
_LISTS = ("bad_words", "stop_regex", "logits_processors", "documents", "tools")
FOREIGN |= {name: [] for name in _LISTS}
FOREIGN |= dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "no_stop_trim"), False)
FOREIGN |= dict.fromkeys(("no_repeat_ngram_size", "top_a", "mirostat", "dry_multiplier"), 0)
FOREIGN |= dict.fromkeys(("xtc_probability", "dynatemp_range", "epsilon_cutoff", "eta_cutoff"), 0)
FOREIGN |= {"skip_special_tokens": True, "length_penalty": 1, "typical_p": 1, "tfs_z": 1}
"""Fields of other engines that change the text -> the value that does not; None: only null."""

_MOST_CONTAINERS = 10_000
_STRING_OR_CONTAINER = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)
_JSON = re.compile(r"application/(.+\+)?json")
_NO_OBJECT = "body: want a JSON object, with Content-Type: application/json"
_SCHEMAS = "#/components/schemas/"

# A list of a million bad items is one mistake, not a million reports.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
NumTokens = Annotated[int, Field(ge=1, lt=2**31)]  # messages repeat it, so it may not be long

_KINDS = {
    "prompt": f"want text, token ids, or a list of up to {MOST_CHOICES} of either",
    "stop": "want text or a list of texts",
    "input": "want text or a list of items",
    "tool_choice": "want auto, none, required or the name of a function",
}


class FunctionName(BaseModel):
    """A function that is to be called."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Function(FunctionName):
    """A function that may be called, with the JSON schema of its arguments."""

    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool; functions alone are served."""

    type: Literal["function"]
    function: Function


class ToolChoice(BaseModel):
    """The choice of one function."""

    type: Literal["function"] = "function"
    function: FunctionName


def _as_sent(tool: Any, check: Any) -> Any:
    """Checks a tool; the chat template gets it as it was sent."""
    check(tool)
    return tool


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MOST_BIASED:
        raise ValueError(f"want at most {MOST_BIASED}")
    return biases


Tools = Annotated[
    list[Annotated[Tool, WrapValidator(_as_sent)]], Field(fail_fast=True, max_length=MOST_CHOICES)
]
TokenId = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]  # as a key
ApiBias = Annotated[Bias, Field(ge=-100, le=100)]
Biases = Annotated[dict[TokenId, ApiBias], BeforeValidator(_few)]


class ApiError(HTTPException):
    """An error reported to the client in one line."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Makes an error; `param` is the request's wrong field, `code` its name for programs."""
        headers = None if retry_after is None else {"retry-after": str(retry_after)}
        super().__init__(status, message, headers)
        self.status, self.message, self.param, self.code = status, message, param, code

    def response(self) -> JSONResponse:
        """The error as a whole response."""
        return JSONResponse(self.body(), self.status, self.headers)

    def body(self) -> dict[str, Any]:
        """The error as the API writes it."""
        kinds = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else kinds[400])
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class BadField(ApiError):
    """A field of a request that cannot be served; the message begins with its name."""

    def __init__(self, param: str, message: str, *, code: str | None = None) -> None:
        super().__init__(400, f"{param}: {message}", param=param, code=code)


class StreamOptions(BaseModel):
    """Extras of a stream besides the text."""

    include_usage: bool | None = None  # a last event with the usage
    include_speculation: bool | None = None  # ours: the depth at which each piece was drafted


class CommonRequest(BaseModel):
    """Fields that completions and chats share; null stands for the default.

    Sampling settings have the names and bounds of `SamplingConfig`, or narrower ones of the API.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Texts | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[Temperature, Field(le=2)] | None = None
    top_p: TopP | None = None
    frequency_penalty: OutputPenalty | None = None
    presence_penalty: OutputPenalty | None = None
    logit_bias: Biases | None = None
    max_tokens: NumTokens | None = None
    user: str | None = None
    # Ours, with vLLM's names.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Penalty | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Ids | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    draft: bool | None = None  # ours; False decodes without drafts and copies
    lookup: bool | None = None  # ours; False decodes without copies


class CompletionRequest(CommonRequest):
    """Body of /v1/completions.

    `continued_tokens` (ours): this many tokens at the end of the prompt belong to an answer that is
    continued; the penalties of the output count them, and stop strings may begin in them.
    `continued_chat` (ours): the prompt is a chat's, whose answers are decoded alone.
    """

    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True, max_length=MOST_CHOICES)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: int | None = None
    suffix: str | None = None
    continued_tokens: Annotated[int, Field(ge=0)] | None = None
    continued_chat: bool | None = None
    add_special_tokens: bool | None = None  # vLLM's; null: those that the tokenizer adds


class ContentPart(BaseModel):
    """Part of a message; text alone is served."""

    type: str
    text: str | None = None


def join_parts(parts: list[ContentPart], kinds: Sequence[str], param: str) -> str:
    """The text of a content; ApiError: a part of none of these kinds."""
    if any(item.type not in kinds for item in parts):
        raise BadField(param, f"only content of type {kinds[0]} is served")
    return "".join(item.text or "" for item in parts)


class Message(BaseModel):
    """One message of a chat; all its fields reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ChatFields(BaseModel):
    """Settings of the chat template, with vLLM's names; null stands for the default."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class ChatRequest(ChatFields, CommonRequest):
    """Body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    functions: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Texts | None = None


class TokenizeRequest(ChatFields):
    """Body of /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(BaseModel):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Ids


async def receive_body(request: Request) -> bytes:
    """Receives a body, whose type must be JSON, so that another site's page cannot send it.

    Raises:
      ApiError: another type, an empty body, or one that breaks off.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not _JSON.fullmatch(kind):
        raise ApiError(400, _NO_OBJECT)
    try:
        content = b"".join([chunk async for chunk in request.stream()])
    except ClientDisconnect as error:
        raise ApiError(400, "body: want all of it, got a part") from error
    if not content:
        raise ApiError(400, _NO_OBJECT)
    return content


def parse_body(kind: type[BodyT], content: bytes) -> BodyT:
    """Parses the body of a request; types are strict, so "3" is refused as a number.

    Raises:
      ApiError: invalid JSON, too many lists and objects, or a wrong value in a field.
    """
    if content.count(b"[") + content.count(b"{") > _MOST_CONTAINERS:
        # Goes from one to the next, so that other threads run meanwhile, and stops at the limit.
        matches = _STRING_OR_CONTAINER.finditer(content)
        containers = (match for match in matches if match[0] in b"[{")
        if next(islice(containers, _MOST_CONTAINERS, None), None) is not None:
            raise ApiError(400, f"body: want at most {_MOST_CONTAINERS:,} lists and objects")
    with refusing_values():
        return kind.model_validate_json(content, strict=True)


@contextmanager
def refusing_values() -> Iterator[None]:
    """Turns pydantic's first finding into an error of the API."""
    try:
        yield
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise ApiError(400, f"body: want JSON, got none: {first['ctx']['error']}") from error
        if not first["loc"]:
            raise ApiError(400, _NO_OBJECT) from error
        field, *path = map(str, first["loc"])
        where, message = ".".join([field, *path]), first["msg"].removeprefix("Value error, ")
        if path and field in _KINDS:
            where, message = field, _KINDS[field]
        shown = where if where.isascii() and len(where) <= 100 else field
        raise ApiError(400, f"{shown}: {message}", param=field) from error


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI schema of an endpoint that parses the body itself."""
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + kind.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def add_schemas(app: FastAPI, *kinds: type[BaseModel]) -> None:
    """Adds the schemas that `schema_of` names to an application's OpenAPI."""
    models, template, without = [(kind, "validation") for kind in kinds], "{model}", app.openapi
    _, schemas = models_json_schema(models, ref_template=_SCHEMAS + template)  # type: ignore[arg-type]

    def openapi() -> dict[str, Any]:
        schema = without()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return schema

    app.openapi = openapi
