"""Tokens of chats, asked or trained: `apply_chat_template`'s, and nothing from messages."""

from copy import deepcopy
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from poss_jax.config.reading import UserError
from poss_jax.data.conversations import Chat, Tokens
from poss_jax.data.rows import encode_documents
from poss_jax.data.templates import ChatTemplate
from poss_jax.data.tokenizer import CHAT_TEMPLATE
from poss_jax.engine.prompts import encode_prompt

MARKS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
OTHERS = ("@0@", "@1@", "@2@", "@3@", "@4@")  # names that no text here spells out
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{{ m.tool_calls | string }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
CORPUS = [
    "def area(width, height):\n    return width * height\n\n\n  The answer is 42.\n\n",
    "### user\n\nx\n### assistant\n\ny It's so, isn't it? assistant user tool",
] * 50
KINDS = ("byte level", "sentencepiece", "space first", "stripping", "unigram", "folding")
PRINTABLE = [chr(code) for code in (10, *range(33, 127), 233, 128512)]
PIECES = ["\n", "\n\n", " ", "  ", "The", "answer", "42.", "é", "😀", "###", "user", "<", "'s"]


@lru_cache
def make_tokenizer(
    kind: str, marks: tuple[str, ...] = MARKS, template: str = CHATML, single: str = ""
) -> Any:
    """A tokenizer of a kind, whose special tokens and template have these marks.

    Args:
      kind: one of `KINDS`.
      marks: special tokens, which replace `MARKS`.
      template: chat template.
      single: what the post-processor writes of a text, such as "<s> $A".
    """
    unknown, bos, eos, *_ = marks
    model = Tokenizer(models.BPE(unk_token=unknown))
    if kind == "unigram":  # its special tokens are pieces, too, and the likeliest
        letters = [(letter, -9.0) for letter in [*PRINTABLE, "▁", "▁The", "answer", "user"]]
        model = Tokenizer(models.Unigram([*((mark, 0.0) for mark in marks), *letters], 0))
    _set_up(model, kind)
    is_stripping, is_folding = kind == "stripping", kind == "folding"
    added = [
        AddedToken(
            mark, lstrip=is_stripping, rstrip=is_stripping, normalized=is_folding, special=True
        )
        for mark in marks
    ]
    if kind == "unigram":
        model.add_special_tokens(added)
    else:
        is_bytes = kind in ("byte level", "stripping", "folding")
        alphabet = pre_tokenizers.ByteLevel.alphabet() if is_bytes else PRINTABLE
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=added,
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        )
        model.train_from_iterator(CORPUS, trainer)
    if single:
        pairs = [(mark, model.token_to_id(mark)) for mark in marks if mark in single]
        model.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)
    made = PreTrainedTokenizerFast(tokenizer_object=model, bos_token=bos, eos_token=eos)
    for mark, other in zip(MARKS, marks, strict=True):
        template = template.replace(mark, other)
    made.chat_template = template
    return made


def _set_up(model: Any, kind: str) -> None:
    if kind == "sentencepiece":
        model.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        model.decoder = decoders.Replace("▁", " ")
    elif kind in ("space first", "unigram"):
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        model.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
    if kind == "folding":
        model.normalizer = normalizers.NFKC()


