"""A chat server with OpenAI's interface that answers the questions of a data set, many at a time.

The server has the model, the template and the length limit. A question that it refuses counts as
one failure, unless it refuses all of the first ones. OpenAI's client asks a busy or unreachable
server again, at growing intervals.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.reading import UserError, lone_surrogates, shorten
from poss_jax.config.regenerate import RegenerateConfig
from poss_jax.engine.answers import Generation

from .questions import Line, Lines, Question, TurnWriter, answer_line, open_dialogue, refuse_answer

_RETRIES = 20  # after 0.5, 1, 2, 4 and then 8 seconds: for about two minutes
_TIMEOUT = 600.0
_AHEAD = 4  # questions running or answered ahead of a slow one, per request
_REFUSALS = 100  # this many refusals and no answer: the settings are wrong

_OF_THE_QUESTION = {400, 413, 422}
_REFUSES = "the server refuses it with status"
_CALLS = ("tool_calls", "function_call")  # finish reasons, and fields of a message
_KNOWN_TO_ALL = ("temperature", "top_p", "seed")


class Refused(Exception):
    """The server refuses a question, or its answer is unusable; `said` quotes the server."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.said = detail


class ChatClient:
    """A chat server with OpenAI's interface, and the name of the model that answers."""

    def __init__(
        self, url: str, model: str | None = None, chat_template_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Sets the address; asks the server for its first model if none is given."""
        try:
            import openai
        except ModuleNotFoundError as error:
            raise UserError("openai is missing; pip install 'poss-jax[regenerate]'") from error
        key = os.environ.get("OPENAI_API_KEY", "").strip() or "none"
        self._url = url.rstrip("/")
        self._client = openai.OpenAI(
            base_url=url, api_key=key, timeout=_TIMEOUT, max_retries=_RETRIES
        )
        self._more = {"chat_template_kwargs": chat_template_kwargs} if chat_template_kwargs else {}
        self.model = model or self._request("models", None, lambda reply: reply["data"][0]["id"])

    def answer(
        self, messages: Sequence[Any], sampling: SamplingConfig, config: RegenerateConfig
    ) -> tuple[Generation, dict[str, str]]:
        """Answers a conversation; returns the other fields of the message (reasoning), too.

        Raises:
          Refused: the server refuses this question, or its answer is unusable.
        """

        def read(choice: dict[str, Any]) -> tuple[Generation, dict[str, str]]:
            message = choice["message"]
            if choice.get("finish_reason") in _CALLS or any(map(message.get, _CALLS)):
                raise Refused("an answer that calls tools")
            # Reasoning that the server splits off an answer has either name.
            thoughts = message.get("reasoning_content") or message.get("reasoning") or ""
            answer = _read(choice, message["content"] or "", thoughts)
            return answer, {"reasoning_content": thoughts} if thoughts else {}

        body = {"messages": messages, **self._more}
        limits = config.max_new_tokens, config.stop
        return self._ask("chat/completions", body, read, sampling, *limits)

    def complete(
        self, prompt: Sequence[int], sampling: SamplingConfig, max_tokens: int, stop: Sequence[str]
    ) -> Generation:
        """Continues a prompt of token ids; raises what `answer` raises."""

        def read(choice: dict[str, Any]) -> Generation:
            return _read(choice, choice["text"])

        return self._ask("completions", {"prompt": prompt}, read, sampling, max_tokens, stop)

    def _ask(
        self,
        path: str,
        body: dict[str, Any],
        read: Callable[[dict[str, Any]], Any],
        sampling: SamplingConfig,
        max_tokens: int,
        stop: Sequence[str],
    ) -> Any:
        """Asks for one text, and reads the server's choice."""
        default = asdict(SamplingConfig())
        settings = {
            name: value
            for name, value in asdict(sampling).items()
            if name in _KNOWN_TO_ALL or value != default[name]
        }
        body = body | settings | {"model": self.model, "max_tokens": max_tokens}
        body |= {"stop": list(stop)} if stop else {}
        return self._request(path, body, lambda reply: read(reply["choices"][0]))

    def _request(self, path: str, body: dict[str, Any] | None, read: Callable[[Any], Any]) -> Any:
        """Sends a request and reads the JSON of the reply. Requests with a body are retried."""
        import openai

        try:
            if body is None:
                reply = self._client.get(path, cast_to=object, options={"max_retries": 0})
            else:
                reply = self._client.post(path, cast_to=object, body=body)
        except openai.APIStatusError as error:
            message = error.body
            message = message.get("message", message) if isinstance(message, dict) else message
            message = " ".join(str(message).encode(errors="replace").decode().split())[:300]
            if error.status_code in _OF_THE_QUESTION and body is not None:
                raise Refused(f"{_REFUSES} {error.status_code}", message) from error
            raise self._error(f"got status {error.status_code}: {message}") from error
        except openai.APIConnectionError as error:
            raise self._error(f"got {str(error.__cause__) or error}") from error
        except (ValueError, RecursionError) as error:
            raise self._error(f"want JSON ({error})") from error
        try:
            return read(reply)
        except (LookupError, TypeError, AttributeError) as error:
            raise self._error(f"want the {path} of OpenAI, got {shorten(reply)}") from error

    def _error(self, message: str) -> UserError:
        return UserError(
            f"server {self._url}: {message}; check --server (its path is mostly /v1), --model and "
            "OPENAI_API_KEY, then run the same command again"
        )


def answer_questions(
    server: ChatClient,
    questions: Sequence[Question],
    config: RegenerateConfig,
    writer: TurnWriter | None = None,
) -> Lines:
    """Answers questions with a server, many at a time.

    Args:
      writer: lets the server write its share of the user turns; None: it writes none.

    Yields:
      Lines of the output (see `answer_window`), in the order of the questions.

    Raises:
      UserError: the server stopped answering; earlier lines are yielded first.
    """
    # Its threads are daemons: an interrupted run does not wait for them.
    pool = ThreadPool(min(config.concurrency, len(questions)) or 1)
    waiting: deque[AsyncResult[Line]] = deque()
    try:
        for question in questions:
            waiting.append(pool.apply_async(_answer, (server, question, config, writer)))
            if len(waiting) == _AHEAD * config.concurrency:
                yield _take(waiting)
        while waiting:
            yield _take(waiting)
    finally:
        pool.terminate()


def hold_refusals(answers: Lines) -> Lines:
    """Holds first lines back until the server accepts a question; UserError if it refuses all."""
    held, refused, num_failed = list[Line](), list[Line](), 0
    with closing(answers):
        for lines in answers:
            held += lines
            num_failed = next(
                (i for i, line in enumerate(held) if "messages" in line and not _is_refusal(line)),
                len(held),
            )
            refused = list(filter(_is_refusal, held[:num_failed]))
            if num_failed < len(held) or len(refused) >= _REFUSALS:
                break
        if refused and (num_failed == len(held) or len(refused) >= _REFUSALS):
            text = "".join(f": {line['said']}" for line in refused[:1] if "said" in line)
            raise UserError(
                f"the server refuses all of the first {len(refused)} questions "
                f"({refused[0]['reason']}{text}); mend the settings, or leave these questions out "
                "of the source, then run again"
            )
        yield held
        yield from answers


def _is_refusal(line: Line) -> bool:
    return line.get("reason", "").startswith(_REFUSES)


def _answer(
    server: ChatClient, question: Question, config: RegenerateConfig, writer: TurnWriter | None
) -> Line:
    """Lets the server answer every turn of a chat, with its earlier answers in context."""
    dialogue, detail = open_dialogue(question, config), {}
    while not dialogue.ended:
        try:
            if writer is not None and writer.is_due(question, dialogue):
                try:
                    prompt = writer.prompt(dialogue)
                except UserError as error:  # the template refuses
                    dialogue.end(str(error))
                    continue
                settings = writer.sampling(dialogue), writer.max_new_tokens, writer.stop
                writer.take(dialogue, server.complete(prompt, *settings))
            elif dialogue.remaining:
                messages = [*dialogue.messages, dialogue.remaining[0]]
                answer, fields = server.answer(messages, dialogue.sampling, config)
                if reason := refuse_answer(answer, config):
                    dialogue.end(reason)
                else:
                    dialogue.take(answer, fields)
            else:
                break
        except Refused as error:
            dialogue.end(str(error))
            detail = {"said": error.said} if error.said else {}
    return answer_line(question, dialogue) | detail


def _take(waiting: deque[AsyncResult[Line]]) -> list[Line]:
    """Takes the first line and the ready ones after it."""
    lines = [waiting.popleft().get()]
    while waiting and waiting[0].ready() and waiting[0].successful():
        lines.append(waiting.popleft().get())
    return lines


def _read(choice: dict[str, Any], text: str, thoughts: str = "") -> Generation:
    """Turns a text into an answer, if it is usable."""
    reason = choice.get("finish_reason")
    if reason == "content_filter":
        raise Refused("the server's content filter ended an answer")
    if lone_surrogates(text + thoughts):
        raise Refused("an answer that is not UTF-8")
    return Generation([], [], text, [], [], "length" if reason == "length" else "stop")
