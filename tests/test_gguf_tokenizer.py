"""Tokenizers from GGUF files: equal to the one that the vocabulary was taken from."""

import itertools
import json
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType
from gguf_files import varied_texts, write_out
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from poss_jax.config.reading import UserError
from poss_jax.convert.source import open_source
from poss_jax.data.tokenizer import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = varied_texts()
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"


def write(path: Path, *, architecture="llama", **metadata):
    """Writes a file of a tokenizer alone; keys as llama.cpp's, without `tokenizer.ggml.`."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        writer.add_key_value(name, value, GGUFValueType.get_type(value))
    writer.add_tensor("x", np.zeros(1, np.float32))
    return write_out(writer, path)


def read(path: Path, **metadata):
    return load_tokenizer(open_source(str(write(path, **metadata))).tokenizer_folder)


def assert_same(ours, theirs: Tokenizer) -> None:
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours(text, add_special_tokens=False).input_ids == ids, text
        want = theirs.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids) == want, text


# The pre-tokenizers as the models' own tokenizer.json has them.
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (
    ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{ENDINGS}?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"{ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = GPT4O.replace(f"{ENDINGS}?", "").replace("{1,3}", "")


def split(pattern):
    last = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(Regex(pattern), "isolated"), last])


GPT2 = ByteLevel(add_prefix_space=False)
DIGITS = Sequence([Digits(individual_digits=True), GPT2])
# Name -> how words are cut, whether they are tokens without merges, whether texts are normalised.
PRE_TOKENIZERS = {
    "gpt-2": (GPT2, False, False),
    "smollm": (DIGITS, False, False),
    "starcoder": (DIGITS, False, False),
    "llama-bpe": (split(LLAMA3), True, False),
    "dbrx": (split(LLAMA3), False, False),
    "qwen2": (split(QWEN2), False, True),
    "tekken": (split(TEKKEN), True, False),
    "gpt-4o": (split(GPT4O), False, False),
}
ADDED = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED}


def train(pre_tokenizer, *, whole_words=False, normalised=False) -> tuple[Tokenizer, dict]:
    """Trains a tokenizer, and gives what a GGUF file holds of it."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer, trained.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = sorted(ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([*TEXTS, *Path(__file__).read_text().splitlines()], trainer)
    state = json.loads(trained.to_str())["model"]
    vocabulary, merges = state["vocab"], [tuple(pair) for pair in state["merges"]]
    if whole_words:  # a word that merges do not make
        vocabulary.setdefault("ĠHello", len(vocabulary))
        merges = [pair for pair in merges if "".join(pair) != "ĠHello"]
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), *ADDED]
    types = [NORMAL] * len(vocabulary) + [*ADDED.values()]
    vocabulary |= {token: tokens.index(token) for token in ADDED}
    model = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_words))
    model.pre_tokenizer, model.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalised:
        model.normalizer = normalizers.NFC()
    model.add_special_tokens([AddedToken(token, normalized=False) for token in [*ADDED][:2]])
    model.add_tokens([AddedToken("<think>", normalized=False)])
    held = {"tokens": tokens, "token_type": types, "merges": [" ".join(pair) for pair in merges]}
    return model, {"model": "gpt2", "bos_token_id": len(tokens) - 3} | held


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_byte_level(tmp_path, name):
    pre_tokenizer, whole_words, normalised = PRE_TOKENIZERS[name]
    model, held = train(pre_tokenizer, whole_words=whole_words, normalised=normalised)
    assert_same(read(tmp_path / "model.gguf", pre=name, **held), model)


def test_the_pre_tokenizers_differ_on_these_texts():
    """Else the test above could not tell them apart."""
    cuts = [[pre.pre_tokenize_str(text) for text in TEXTS] for pre in (GPT2, DIGITS)]
    cuts += [[split(p).pre_tokenize_str(t) for t in TEXTS] for p in (LLAMA3, QWEN2, TEKKEN, GPT4O)]
    assert all(one != other for i, one in enumerate(cuts) for other in cuts[:i])


@pytest.mark.parametrize(
    ("pre", "flags", "ends"),
    [
        ("gpt-2", {}, (0, 0)),
        ("smollm", {"add_bos_token": True}, (1, 0)),
        ("llama-bpe", {}, (1, 0)),
        ("llama-bpe", {"add_bos_token": False}, (0, 0)),
        ("tekken", {"add_eos_token": True, "eos_token_id": 5}, (1, 1)),
        ("gpt-2", {"add_eos_token": True}, (0, 0)),  # no such token
    ],
)
def test_bos_and_eos(tmp_path, pre, flags, ends):
    _, held = train(PRE_TOKENIZERS[pre][0])
    ours = read(tmp_path / "model.gguf", pre=pre, **held, **flags)
    plain = ours("Hello", add_special_tokens=False).input_ids
    bos, eos = [held["bos_token_id"]] * ends[0], [5] * ends[1]
    assert ours("Hello").input_ids == [*bos, *plain, *eos]


