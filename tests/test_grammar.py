"""Grammars: answers match them, and are the same with and without drafts, in any company."""

import json
import re
from typing import Any

import jax
import jsonschema_rs
import numpy as np
import pytest
from models import certain_pair, make_engine, tiny_llama
from test_slots_mesh import Store
from test_text import BYTE_LEVEL, spell

from benchmarks.options import read_schemas
from poss_jax import Engine, Generation, SamplingConfig, Scheduler, Slots, TreeConfig, UserError
from poss_jax.config.models import DraftConfig, Drafting
from poss_jax.engine import batch, leader
from poss_jax.engine.batch import Batch, no_masks, score_prompt
from poss_jax.engine.grammar import Grammar, GrammarCompiler
from poss_jax.engine.grammar_trials import LIMITS
from poss_jax.engine.guides import GrammarState, Walk
from poss_jax.engine.leader import follow
from poss_jax.engine.prompts import PreparedPrompt

LEAST_ROWS = 128
EOS, VOCAB = 1, len(BYTE_LEVEL)
LENGTH = {"max_position_embeddings": 400}
LLAMA = tiny_llama(vocab_size=VOCAB, num_layers=1, eos_token_ids=(EOS,), **LENGTH)
POSS = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2))
SHARED = {"family": "eagle3", "kv": "shared", "aux_layers": (0, 0), "head_size": 128}
E3 = DraftConfig(layer=LLAMA, positions_per_specialist=(2,), **SHARED)
TREE = TreeConfig(depth=3, top_k=4, total_tokens=12)
CHAIN = TreeConfig(depth=3, top_k=1, total_tokens=4)
SMALL = TreeConfig(depth=2, top_k=2, total_tokens=5)
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
PATTERN = r"[a-f]{3,9}-[0-9]{1,9}"
REQUESTS = [  # grammar, settings
    (Grammar.json_schema(PERSON), SamplingConfig()),
    (None, SamplingConfig(temperature=1.0, seed=1)),
    (Grammar.json_schema(PERSON), SamplingConfig(temperature=0.8, top_p=0.9, top_k=5, seed=2)),
    (Grammar.regex(PATTERN), SamplingConfig(temperature=1.0, seed=3)),
    (Grammar.regex(PATTERN), SamplingConfig(frequency_penalty=1.5, logit_bias={5: 1.0, 60: -3.0})),
    (Grammar.choice(["yes", "no", "never"]), SamplingConfig(temperature=1.0, seed=4)),
    (Grammar.lark('start: "<" WORD ">" start? \nWORD: /[xyz]{1,4}/'), SamplingConfig()),
    (None, SamplingConfig()),
]


def draw_engine(
    tree: TreeConfig | None, config: DraftConfig = POSS, drafting: Drafting = "coupled"
) -> Engine:
    """A target that nearly always knows the next token; without a tree it decodes alone."""
    target, draft = certain_pair(LLAMA, POSS, sharpness=1.0, disorder=0.3)
    pair = () if tree is None else (config, draft if config is POSS else None)
    vocabulary = tuple(range(0, 256, 2)) if config is E3 else None
    engine = make_engine(LLAMA, target, *pair, tree=tree, vocabulary=vocabulary, drafting=drafting)
    engine.tokenizer = BYTE_LEVEL
    return engine


def prepare(
    engine: Engine, ids: list[int], limit: int, sampling: SamplingConfig, grammar: Grammar | None
) -> PreparedPrompt:
    prompt = engine.prepare(ids, limit, sampling)
    return grammar.constrain(prompt, engine) if grammar else prompt


def prepare_all(engine: Engine) -> list[PreparedPrompt]:
    return [
        prepare(engine, [5 + index, 7, 9], 60, sampling, grammar)
        for index, (grammar, sampling) in enumerate(REQUESTS)
    ]


def make_slots(engine: Engine) -> Slots:
    """Slots of the same shapes, so that all tests share their programs."""
    return Slots(engine, sizes=(4,), max_length=100, max_logprobs=2)


