"""Chats -> text by a chat template, within limits of time, memory and length.

Templates are programs that come with a model, so they run in another process (`render_worker.py`),
which can be ended. It starts with the first chat, serves all threads one at a time, and costs a
fraction of a millisecond per call.
"""

import atexit
import json
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from poss_jax.config.paths import child_python
from poss_jax.config.reading import one_line

SECONDS = 2.0  # of processor time per text
MEMORY_BYTES = 1 << 30
CHARACTERS = 1 << 20  # per text, plus `GROWTH` times what the chats hold
GROWTH = 4


class RenderError(Exception):
    """A template cannot render a chat; the message is one line."""


class RenderEnded(RenderError):
    """The rendering process ended, most likely for lack of memory."""


class Step(NamedTuple):
    """A prefix of a chat to render.

    Attributes:
      end: number of messages in it.
      is_asking: add the generation prompt.
    """

    end: int
    is_asking: bool


class Part(NamedTuple):
    """A rendered text, given by its difference from the one before.

    Attributes:
      shared: length of the common prefix; 0 for the first text.
      text: what follows them.
    """

    shared: int
    text: str


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    template: str | None = None,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
    is_asking: bool,
) -> str:
    """Renders a whole chat (see `render_steps`)."""
    given: Any = {"template": template, "tools": tools, "variables": variables}
    return render_steps(tokenizer, messages, [Step(len(messages), is_asking)], **given)[0].text


def render_steps(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    steps: Sequence[Step],
    *,
    template: str | None = None,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> list[Part]:
    """Renders prefixes of a chat as `tokenizer.apply_chat_template` does.

    Args:
      template: text of the template; None takes the tokenizer's own.
      tools: JSON schemas of what the assistant may call.
      variables: further values for the template, and `continue_final_message` to leave the last
        message open.

    Raises:
      RenderError: the template is missing or raises an error, or a text exceeds the limits.
      RenderEnded: the rendering process has ended.
    """
    try:
        chosen = tokenizer.get_chat_template(template, tools)
        # As transformers, without keys that have no value.
        given = [{k: one[k] for k in one if one[k] is not None} for one in messages]
        chat = json.dumps(given)
        offered = json.dumps([tools, dict(variables)])
    except (ValueError, TypeError, RecursionError) as error:
        raise RenderError(one_line(error)) from error
    limits = {
        "seconds": SECONDS,
        "bytes": MEMORY_BYTES,
        "characters": CHARACTERS + GROWTH * (len(chat) + len(offered)),
    }
    own = tokenizer.special_tokens_map | {"chat_template": chosen, "tools": tools}
    settings = dict(variables) | own
    about = json.dumps({"template": settings, "limits": limits, "steps": steps})
    return _WORKER.render(f'{about[:-1]}, "chat": {chat}}}\n'.encode(), len(steps))


def join_parts(parts: Sequence[Part]) -> list[str]:
    """Whole texts of parts, the first of which shares nothing."""
    texts = accumulate(parts, lambda text, part: text[: part.shared] + part.text, initial="")
    return [*texts][1:]


def start_renderer() -> None:
    """Starts the rendering process early, since starting takes seconds."""
    _WORKER.start()


class _Worker:
    """The rendering process; serves one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, request: bytes, num_texts: int) -> list[Part]:
        """Sends a request and reads its answers; restarts the process if it has ended."""
        with self._lock:
            process = self._running()
            try:
                lines = _exchange(process, request, num_texts)
            except BaseException:  # Ctrl-C: the next request must not get these answers
                self.stop()
                raise
            if len(lines) < num_texts:
                raise _error_of_end(process.wait(), len(request))
        answers = [json.loads(line) for line in lines]
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise RenderError(one_line(errors[0]))
        return [Part(**answer) for answer in answers]

    def start(self) -> None:
        """Starts the process, if there is none."""
        with self._lock:
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._process = _start()
        return self._process

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _start() -> subprocess.Popen[bytes]:
    command, environment = child_python(str(Path(__file__).with_name("render_worker.py")))
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment | {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "OPENBLAS_NUM_THREADS": "1"},
        process_group=0,  # Ctrl-C goes to the program alone
    )


def _error_of_end(code: int, num_bytes: int) -> RenderError:
    if code == -signal.SIGPROF:
        return RenderError(f"it takes more than {SECONDS:g} s of processor time")
    return RenderEnded(
        f"code {code}; want a chat that fits {MEMORY_BYTES / 2**20:,.0f} MiB of memory while it "
        f"is written, got {num_bytes:,} bytes"
    )


def _exchange(process: subprocess.Popen[bytes], request: bytes, num_lines: int) -> list[bytes]:
    """Reads complete lines; fewer than requested if the process ends."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except BrokenPipeError:
        return []
    lines = (process.stdout.readline() for _ in range(num_lines))
    return [line for line in lines if line.endswith(b"\n")]


_WORKER = _Worker()
atexit.register(_WORKER.stop)
