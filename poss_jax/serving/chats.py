"""Chats of requests -> messages and tools, and how the chat template is to write them."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from poss_jax.config.decoding import ServeConfig
from poss_jax.config.json_reading import JsonError, parse_json
from poss_jax.config.reading import cut
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import Rendering, escapes_arguments
from poss_jax.serving.bodies import (
    BadField,
    ChatFields,
    ChatRequest,
    Message,
    ToolChoice,
    join_parts,
)
from poss_jax.serving.tools import FORMS, Caller, call_grammar, find_format, marks_of

_ROLES = ("assistant", "developer", "function", "system", "tool", "user")
_OWN_VARIABLES = (
    *("messages", "conversations", "tools", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "return_assistant_tokens_mask"),
)
_WORD = re.compile("""['"]([A-Za-z][A-Za-z0-9_-]*)['"]""")  # quoted


def read_messages(engine: Engine, sent: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the chat template takes them.

    Raises:
      ApiError: a content other than text, or an unknown role.
    """
    messages = []
    for message in sent:
        content, extra = message.content, message.model_extra or {}
        if isinstance(content, list):
            content = join_parts(content, ("text",), "messages")
        extra = {key: value for key, value in extra.items() if value is not None}
        # With tool calls, templates treat missing content differently from an empty one.
        content = content if extra else content or ""
        messages.append({"role": message.role, "content": content, **extra})
    if engine.tokenizer is None:
        return messages
    template = str(engine.tokenizer.chat_template or "")
    roles = {*_ROLES, *_WORD.findall(template)}
    for message in messages:
        if message["role"] not in roles:  # neither the API's nor named in the template
            choices, got = ", ".join(_ROLES), cut(ascii(message["role"]))
            raise BadField("messages", f"want a role of {choices}, got {got}")
    has_calls = any("tool_calls" in message for message in messages)
    if has_calls and escapes_arguments(engine.tokenizer):
        messages = [_with_objects(message) for message in messages]
    return messages


def read_rendering(
    engine: Engine, body: ChatFields, messages: Sequence[dict[str, Any]]
) -> Rendering:
    """Reads how a chat is to be written.

    Raises:
      ApiError: its fields contradict each other, or set what the template gets from elsewhere.
    """
    variables = dict(body.chat_template_kwargs or {})
    special = engine.tokenizer.special_tokens_map if engine.tokenizer is not None else {}
    tools: Any = body.tools or None  # as they were sent
    if isinstance(body, ChatRequest) and body.tool_choice == "none":
        tools = None  # what the model does not see, it does not call
    if taken := variables.keys() & {*_OWN_VARIABLES, *special}:
        raise BadField("chat_template_kwargs", f"{min(taken)} cannot be set here")
    if not body.continue_final_message:
        return Rendering(tools, body.add_generation_prompt is not False, variables)
    if body.add_generation_prompt or messages[-1]["role"] != "assistant":
        message = "want an assistant's message at the end, and no add_generation_prompt"
        raise BadField("continue_final_message", message)
    return Rendering(tools, False, variables | {"continue_final_message": True})


def read_caller(
    engine: Engine, config: ServeConfig, body: ChatRequest, tools: Sequence[dict[str, Any]] | None
) -> Caller | None:
    """Reads how tools are to be called; None: there are none.

    Raises:
      ApiError: the model cannot be told of tools, its calls cannot be read, or a choice of tools
        that is not served.
    """
    named = body.tool_choice.function.name if isinstance(body.tool_choice, ToolChoice) else None
    is_forced = named is not None or body.tool_choice == "required"
    if is_forced and not body.tools:
        raise BadField("tool_choice", "want tools with it")
    if not tools:
        return None
    template = ""
    if engine.tokenizer is not None and engine.tokenizer.chat_template:
        template = engine.tokenizer.get_chat_template(None, tools)
    if not re.search(r"\btools\b", template):
        raise BadField("tools", "this model's chat template has none")
    form = config.tool_format or find_format(template)
    if form is None:
        message = "calls of this model's chat template have no known form; start with --tool-format"
        raise BadField("tools", message)
    is_single = named is not None or body.parallel_tool_calls is False
    caller = Caller(FORMS[form], frozenset(tool["function"]["name"] for tool in tools), is_single)
    if not (is_forced or any(tool["function"].get("strict") for tool in tools)):
        # Marks in an answer of JSON are letters of its strings.
        formats = body.structured_outputs or {}
        is_json = (body.response_format or {}).get("type", "text") != "text"
        is_json |= any(formats.get(key) not in (None, False) for key in ("json", "json_object"))
        return None if is_json and not caller.form.bare else caller
    allowed = [tool for tool in tools if named in (None, tool["function"]["name"])]
    if not allowed:
        raise BadField("tool_choice", "want the name of a tool")
    marks = marks_of(engine.tokenizer, caller.form, with_text=is_forced)
    settings: Any = {"is_forced": is_forced, "is_single": is_single}
    return caller._replace(grammar=call_grammar(caller.form, allowed, marks, **settings))


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Gives arguments as objects if they are JSON; other arguments stay as they are."""
    calls: Any = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    calls = [*calls]
    for index, call in enumerate(calls):
        with suppress(JsonError, LookupError, TypeError):
            function = call["function"]
            if isinstance(arguments := parse_json(function["arguments"]), dict):
                calls[index] = call | {"function": function | {"arguments": arguments}}
    return message | {"tool_calls": calls}
