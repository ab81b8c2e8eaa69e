"""Records of every format, chat templates and their errors, and the trained parts of a chat."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
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
from poss_jax.data.conversations import Broken, Chat, Rendered, Tokens, detect_format, read_document
from poss_jax.data.rendering import RenderError, Step, render_chat, render_steps
from poss_jax.data.rows import encode_documents
from poss_jax.data.templates import BUILT_IN, ChatTemplate
from poss_jax.data.tokenizer import CHAT_TEMPLATE
from poss_jax.engine.prompts import encode_prompt

LLAMA3 = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPACED = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TEXT = "def area(width, height):\n    return width * height\n\nThe answer is 42. How? So.\n" * 20


def chat(*turns: str) -> list[dict[str, str]]:
    """User, assistant, user, ...; what begins with "system " is a system message."""
    system = [turn for turn in turns[:1] if turn.startswith("system ")]
    roles = ["system"] * len(system) + ["user", "assistant"] * len(turns)
    return [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]


def sharegpt(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in turns]}


# --------------------------------------------------------------------------------------------------
# Formats

HELLO, YES = chat("Hi", "Hello."), chat("Hi", "Yes.")


@pytest.mark.parametrize(
    ("record", "kind", "wanted"),
    [
        (sharegpt(("human", "Hi"), ("gpt", "Hello.")), "chat", HELLO),
        ({"conversations": HELLO, "id": 3}, "chat", HELLO),
        ({"prompt": "Hi", "prompt_id": "a", "messages": HELLO}, "chat", HELLO),
        ({"messages": chat("system Be.", *"abcd")}, "chat", chat("system Be.", *"abcd")),
        ({"messages": chat(*"ab"), "system": "system S"}, "chat", chat("system S", *"ab")),
        ({"messages": chat("system A", *"ab"), "system": "B"}, "chat", chat("system A", *"ab")),
        ({"messages": chat(*"ab"), "system": " "}, "chat", chat(*"ab")),
        ({"prompt": "a", "response": "b", "system": "system S"}, "pairs", chat("system S", *"ab")),
        ({"question": "Hi", "answer": "Hello."}, "pairs", HELLO),
        ({"question": "Hm", "prompt": "Hi", "completion": "Hello."}, "pairs", HELLO),
        ({"instruction": "Hi", "input": "", "output": "Hello."}, "pairs", HELLO),
        ({"prompt": "Hi", "completion": "Hello."}, "pairs", HELLO),
        # Columns of a table whose records have several layouts.
        ({"question": None, "answer": None, "prompt": "Hi", "completion": "Yes."}, "pairs", YES),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "pairs", chat("Add.\n\n1 2", "3")),
    ],
)
def test_chats_of_every_format(record: dict, kind: str, wanted: list[dict[str, str]]) -> None:
    assert detect_format(record) == kind
    assert read_document(record, kind) == (Chat(wanted), "")


USER, GPT, AGAIN = ("human", "Hi"), ("gpt", "Hello."), ("user", "More")


@pytest.mark.parametrize(
    ("turns", "kept", "left_out"),
    [
        ([GPT, USER, GPT], 2, "begins with the assistant"),
        ([("system", "Be."), GPT, USER, GPT], 3, "begins with the assistant"),
        ([("system", " "), USER, GPT], 3, ""),
        ([USER, GPT, USER], 2, ""),
        ([USER, GPT, USER, USER, GPT], 2, "two user turns in a row"),
        ([USER, GPT, GPT], 2, "two assistant turns in a row"),
        ([USER, GPT, AGAIN, ("gpt", "")], 2, "an empty turn"),
        ([USER, GPT, ("system", "Now."), AGAIN, GPT], 2, "a system turn inside"),
        ([USER, GPT, ("tool", "{}"), ("tool", ""), GPT], 5, ""),
        ([USER, GPT, ("observation", "{}"), GPT], 2, "unknown role"),
        ([USER, GPT, AGAIN, ("tool", "{}"), GPT], 2, "the result of a tool that was not called"),
        ([USER, GPT, AGAIN, ("gpt", None)], 2, "a turn without text"),
        ([USER, ("gpt", "")], 0, "an empty turn"),
        ([USER], 0, "no answer to train on"),
        ([GPT], 0, "begins with the assistant"),
        ([], 0, "empty conversation"),
    ],
)
def test_odd_chats_are_used_up_to_the_oddity(turns: list, kept: int, left_out: str) -> None:
    document, why = read_document(sharegpt(*turns), "chat")
    if kept:
        assert isinstance(document, Chat)
        assert (len(document.messages), why) == (kept, left_out)
        assert document.messages[-1] == HELLO[1]
    else:
        assert isinstance(document, Broken) and document.reason == left_out


def test_a_history_is_left_out_of_a_pair() -> None:
    record, want = {"instruction": "a", "output": "b"}, Chat(chat(*"ab"))
    assert read_document({**record, "history": []}, "pairs") == (want, "")
    document, why = read_document({**record, "history": [["c", "d"]]}, "pairs")
    assert (document, why) == (want, "earlier turns in 'history'")


IMAGE = {"role": "user", "content": [{"type": "image"}]}


@pytest.mark.parametrize(
    ("record", "kind", "reason"),
    [
        ({"conversations": "text"}, "chat", "no list of messages"),
        ({"conversations": ["text", 3]}, "chat", "unknown role"),
        ({"messages": [IMAGE]}, "chat", "a turn without"),
        ({"question": "Hi", "answer": 3}, "pairs", "a turn without text"),
        ({"question": "Hi"}, "pairs", "no question and answer"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "tokens", "input_ids and loss_mask of diff"),
        ({"input_ids": [], "loss_mask": []}, "tokens", "input_ids and loss_mask are not lists"),
        ({"input_ids": [1.5], "loss_mask": [1]}, "tokens", "input_ids and loss_mask are not lists"),
        ({"input_ids": [[1], [2, 3]], "loss_mask": [1]}, "tokens", "input_ids and loss_mask are"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "tokens", "a loss_mask that is not 0 or 1"),
        ({"text": 3}, "rendered", "no string 'text'"),
        ({"title": "x"}, None, "no known format"),
    ],
)
def test_records_that_cannot_be_used(record: dict, kind: str | None, reason: str) -> None:
    document, _ = read_document(record, kind)
    assert isinstance(document, Broken) and document.reason.startswith(reason)


# --------------------------------------------------------------------------------------------------
# Templates and masks


def make_tokenizer(specials: list[str], *, like: str = "bytes") -> PreTrainedTokenizerFast:
    """A tiny tokenizer: byte-level (as Llama-3's), trimming offsets (GPT-2's), or Llama-2's."""
    model = Tokenizer(models.BPE(unk_token=None))
    if like == "llama2":
        model.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        model.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = sorted({*map(chr, range(32, 127)), "\n", "▁", "é", "😀"})
    else:
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([TEXT], trainer)
    bos = processors.TemplateProcessing(
        single=f"{specials[0]} $A", special_tokens=[(specials[0], 0)]
    )
    trim = [] if like == "llama2" else [processors.ByteLevel(trim_offsets=like == "gpt2")]
    model.post_processor = processors.Sequence([*trim, bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=specials[0],
        eos_token=specials[1],
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    class Slow(PreTrainedTokenizerFast):
        is_fast = False  # tells no offsets

    made = {
        "llama3": make_tokenizer(LLAMA3),
        "gpt2": make_tokenizer([*LLAMA3, "<|im_end|>"], like="gpt2"),
        "llama2": make_tokenizer(["<s>", "</s>"], like="llama2"),
        "chatml": make_tokenizer(["<s>", "<|im_end|>", "<|im_start|>"]),
    }
    made["slow"] = Slow(
        tokenizer_object=made["llama3"].backend_tokenizer, bos_token=LLAMA3[0], eos_token=LLAMA3[1]
    )
    return made


SYSTEM_CHAT = chat("system Be brief.", "Hi\n", "Hello 😀.", "How? ", "Zo é")


def test_built_in_templates_drawn(tokenizers: dict[str, Any]) -> None:
    def write(name: str) -> str:
        return tokenizers[name].apply_chat_template(
            SYSTEM_CHAT, chat_template=BUILT_IN[name], tokenize=False
        )

    assert write("llama2") == (
        "<s>[INST] <<SYS>>\nsystem Be brief.\n<</SYS>>\n\nHi [/INST] Hello 😀. </s>"
        "<s>[INST] How? [/INST] Zo é </s>"
    )
    turns = [(turn["role"], turn["content"].strip()) for turn in SYSTEM_CHAT]
    written = [f"<|start_header_id|>{r}<|end_header_id|>\n\n{text}<|eot_id|>" for r, text in turns]
    assert write("llama3") == "<|begin_of_text|>" + "".join(written)


TEMPLATES = [
    ("llama3", "llama3", "{}<|eot_id|>"),
    ("gpt2", "llama3", "{}<|eot_id|>"),
    ("slow", "llama3", "{}<|eot_id|>"),
    ("llama2", "llama2", "{} </s>"),
    ("chatml", CHATML, "{}<|im_end|>"),
    ("gpt2", CHATML, "{}<|im_end|>"),
    ("llama3", CHAT_TEMPLATE, "{}<|eot_id|>"),
    ("gpt2", SPACED, "{}<|eot_id|>"),
]


def open_template(tokenizer: Any, template: str, folder: Path, **settings: Any) -> Any:
    """One of the built-in templates, or a file of this text."""
    if template not in BUILT_IN:
        (folder / "chat.jinja").write_text(template)
        template = str(folder / "chat.jinja")
    return ChatTemplate(tokenizer, template, **settings)


def learnt_spans(sequence: Tokens) -> list[list[int]]:
    bounds = np.flatnonzero(np.diff(sequence.trained, prepend=False, append=False))
    return bounds.reshape(-1, 2).tolist()


@pytest.mark.parametrize(("name", "template", "answer"), TEMPLATES)
def test_what_is_learnt_follows_the_prompt_that_the_engine_makes(
    tokenizers, tmp_path, name, template, answer, monkeypatch
):
    rng, tokenizer = np.random.default_rng(0), tokenizers[name]
    pieces = ["\n", " ", "The", "answer", "42.", "é", "😀", "###", "return", "[/INST", "<|eot"]
    drawn = [["x" + "".join(rng.choice(pieces, 9)) + "y" for _ in range(2 * n)] for n in (1, 2, 4)]
    opened = open_template(tokenizer, template, tmp_path)
    monkeypatch.setattr(tokenizer, "chat_template", BUILT_IN.get(template, template))
    for messages in (SYSTEM_CHAT, *(chat(*turns) for turns in drawn)):
        [[sequence]] = encode_documents([Chat(messages)], tokenizer, opened)
        answers = [n for n, turn in enumerate(messages) if turn["role"] == "assistant"]
        for (begin, end), n in zip(learnt_spans(sequence), answers, strict=True):
            learnt = tokenizer.decode(sequence.ids[begin:end])
            assert learnt == answer.format(messages[n]["content"])
            prompt = encode_prompt(messages[:n], tokenizer, 10_000)
            assert sequence.ids[:begin].tolist() == prompt


def test_a_system_prompt_for_chats_that_have_none(tokenizers: dict[str, Any]) -> None:
    opened = ChatTemplate(tokenizers["llama2"], "llama2", "Be kind.")
    [one] = opened.render(Chat(HELLO))
    assert one.text.startswith("<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST]")
    [one] = opened.render(Chat(SYSTEM_CHAT))
    assert "kind" not in one.text


@pytest.mark.parametrize("name", ["llama3", "llama2"])
def test_chats_that_are_rendered_already(tokenizers, name) -> None:
    opened = ChatTemplate(tokenizers[name], name)
    [rendered] = opened.render(Chat(SYSTEM_CHAT))
    assert opened.find_answers(rendered.text) == [rendered]
    [cut] = opened.find_answers(rendered.text[: rendered.spans[1][0] + 2])
    assert cut.spans == [rendered.spans[0], (rendered.spans[1][0], rendered.spans[1][0] + 2)]
    documents = [Chat(SYSTEM_CHAT), Rendered(rendered.text)]
    [a], [b] = (
        sequences
        for document in documents
        for sequences in encode_documents([document], tokenizers[name], opened)
    )
    assert (a.ids == b.ids).all() and (a.trained == b.trained).all()


def test_spelled_out_special_tokens_are_no_special_tokens(tokenizers: dict[str, Any]) -> None:
    opened = ChatTemplate(tokenizers["llama3"], "llama3")
    refused = opened.render(Chat(chat("Hi<|eot_id|>", "Hello.")))
    assert refused == Broken("a special token is spelled out", "<|eot_id|>")
    assert isinstance(opened.render(Chat(chat("Hi <|eot_i", "Hello </s>."))), list)


def test_whether_turns_end(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    assert ChatTemplate(tokenizers["llama2"], "llama2").ends_turns
    endless = CHAT_TEMPLATE.replace("eos_token", "''")
    assert not open_template(tokenizers["llama2"], endless, tmp_path).ends_turns


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (None, "no chat template; set data.template to llama2, llama3 or the path of a"),
        ("chatml", r"'chatml': want null .*llama2, llama3 or the path of a \.jinja"),
        ("llama3", r"this tokenizer has no <\|start_header_id\|>; take the template"),
    ],
)
def test_templates_that_cannot_be_used(tokenizers, template, error) -> None:
    with pytest.raises(UserError, match=error) as caught:
        ChatTemplate(tokenizers["llama2"], template)
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------------
# Templates that come with a model: texts as of transformers, errors, any thread

ASKED = [
    {"role": "user", "content": "Hé 😀?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "So?", "name": None},
]


def plain_tokenizer(template: Any) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        bos_token="<s>",
        eos_token="</s>",
    )
    made.chat_template = template
    return made


def render(template: Any, *, is_asking: bool = True) -> str:
    return render_chat(plain_tokenizer(template), ASKED, is_asking=is_asking)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages['x']['y'] }}", "'list object' has no attribute 'x'"),
        ("{{ {}|dictsort(by=3) }}", 'You can only sort by either "key" or "value"'),
        ("{{ 'a' + 1 }}", "TypeError: can only concatenate str"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 5000, "RecursionError"),
        ("{% for x in", "unexpected 'end of template'"),
        ("{{ raise_exception('a\nb' ~ 'c' * 10**6) }}", "a bc+"),
        (r"{{ '\ud800' }}", r"want text as UTF-8, got half a character \(surrogates not allowed\)"),
        ("{{ messages.append(1) }}", "access to attribute .append. of .list. object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' .* is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader for this environment"),
        ({"tool_use": "{{ 1 }}"}, "multiple chat templates with no default"),
        (5, "TypeError"),
    ],
    ids=str,
)
def test_errors_of_templates_are_one_line(template: Any, error: str) -> None:
    with pytest.raises(RenderError, match=error) as caught:
        render(template)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) <= 200
    tokenizer = plain_tokenizer(template)
    with pytest.raises(UserError, match=rf"chat template refuses them: .*{error}"):
        encode_prompt(ASKED, tokenizer, 10)
    with pytest.raises(UserError, match=rf"the chat template refuses it: .*{error}"):
        ChatTemplate(tokenizer, None)


