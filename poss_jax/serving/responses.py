"""/v1/responses, translated: a request -> a chat's, the chat's reply -> items and their events.

created ─► item added ─► text or arguments, bit by bit ─► item done ─► next item ... ─► completed
"""

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, Field

from poss_jax.config.decoding import ServeConfig
from poss_jax.engine.answers import Chunk
from poss_jax.engine.engine import Engine
from poss_jax.engine.streams import Chunks
from poss_jax.serving.bodies import (
    MOST_MESSAGES,
    ApiError,
    BadField,
    ChatRequest,
    CommonRequest,
    ContentPart,
    NumTokens,
    join_parts,
    refusing_values,
)
from poss_jax.serving.replies import KEEP_ALIVE, Reply, event
from poss_jax.serving.requests import Job, read_chat
from poss_jax.serving.tools import Call

_REFUSED = (
    *("previous_response_id", "conversation", "prompt", "background", "context_management"),
    *("n", "max_tokens", "response_format", "logprobs", "top_logprobs", "max_tool_calls"),
)
_NOTHING = (None, False, 0, [])
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
_REPEATED = ("metadata", "text", "tools", "tool_choice")  # in the response, as they came
_TEXTS = ("input_text", "output_text", "text")

Content = str | Annotated[list[ContentPart], Field(fail_fast=True)]


class Item(BaseModel):
    """Part of the input: a message, a call that the model made, or the result of one."""

    type: str = "message"
    role: str | None = None
    content: Content = ""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content = ""


