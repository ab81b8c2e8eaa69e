"""Chats -> text by a chat template, within limits of time, memory and length.

Templates run in another process (`render_worker.py`): they are programs that come with a model, and
only a process can be ended whatever it does. It starts with the first chat, serves all threads in
turn, and costs a fraction of a millisecond per call.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poss_jax.config.reading import one_line

SECONDS = 2.0  # of processor time, for one text
MEMORY_BYTES = 1 << 30
CHARACTERS = 1 << 20  # of one text, beside `GROWTH` times what the chats hold
GROWTH = 4


class RenderError(Exception):
    """Says in one line why a template does not write a chat."""


def render_chats(
    tokenizer: Any,
    chats: Sequence[Sequence[dict[str, Any]]],
    *,
    template: str | None = None,
    is_asking: bool,
) -> list[str]:
    """Writes chats as `tokenizer.apply_chat_template` does.

    Args:
      tokenizer: tokenizer of the target.
      chats: messages {"role", "content"} of each.
      template: text of the template; None takes the tokenizer's own.
      is_asking: end with what asks for an answer.

    Raises:
      RenderError: the template is missing or raises an error, or a text takes too much.
    """
    try:
        chosen = tokenizer.get_chat_template(template)
        messages = json.dumps([[_without_none(message) for message in chat] for chat in chats])
    except (ValueError, TypeError, RecursionError) as error:
        raise RenderError(one_line(error)) from error
    settings = {"chat_template": chosen, "add_generation_prompt": is_asking}
    limits = {
        "seconds": SECONDS,
        "bytes": MEMORY_BYTES,
        "characters": CHARACTERS + GROWTH * len(messages),
    }
    about = json.dumps({"template": tokenizer.special_tokens_map | settings, "limits": limits})
    return _WORKER.render(f'{about[:-1]}, "chats": {messages}}}\n'.encode(), len(chats))


class _Worker:
    """The process that renders; one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, request: bytes, num_chats: int) -> list[str]:
        """Sends a request and reads its answers; after an end the next one starts a new process."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self._process = _start()
            try:
                lines = _exchange(self._process, request, num_chats)
            except BaseException:  # Ctrl-C: the next request must not get these answers
                self.stop()
                raise
            if len(lines) < num_chats:
                code = self._process.wait()
                late = f"it takes more than {SECONDS:g} s of processor time"
                raise RenderError(
                    late if code == -signal.SIGPROF else f"its process ended with code {code}"
                )
        answers = [json.loads(line) for line in lines]
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise RenderError(one_line(errors[0]))
        return [answer["text"] for answer in answers]

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("render_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "OPENBLAS_NUM_THREADS": "1"},
        process_group=0,  # Ctrl-C is for the program, which decides what to do
    )


def _exchange(process: subprocess.Popen[bytes], request: bytes, num_lines: int) -> list[bytes]:
    """Whole lines that come back; fewer than asked for where the process ends."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except BrokenPipeError:
        return []
    lines = (process.stdout.readline() for _ in range(num_lines))
    return [line for line in lines if line.endswith(b"\n")]


def _without_none(message: dict[str, Any]) -> dict[str, Any]:
    """Leaves out keys without a value, as transformers does."""
    return {key: value for key, value in message.items() if value is not None}


_WORKER = _Worker()
atexit.register(_WORKER.stop)
