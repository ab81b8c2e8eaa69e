"""Streams that outlive their server: what was delivered, and requests for the rest."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from pool import MOST_TRIES, Call, GivenUp, Pool
from starlette.responses import Response, StreamingResponse

from poss_jax.engine.prompts import prompt_seed
from poss_jax.serving.bodies import ApiError
from poss_jax.serving.replies import DONE, event, format_token

Event = dict[str, Any]

_SILENCE_SECONDS = 30.0  # a server that is alive writes a comment every 10 s
# Fields that a continuation lacks or sets itself.
_REPLACED = {"messages", "prompt", "n", "best_of", "echo", "suffix", "max_completion_tokens"}
_REPLACED |= {"logprobs", "top_logprobs", "tools", "functions", "modalities"}


class Died(Exception):
    """An upstream went away before its answer was complete."""


class Settings(NamedTuple):
    """Settings of the proxy; limits of answers are the servers'."""

    max_new_tokens: int = 256
    timeout_seconds: float = 600.0
    patience: float = 60.0  # seconds that a broken stream waits for a server with room


@dataclass
class Choice:
    """The delivered part of one choice."""

    prompt_ids: list[int]
    next_offset: int  # characters before the next token, as log-probabilities count them
    ids: list[int] = field(default_factory=list)  # tokens delivered
    is_finished: bool = False  # the client has its end


