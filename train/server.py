"""A chat server with OpenAI's interface that answers the questions of a data set, many at a time.

The server has the model, the template and the length limit. A question that it refuses counts as
one failure, unless it refuses all of the first ones. OpenAI's client asks a busy or unreachable
server again, at growing intervals.
"""

import itertools
import os
import re
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.reading import UserError, lone_surrogates, shorten
from poss_jax.config.regenerate import RegenerateConfig
from poss_jax.engine.answers import Generation
from poss_jax.engine.dialogue import Dialogue

from .answers import Line, Lines, Question, answer_line, open_dialogue, refuse_answer
from .self_prompt import TurnWriter

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
    """A chat server with OpenAI's interface.

    Attributes:
      model: name of the model that answers.
    """

    def __init__(
        self, url: str, model: str | None = None, chat_template_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Sets the address; asks the server for its first model if none is given.

        Raises:
          UserError: the server does not answer, OPENAI_API_KEY is not a key, or the package
            openai is missing.
        """
        try:
            import openai
        except ModuleNotFoundError as error:
            raise UserError("openai is missing; pip install 'poss-jax[regenerate]'") from error
        self._url, key = url.rstrip("/"), os.environ.get("OPENAI_API_KEY", "").strip()
        if not re.fullmatch("[!-~]*", key):
            raise UserError("OPENAI_API_KEY: want a key in ASCII, got other characters")
        self._client = openai.OpenAI(
            base_url=url, api_key=key or "none", timeout=_TIMEOUT, max_retries=_RETRIES
        )
        self._more = {"chat_template_kwargs": chat_template_kwargs} if chat_template_kwargs else {}
        self.model = model or self._first_model()

    def answer(
        self, messages: Sequence[Any], sampling: SamplingConfig, config: RegenerateConfig
    ) -> tuple[Generation, dict[str, str]]:
        """Answers a conversation.

        Returns:
          The answer, and other fields of its message: the target's reasoning.

        Raises:
          Refused: the server refuses this question.
          UserError: it answers no question.
        """
        body = {"messages": messages, **self._more}
        limits = config.max_new_tokens, config.stop
        choice = self._choose("chat/completions", body, sampling, *limits)
        message = choice["message"] if isinstance(choice.get("message"), dict) else {}
        if choice.get("finish_reason") in _CALLS or any(map(message.get, _CALLS)):
            raise Refused("an answer that calls tools")
        text = message.get("content", 0)
        text = "" if text is None else text
        # Reasoning that the server splits off an answer has either name.
        thoughts = message.get("reasoning_content") or message.get("reasoning") or ""
        if not (isinstance(text, str) and isinstance(thoughts, str)):
            raise self._error(f"want a chat completion, got {shorten(choice)}")
        return _read(choice, text, thoughts), {"reasoning_content": thoughts} if thoughts else {}

    def complete(
        self, prompt: Sequence[int], sampling: SamplingConfig, max_tokens: int, stop: Sequence[str]
    ) -> Generation:
        """Continues a prompt of token ids; raises what `answer` raises."""
        choice = self._choose("completions", {"prompt": prompt}, sampling, max_tokens, stop)
        if not isinstance(text := choice.get("text"), str):
            raise self._error(f"want a completion, got {shorten(choice)}")
        return _read(choice, text)

    def _choose(
        self,
        path: str,
        body: dict[str, Any],
        sampling: SamplingConfig,
        max_tokens: int,
        stop: Sequence[str],
    ) -> dict[str, Any]:
        """Asks for one text; returns the server's choice."""
        body = body | {"max_tokens": max_tokens} | ({"stop": list(stop)} if stop else {})
        reply = self._request(path, body | self._sampling(sampling))
        try:
            choice = reply["choices"][0]
        except (KeyError, IndexError, TypeError):
            choice = reply
        if not isinstance(choice, dict):
            raise self._error(f"want a chat completion, got {shorten(reply)}")
        return choice

    def _sampling(self, sampling: SamplingConfig) -> dict[str, Any]:
        """Sampling fields; those that not all servers know are sent only if set."""
        default = asdict(SamplingConfig())
        sent = {
            name: value
            for name, value in asdict(sampling).items()
            if name in _KNOWN_TO_ALL or value != default[name]
        }
        return {"model": self.model, **sent}

    def _first_model(self) -> str:
        try:
            reply = self._request("models")
        except Refused as error:
            raise self._error(f"{error}: {error.said}") from error
        try:
            name = reply["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            name = None
        if not isinstance(name, str):
            raise self._error(f"want a list of models, got {shorten(reply)}; give --model")
        return name

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Sends a request; returns its JSON. Requests with a body are retried."""
        import openai

        try:
            if body is None:
                return self._client.get(path, cast_to=object, options={"max_retries": 0})
            return self._client.post(path, cast_to=object, body=body)
        except openai.APIStatusError as error:
            status, text = error.status_code, _message(error.body)
            if status in _OF_THE_QUESTION:
                raise Refused(f"{_REFUSES} {status}", text) from error
            raise self._error(f"got status {status}: {text}") from error
        except openai.APIConnectionError as error:
            raise self._error(f"got {str(error.__cause__) or error}") from error
        except (ValueError, RecursionError) as error:
            raise self._error(f"want JSON ({error})") from error

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
      config: settings of all answers, and the number of questions in flight.
      writer: lets the server write its share of the user turns; None: it writes none.

    Yields:
      Lines of the output (see `answer_window`), in the order of the questions.

    Raises:
      UserError: the server stopped answering; earlier lines are yielded first.
    """
    tasks: SimpleQueue[tuple[Question, Future[Line]] | None] = SimpleQueue()

    def work() -> None:
        while task := tasks.get():
            question, line = task
            try:
                line.set_result(_answer(server, question, config, writer))
            except BaseException as error:
                line.set_exception(error)

    num_threads = min(config.concurrency, len(questions))
    for _ in range(num_threads):  # daemons: an interrupted run does not wait for them
        threading.Thread(target=work, daemon=True).start()
    waiting: deque[Future[Line]] = deque()
    try:
        for question in questions:
            waiting.append(Future())
            tasks.put((question, waiting[-1]))
            if len(waiting) == _AHEAD * config.concurrency:
                yield _take(waiting)
        while waiting:
            yield _take(waiting)
    finally:
        while not tasks.empty():
            tasks.get()
        for _ in range(num_threads):
            tasks.put(None)


def hold_refusals(answers: Lines) -> Lines:
    """Holds the first lines back until the server has accepted one question.

    Raises:
      UserError: the server refuses all of the first questions.
    """
    held, failures, refused = list[Line](), list[Line](), list[Line]()
    with closing(answers):
        for lines in answers:
            held += lines
            failures = list(
                itertools.takewhile(lambda line: "messages" not in line or _is_refusal(line), held)
            )
            refused = list(filter(_is_refusal, failures))
            if len(failures) < len(held) or len(refused) >= _REFUSALS:
                break
        if len(refused) >= _REFUSALS or (refused and len(failures) == len(held)):
            text = "".join(f": {line['said']}" for line in refused[:1] if "said" in line)
            raise UserError(
                f"the server refuses all of the first {len(refused)} questions "
                f"({refused[0]['reason']}{text}); mend the settings, or leave these questions out "
                "of the source, then run again"
            )
        if held:
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
                _write_turn(server, dialogue, writer)
                continue
            if not dialogue.remaining:
                break
            messages = [*dialogue.messages, dialogue.remaining[0]]
            answer, fields = server.answer(messages, dialogue.sampling, config)
        except Refused as error:
            dialogue.end(str(error))
            detail = {"said": error.said} if error.said else {}
            continue
        if reason := refuse_answer(answer, config):
            dialogue.end(reason)
        else:
            dialogue.take(answer, fields)
    return answer_line(question, dialogue) | detail


def _write_turn(server: ChatClient, dialogue: Dialogue, writer: TurnWriter) -> None:
    """Lets the server write the next user's turn, or ends the chat if the template refuses."""
    try:
        prompt = writer.prompt(dialogue)
    except UserError as error:
        dialogue.end(str(error))
        return
    sampling = writer.sampling(dialogue)
    writer.take(dialogue, server.complete(prompt, sampling, writer.max_new_tokens, writer.stop))


def _take(waiting: deque[Future[Line]]) -> list[Line]:
    """Takes the first line and the ready ones after it."""
    lines = [waiting.popleft().result()]
    while waiting and waiting[0].done() and not waiting[0].exception():
        lines.append(waiting.popleft().result())
    return lines


def _read(choice: dict[str, Any], text: str, thoughts: str = "") -> Generation:
    """Turns a text into an answer.

    Raises:
      Refused: it is unusable.
    """
    reason = choice.get("finish_reason")
    if reason == "content_filter":
        raise Refused("the server's content filter ended an answer")
    if lone_surrogates(text + thoughts):
        raise Refused("an answer that is not UTF-8")
    return Generation([], [], text, [], [], "length" if reason == "length" else "stop")


def _message(body: object) -> str:
    """The message of an error, in one line."""
    text = body.get("message", body) if isinstance(body, dict) else body
    return " ".join(str(text).encode(errors="replace").decode().split())[:300]
