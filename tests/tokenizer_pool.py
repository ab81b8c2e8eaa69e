"""Small tokenizers of the kinds that public models have; they differ in what `<think>` is.

added     Qwen's: tags are added tokens, and not special
special   tags are special tokens
fallback  Llama 2's: words, bytes for the rest, a space before a text; added tags
letters   no bytes at all, so many letters cannot be written; added tags
plain     tags are spelled
folding   text is normalised before it is split; added tags
"""

import json
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

POOL = ("added", "special", "fallback", "letters", "plain", "folding")
BOS, EOS = "<s>", "<|im_end|>"
SPECIAL = (BOS, EOS, "<|im_start|>", "<|endoftext|>")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
VOCAB_SIZE = 512
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} <tool_call> {% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "what is the weather in Rome? let me look: it is sunny, 21 degrees, and so on and on",
    '{"name": "weather", "arguments": {"city": "Rome"}} tool_call think hello 0123456789',
] * 40
_LETTERS = sorted({chr(code) for code in range(33, 127)} | {"▁", "\n", "é"})


@lru_cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of `POOL` with a chat template that knows tools; the target has more tokens."""
    has_bytes = kind not in ("fallback", "letters")
    model = Tokenizer(models.BPE(byte_fallback=kind == "fallback"))
    if has_bytes:
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
    else:
        model.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        fallback = [decoders.ByteFallback()] * (kind == "fallback")
        model.decoder = decoders.Sequence([*steps[:1], *fallback, *steps[1:]])
    if kind == "folding":
        model.normalizer = normalizers.NFKC()
    bytes_of_fallback = [f"<0x{byte:02X}>" for byte in range(256)] if kind == "fallback" else []
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=[*SPECIAL, *bytes_of_fallback],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if has_bytes else _LETTERS,
        show_progress=False,
    )
    model.train_from_iterator(_CORPUS, trainer)
    if kind == "fallback":  # the trainer wants them special
        model = _unmark(model, bytes_of_fallback)
    tags = [AddedToken(tag, normalized=False, special=kind == "special") for tag in TAGS]
    if kind != "plain":
        model.add_tokens(tags)
    made = PreTrainedTokenizerFast(tokenizer_object=model, bos_token=BOS, eos_token=EOS)
    made.chat_template = TEMPLATE
    return made


def _unmark(model: Tokenizer, names: list[str]) -> Tokenizer:
    """The same tokenizer, in which some special tokens are ordinary ones."""
    spec = json.loads(model.to_str())
    spec["added_tokens"] = [one for one in spec["added_tokens"] if one["content"] not in names]
    return Tokenizer.from_str(json.dumps(spec))


def ids_of(kind: str, names: Sequence[str]) -> list[int]:
    """Tokens of these names, as far as there are any."""
    vocabulary = tokenizer_of(kind).get_vocab()
    return [vocabulary[name] for name in names if name in vocabulary]


def spell(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Tokens of a text that does not begin an answer."""
    anchor = tokenizer.encode("x", add_special_tokens=False)
    return tokenizer.encode("x" + text, add_special_tokens=False)[len(anchor) :]
