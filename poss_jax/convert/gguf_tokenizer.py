"""Turns the tokenizer of a GGUF file into Hugging Face's files.

Texts get the same tokens as in llama.cpp, except that Qwen's texts are normalised first, as its
own tokenizer does. `docs/checkpoints.md` says where `transformers` differs.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from poss_jax.config.numbers import Count
from poss_jax.config.reading import UserError, one_line, shorten
from poss_jax.convert.gguf_source import STOPS, GgufFile

# Types of tokens.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_SPECIALS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}  # where the file does not say, as llama.cpp

# Words of byte-level BPE, by the name of the pre-tokenizer. A text is cut by each pattern in turn.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_DIGITS = (r"\p{N}", *_GPT2)
_LLAMA3 = (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}",)
_QWEN2 = (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}",)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_TEKKEN = (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}{_REST_WITH_SLASH}",)
_GPT4O = (
    rf"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}{_REST_WITH_SLASH}",
)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0")
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "mellum", "a.x-4.0"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), _DIGITS),
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
# Unless the file says no, bos comes first; a word that is a token is not put together by merges.
_LLAMA3_LIKE = (*_LLAMA3_NAMES, "tekken")
_NORMALISED = ("qwen2", "deepseek-r1-qwen")


def write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json; refuses unknown kinds of tokenizers."""
    kind = gguf.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UserError(
            f"{gguf.path}: tokenizer: want gpt2 or llama, got {shorten(kind)}; models with another "
            "cannot be converted"
        )
    tokens = gguf.tokens
    usual = _SENTENCEPIECE_IDS if kind == "llama" else {}
    stored = {name: gguf.special_id(key, usual.get(name)) for name, key in _SPECIALS.items()}
    ids = {name: index for name, index in stored.items() if index is not None}
    if any(index not in range(len(tokens)) for index in ids.values()):
        raise gguf.unfit("tokenizer.ggml", f"special tokens below {len(tokens)}", ids)
    try:
        tokenizer = _byte_level(gguf) if kind == "gpt2" else _sentencepiece(gguf, ids)
        _add_tokens(tokenizer, gguf)
        _add_ends(tokenizer, gguf, ids)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the Rust side raises plain Exception, and others if it panics
        raise UserError(
            f"{gguf.path}: its tokenizer is broken ({one_line(error)}); fetch the file again"
        ) from error
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.of_model("context_length", Count | None),
        **{f"{name}_token": tokens[index] for name, index in ids.items()},
    }
    if (template := gguf.metadata.get("tokenizer.chat_template")) is not None:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2))


# --------------------------------------------------------------------------------------------------
# The two kinds


def _byte_level(gguf: GgufFile) -> Tokenizer:
    name = gguf.metadata.get("tokenizer.ggml.pre")
    if name not in _PATTERNS:
        raise UserError(
            f"{gguf.path}: pre-tokenizer: want one of {', '.join(_PATTERNS)}, got {shorten(name)}; "
            "texts would be cut in other places than the model was trained with"
        )
    vocabulary = {token: index for index, token in enumerate(gguf.tokens)}
    merges = []
    for merge in gguf.read("tokenizer.ggml.merges", list[str]):
        first, _, second = merge[1:].partition(" ")  # the first character may be a space itself
        merges.append((merge[:1] + first, second))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _LLAMA3_LIKE))
    if name in _NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    words = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in _PATTERNS[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: GgufFile, ids: dict[str, int]) -> Tokenizer:
    tokens = gguf.tokens
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = gguf.read("tokenizer.ggml.scores", list[float], [0.0] * len(tokens))
    model = models.BPE(
        vocabulary,
        _derive_merges(vocabulary, scores),
        unk_token=tokens[ids["unk"]],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    normal: list[Any] = [normalizers.Replace(" ", "▁")]
    decoded: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.metadata.get("tokenizer.ggml.add_space_prefix", True):
        normal.insert(0, normalizers.Prepend("▁"))
        decoded.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normal)
    tokenizer.decoder = decoders.Sequence(decoded)
    return tokenizer


def _derive_merges(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Lists the pairs of pieces that make a piece, from the best piece to the worst."""
    lengths = {len(token) for token in vocabulary}  # keeps a long token from being cut everywhere
    pairs = [
        (scores[index], cut, token)
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if cut in lengths and len(token) - cut in lengths
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    pairs.sort(key=lambda pair: pair[:2], reverse=True)
    return [(token[:cut], token[cut:]) for _, cut, token in pairs]


# --------------------------------------------------------------------------------------------------
# Added tokens, and what is put around a text


def _add_tokens(tokenizer: Tokenizer, gguf: GgufFile) -> None:
    """Adds the tokens that are never cut; in Phi-3 they swallow the spaces behind them."""
    tokens = gguf.tokens
    is_phi3 = gguf.architecture == "phi3" and gguf.metadata["tokenizer.ggml.model"] == "llama"
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    kinds = gguf.read("tokenizer.ggml.token_type", list[int], [1] * len(tokens))
    for token, kind in zip(tokens, kinds, strict=True):
        is_stop = token in STOPS
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or is_stop:
            is_special = kind != _USER_DEFINED or is_stop
            swallows = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
            added[is_special].append(AddedToken(token, normalized=False, rstrip=swallows))
    tokenizer.add_special_tokens(added[True])
    tokenizer.add_tokens(added[False])


def _add_ends(tokenizer: Tokenizer, gguf: GgufFile, ids: dict[str, int]) -> None:
    """Puts bos before a text and eos after it, if the model wants that."""
    metadata = gguf.metadata
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    usual = is_sentencepiece or metadata.get("tokenizer.ggml.pre") in _LLAMA3_LIKE
    adds = {"bos": metadata.get("tokenizer.ggml.add_bos_token", usual)}
    adds |= {"eos": metadata.get("tokenizer.ggml.add_eos_token", False)}
    tokens = gguf.tokens
    specials = [
        {"id": name, "ids": [ids[name]], "tokens": [tokens[ids[name]]]}
        for name in adds
        if adds[name] and name in ids
    ]
    used = {"$A", *(special["id"] for special in specials)}
    if specials:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[piece for piece in ("bos", "$A", "eos") if piece in used],
            special_tokens=specials,
        )
