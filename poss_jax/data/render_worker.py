"""Renders chats for `rendering.py`: a program that answers lines of JSON with lines of JSON.

A template comes with a model, and Jinja's sandbox only keeps it from files and Python. So this
process's memory is limited, and a kernel timer ends it if a text takes too long, even inside a
single operation on long strings or numbers.
"""

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template


def main() -> None:
    """Answers every request line with a line for each of its steps."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may have changed it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limits, chat, before = request["limits"], request["chat"], ""
        _limit_memory(limits["bytes"])
        for end, is_asking in request["steps"]:
            template = request["template"] | {"add_generation_prompt": is_asking}
            signal.setitimer(signal.ITIMER_PROF, limits["seconds"])  # the signal ends the process
            text, error = _render(chat[:end], template, limits["characters"])
            answer = json.dumps({"error": error} if error else _part(before, text))
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.write(answer + "\n")
            before = text
        sys.stdout.flush()


def _part(before: str, text: str) -> dict[str, Any]:
    """Compares a text with the one before (see `rendering.Part`)."""
    least, most = 0, min(len(before), len(text))
    while least < most:
        middle = (least + most + 1) // 2
        is_same = before[least:middle] == text[least:middle]
        least, most = (middle, most) if is_same else (least, middle - 1)
    return {"shared": least, "text": text[least:]}


def _render(chat: Any, template: dict[str, Any], most_characters: int) -> tuple[str, str]:
    """Renders a chat; returns the text, or "" and the reason."""
    try:
        (text,), _ = render_jinja_template(conversations=[chat], **template)
        if len(text) > most_characters:
            return "", f"want at most {most_characters:,} characters, got {len(text):,}"
        text.encode()
        return text, ""
    except UnicodeEncodeError as error:
        return "", f"want text as UTF-8, got half a character ({error.reason})"
    except TemplateError as error:
        return "", str(error)[:1000] or type(error).__name__
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"[:1000]


def _limit_memory(num_bytes: int) -> None:
    """Limits, once, how much memory the process may add to what it has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm")
    if soft == hard == resource.RLIM_INFINITY and pages.exists():
        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, hard))


if __name__ == "__main__":
    main()