@pytest.fixture(scope="module")
def alone() -> list[Generation]:
    """Answers of the target alone."""
    engine = draw_engine(None)
    return engine.decode(prepare_all(engine), batch_size=4)


def test_answers_match(alone: list[Generation]) -> None:
    check_matches(alone)


def check_matches(answers: list[Generation]) -> None:
    """Checks the answers to `REQUESTS`."""
    texts = [answer.text or "" for answer in answers]
    assert all(answers[index].stop_reason == "stop" for index in (0, 2, 3, 4, 5, 6))
    for text in (texts[0], texts[2]):
        jsonschema_rs.validate(PERSON, json.loads(text))
    for text in (texts[3], texts[4]):
        assert re.fullmatch(PATTERN, text)
    assert texts[5] in ("yes", "no", "never")
    assert re.fullmatch("(<[xyz]{1,4}>)+", texts[6])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tree", "config"),
    [
        pytest.param(TREE, POSS, id="tree"),
        pytest.param(CHAIN, POSS, id="chain", marks=pytest.mark.slow),
        pytest.param(SMALL, E3, id="EAGLE-3", marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_text(tree, config, alone) -> None:
    """EAGLE-3's draft is random and knows half of the tokens."""
    engine = draw_engine(tree, config)
    answers = engine.decode(prepare_all(engine), batch_size=4)
    assert [one.output_ids for one in answers] == [one.output_ids for one in alone]
    assert len(answers[0].output_ids) - 1 > 1.5 * len(answers[0].accepted_per_round)


def test_without_time_to_walk_texts_are_the_same(alone, monkeypatch) -> None:
    monkeypatch.setattr(batch, "_WALK_SECONDS", 0.0)
    engine = draw_engine(TREE)
    answers = engine.decode(prepare_all(engine), batch_size=4)
    assert [one.output_ids for one in answers] == [one.output_ids for one in alone]


def test_texts_of_sampled_drafts_match_too(alone, monkeypatch) -> None:
    """Greedy ones are still the target's; walks over drawn trees have all the time they need."""
    monkeypatch.setattr(batch, "_WALK_SECONDS", 0.0)
    engine = draw_engine(SMALL, drafting="sampled")
    answers = engine.decode(prepare_all(engine), batch_size=4)
    check_matches(answers)
    for index in (0, 4, 6, 7):
        assert answers[index].output_ids == alone[index].output_ids


def test_sampled_drafts_know_the_grammar_at_the_root() -> None:
    """Nearly all tokens are forbidden, so that others are hardly drafted by chance."""
    engine = draw_engine(SMALL, drafting="sampled")
    grammar = Grammar.regex("[\x80-\x84]{40}|([0-9a-f]{2}){20}")
    plain = prepare_all(engine)[4:]  # whose settings make it the same program
    prompt = prepare(engine, [5, 7], 41, SamplingConfig(temperature=1.0, seed=3), grammar)
    answer, *_ = engine.decode([prompt, *plain[:3]], batch_size=4)
    assert answer.mean_acceptance_length > 1.4


@pytest.mark.parametrize(
    "has_draft",
    [pytest.param(True, id="draft"), pytest.param(False, id="no draft", marks=pytest.mark.slow)],
)
def test_certain_tokens_are_nobodys_drafts(has_draft: bool) -> None:
    """They come with the rounds, but count as accepted no more than the target's own tokens."""
    engine = draw_engine(SMALL if has_draft else None).with_tree(SMALL, lookup=6)
    prompt = prepare_all(engine)[0]
    scheduler = Scheduler(make_slots(engine))
    try:
        chunks = list(scheduler.submit(prompt))
        whole, depths = chunks[-1].answer, [depth for chunk in chunks for depth in chunk.depths]
        assert whole is not None and len(whole.output_ids) > 2 * len(whole.accepted_per_round)
        assert max(depths) <= SMALL.depth and min(depths) == 0
        assert sum(whole.accepted_per_round) == (sum(map(bool, depths)) if has_draft else 0)
        for length in range(1, len(whole.output_ids), 3):  # cut among certain tokens, too
            *_, last = scheduler.submit(prompt._replace(max_new_tokens=length))
            assert last.answer is not None and last.answer.output_ids == whole.output_ids[:length]
            assert sum(last.answer.accepted_per_round) == sum(map(bool, depths[:length]))
    finally:
        scheduler.close()
    assert has_draft == bool(scheduler.stats.drafted) == bool(scheduler.stats.accepted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_wins_over_a_least_length(temperature: float) -> None:
    """Neither is a stop token allowed that the grammar forbids, nor one forbidden that it wants."""
    engine = draw_engine(TREE)
    sampling = SamplingConfig(temperature=temperature, min_tokens=20, logit_bias={5: 1.0}, seed=2)
    grammar, stop_ids = Grammar.choice(["yes", "no", "never"]), [EOS, *ids("q")]
    prompt = grammar.constrain(engine.prepare([5, 7], 30, sampling, stop_ids=stop_ids), engine)
    (answer,) = engine.decode([prompt], batch_size=4)
    assert answer.text in ("yes", "no", "never") and answer.output_ids[-1] == EOS


def test_any_company_leaves_the_texts_as_they_are(alone: list[Generation]) -> None:
    """Some are cancelled halfway; the prompt of two choices is read once."""
    engine = draw_engine(SMALL)
    scheduler = Scheduler(make_slots(engine))
    try:
        prompts = prepare_all(engine)
        streams = scheduler.submit_all([*prompts, *prompts, prompts[0], prompts[0]])
        for stream in streams[8:16:2]:
            stream.cancel()
        answers = [list(stream)[-1].answer for stream in streams]
    finally:
        scheduler.close()
    assert scheduler.error is None
    for index, answer in enumerate(answers):
        want = alone[index % 8 if index < 16 else 0].output_ids
        assert answer is not None
        if answer.stop_reason == "cancelled":
            want = want[: len(answer.output_ids)]
        assert answer.output_ids == want
    assert [one.stop_reason for one in answers if one].count("cancelled") <= 4


def test_a_follower_needs_no_grammar(alone, monkeypatch) -> None:
    """It gets the masks; prompts are scored between rounds."""
    store = Store()
    monkeypatch.setattr(leader, "_store", lambda: store)
    engine, text = draw_engine(SMALL), list(range(3, 93))
    ours, theirs = make_slots(engine), make_slots(engine)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        scheduler = Scheduler(ours)
    try:
        streams = scheduler.submit_all(prepare_all(engine))
        assert scheduler.score(text) == score_prompt(engine, text, num_logprobs=2, max_length=100)
        answers = [list(stream)[-1].answer for stream in streams]
    finally:
        scheduler.close()
    assert [one and one.output_ids for one in answers] == [one.output_ids for one in alone]
    monkeypatch.setattr(Batch, "walk", None)
    follow(theirs)
    for a, b in zip(jax.tree.leaves(theirs.state), jax.tree.leaves(ours.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_grammar_that_gets_too_complex_ends_its_text_alone(alone, monkeypatch) -> None:
    engine = draw_engine(SMALL)
    scheduler = Scheduler(make_slots(engine))
    monkeypatch.setitem(LIMITS, "max_lexer_states", 40)
    try:
        hard, sampling = (
            Grammar.regex("([a-z]*[a-m][a-z]{12}){3}9"),
            SamplingConfig(temperature=2.0),
        )
        prompt = prepare(engine, [5, 7, 9], 60, sampling, hard)
        other, bad = scheduler.submit(prepare_all(draw_engine(None))[1]), scheduler.submit(prompt)
        with pytest.raises(UserError, match="too many states"):
            list(bad)
        answer = list(other)[-1].answer
    finally:
        scheduler.close()
    assert scheduler.error is None and answer is not None
    assert answer.output_ids == alone[1].output_ids


# --------------------------------------------------------------------------------------------------
# The walk over a tree


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTE_LEVEL, VOCAB, [EOS])


def ids(text: str) -> list[int]:
    return spell(BYTE_LEVEL, text)


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]).tolist()


def test_forbidden_nodes_give_their_places_to_certain_tokens(compiler, monkeypatch) -> None:
    """root "a" ┬ "b" ─ "d"        after a: "bcde" or "x", so "d" and "q" are forbidden
    ├ "x"                and "c", "d" are certain after "b"
    └ "q" ─ "x".
    """
    guide = compiler.submit(Grammar.regex("a(bcde|x)")).result()
    guide.advance(ids("a"))
    tokens, parents = np.array(ids("abxqdx")), np.array([0, 0, 0, 0, 1, 3])
    copies, copy = [guide], GrammarState.copy
    monkeypatch.setattr(GrammarState, "copy", lambda self: copies.append(self) or copy(self))
    masks = no_masks(VOCAB, 6)
    Walk(guide, tokens, parents, masks).mend(depth=3)
    assert len(copies) == 2  # one state walks all over the tree; a copy may be large
    assert tokens.tolist() == [*ids("abxcd"), EOS]
    assert parents.tolist() == [0, 0, 0, 1, 3, 2]
    nexts = [ids("b") + ids("x"), ids("c"), [EOS], ids("d"), ids("e")]
    assert [allowed(mask) for mask in masks[:5]] == [sorted(one) for one in nexts]
    assert len(allowed(masks[5])) == VOCAB  # after the end any token will do
    other = guide.copy()
    other.advance(ids("bcde"))  # the walk left the guide where it was


@pytest.mark.parametrize("seed", range(20))
def test_masks_are_those_of_the_path(compiler: GrammarCompiler, seed: int) -> None:
    rng = np.random.default_rng(seed)
    grammar = Grammar.json_schema({"type": "array", "items": {"enum": ["ab", 12, None, "ac"]}})
    guide = compiler.submit(grammar).result()
    tokens = np.array(rng.choice([*ids('[]"abc12, nul'), EOS], 40))
    parents = np.array([0, *(int(rng.integers(0, node)) for node in range(1, 40))])
    masks = no_masks(VOCAB, 40)
    root = guide.copy()
    root.advance(ids("["))
    tokens[0] = ids("[")[0]
    Walk(root, tokens, parents, masks).mend(depth=12)
    for node in range(40):
        path, here = [], node
        while here and parents[here] != here:
            path, here = [int(tokens[here]), *path], int(parents[here])
        if here == 0 and EOS not in path:
            fresh = root.copy()
            fresh.advance(path)
            want = no_masks(VOCAB)
            fresh.fill(want)
            np.testing.assert_array_equal(masks[node], want)


# --------------------------------------------------------------------------------------------------
# Schemas


@pytest.mark.parametrize("kind", list(dict.fromkeys(kind for kind, _ in read_schemas())))
def test_what_the_masks_allow_is_valid(compiler: GrammarCompiler, kind: str) -> None:
    for seed, schema in enumerate(schema for name, schema in read_schemas() if name == kind):
        text = random_text(compiler, schema, np.random.default_rng(seed))
        is_leap_day = text.endswith('-02-29"')  # llguidance allows one in every year
        jsonschema_rs.validate(schema, json.loads(text), validate_formats=not is_leap_day)


def random_text(compiler: GrammarCompiler, schema: Any, rng: np.random.Generator) -> str:
    """A text of any tokens that the masks allow; it ends where it may."""
    guide, mask, tokens = compiler.submit(Grammar.json_schema(schema)).result(), no_masks(VOCAB), []
    while EOS not in tokens:
        assert len(tokens) < 2000
        guide.fill(mask)
        choices = allowed(mask)
        tokens.append(EOS if EOS in choices else int(rng.choice(choices)))
        guide.advance(tokens[-1:])
    return BYTE_LEVEL.decode(tokens[:-1])
