"""Grammars: what an answer must match, compiled for the tokens of a target.

    prompt = Grammar.choice(["yes", "no"]).constrain(engine.prepare("Is it?", 8), engine)

    Grammar ─► GrammarCompiler (a target's) ─► GrammarState (an answer's) ─► masks, a bit per token

`llguidance` reads schemas and grammars and matches tokens byte by byte. It needs about 30 us per
node, so the host walks the drafted tree between drafting and verifying (`batch.py`): deeper nodes
that a grammar forbids are cut off, and tokens that are certain take their places, such as the name
of the next field (`guides.py`).
"""

import atexit
import itertools
import json
import re
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from queue import PriorityQueue
from typing import Any

from tokenizers import Tokenizer

from poss_jax.config.paths import child_python
from poss_jax.config.reading import UserError, lone_surrogates, one_line
from poss_jax.data.tokenizer import errors_of_tokenizer
from poss_jax.engine import grammar_trials
from poss_jax.engine.grammar_trials import MOST_BYTES, STACK_BYTES, Tokens, Trial, compile_matcher
from poss_jax.engine.guides import GrammarState, explain
from poss_jax.engine.models import Models
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.text import byte_letters

# As `json.dumps` writes it. With free white space a text need not end, and little is certain.
JSON_LAYOUT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_MOST_CHARACTERS = 2**16
_CPU_SECONDS = (0.1, 1.0)  # of a grammar's first trial, and of its last; most take a hundredth
_MOST_KEPT_BYTES = 2**27  # of compiled grammars
_LEAST_BYTES = 2**14  # that one counts for
_TOO_LARGE = {
    "time": f"want a grammar that compiles within {_CPU_SECONDS[-1]:.0f} s, this one takes longer",
    "memory": f"want a grammar that takes at most {MOST_BYTES >> 20} MiB, this one takes more",
}
_SPECIAL = b"\xff"  # begins what llguidance calls a token that no text spells
_LEAST_FORCED = 256  # characters
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True)
class Grammar:
    """A description that an answer must match from its first character to its last."""

    source: str
    name: str = "grammar"  # where it comes from, for messages
    kind: str = "llguidance"  # how it is written (see `grammar_trials.read_source`)

    @classmethod
    def json_schema(cls, schema: dict[str, Any], name: str = "json_schema") -> "Grammar":
        """JSON of a schema, in one line; the schema's `x-guidance` may ask for another layout."""
        text = json.dumps(schema)  # so that numbers may have more than 64 bits
        try:
            source = _llguidance().LLMatcher.grammar_from_json_schema(text, defaults=JSON_LAYOUT)
        except ValueError as error:
            raise UserError(f"{name}: {one_line(error)}") from error
        return cls(source, name)

    @classmethod
    def regex(cls, pattern: str, name: str = "regex") -> "Grammar":
        """A regular expression of Rust's kind, without look-around."""
        _check_letters(pattern, name)
        return cls(_llguidance().LLMatcher.grammar_from_regex(pattern), name)

    @classmethod
    def choice(cls, texts: Sequence[str], name: str = "choice") -> "Grammar":
        """One of some texts."""
        if not all(texts) or not texts:
            raise UserError(f"{name}: want at least one text, and none empty")
        quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return cls.lark(f"start: TEXT\nTEXT: {quoted}".replace("\x7f", r"\u007f"), name)

    @classmethod
    def lark(cls, text: str, name: str = "grammar") -> "Grammar":
        """A grammar of Lark, or of llama.cpp's GBNF."""
        _check_letters(text, name)
        if control := _CONTROL.search(text):
            got, escape = ascii(control[0]), f"\\u{ord(control[0]):04x}"
            raise UserError(f"{name}: want no control character, got {got}; write {escape}")
        return cls(text, name, kind="grammar")

    def constrain(self, prompt: PreparedPrompt, engine: Models) -> PreparedPrompt:
        """Makes an answer match this grammar; one cut by its limit is only a beginning.

        Raises:
          UserError: the grammar cannot be served, or the continued tokens do not match.
        """
        vocab_size = engine.target_config.vocab_size
        guide = compiler_of(engine.tokenizer, vocab_size, engine.stop_ids).submit(self).result()
        guide.advance(prompt.ids[len(prompt.ids) - prompt.num_continued :])
        return prompt._replace(guide=guide)


