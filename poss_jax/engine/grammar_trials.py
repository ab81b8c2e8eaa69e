"""A process that tries grammars, since nothing else bounds what llguidance takes to compile them.

    python -P poss_jax/engine/grammar_trials.py < tokens and grammars > trials

Forty bytes of JSON schema can take minutes and all memory. So a grammar is compiled here first, in
a fork with limits, and in the server only if that succeeded. This program is started by its path
and imports nothing of ours.

Lines of JSON: the tokens, in hexadecimal, and the ids that end a text; then [kind, grammar,
seconds] per trial, each answered by [what it exceeded, its error, its memory in bytes, the grammar
as llguidance writes it]. It ends without an answer once a trial is killed from outside.
"""

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

MOST_BYTES = 2**26
"""Most memory that a compiled grammar may take."""

# Bounds of a grammar's size, its memory while it is used (about 2 kB per state), and a mask's time.
LIMITS = {"max_lexer_states": 20_000, "max_grammar_size": 100_000, "verbose_errors": False}
STACK_BYTES = 2**29
"""The deepest grammar of 64 kB takes a tenth of it; a default stack overflows."""

_CLOCK_SECONDS = 60  # by the clock, for a trial that computes nothing


class Trial(NamedTuple):
    """What became of a grammar."""

    exceeded: str  # the limit that it exceeded, "time" or "memory"; "": none
    error: str = ""  # what is wrong with it; "": nothing
    num_bytes: int = 0  # memory that it takes
    source: str = ""  # the grammar as llguidance writes it


class Tokens:
    """The tokens of a target, in the form of `llguidance.TokenizerWrapper`."""

    is_tokenizer_wrapper, bos_token_id, special_token_ids = True, None, ()

    def __init__(self, tokens: Sequence[bytes], stop_ids: Sequence[int]) -> None:
        import llguidance

        self.tokens, self.eos_token_id = tokens, stop_ids[0]
        self.llguidance = llguidance.LLTokenizer(self, eos_token=list(stop_ids))  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """Splits a text that must follow."""
        return self.llguidance.greedy_tokenize(text)


def read_source(kind: str, text: str) -> str:
    """A grammar as llguidance writes it.

    Args:
      kind: "grammar" for Lark or GBNF; anything else: it is written so already.

    Raises:
      ValueError: it has a mistake.
    """
    import llguidance

    return llguidance.grammar_from("grammar", text) if kind == "grammar" else text


def compile_matcher(tokens: Tokens, source: str) -> Any:
    """Compiles a grammar into an `LLMatcher`, which has the mistakes that its first mask finds.

    Wants a stack of `STACK_BYTES`.
    """
    import llguidance

    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokens.llguidance, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _try(tokens: Tokens, kind: str, text: str, seconds: float) -> None:
    """Compiles a grammar within limits, writes what became of it, and ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(_CLOCK_SECONDS)

    def work() -> None:
        try:
            virtual, baseline = _memory()
            if virtual:  # as much again for what is freed, and for the allocator
                hard = resource.getrlimit(resource.RLIMIT_AS)[1]
                resource.setrlimit(resource.RLIMIT_AS, (virtual + 3 * MOST_BYTES, hard))
            try:
                source = read_source(kind, text)
                error = compile_matcher(tokens, source).get_error()
            except (ValueError, RecursionError) as caught:
                source, error = "", str(caught)
            num_bytes = max(_memory()[1] - baseline, 0)
            _write(Trial("memory" if num_bytes > MOST_BYTES else "", error, num_bytes, source))
            os._exit(0)
        finally:
            os._exit(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _memory() -> tuple[int, int]:
    """Bytes of this process, virtual and resident; 0 where the system does not tell."""
    if not os.path.exists("/proc/self/statm"):
        return 0, 0
    with open("/proc/self/statm") as file:
        virtual, resident, *_ = (
            int(pages) * resource.getpagesize() for pages in file.read().split()
        )
    return virtual, resident


def _write(trial: Trial) -> None:
    sys.stdout.write(json.dumps(trial) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Tries grammars until standard input ends or one is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's to handle
    threading.stack_size(STACK_BYTES)
    names, stop_ids = json.loads(sys.stdin.readline())
    tokens = Tokens(list(map(bytes.fromhex, names)), stop_ids)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _try(tokens, *json.loads(line))
        _, status = os.waitpid(child, 0)
        killer = os.WTERMSIG(status)  # 0: none
        if killer == signal.SIGKILL:  # none of our limits sends it
            return
        if status:
            is_late = killer in (signal.SIGPROF, signal.SIGALRM)
            _write(Trial("time" if is_late else "memory"))


if __name__ == "__main__":
    main()
