"""Chat templates that come with a model: texts as of transformers, errors, any thread."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from poss_jax.config.reading import UserError
from poss_jax.data.rendering import RenderError, Step, render_chat, render_steps
from poss_jax.data.templates import BUILT_IN, ChatTemplate
from poss_jax.data.tokenizer import CHAT_TEMPLATE
from poss_jax.engine.prompts import encode_prompt

CHAT = [
    {"role": "user", "content": "Hé 😀?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "So?", "name": None},
]


def make_tokenizer(template: Any) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        bos_token="<s>",
        eos_token="</s>",
    )
    made.chat_template = template
    return made


def render(template: Any, *, is_asking: bool = True) -> str:
    return render_chat(make_tokenizer(template), CHAT, is_asking=is_asking)


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
    tokenizer = make_tokenizer(template)
    with pytest.raises(UserError, match=rf"chat template refuses them: .*{error}"):
        encode_prompt(CHAT, tokenizer, 10)
    with pytest.raises(UserError, match=rf"the chat template refuses it: .*{error}"):
        ChatTemplate(tokenizer, None)


REWRITES = (  # drops the answers before the last one, as templates do with thoughts
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content if m.role == 'user' or loop.index > messages|length - 2 }}{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt }}"
)


@pytest.mark.parametrize("template", [*BUILT_IN.values(), CHAT_TEMPLATE, REWRITES])
def test_beginnings_of_a_chat_are_told_by_what_they_add(template: str) -> None:
    tokenizer, chat = make_tokenizer(template), CHAT[:2] * 3
    steps = [Step(end, end % 2 == 1) for end in range(1, 7)]
    before = ""
    for step, part in zip(steps, render_steps(tokenizer, chat, steps), strict=True):
        text = tokenizer.apply_chat_template(
            chat[: step.end], tokenize=False, add_generation_prompt=step.is_asking
        )
        assert part.shared == len(os.path.commonprefix([before, text]))  # noqa: RUF071
        assert before[: part.shared] + part.text == text
        before = text


def test_threads_get_their_own_texts() -> None:
    def ask(number: int) -> bool:
        tokenizer = make_tokenizer(f"{number} " + "{{ messages[0].content }}")
        chat = [{"role": "user", "content": f"question {number}"}]
        return render_chat(tokenizer, chat, is_asking=True) == f"{number} question {number}"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(100)))


HALF = "prompt: want text as UTF-8, got half a character"
LONG = "want token ids of 0 to 9, got one of more than 64 bits"


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
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match=message):
        encode_prompt(prompt, tokenizer, 10)