class ResponseRequest(CommonRequest):
    """Body of /v1/responses; fields that only we have work as in chats."""

    input: str | Annotated[list[Item], Field(max_length=MOST_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: NumTokens | None = None
    text: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None


def read_response(engine: Engine, config: ServeConfig, body: ResponseRequest) -> Job:
    """Turns a request into a chat's, and that into a job.

    Raises:
      ApiError: something in it cannot be served.
    """
    extra = body.model_extra or {}
    refused = [name for name in _REFUSED if getattr(body, name, extra.get(name)) not in _NOTHING]
    refused += ["truncation"] if body.truncation not in (None, "disabled") else []
    refused += ["include"] if set(body.include or ()) - {"reasoning.encrypted_content"} else []
    if refused:  # such as what needs a memory
        raise BadField(refused[0], "not served by /v1/responses")
    for name in _REPEATED:
        try:
            json.dumps(getattr(body, name), allow_nan=False)
        except ValueError as error:
            raise BadField(name, "want finite numbers") from error
    form, choice = _form_of(body), body.tool_choice
    fields = extra | body.model_dump(include=set(CommonRequest.model_fields), exclude_none=True)
    fields |= {
        "messages": _read_input(body),
        "max_completion_tokens": body.max_output_tokens,
        "tools": [*map(_nest, body.tools or ())] or None,
        "tool_choice": _nest(choice) if isinstance(choice, dict) else choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": form,
    }
    if form.get("type") == "json_schema":
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    try:
        with refusing_values():
            chat = ChatRequest.model_validate(fields, strict=True)
        job = read_chat(engine, config, chat)
    except ApiError as error:
        if error.param not in _NAMES:
            raise
        name, message = _NAMES[error.param], error.message.partition(": ")[2] or error.message
        raise BadField(name, message, code=error.code) from error
    if (grammar := job.grammar) is None:
        return job
    return job._replace(grammar=replace(grammar, name=_NAMES.get(grammar.name, grammar.name)))


def _form_of(body: ResponseRequest) -> dict[str, Any]:
    form = (body.text or {}).get("format")
    if not isinstance(form, dict | None):
        raise BadField("text", "want an object as format")
    return {"type": "text"} if form is None else form


def _nest(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as chats have it: its function apart from its type."""
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": tool.get("type"), "function": function}


def _read_input(body: ResponseRequest) -> list[dict[str, Any]]:
    """The messages of the input; calls belong to the assistant's message before them."""
    items = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for item in items:
        match item:
            case Item(type="message", role=str(role)):
                messages.append({"role": role, "content": _read_text(item.content)})
            case Item(type="function_call", call_id=str(called), name=str(name)):
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": name, "arguments": item.arguments or "{}"}
                call = {"id": called, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case Item(type="function_call_output", call_id=str(called)):
                text = _read_text(item.output)
                messages.append({"role": "tool", "tool_call_id": called, "content": text})
            case _:
                kinds = "function_call and function_call_output with a call_id"
                raise BadField("input", f"want messages with a role, {kinds}")
    return messages


def _read_text(content: Content) -> str:
    return content if isinstance(content, str) else join_parts(content, _TEXTS, "input")


class ResponseReply(Reply):
    """The reply to a chat, written as the response to a request: its items, and their events."""

    def __init__(self, body: ResponseRequest, *args: Any, **options: Any) -> None:
        """Begins a response to `body`; see `Reply` for the other arguments."""
        super().__init__(*args, **options)
        names = {"instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user"}
        fields = body.model_dump(include=names)
        fields |= {"tools": body.tools or [], "tool_choice": body.tool_choice or "auto"}
        fields |= {"parallel_tool_calls": body.parallel_tool_calls is not False}
        fields |= {"text": {"format": _form_of(body)}, "truncation": "disabled", "store": False}
        fields |= {"id": _new_id("resp"), "object": "response", "created_at": int(time.time())}
        fields |= dict.fromkeys(("previous_response_id", "error", "incomplete_details", "usage"))
        fields |= {"model": self._about["model"], "status": "in_progress", "output": []}
        self._begun = fields
        self._items: list[dict[str, Any]] = []
        self._text: str | None = None  # of the message under way
        self._num_events = 0

    async def write_body(self, chunks: Chunks) -> dict[str, Any]:
        """Takes all chunks; returns the whole response."""
        events = [entry async for entry in self._write(chunks) if entry is not None]
        return events[-1]["response"]

    async def write_events(self, chunks: Chunks) -> AsyncIterator[bytes]:
        """Takes all chunks; yields server-sent events."""
        try:
            async for entry in self._write(chunks):
                yield KEEP_ALIVE if entry is None else _to_bytes(entry)
        except ApiError as error:
            details = {"code": error.code, "message": error.message, "param": error.param}
            yield _to_bytes(self._tell("error", **details))

    async def _write(self, chunks: Chunks) -> AsyncIterator[dict[str, Any] | None]:
        """Gives all events, in OpenAI's order; None while nothing comes."""
        for state in ("created", "in_progress"):
            yield self._tell(f"response.{state}", response=self._begun)
        async for item in chunks:
            if item is None:
                yield None
            elif (data := self.take(*item)) is not None:
                for added in data["choices"][0]["delta"]["items"]:
                    for update in self._add(added):
                        yield update
        reply = self.body()
        is_cut = reply["choices"][0]["finish_reason"] == "length"
        status = "incomplete" if is_cut else "completed"
        for entry in self._end_message(status, is_wanted=not self._items):
            yield entry
        usage = reply["usage"]
        usage = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "speculation": usage["speculation"],
        }
        ended = {"status": status, "output": self._items, "usage": usage} | self.metrics()
        ended |= {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        yield self._tell(f"response.{status}", response=self._begun | ended)

    def _delta(self, choice: Any, chunk: Chunk) -> dict[str, Any]:
        """Texts and calls in the order of the answer, which is the items' order."""
        return {"items": self._split(choice, chunk)}

    def _add(self, item: str | Call) -> Iterator[dict[str, Any]]:
        """Adds a text or a call; a message behind a call has no blanks before it."""
        if isinstance(item, str):
            text = item.lstrip() if self._text is None and self._items else item
            yield from self._begin_message()
            self._text = (self._text or "") + text
            yield self._of_item("output_text.delta", content_index=0, delta=text, logprobs=[])
            return
        yield from self._end_message("completed")
        name, arguments = item["function"]["name"], item["function"]["arguments"]
        call = {"type": "function_call", "id": _new_id("fc"), "call_id": item["id"], "name": name}
        yield self._begin_item(call | {"status": "in_progress", "arguments": ""})
        yield self._of_item("function_call_arguments.delta", delta=arguments)
        yield self._of_item("function_call_arguments.done", name=name, arguments=arguments)
        yield self._end_item(status="completed", arguments=arguments)

    def _begin_message(self) -> Iterator[dict[str, Any]]:
        """Begins a message unless one is under way."""
        if self._text is None:
            item = {"type": "message", "id": _new_id("msg"), "role": "assistant", "content": []}
            yield self._begin_item(item | {"status": "in_progress"})
            yield self._of_item("content_part.added", content_index=0, part=_part(""))
            self._text = ""

    def _end_message(self, status: str, *, is_wanted: bool = False) -> Iterator[dict[str, Any]]:
        """Ends the message under way; an empty one if it is wanted."""
        if is_wanted:
            yield from self._begin_message()
        if self._text is not None:
            content, self._text = _part(self._text), None
            done: Any = {"text": content["text"], "logprobs": []}
            yield self._of_item("output_text.done", content_index=0, **done)
            yield self._of_item("content_part.done", content_index=0, part=content)
            yield self._end_item(status=status, content=[content])

    def _begin_item(self, item: dict[str, Any]) -> dict[str, Any]:
        self._items.append(item)
        return self._of_item("output_item.added", item=item)

    def _end_item(self, **fields: Any) -> dict[str, Any]:
        self._items[-1] = item = self._items[-1] | fields
        return self._of_item("output_item.done", item=item)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        position: dict[str, Any] = {"output_index": len(self._items) - 1}
        if "item" not in fields:
            position["item_id"] = self._items[-1]["id"]
        return self._tell(f"response.{kind}", **position, **fields)

    def _tell(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The next event."""
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _to_bytes(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\n".encode() + event(data)
