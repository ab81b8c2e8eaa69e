"""Answers with copies: those of the target alone, with any draft or none, in any company."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from models import certain_pair, make_engine, tiny_llama
from programs import Runs, refusal
from test_grammar import E3, POSS, TREE, draw_engine, make_slots, prepare_all
from test_mesh import EIGHT, random_engine
from test_mesh import POSS as POSS_ON_MESH
from test_text import BYTE_LEVEL, spell

from infer import generate, lossless, serve
from infer.bench import __main__ as bench
from infer.generate_run import Screen
from poss_jax import Engine, Generation, SamplingConfig, Scheduler, Slots, TreeConfig, UserError
from poss_jax.config.bench import BenchConfig, MethodConfig
from poss_jax.config.decoding import GenerateConfig
from poss_jax.config.models import DraftConfig
from poss_jax.engine import trees
from poss_jax.engine.answers import Chunk
from poss_jax.engine.text import Piece
from poss_jax.program.options import load_engine
from poss_jax.program.running import BRACKETS, BRACKETS_OF_COPIES

LOOKUP, ALL = 6, 1000  # of a tree all nodes at most
LEAST_ROWS = 128
SHALLOW = TreeConfig(depth=2, top_k=4, total_tokens=12)
CHAIN = TreeConfig(depth=5, top_k=1, total_tokens=6)

Main = Callable[[list[str]], None]


@pytest.fixture(scope="module")
def alone() -> list[Generation]:
    """Answers of the target alone, with grammars, filters and penalties."""
    engine = draw_engine(None)
    return engine.decode(prepare_all(engine), batch_size=8)


def with_lookup(
    config: DraftConfig | None, tree: TreeConfig = TREE, lookup: int = LOOKUP, **options: Any
) -> Engine:
    engine = draw_engine(None) if config is None else draw_engine(tree, config, **options)
    return engine.with_tree(tree, lookup=lookup)


def ids(answers: Sequence[Generation | None]) -> list[list[int]]:
    return [answer.output_ids for answer in answers if answer is not None]


def count_copied(answers: Sequence[Generation | None]) -> int:
    return sum(sum(answer.copied_per_round) for answer in answers if answer is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options", "batch_size"),
    [
        # Coupled PosS also behind a server, below; both families also in test_lookup.py.
        pytest.param(POSS, {}, 4, id="PosS"),
        pytest.param(POSS, {"drafting": "argmax"}, 3, id="argmax"),
        pytest.param(POSS, {"lookup": ALL}, 4, id="all"),
        pytest.param(POSS, {"tree": CHAIN, "lookup": 2}, 4, id="chain"),
        pytest.param(E3, {}, 4, id="EAGLE-3"),
        pytest.param(E3, {"drafting": "argmax"}, 3, id="EAGLE-3, argmax"),
        pytest.param(E3, {"tree": CHAIN, "lookup": ALL}, 3, id="EAGLE-3, chain"),
        pytest.param(None, {}, 1, id="no draft"),
        pytest.param(None, {"lookup": ALL}, 4, id="no draft, all"),
    ],
)
def test_copies_change_no_text(config, options, batch_size, alone) -> None:
    engine = with_lookup(config, **options)
    answers = engine.decode(prepare_all(engine), batch_size=batch_size)
    assert ids(answers) == ids(alone)
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    assert count_copied(answers) > 0
    for answer in answers:
        counts = zip(answer.copied_per_round, answer.accepted_per_round, strict=True)
        assert all(copied <= accepted <= engine.max_accepted for copied, accepted in counts)
        assert max(answer.copied_per_round) <= engine.settings.lookup


@pytest.mark.quick
@pytest.mark.parametrize(
    "config",
    [pytest.param(POSS, id="PosS"), pytest.param(None, id="no draft", marks=pytest.mark.slow)],
)
def test_copies_change_no_text_of_a_server(config, alone) -> None:
    engine = with_lookup(config, SHALLOW)
    scheduler = Scheduler(make_slots(engine))
    prompts = prepare_all(engine)
    try:
        without = [prompt._replace(lookup=False) for prompt in prompts]
        streams = scheduler.submit_all([*prompts, *without])
        answers = [list(stream)[-1].answer for stream in streams]
    finally:
        scheduler.close()
    assert scheduler.error is None
    assert ids(answers) == ids([*alone, *alone])
    assert [answer.text for answer in answers] == [answer.text for answer in alone] * 2
    assert count_copied(answers[:8]) > 0
    assert count_copied(answers[8:]) == 0


@pytest.mark.parametrize(
    "config",
    [pytest.param(POSS, id="PosS"), pytest.param(None, id="no draft", marks=pytest.mark.slow)],
)
def test_cached_beginnings_of_prompts_are_copied_from(
    config: DraftConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poss_jax.engine.device.CPU_CHUNKS", (32, 16))
    engine = with_lookup(config, SHALLOW)
    plain = engine.with_tree({1: None})
    passage = plain.generate([[5, 7, 9]], max_new_tokens=40)[0].output_ids
    chats = [[*passage, 5 + index, *passage[: 20 + index]] for index in range(4)]
    prompts = [engine.prepare(chat, 40, max_length=110) for chat in chats]
    alone = plain.decode(prompts)
    scheduler = Scheduler(Slots(engine, sizes=(4,), max_length=110, max_prefix_bytes=2**26))
    try:
        first = list(scheduler.submit(prompts[0]))[-1].answer
        streams = scheduler.submit_all(prompts[1:])
        answers = [first, *(list(stream)[-1].answer for stream in streams)]
    finally:
        scheduler.close()
    assert scheduler.error is None
    assert ids(answers) == ids(alone)
    assert [answer.cached_tokens for answer in answers if answer] == [0, 32, 32, 32]
    assert count_copied(answers) > 0


def test_streams_of_copied_pieces_of_characters() -> None:
    """Tokens are bytes of two characters, and a special one, which adds no text."""
    engine = with_lookup(None)
    tokens = [*spell(BYTE_LEVEL, "é\N{THUMBS UP SIGN}"), 0]
    biased = SamplingConfig(temperature=1.0, seed=4, logit_bias=dict.fromkeys(tokens, 80.0))
    prompt = engine.prepare(tokens * 3, 60, biased)
    chunks = list(engine.decode_rounds(prompt))
    answer = chunks[-1].answer
    (alone,) = engine.with_tree({1: None}).decode([prompt])
    assert answer is not None and set(answer.output_ids) == {*tokens}
    assert (answer.output_ids, answer.text) == (alone.output_ids, alone.text)
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert count_copied([answer]) > 0


def test_streams_tell_copies_from_drafts() -> None:
    engine = with_lookup(POSS, SHALLOW)
    prompt = prepare_all(engine)[-1]
    (answer,) = engine.decode([prompt])
    chunks = list(engine.decode_rounds(prompt))
    assert chunks[-1].answer == answer
    copied = [sum(depth < 0 for depth in chunk.depths) for chunk in chunks[1:]]
    drafted = [sum(depth > 0 for depth in chunk.depths) for chunk in chunks[1:]]
    assert copied == answer.copied_per_round and sum(copied) > 0
    assert [a + b for a, b in zip(copied, drafted, strict=True)] == answer.accepted_per_round
    for chunk in chunks:
        origins = [piece.origin for piece in chunk.pieces]
        assert origins == sorted(origins, key=["drafted", "copied", "chosen"].index)


def test_a_loop_is_copied_to_its_end() -> None:
    """Lookup alone, of a target whose next token follows from the last one."""
    llama = tiny_llama(vocab_size=13, max_position_embeddings=400)
    target, _ = certain_pair(llama, DraftConfig(layer=llama), sharpness=3.0, disorder=0.0)
    engine = make_engine(llama, target, tree=TREE)
    (want,) = engine.generate([[3, 5]], max_new_tokens=90)
    (answer,) = engine.with_tree(TREE, lookup=LOOKUP).generate([[3, 5]], max_new_tokens=90)
    assert answer.output_ids == want.output_ids
    assert answer.accepted_per_round[-3:-1] == [LOOKUP, LOOKUP]
    assert answer.copied_per_round == answer.accepted_per_round


@pytest.mark.slow
def test_devices_copy_alike() -> None:
    sampling = [SamplingConfig(), SamplingConfig(temperature=0.5, seed=3, repetition_penalty=1.1)]
    prompts, sampling = [[1, 2, 3, 1, 2], [4] * 9] * 2, sampling * 2
    texts = []
    for mesh in (EIGHT, None):
        engine = random_engine(POSS_ON_MESH, mesh)
        engine = engine.with_tree(engine.trees, lookup=LOOKUP)
        texts.append(engine.generate(prompts, max_new_tokens=30, batch_size=4, sampling=sampling))
    assert texts[0] == texts[1]
    assert count_copied(texts[0]) > 0


SAMPLED = "lookup: want coupled or argmax drafting, got sampled"


@pytest.mark.parametrize("main", [generate.main, serve.main, bench.main, lossless.main])
def test_programs_refuse_sampled_drafts_before_they_load_models(main: Main) -> None:
    words = ["--target", "nowhere", "--lookup", "3", "--drafting", "sampled"]
    words += ["--question", "?"] if main is generate.main else []
    assert SAMPLED in refusal(main, *words)


def test_engines_and_methods_with_sampled_drafts_are_refused() -> None:
    with pytest.raises(UserError, match=SAMPLED):
        draw_engine(TREE, drafting="sampled").with_tree(TREE, lookup=LOOKUP)
    method = MethodConfig(draft="d", drafting="sampled")
    with pytest.raises(ValueError, match=rf"methods\.m: {SAMPLED}"):
        BenchConfig(target="t", methods={"m": method}, lookup=3)


def test_the_screen_marks_copies_apart(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [Piece("a", 1), Piece("b", -2), Piece("c", -3), Piece("d", 0)]
    Screen(shows_drafts=True, shows_copies=True).show(Chunk(pieces, [5] * 4, [1, -2, -3, 0]))
    (a, b), (c, d) = BRACKETS, BRACKETS_OF_COPIES
    shown = capsys.readouterr()
    assert shown.out == f"{a}a{b}{c}bc{d}d"
    copies = f"copies from prompt and answer {c}like this{d}"
    assert shown.err == f"accepted drafts look {a}like this{b}, {copies}\n"


def test_no_tree_and_lookup_leave_out_the_draft(runs: Runs) -> None:
    models = {"target": runs.model("target"), "draft": runs.model("poss2")}
    engine = load_engine(GenerateConfig(**models, trees="none", lookup=5, question="?"))
    assert (engine.draft_config, engine.max_accepted) == (None, 5)


@pytest.mark.parametrize(
    ("device", "settings", "lookup"),
    [
        ("cpu", {}, 8),
        ("cpu", {"lookup": 0}, 0),
        ("cpu", {"draft": None}, 0),
        ("cpu", {"drafting": "sampled"}, 0),
        ("gpu", {}, 0),
        ("gpu", {"lookup": 3}, 3),
    ],
)
def test_a_draft_on_cpu_is_joined_by_copies(runs, monkeypatch, device, settings, lookup) -> None:
    models = {"target": runs.model("target"), "draft": runs.model("poss2")}
    monkeypatch.setattr(trees.jax, "default_backend", lambda: device)
    assert load_engine(GenerateConfig(question="?", **models | settings)).settings.lookup == lookup