def test_added_tokens_and_template(tmp_path):
    _, held = train(GPT2)
    first = len(held["tokens"]) - 3
    ours = read(
        tmp_path / "model.gguf",
        pre="gpt-2",
        **held,
        eos_token_id=first + 1,
        padding_token_id=first + 1,
        chat_template=TEMPLATE,
    )
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (*[*ADDED][:2], "<|im_end|>")
    assert ours.unk_token is None
    special = {index: token.special for index, token in ours.added_tokens_decoder.items()}
    assert special == {first: True, first + 1: True, first + 2: False}
    assert ours("a<think>b").input_ids[1] == first + 2
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == "<|im_start|>user: Hi"


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIALS = ["<unk>", "<s>", "</s>"]


def sentencepiece(architecture="llama", **more):
    """GGUF fields of a vocabulary like Llama 2's: earlier pieces score higher."""
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    # A piece that is the name of a token which ends turns would be one, as in llama.cpp.
    lines = [line.replace(" ", "▁") for line in TEXTS if "<|" not in line]
    trained.train_from_iterator(lines, trainer)
    vocabulary = trained.get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    long, short = [p for p in pieces if len(p) > 1], [p for p in pieces if len(p) == 1]
    scores = [0.0] * 259 + [-float(i) for i in range(len(long))] + [-1e9] * len(short)
    tokens = [*SPECIALS, *BYTES, *long, *short, "<|user|>", "<|endoftext|>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [CONTROL] * 2
    held = {"tokens": tokens, "scores": [*scores, 0.0, 0.0], "token_type": types}
    return {"architecture": architecture, "model": "llama"} | held | more


def merge_best(text: str, held) -> list[int]:
    """SentencePiece's BPE: joins the best pair of neighbours, the first of equals, while it can."""
    ids = {token: index for index, token in enumerate(held["tokens"])}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [a + b for a, b in itertools.pairwise(symbols)]
        places = [place for place, pair in enumerate(pairs) if pair in ids]
        if not places:
            break
        best = max(places, key=lambda place: (held["scores"][ids[pairs[place]]], -place))
        symbols[best : best + 2] = [pairs[best]]
    return [
        index
        for symbol in symbols
        for index in ([ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()])
    ]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece(tmp_path, has_prefix):
    held = sentencepiece(add_space_prefix=has_prefix)
    ours = read(tmp_path / "model.gguf", **held)
    for text in TEXTS:
        want = merge_best(f" {text}" if has_prefix else text, held) if text else []
        assert ours(text).input_ids == [1, *want], text
        assert ours.decode(want) == text


def test_special_tokens_of_sentencepiece(tmp_path):
    """As llama.cpp, text behind a special token has a space before it, too."""
    held = sentencepiece()
    ours = read(tmp_path / "model.gguf", **held)
    user = held["tokens"].index("<|user|>")
    want = [1, *merge_best(" a", held), user, *merge_best("  b", held)]
    assert ours("a<|user|> b").input_ids == want
    assert (ours.bos_token, ours.eos_token, ours.unk_token) == ("<s>", "</s>", "<unk>")


def test_special_tokens_of_phi_3_swallow_spaces(tmp_path):
    held = sentencepiece("phi3")
    ours = read(tmp_path / "model.gguf", **held)
    user, end = (held["tokens"].index(token) for token in ("<|user|>", "<|endoftext|>"))
    b = merge_best(" b", held)
    assert ours("<|user|>\n  b").input_ids == [1, user, *b]
    assert ours("<|endoftext|> b").input_ids == [1, end, *merge_best("  b", held)]


def test_a_long_token_is_cut_in_time_of_its_length(tmp_path):
    held = sentencepiece()
    changed = held | {"tokens": [*held["tokens"][:-1], "a" * 10**6]}
    begun = time.process_time()
    read(tmp_path / "model.gguf", **changed)
    assert time.process_time() - begun < 10  # minutes, if every cut is copied


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": ["no such"]}, "its tokenizer is broken"),
        ({"merges": [1, 2]}, "merges: want a valid string"),
        ({"tokens": [1.0]}, "tokens: want a valid string"),
        ({"token_type": [1]}, "tokenizer is broken"),
        ({"eos_token_id": 9999}, "want special tokens below"),
        ({"bos_token_id": "<s>"}, "bos_token_id: want a valid integer"),
        ({"eos_token_id": [2, 3]}, "eos_token_id: want a valid integer"),
    ],
)
def test_broken(tmp_path, changes, message):
    _, held = train(GPT2)
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path / "model.gguf", **({"pre": "gpt-2"} | held | changes))
    assert "\n" not in str(error.value)