class ContinuedStream:
    """One stream to a client, however many servers it takes.

    Every choice is continued by itself, as a completion of token ids. Events of the first server
    are held back until all choices have begun, so that another one can replace it until then.
    """

    def __init__(self, pool: Pool, settings: Settings, call: Call, body: dict[str, Any]) -> None:
        self._pool, self._settings = pool, settings
        self._is_chat = "chat" in call.path
        self._shows_ids = bool(body.get("return_token_ids"))
        seed = secrets.randbits(32) if body.get("seed") is None else body["seed"]
        self._body = body | {"return_token_ids": True, "seed": seed}
        content = json.dumps(self._body).encode()
        self._call = call._replace(content=content, silence=_SILENCE_SECONDS)
        self._arrived = time.monotonic()
        self._choices: dict[int, Choice] = {}
        self._about: Event = {}
        self._has_usage = False  # the client was told

    async def respond(self) -> Response:
        """Opens the stream; errors come as the server says them."""
        first = await self._pool.open(self._call)
        if not first.headers.get("content-type", "").startswith("text/event-stream"):
            await first.aread()
            return plain(first)
        headers = {"cache-control": "no-store"}
        return StreamingResponse(
            self._lines(first), media_type="text/event-stream", headers=headers
        )

    async def _lines(self, first: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self._events(first)) as events:
                async for data in events:
                    yield b": waiting\n\n" if data is None else event(data)
            yield DONE
        except GivenUp as error:
            yield event(ApiError(503, str(error)).body())

    async def _events(self, first: httpx.Response) -> AsyncIterator[Event | None]:
        """Events of the whole answer; None keeps the connection alive."""
        try:
            async with aclosing(self._of_first(first)) as events:
                async for data in events:
                    yield data
        except Died:
            rests = [self._of_rest(index) for index in sorted(self._choices)]
            async with aclosing(merge(rests)) as events:
                async for data in events:
                    yield data
            options = self._body.get("stream_options") or {}
            if options.get("include_usage") and not self._has_usage:
                yield self._about | {"choices": [], "usage": self._usage()}

    async def _of_first(self, response: httpx.Response) -> AsyncIterator[Event | None]:
        """Events of the first server; it can be replaced until all choices have begun.

        Raises:
          Died: choices have begun that are to be continued.
        """
        held: list[Event | None] = []
        for _ in range(MOST_TRIES):
            try:
                async with aclosing(read_events(response)) as events:
                    async for data in events:
                        if data is None:
                            yield None
                            continue
                        held.append(self._take(data))
                        if self._has_begun:
                            for one in filter(None, held):
                                yield one
                            held.clear()
                if not self._is_finished:
                    raise Died("the server stopped")
                return
            except Died:
                if self._has_begun:
                    raise
            held.clear()
            self._choices.clear()
            response = await self._reopen(self._call)
        raise GivenUp("servers die of the request")

    async def _of_rest(self, index: int) -> AsyncIterator[Event | None]:
        """Events of a choice from where it broke off."""
        choice = self._choices[index]
        for _ in range(MOST_TRIES):
            if choice.is_finished:
                return
            response = await self._reopen(await self._continuation(index))
            offset = choice.next_offset
            try:
                async with aclosing(read_events(response)) as events:
                    async for data in events:
                        if data is None:
                            yield None
                        elif (told := self._translate(data, index, offset)) is not None:
                            yield told
            except Died:
                await asyncio.sleep(0.1)
        if not choice.is_finished:
            raise GivenUp("servers die of the request")

    async def _reopen(self, call: Call) -> httpx.Response:
        response = await self._pool.open(call, patience=self._settings.patience)
        if response.status_code != 200:
            await response.aread()
        return _accepted(response)

    @property
    def _has_begun(self) -> bool:
        prompt = self._body.get("prompt")
        is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
        num_prompts = len(prompt) if is_list else 1
        return len(self._choices) == num_prompts * int(self._body.get("n") or 1)

    @property
    def _is_finished(self) -> bool:
        return all(choice.is_finished for choice in self._choices.values())

    def _take(self, data: Event) -> Event | None:
        """Takes an event in; returns what the client is to see of it, None if nothing."""
        if not self._about:
            self._about = {key: data[key] for key in data if key not in ("choices", "usage")}
        if not data["choices"]:
            self._has_usage = self._is_finished
            return data if self._is_finished else None
        shown = [one for one in map(self._take_choice, data["choices"]) if one is not None]
        return data | self._about | {"choices": shown} if shown else None

    def _take_choice(self, told: Event) -> Event | None:
        index, ids = told["index"], told.get("token_ids", [])
        if "prompt_token_ids" in told:
            offset = len(told.get("text", ""))
            self._choices[index] = Choice(told["prompt_token_ids"], offset)
        if index not in self._choices:
            raise GivenUp("the server does not return token ids; is it poss-serve?")
        choice = self._choices[index]
        is_late = time.monotonic() - self._arrived > self._settings.timeout_seconds
        if told["finish_reason"] == "length" and not ids and not is_late:
            return None  # its server stopped before the answer had ended
        choice.ids += ids
        choice.is_finished = told["finish_reason"] is not None
        if not self._is_chat and told["logprobs"]:
            last = told["logprobs"]
            choice.next_offset = last["text_offset"][-1] + len(last["tokens"][-1])
        if self._shows_ids:
            return told
        told = {key: told[key] for key in told if key not in ("token_ids", "prompt_token_ids")}
        is_shown = any(told.get(key) for key in ("text", "delta", "logprobs", "finish_reason"))
        return told if is_shown else None

    def _translate(self, data: Event, index: int, offset: int) -> Event | None:
        """Event of a continuation as the client is to see it, None if nothing.

        Raises:
          Died: the server has other weights, so it cannot continue the text.
        """
        if data["system_fingerprint"] != self._about["system_fingerprint"]:
            raise Died("another model")
        if not data["choices"] or "prompt_token_ids" in data["choices"][0]:
            return None
        [told] = data["choices"]
        told, logprobs = told | {"index": index}, told["logprobs"]
        if self._is_chat:
            text = told.pop("text")
            told["delta"] = {"content": text} if text else {}
            told["logprobs"] = logprobs and chat_logprobs(logprobs)
        elif logprobs:
            logprobs["text_offset"] = [offset + one for one in logprobs["text_offset"]]
        return self._take(data | {"choices": [told]})

    async def _continuation(self, index: int) -> Call:
        """Request for the rest of a choice, as a completion of token ids."""
        choice, asked = self._choices[index], self._body
        body = {key: asked[key] for key in asked if key not in _REPLACED}
        if not self._is_chat:
            body["logprobs"] = asked.get("logprobs")
        elif asked.get("logprobs"):
            body["logprobs"] = asked.get("top_logprobs") or 0
        continued = 0 if self._is_chat else int(asked.get("continued_tokens") or 0)
        body |= {
            "prompt": choice.prompt_ids + choice.ids,
            "continued_tokens": continued + len(choice.ids),
            "continued_chat": self._is_chat or bool(asked.get("continued_chat")),
            "max_tokens": max(1, await self._limit(choice) - len(choice.ids)),
            "seed": prompt_seed(int(asked["seed"]) % 2**32, index),
        }
        content = json.dumps(body).encode()
        return self._call._replace(path="/v1/completions", content=content)

    async def _limit(self, choice: Choice) -> int:
        """Most tokens of a choice."""
        names = ("max_completion_tokens", "max_tokens") if self._is_chat else ("max_tokens",)
        for name in names:
            if self._body.get(name):
                return int(self._body[name])
        call = self._call._replace(method="GET", path="/v1/models", content=b"")
        models = await self._pool.fetch(call, patience=self._settings.patience)
        room = _accepted(models).json()["data"][0]["max_model_len"] - len(choice.prompt_ids)
        return min(self._settings.max_new_tokens, room)

    def _usage(self) -> dict[str, int]:
        """Counts of tokens, those that were read again not counted again."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        per_prompt = choices[:: int(self._body.get("n") or 1)]
        prompt = sum(len(choice.prompt_ids) for choice in per_prompt)
        completion = sum(len(choice.ids) for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


async def read_events(response: httpx.Response) -> AsyncIterator[Event | None]:
    """Events of a stream; None is a comment that keeps the connection alive.

    Raises:
      Died: the stream ends before it is complete, or with an error.
    """
    try:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                if "error" in data:
                    raise Died(str(data["error"]))
                yield data
            elif line:
                yield None
    except (httpx.TransportError, json.JSONDecodeError) as error:
        raise Died(str(error)) from error
    finally:
        await response.aclose()
    raise Died("the stream ends early")


def chat_logprobs(logprobs: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of a completion as chats have them.

    Completions name tokens by their text, but of two that look the same one by its id.
    """
    columns = (logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs"))
    content = [
        format_token(token, value) | {"top_logprobs": [format_token(*one) for one in top.items()]}
        for token, value, top in zip(*columns, strict=True)
    ]
    return {"content": content, "refusal": None}


async def merge(sources: Sequence[AsyncIterator[Any]]) -> AsyncIterator[Any]:
    """Items of several iterators as they come."""
    items: asyncio.Queue[tuple[Any, bool]] = asyncio.Queue(1)

    async def read(source: AsyncIterator[Any]) -> None:
        try:
            async for item in source:
                await items.put((item, False))
            await items.put((None, True))
        except Exception as error:
            await items.put((error, True))

    tasks = [asyncio.create_task(read(source)) for source in sources]
    num_open = len(tasks)
    try:
        while num_open:
            item, is_end = await items.get()
            if isinstance(item, Exception):
                raise item
            num_open -= is_end
            if not is_end:
                yield item
    finally:
        for task in tasks:
            task.cancel()


def _accepted(response: httpx.Response) -> httpx.Response:
    if response.status_code != 200:
        raise GivenUp(f"no server takes the rest, status {response.status_code}")
    return response


def plain(response: httpx.Response) -> Response:
    """Passes a whole response on."""
    names = ("content-type", "retry-after")
    headers = {name: response.headers[name] for name in names if name in response.headers}
    return Response(response.content, response.status_code, headers)