REWRITES = (  # drops the answers before the last one, as templates do with thoughts
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content if m.role == 'user' or loop.index > messages|length - 2 }}{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt }}"
)


@pytest.mark.parametrize("template", [*BUILT_IN.values(), CHAT_TEMPLATE, REWRITES])
def test_beginnings_of_a_chat_are_rendered_as_transformers_does(template: str) -> None:
    tokenizer, chat = plain_tokenizer(template), ASKED[:2] * 3
    steps = [Step(end, end % 2 == 1) for end in range(1, 7)]
    for step, text in zip(steps, render_steps(tokenizer, chat, steps), strict=True):
        assert text == tokenizer.apply_chat_template(
            chat[: step.end], tokenize=False, add_generation_prompt=step.is_asking
        )


def test_threads_get_their_own_texts() -> None:
    def ask(number: int) -> bool:
        tokenizer = plain_tokenizer(f"{number} " + "{{ messages[0].content }}")
        chat = [{"role": "user", "content": f"question {number}"}]
        return render_chat(tokenizer, chat, is_asking=True) == f"{number} question {number}"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(100)))


HALF = "prompt: want text as UTF-8, got half a character"
LONG = "want token ids of 0 to 9, got a number of too many digits"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "user", "content": "\ud800"}], "refuses them: "),
        ([{"role": "user", "content": {1}}], "want a role and a content of text"),
        ("a \ud800", HALF),
        ("\udcff", HALF),
        ([0, 10**5000], LONG),
        ([0, -(10**5000)], LONG),
    ],
    ids=["half", "set", "text", "escape", "large", "small"],
)
def test_prompts_that_are_none(prompt: Any, message: str) -> None:
    tokenizer = plain_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match=message):
        encode_prompt(prompt, tokenizer, 10)