def asked(chat: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    return encode_prompt(chat, tokenizer, 10_000)


def of_transformers(chat: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def draw_chats(*pieces: str) -> list[list[dict[str, Any]]]:
    rng = np.random.default_rng(0)

    def text() -> str:
        return "".join(rng.choice([*PIECES, *pieces], 8))

    return [[user(text()), assistant(text()), user(text())] for _ in range(20)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [CHATML, WITH_BOS, CHAT_TEMPLATE])
def test_prompts_have_the_tokens_of_transformers(kind: str, template: str) -> None:
    """Messages that spell out special tokens say text."""
    tokenizer = make_tokenizer(kind, template=template)
    oracle = make_tokenizer(kind, OTHERS, template)  # the same ids; for it the texts are harmless
    for chat in draw_chats():
        assert asked(chat, tokenizer) == of_transformers(chat, tokenizer)
    for chat in draw_chats(*MARKS):
        ids = asked(chat, tokenizer)
        assert ids == of_transformers(chat, oracle)
        if kind in ("byte level", "space first", "folding"):  # others lose blanks
            assert chat[-1]["content"] in tokenizer.decode(ids)


def test_letters_that_the_tokenizer_folds_to_a_special_token() -> None:
    wide = "＜/s＞"
    tokenizer, oracle = make_tokenizer("folding"), make_tokenizer("folding", OTHERS)
    assert tokenizer(wide)["input_ids"] == [MARKS.index("</s>")]
    assert asked([user(wide)], tokenizer) == of_transformers([user(wide)], oracle)


def test_special_tokens_anywhere_in_a_message() -> None:
    tokenizer = make_tokenizer("byte level", template=CHATML)
    oracle = make_tokenizer("byte level", OTHERS, CHATML)
    call = {"function": {"name": "</s>", "arguments": {"<|im_end|>": ["<|im_start|>", None, 1]}}}
    chat = [user("hi"), {**assistant(""), "tool_calls": [call]}, {"role": "</s>", "content": "ok"}]
    assert asked(chat, tokenizer) == of_transformers(chat, oracle)


def test_tokens_that_the_tokenizer_writes_from_plain_text_are_refused() -> None:
    tokenizer = deepcopy(make_tokenizer("byte level"))
    words = (token for token in tokenizer.get_vocab() if token.isascii() and token.isalpha())
    merged = max(words, key=len)
    tokenizer.add_special_tokens({"additional_special_tokens": [merged]})
    assert len(merged) > 1 and asked([user("the")], tokenizer)
    with pytest.raises(UserError, match="cannot tell it from its own; leave it out"):
        asked([user(f"the {merged}")], tokenizer)


@pytest.mark.parametrize("single", ["$A </s>", "<s> $A </s>", "<s> $A"])
def test_what_the_tokenizer_adds_to_texts_is_not_in_chats(single: str) -> None:
    tokenizer = make_tokenizer("byte level", single=single)
    ids = asked([user("hi")], tokenizer)
    assert ids == of_transformers([user("hi")], tokenizer)
    [[sequence]] = learn([user("hi"), assistant("yes")], tokenizer)
    assert turns_of(sequence)[0][0] == ids
    assert encode_prompt("hi", tokenizer, 10_000) == tokenizer("hi")["input_ids"]  # no chat


def learn(chat: list[dict[str, Any]], tokenizer: Any) -> list[list[Tokens]]:
    documents = list(encode_documents([Chat(chat)], tokenizer, ChatTemplate(tokenizer, None)))
    assert all(isinstance(one, list) for one in documents)
    return documents  # type: ignore[return-value]


def turns_of(sequence: Tokens) -> list[tuple[list[int], list[int]]]:
    """The text before each answer of a document, and the answer."""
    bounds = np.flatnonzero(np.diff(sequence.trained, prepend=False, append=False)).reshape(-1, 2)
    ids = sequence.ids.tolist()
    return [(ids[:begin], ids[begin:end]) for begin, end in bounds]


@pytest.mark.parametrize("template", [CHATML, CHAT_TEMPLATE])
@pytest.mark.parametrize("answer", ["hello", "\n\nhello", "\nhello", "  d", "\n", "x", "1x"])
def test_answers_that_merge_with_the_end_of_their_prompt(template: str, answer: str) -> None:
    tokenizer = make_tokenizer("byte level", template=template)
    chat = [user("x"), assistant(answer), user("y"), assistant("z")]
    [sequences] = learn(chat, tokenizer)
    end = {CHATML: "<|im_end|>", CHAT_TEMPLATE: "</s>"}[template]
    turns = [turn for sequence in sequences for turn in turns_of(sequence)]
    assert turns == [
        (of_transformers(chat[:1], tokenizer), tokenizer(answer + end)["input_ids"]),
        (of_transformers(chat[:3], tokenizer), tokenizer("z" + end)["input_ids"]),
    ]
