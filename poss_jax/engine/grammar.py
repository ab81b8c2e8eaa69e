"""Grammars: what an answer must match, and the tokens that may follow at every node of a tree.

    Grammar ─► GrammarCompiler (a target's) ─► Guide (a text's state) ─► masks, a bit per token

`llguidance` reads schemas and grammars and matches tokens byte by byte. It needs about 30 us per
node, so the host walks the drafted tree between drafting and verifying (`guided.py`).
"""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from poss_jax.config.reading import UserError, one_line
from poss_jax.data.tokenizer import errors_of_tokenizer

# As `json.dumps` writes it. With free white space a text need not end, and little is certain.
JSON_LAYOUT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
# Bounds of a grammar's memory (about 2 kB per state) and of the time to compile it (1 s).
_LIMITS = {"max_lexer_states": 20_000, "max_grammar_size": 100_000, "verbose_errors": False}
_MOST_CHARACTERS = 2**16
_NUM_KEPT = 16  # compiled grammars
_STACK_BYTES = 2**29  # the deepest grammar of this size takes a tenth; a default stack overflows


@dataclass(frozen=True)
class Grammar:
    """What an answer must match from its first character to its last.

    Attributes:
      source: the grammar as `llguidance` writes it.
      name: where it comes from, for messages.
    """

    source: str
    name: str = "grammar"

    @classmethod
    def json_schema(cls, schema: dict[str, Any], name: str = "json_schema") -> "Grammar":
        """JSON of a schema, in one line; the schema's `x-guidance` may ask for another layout."""
        with _errors_of(name):
            source = _llguidance().LLMatcher.grammar_from_json_schema(schema, defaults=JSON_LAYOUT)
        return cls(source, name)

    @classmethod
    def regex(cls, pattern: str, name: str = "regex") -> "Grammar":
        """A regular expression of Rust's kind, without look-around."""
        return cls(_llguidance().LLMatcher.grammar_from_regex(pattern), name)

    @classmethod
    def choice(cls, texts: Sequence[str], name: str = "choice") -> "Grammar":
        """One of some texts."""
        if not all(texts) or not texts:
            raise UserError(f"{name}: want at least one text, and none empty")
        quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return cls.lark(f"start: TEXT\nTEXT: {quoted}", name)

    @classmethod
    def lark(cls, text: str, name: str = "grammar") -> "Grammar":
        """A grammar of Lark, or of llama.cpp's GBNF."""
        _check_size(text, name)
        with _errors_of(name):
            return cls(_llguidance().grammar_from("grammar", text), name)


class GrammarCompiler:
    """Compiles grammars for the tokens of one target."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        """Reads a tokenizer, which takes up to a second.

        Args:
          tokenizer: the target's.
          vocab_size: V.
          stop_ids: tokens that end a text once it matches.

        Raises:
          UserError: no tokenizer, one that `llguidance` cannot read, or nothing ends a text.
        """
        if tokenizer is None or not stop_ids:
            raise UserError("grammar: want a target with a tokenizer and an EOS token")
        _llguidance()
        from llguidance.hf import from_tokenizer

        with errors_of_tokenizer("grammar: want a fast tokenizer, got", "use another target"):
            self._tokens = from_tokenizer(tokenizer, vocab_size, list(stop_ids))
        self._stop_ids = frozenset(stop_ids)
        self._compile = lru_cache(_NUM_KEPT)(self._compile_one)
        default = threading.stack_size(_STACK_BYTES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="poss-grammar-compiler")
        self._thread.submit(int).result()
        threading.stack_size(default)

    def compile(self, grammar: Grammar, continued: Sequence[int] = ()) -> "Guide":
        """Compiles a grammar, within limits on its size and the time; one at a time.

        Args:
          grammar: what an answer must match.
          continued: tokens that the answer has already.

        Raises:
          UserError: the grammar has a mistake or is too large, or the tokens do not match.
        """
        _check_size(grammar.source, grammar.name)
        guide = self._thread.submit(self._compile, grammar).result().copy()
        guide.advance(continued)
        return guide

    def _compile_one(self, grammar: Grammar) -> "Guide":
        library = _llguidance()
        limits = library.LLParserLimits(**_LIMITS)
        matcher = library.LLMatcher(self._tokens, grammar.source, log_level=0, limits=limits)
        guide = Guide(matcher, self._stop_ids, grammar.name)
        if not guide.is_broken:  # some mistakes are found only by the first mask
            guide.fill(np.zeros(-(-self._tokens.vocab_size // 32), np.uint32))
        guide.check()
        return guide


class Guide:
    """A grammar after the tokens of a text: knows which may follow."""

    def __init__(self, matcher: Any, stop_ids: frozenset[int], name: str) -> None:
        self._matcher, self._stop_ids, self._name = matcher, stop_ids, name

    def copy(self) -> "Guide":
        """The same state, for another text."""
        return Guide(self._matcher.deep_copy(), self._stop_ids, self._name)

    @property
    def is_broken(self) -> bool:
        """True after an error, for ever."""
        return self._matcher.is_error()

    def check(self) -> None:
        """Raises UserError after an error of the grammar."""
        if self.is_broken:
            message = self._matcher.get_error().replace("<non-verbose/>", "")
            raise UserError(f"{self._name}: {one_line(message)}")

    def advance(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text.

        Raises:
          UserError: the grammar does not allow one, or is too complex to tell.
        """
        for token in tokens:
            is_end = token in self._stop_ids
            if not (self._matcher.is_accepting() if is_end else self._matcher.consume_token(token)):
                self.check()
                raise UserError(f"{self._name}: want tokens that match, got token {token}")

    def fill(self, mask: np.ndarray) -> None:
        """Writes which tokens may follow: a mask [words] uint32, as `sampling.unpack` reads it."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def enter(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the masks allow, for a look at what may follow them."""
        self._matcher.consume_tokens(list(tokens))

    def leave(self, num_tokens: int) -> None:
        """Removes the last tokens."""
        self._matcher.rollback(num_tokens)

    def ends_with(self, token: int) -> bool:
        """Tells whether a token ends the text."""
        return token in self._stop_ids


def _check_size(text: str, name: str) -> None:
    if (got := len(text)) > _MOST_CHARACTERS:
        raise UserError(f"{name}: want at most {_MOST_CHARACTERS:,} characters, got {got:,}")


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(f"{name}: {one_line(error)}") from error


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UserError("grammar: want llguidance; pip install 'poss-jax[serve]'") from error
    return llguidance
