"""Random Jinja templates: a text, or one line."""

import functools

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from poss_jax.data.rendering import RenderError, render_chat

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
ATOMS = ["messages", "m", "m.content", "'ab'", "7", "0", "-1", "none", "bos_token"]
ATOMS += ["[1, 2]", "{'a': 1}", "loop.index", "add_generation_prompt", "''", "range(99)", "cycler"]
OPERATORS = ["+", "*", "~", "/", "//", "%", "-", "in", "==", "<"]
FILTERS = ["length", "upper", "list", "join", "tojson", "sort", "sum", "int", "trim", "first"]
FILTERS += ["center(10**3)", "replace('', 'abc')", "batch(10**3, 1)", "indent(999)", "urlize"]
FILTERS += ["map('x')"]
METHODS = ".zfill(10**3) .split() .strip() [0] ['a'] .a.b () .__class__ [::2]".split()

expressions = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(OPERATORS), inner),
        st.builds("{}|{}".format, inner, st.sampled_from(FILTERS)),
        st.builds("({}){}".format, inner, st.sampled_from(METHODS)),
    ),
    max_leaves=5,
)
statements = st.recursive(
    st.one_of(
        st.builds("{{{{ {} }}}}".format, expressions),
        st.builds("{{% set n.x = {} %}}".format, expressions),
        st.just("{{ n.x }}"),
        st.sampled_from(
            ["text ", "{{ f() }}", "{% break %}", "{{", "%}", "{{ raise_exception(n) }}"]
        ),
    ),
    lambda inner: st.one_of(
        st.builds("{{% for m in {} %}}{}{{% endfor %}}".format, expressions, inner),
        st.builds("{{% for i in range(3) %}}{}{{% endfor %}}".format, inner),
        st.builds("{{% macro f() %}}{}{{% endmacro %}}{{{{ f() }}}}".format, inner),
        st.builds("{{% if {} %}}{}{{% else %}}x{{% endif %}}".format, expressions, inner),
        st.builds("{}{}".format, inner, inner),
    ),
    max_leaves=6,
)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>")


@given(statements)
def test_templates(template: str) -> None:
    # Nothing that grows without end: only the sandbox's own limit of ranges would stop it.
    template = "{% set n = namespace(x='ab') %}" + template
    try:
        text = render_chat(tokenizer(), CHAT, template=template, is_asking=True)
        assert text.encode() is not None
    except RenderError as error:
        assert str(error) and len(str(error).splitlines()) == 1
        assert str(error).encode() is not None
