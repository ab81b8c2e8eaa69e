"""Grammars: what an answer must match, and the tokens that may follow at every node of a tree.

    Grammar ─► GrammarCompiler (a target's) ─► Guide (a text's state) ─► masks, a bit per token

`llguidance` reads schemas and grammars and matches tokens byte by byte. It needs about 30 us per
node, so the host walks the drafted tree between drafting and verifying (`live.py`): deeper nodes
that a grammar forbids are cut off, and tokens that are certain take their places, such as the name
of the next field.
"""

import json
import math
import threading
import time
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

    def compile(
        self,
        tokenizer: Any,
        vocab_size: int,
        stop_ids: Sequence[int],
        continued: Sequence[int] = (),
    ) -> "Guide":
        """Compiles it for the tokens of a target (see `GrammarCompiler`)."""
        compiler = _compiler_of(tokenizer, vocab_size, tuple(stop_ids))
        return compiler.compile(self, continued)


class GrammarCompiler:
    """Compiles grammars for the tokens of one target."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        """Reads a tokenizer, which takes up to a second.

        Args:
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


@lru_cache(maxsize=4)
def _compiler_of(tokenizer: Any, vocab_size: int, stop_ids: tuple[int, ...]) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size, stop_ids)


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

    def mend(self, *tree: np.ndarray, depth: int, seconds: float) -> None:
        """Fills the masks of a tree, and replaces its forbidden nodes (see `Walk`)."""
        Walk(self, *tree).mend(depth=depth, seconds=seconds)

    def enter(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the masks allow, for a look at what may follow them."""
        self._matcher.consume_tokens(list(tokens))

    def leave(self, num_tokens: int) -> None:
        """Removes the last tokens."""
        self._matcher.rollback(num_tokens)

    def ends_with(self, token: int) -> bool:
        """Tells whether a token ends the text."""
        return token in self._stop_ids


class Walk:
    """A grammar's walk over one tree."""

    def __init__(
        self, guide: Guide, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray
    ) -> None:
        """Begins at the root.

        Args:
          guide: the grammar there; stays as it is.
          tokens: token of each node [M]; changed by `mend`.
          parents: node that each one continues [M], as in `Tree`; changed.
          masks: which tokens may follow each node [M words], ones at first; filled.
        """
        self._guide, self._here = guide, guide.copy()
        self._tokens, self._parents, self._masks = tokens, parents, masks
        self._leaves: dict[int, list[int]] = {}  # reached, without reached children: their paths
        self._free = set(range(1, len(tokens)))
        self._until = math.inf

    def mend(self, *, depth: int, seconds: float = math.inf) -> None:
        """Fills the masks, and replaces forbidden nodes by certain ones.

        A forbidden node becomes its own parent, so that no path reaches it; so do those for which
        there is no time. A token is certain if it is the only one allowed.

        Args:
          depth: longest path the tree may have.
          seconds: time there is.
        """
        self._until = time.monotonic() + seconds
        children: list[list[int]] = [[] for _ in self._tokens]
        for node, parent in enumerate(self._parents[1:].tolist(), start=1):
            children[parent].append(node)
        self._visit(0, [], children)
        free = sorted(self._free)
        self._parents[free] = free
        for leaf, path in self._leaves.items():
            self._append_certain(leaf, path, free, depth)

    def _visit(self, node: int, path: list[int], children: list[list[int]]) -> None:
        """Fills the masks of a node and of all that may follow it."""
        mask = self._masks[node]
        self._here.fill(mask)
        tokens = {child: int(self._tokens[child]) for child in children[node]}
        allowed = {child: token for child, token in tokens.items() if _has(mask, token)}
        if not allowed:
            self._leaves[node] = path
        for child, token in allowed.items():
            if time.monotonic() > self._until:
                return
            self._free.remove(child)
            if not self._guide.ends_with(token):
                self._here.enter([token])
                self._visit(child, [*path, token], children)
                self._return_to(path)

    def _append_certain(self, node: int, path: list[int], free: list[int], depth: int) -> None:
        """Appends certain tokens to a leaf, as long as there are places."""
        self._here = self._guide.copy()
        self._here.enter(path)
        for _ in range(len(path), depth):
            token = _only_token(self._masks[node])
            if not free or token is None or time.monotonic() > self._until:
                return
            child = free.pop(0)
            self._tokens[child], self._parents[child] = token, node
            if self._guide.ends_with(token):
                return
            self._here.enter([token])
            self._here.fill(self._masks[child])
            node = child

    def _return_to(self, path: list[int]) -> None:
        """Goes back one token; from an error, such as a limit, there is no way but a new walk."""
        if self._here.is_broken:
            self._here = self._guide.copy()
            self._here.enter(path)
        else:
            self._here.leave(1)


def _has(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


def _only_token(mask: np.ndarray) -> int | None:
    """The only token that a mask allows; None if there are others."""
    words = np.flatnonzero(mask)
    word = int(mask[words[0]]) if len(words) == 1 else 0
    return 32 * int(words[0]) + word.bit_length() - 1 if word.bit_count() == 1 else None


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