class GrammarCompiler:
    """Compiles grammars for the tokens of one target, one at a time.

    Each is tried in another process first (`grammar_trials`). The first trial is short; those that
    need a longer one wait until no other grammar waits for its first.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        """Reads a tokenizer, which takes up to a second.

        Args:
          stop_ids: tokens that end an answer once it matches.

        Raises:
          UserError: no tokenizer, one that cannot be read, or nothing ends an answer.
        """
        if tokenizer is None or not stop_ids:
            raise UserError("grammar: want a target with a tokenizer and an EOS token")
        _llguidance()
        with errors_of_tokenizer("grammar: want a fast tokenizer, got", "use another target"):
            self._tokens = TokenizerTokens(tokenizer, vocab_size, stop_ids)
        self._stop_ids = frozenset(stop_ids)
        self._trials = _Trials(self._tokens.tokens, stop_ids)
        self._kept = OrderedDict[Grammar, tuple[GrammarState | str, int]]()  # and its bytes
        self._queue: PriorityQueue[_Order] = PriorityQueue()
        self._count = itertools.count()
        default = threading.stack_size(STACK_BYTES)
        threading.Thread(target=self._work, name="poss-grammar-compiler", daemon=True).start()
        threading.stack_size(default)

    def submit(self, grammar: Grammar) -> "Future[GrammarState]":
        """Puts a grammar into the queue; one that is cancelled is dropped.

        Raises:
          UserError: from the future: the grammar has a mistake, or is too large.
        """
        future: Future[GrammarState] = Future()
        self._queue.put((0, next(self._count), grammar, future))
        return future

    def _work(self) -> None:
        while True:
            trial, _, grammar, future = self._queue.get()
            if future.cancelled():
                continue
            try:
                guide = self._compile(grammar, trial)
            except BaseException as error:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
                continue
            if guide is None:
                self._queue.put((trial + 1, next(self._count), grammar, future))
            elif future.set_running_or_notify_cancel():
                future.set_result(guide.copy())

    def _compile(self, grammar: Grammar, trial: int) -> GrammarState | None:
        """Compiles a grammar; None if it needs a longer trial."""
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
        else:
            if (size := len(grammar.source)) > _MOST_CHARACTERS:
                limit = f"want at most {_MOST_CHARACTERS:,} characters, got {size:,}"
                raise UserError(f"{grammar.name}: {limit}")
            tried = self._trials.run(grammar, _CPU_SECONDS[trial])
            if tried.exceeded == "time" and trial + 1 < len(_CPU_SECONDS):
                return None
            num_bytes = max(tried.num_bytes, _LEAST_BYTES) + len(grammar.source)
            self._kept[grammar] = self._read(grammar, tried), num_bytes
            sizes = [size for _, size in self._kept.values()]
            while len(sizes) > 1 and sum(sizes) > _MOST_KEPT_BYTES:
                self._kept.popitem(last=False)  # the one that was not asked for longest
                del sizes[0]
        guide, _ = self._kept[grammar]
        if isinstance(guide, str):
            raise UserError(guide)
        return guide

    def _read(self, grammar: Grammar, tried: Trial) -> GrammarState | str:
        """What a trial found; a message if the grammar cannot be served."""
        if tried.exceeded:
            return (
                f"{grammar.name}: {_TOO_LARGE[tried.exceeded]}; simplify it, or lower its numbers"
            )
        if tried.error:
            return f"{grammar.name}: {explain(tried.error)}"
        matcher = compile_matcher(self._tokens, tried.source)
        forced = matcher.compute_ff_tokens()
        if matcher.validate_tokens(forced[:1]) < len(forced[:1]):
            return f"{grammar.name}: {explain('NoExtension')}"
        if matcher.is_error():
            return f"{grammar.name}: {explain(matcher.get_error())}"
        return GrammarState(matcher, self._stop_ids, grammar.name)


_Order = tuple[int, int, Grammar, "Future[GrammarState]"]
"""Number of the trial, order of arrival, grammar, and who waits for it."""


class _Trials:
    """The process that tries grammars; it starts with the first one."""

    def __init__(self, tokens: Sequence[bytes], stop_ids: Sequence[int]) -> None:
        self._about = json.dumps([[token.hex() for token in tokens], list(stop_ids)])
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    def run(self, grammar: Grammar, seconds: float) -> Trial:
        """Tries a grammar for some CPU seconds; once more if the process is killed meanwhile."""
        for _ in range(2):
            with suppress(OSError):
                process = self._process or self._start()
                self._send(process, json.dumps([grammar.kind, grammar.source, seconds]))
                if line := process.stdout.readline() if process.stdout else "":
                    return Trial(*json.loads(line))
            self.close()
        message = "the process that tries grammars was killed twice; try again"
        raise UserError(f"{grammar.name}: {message}")

    def _start(self) -> "subprocess.Popen[str]":
        command, environment = child_python(grammar_trials.__file__)
        self._process = process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        self._send(process, self._about)
        return process

    def _send(self, process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def compiler_of(tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> GrammarCompiler:
    """The compiler of a target; a tokenizer that cannot be read is read once.

    Raises:
      UserError: what `GrammarCompiler` refuses.
    """
    with _COMPILERS:
        compiler = _find_compiler(tokenizer, vocab_size, tuple(stop_ids))
    if isinstance(compiler, str):
        raise UserError(compiler)
    return compiler


_COMPILERS = threading.Lock()


@lru_cache(maxsize=4)
def _find_compiler(
    tokenizer: Any, vocab_size: int, stop_ids: tuple[int, ...]
) -> GrammarCompiler | str:
    try:
        return GrammarCompiler(tokenizer, vocab_size, stop_ids)
    except UserError as error:
        return str(error)


def _check_letters(text: str, name: str) -> None:
    if surrogates := lone_surrogates(text):
        raise UserError(f"{name}: want text, got {min(surrogates)!a}")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UserError("grammar: want llguidance; pip install 'poss-jax[serve]'") from error
    return llguidance


class TokenizerTokens(Tokens):
    """The tokens of a tokenizer of transformers, which splits texts as the model reads them.

    llguidance's own reader takes every added token `<...>` for a special one, which no text spells.
    In many models `<think>` and `<tool_call>` are text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        """Reads a fast tokenizer of transformers.

        Args:
          vocab_size: number of the target's tokens; those that the tokenizer lacks have no text.
          stop_ids: tokens that end a text.

        Raises:
          ValueError: its decoder is of no known kind.
        """
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        special = {token["id"] for token in spec["added_tokens"] if token["special"]} | {*stop_ids}
        read_name = _name_reader(spec["decoder"])
        tokens = [_SPECIAL + b"<[%d]>" % token for token in range(vocab_size)]
        for name, token in tokenizer.get_vocab().items():
            if token < vocab_size:
                is_special = token in special
                tokens[token] = _SPECIAL + name.encode() if is_special else read_name(name)
        super().__init__(tokens, stop_ids)
        self._encoder = Tokenizer.from_str(json.dumps(_without_prefix(spec)))
        self._encoder.encode_special_tokens = True  # a special token's name is text
        self._most_forced = max(_LEAST_FORCED, 4 * max(map(len, tokens)))

    def __call__(self, text: str) -> list[int]:
        """Splits the beginning of a text that must follow; only its first token is forced."""
        text = text[: self._most_forced]
        ids = self._encoder.encode(text, add_special_tokens=False).ids
        is_same = b"".join(map(self.tokens.__getitem__, ids)) == text.encode()
        return ids if is_same else super().__call__(text)  # it folds letters, or lacks some


