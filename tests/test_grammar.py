"""Grammars: answers match them, and are the same with and without drafts, in any company."""

from collections.abc import Iterator

import pytest
from models import certain_pair, make_engine, one_layout, tiny_llama
from test_text import BYTE_LEVEL

from poss_jax import Engine, SamplingConfig, TreeConfig
from poss_jax.config.models import DraftConfig
from poss_jax.engine.grammar import Grammar
from poss_jax.engine.prompts import PreparedPrompt

EOS = 1
LLAMA = tiny_llama(num_layers=1, vocab_size=266, max_position_embeddings=400, eos_token_ids=(EOS,))
POSS = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2))
TREES = {
    "tree": TreeConfig(depth=4, top_k=4, total_tokens=12),
    "chain": TreeConfig(depth=3, top_k=1, total_tokens=4),
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pet": {"enum": ["cat", "dog", None]},
    },
    "required": ["name", "age", "pet"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar.json_schema(PERSON),
    None,
    Grammar.regex(r"[a-f]{3,9}-[0-9]+"),
    Grammar.choice(["yes", "no", "never"]),
    Grammar.json_schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 5}),
    Grammar.lark('start: "<" WORD ">" start? \nWORD: /[xyz]{1,4}/'),
]
SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=1.0, seed=1),
    SamplingConfig(temperature=0.8, top_p=0.9, top_k=5, seed=2),
    SamplingConfig(frequency_penalty=1.5, logit_bias={5: 1.0, 60: -3.0}),
]


@pytest.fixture(scope="module", autouse=True)
def same_layout() -> Iterator[None]:
    with one_layout(num_biased=2):
        yield


@pytest.fixture(scope="module")
def engine() -> Engine:
    target, draft = certain_pair(LLAMA, POSS, sharpness=1.0, disorder=0.3)
    engine = make_engine(LLAMA, target, POSS, draft, tree=TREES["tree"])
    engine.tokenizer = BYTE_LEVEL
    return engine


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Engine:
    """The same target without a draft."""
    target, _ = certain_pair(LLAMA, POSS, sharpness=1.0, disorder=0.3)
    alone = make_engine(LLAMA, target)
    alone.tokenizer = BYTE_LEVEL
    return alone


def prepare_all(engine: Engine, limit: int = 60) -> list[PreparedPrompt]:
    pairs = [(grammar, one) for grammar in GRAMMARS for one in SAMPLINGS]
    return [
        engine.prepare([5 + index, 7, 9], limit, sampling, grammar=grammar)
        for index, (grammar, sampling) in enumerate(pairs)
    ]


@pytest.mark.quick
@pytest.mark.parametrize("tree", TREES)
def test_drafts_change_no_text(engine: Engine, alone: Engine, tree: str) -> None:
    prompts = prepare_all(engine)
    want = alone.decode(prompts, batch_size=4)
    got = engine.with_tree(TREES[tree]).decode(prompts, batch_size=4)
    for prompt, a, b in zip(prompts, got, want, strict=True):
        print(prompt.guide and prompt.guide._name, a.text, a.mean_acceptance_length, a.stop_reason)
    assert [answer.output_ids for answer in got] == [answer.output_ids for answer in want]
