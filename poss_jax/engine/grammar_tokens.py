"""The tokens of a target as llguidance takes them: their bytes, and how a text is tokenised.

llguidance's own reader takes every added token `<...>` for a special one, which no text spells. In
many models `<think>` and `<tool_call>` are text.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from poss_jax.engine.grammar_trials import Tokens
from poss_jax.engine.text import byte_letters

_SPECIAL = b"\xff"  # begins what llguidance calls a token that no text spells
_LEAST_FORCED = 256  # characters


class TokenizerTokens(Tokens):
    """The tokens of a tokenizer of transformers, which splits texts as the model reads them."""

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