def _name_reader(decoder: Any) -> Callable[[str], bytes]:
    """A function from a token's name to its bytes, as the decoder reads it."""
    kinds = {step["type"]: step for step in _steps(decoder, "decoders")}
    if "ByteLevel" in kinds:
        letters = byte_letters()

        def spell(name: str) -> bytes:
            is_spelled = letters.keys() >= set(name)
            return bytes(map(letters.__getitem__, name)) if is_spelled else name.encode()

        return spell
    if not kinds.keys() & {"ByteFallback", "Replace", "Metaspace"}:
        raise ValueError(f"a decoder of type {', '.join(kinds) or None}")
    space = kinds.get("Metaspace", {}).get("replacement")
    replace = kinds.get("Replace", {})
    if replace.get("content") == " ":
        space = replace["pattern"].get("String")
    has_bytes = "ByteFallback" in kinds
    bytes_of = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256) if has_bytes}
    return lambda name: bytes_of.get(name) or (name.replace(space, " ") if space else name).encode()


def _without_prefix(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer without the space that some put before a text."""
    normalizers = [
        step for step in _steps(spec["normalizer"], "normalizers") if step["type"] != "Prepend"
    ]
    splitters = [
        step | {"prepend_scheme": "never"} if step["type"] == "Metaspace" else step
        for step in _steps(spec["pre_tokenizer"], "pretokenizers")
    ]
    return spec | {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters},
        "padding": None,
        "truncation": None,
    }


def _steps(component: Any, name: str) -> list[Any]:
    """The steps of a component, which may be a sequence of others; none of None."""
    if component is None:
        return []
    if name not in component:
        return [component]
    return list(itertools.chain(*(_steps(step, name) for step in component[name])))
