"""Renders chats for `rendering.py`: a program that answers lines of JSON with lines of JSON.

A template comes with a model, and Jinja's sandbox only keeps it from files and from Python. So the
memory of this process is limited, and a timer of the kernel ends it where a text takes too long,
also inside of a single operation on long strings or numbers.
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
    """Answers every request, a line, with a line for each of its chats."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the program does with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limits, chats = request["limits"], request["chats"]
        _limit_memory(limits["bytes"])
        for chat in chats:
            signal.setitimer(signal.ITIMER_PROF, limits["seconds"])  # its signal ends the process
            answer = json.dumps(_render(chat, request["template"], limits["characters"]))
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _render(chat: Any, template: dict[str, Any], most_characters: int) -> dict[str, str]:
    try:
        (text,), _ = render_jinja_template(conversations=[chat], **template)
        if len(text) > most_characters:
            return {"error": f"want at most {most_characters:,} characters, got {len(text):,}"}
        text.encode()
        return {"text": text}
    except UnicodeEncodeError as error:
        return {"error": f"want text as UTF-8, got half a character ({error.reason})"}
    except TemplateError as error:
        return {"error": str(error)[:1000]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def _limit_memory(num_bytes: int) -> None:
    """Limits what the process may take beyond what it has now, once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm")
    if soft == hard == resource.RLIM_INFINITY and pages.exists():
        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, hard))


if __name__ == "__main__":
    main()
