"""Streaming: an answer round by round is the answer, on the screen too, and may be broken off."""

import json
import sys
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from programs import Runs, copy_model, refusal, write_lines
from test_text import byte_fallback

from infer.generate import main
from infer.generate_run import Screen
from poss_jax import Chunk, Engine, Generation, SamplingConfig, TreeConfig, UserError
from poss_jax.config.decoding import EngineConfig
from poss_jax.engine.text import Piece
from poss_jax.program.running import BRACKETS, COLOUR, text_marks

N = 24
TREE = TreeConfig(depth=2, top_k=2, total_tokens=6)
PROMPTS = ["def area_7", "def area_1_1(width, heig", "中"]
SAMPLED = SamplingConfig(temperature=1.2, top_p=0.95, logit_bias={299: 1}, seed=5)


@pytest.fixture(scope="module")
def engine(runs: Runs) -> Engine:
    return Engine.load(runs.model("target"), runs.model("poss2"), EngineConfig(tree=TREE))


@pytest.fixture(scope="module")
def answers(engine: Engine) -> dict[str, list[Generation]]:
    """The answers of `generate`, one prompt at a time."""
    kinds = {"greedy": None, "sampled": [SAMPLED] * len(PROMPTS)}
    return {
        kind: engine.generate(PROMPTS, max_new_tokens=N, sampling=sampling)
        for kind, sampling in kinds.items()
    }


def chunks_of(engine: Engine, prompt: Any, **options: Any) -> tuple[list[Chunk], Generation]:
    chunks = list(engine.stream(prompt, max_new_tokens=N, **options))
    assert [chunk.answer for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    answer = chunks[-1].answer
    assert answer is not None
    return chunks, answer


# --------------------------------------------------------------------------------------------------
# The engine


@pytest.mark.parametrize(("kind", "sampling"), [("greedy", None), ("sampled", SAMPLED)])
def test_chunks_make_the_answer_of_generate(engine, answers, kind, sampling) -> None:
    assert any("\ufffd" in (answer.text or "") for answer in answers["sampled"])
    num_whole = 0
    for prompt, expected in zip(PROMPTS, answers[kind], strict=True):
        chunks, answer = chunks_of(engine, prompt, sampling=sampling)
        assert answer == expected
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert [token for chunk in chunks for token in chunk.output_ids] == expected.output_ids
        assert all(len(chunk.output_ids) == len(chunk.is_drafted) for chunk in chunks)
        # The first chunk is the token after the prompt; of a round, the first are drafted.
        assert chunks[0].is_drafted == [False]
        assert [sum(chunk.is_drafted) for chunk in chunks[1:]] == expected.accepted_per_round
        for chunk in chunks:
            num_drafted = sum(chunk.is_drafted)
            own = [0] * (len(chunk.depths) - num_drafted)
            assert chunk.depths == [*range(1, num_drafted + 1), *own]
        tokens = [engine.tokenizer.decode([token]) for token in answer.output_ids]
        if "\ufffd" not in "".join(tokens):  # so that every token is a piece
            assert [piece.text for chunk in chunks for piece in chunk.pieces] == tokens
            assert all([p.depth for p in chunk.pieces] == chunk.depths for chunk in chunks)
            num_whole += 1
    assert num_whole > 0 or sampling


@pytest.mark.parametrize(("kind", "sampling"), [("greedy", None), ("sampled", SAMPLED)])
def test_stop_strings_at_every_place_of_an_answer(engine, answers, kind, sampling) -> None:
    whole = answers[kind][0]
    text, decode = whole.text or "", engine.tokenizer.decode
    for at in range(0, len(text) - 3, 4):
        stop = text[at : at + 3]
        chunks, answer = chunks_of(engine, PROMPTS[0], sampling=sampling, stop=[stop])
        assert answer.text == text[: text.index(stop)]
        assert "".join(chunk.text for chunk in chunks) == answer.text
        count = len(answer.output_ids)
        assert answer.output_ids == whole.output_ids[:count]
        assert [token for chunk in chunks for token in chunk.output_ids] == answer.output_ids
        assert stop in decode(answer.output_ids)
        if "\ufffd" not in stop:  # which is decided by the token after it
            assert stop not in decode(answer.output_ids[:-1])
        assert answer.stop_reason == "stop"
        assert [sum(chunk.is_drafted) for chunk in chunks[1:]] == answer.accepted_per_round
        check_rounds(answer, whole)


def test_a_stop_string_may_name_a_special_token(engine: Engine) -> None:
    """The answer ends there as at a stop token, and its text has no special tokens."""
    name = "<pad>"
    token = engine.tokenizer.convert_tokens_to_ids(name)
    biased = SamplingConfig(logit_bias={token: 100.0})
    for stop in ([name], [name + name]):
        chunks, answer = chunks_of(engine, PROMPTS[0], sampling=biased, stop=stop)
        assert answer.output_ids == [token] * (len(stop[0]) // len(name))
        assert (answer.text, answer.stop_reason) == ("", "stop")
        assert not any(chunk.text for chunk in chunks)
    ended = engine.generate([PROMPTS[0]], max_new_tokens=N, sampling=biased, stop=[name])
    assert ended[0].output_ids == [token]


def check_rounds(answer: Generation, whole: Generation) -> None:
    """The rounds equal the whole answer's, the last one cut like the tokens."""
    last = len(answer.accepted_per_round) - 1
    if last < 0:
        assert len(answer.output_ids) == 1
        return
    assert answer.accepted_per_round[:last] == whole.accepted_per_round[:last]
    assert answer.offered_per_round[:last] == whole.offered_per_round[:last]
    accepted, offered = whole.accepted_per_round[last], whole.offered_per_round[last]
    in_last = (
        len(answer.output_ids) - 1 - sum(1 + count for count in answer.accepted_per_round[:last])
    )
    assert 1 <= in_last <= accepted + 1
    assert answer.accepted_per_round[last] == min(accepted, in_last)
    assert answer.offered_per_round[last] == (
        offered if in_last > accepted else min(offered, in_last)
    )


def test_stop_strings_in_batches_end_each_row_by_itself(engine, answers) -> None:
    first, second, _ = [answer.text or "" for answer in answers["greedy"]]
    stop = next(first[i : i + 6] for i in range(len(first) - 5) if first[i : i + 6] not in second)
    options = {"max_new_tokens": N, "stop": ["never there", stop]}
    alone = [[*engine.stream(prompt, **options)][-1].answer for prompt in PROMPTS]
    assert engine.generate(PROMPTS, batch_size=2, **options) == alone
    assert {answer.stop_reason for answer in alone} == {"stop", "length"}


def test_a_stream_may_be_broken_off(engine: Engine, answers: dict[str, list[Generation]]) -> None:
    stream = engine.stream(PROMPTS[0], max_new_tokens=N)
    first, second = next(stream), next(stream)
    assert (answers["greedy"][0].text or "").startswith(first.text + second.text)
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
    other = engine.stream(PROMPTS[1], max_new_tokens=N)
    next(other)  # left as it is
    assert chunks_of(engine, PROMPTS[0])[1] == answers["greedy"][0]


def test_an_answer_begins_with_its_space_unless_it_is_a_message(engine: Engine) -> None:
    """Decoders of SentencePiece drop the space before the first word of a text."""
    other, tokenizer = copy(engine), byte_fallback()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    other.tokenizer = tokenizer
    word, space = tokenizer.convert_tokens_to_ids(["▁a", "▁▁"])
    sampling = SamplingConfig(logit_bias={word: 90, space: 90}, temperature=1, seed=1)
    message = [{"role": "user", "content": "é"}]
    for prompt, dropped in (("é", ""), ([word], ""), ([0], " "), (message, " ")):
        (answer,) = other.generate([prompt], max_new_tokens=N, sampling=sampling)
        assert set(answer.output_ids) == {word, space}
        whole = "".join({word: " a", space: "  "}[token] for token in answer.output_ids)
        assert dropped + (answer.text or "") == whole
        assert chunks_of(other, prompt, sampling=sampling)[1] == answer
        (at_stop,) = other.generate([prompt], max_new_tokens=N, sampling=sampling, stop=["zz"])
        assert at_stop.text == answer.text


def test_without_tokenizer_there_are_tokens_and_no_text(engine, answers) -> None:
    ids, tokenizer = engine.encode(PROMPTS[0]), engine.tokenizer
    engine.tokenizer = None
    try:
        chunks, answer = chunks_of(engine, ids)
        with pytest.raises(UserError, match="stop: this target has no tokenizer"):
            engine.stream(ids, max_new_tokens=N, stop=["x"])
        for prompt in ("text", [{"role": "user", "content": "text"}]):
            with pytest.raises(UserError, match="this target has no tokenizer; give `prompt_ids`"):
                engine.encode(prompt)
    finally:
        engine.tokenizer = tokenizer
    assert answer.text is None and not any(chunk.pieces for chunk in chunks)
    assert answer.output_ids == answers["greedy"][0].output_ids


# --------------------------------------------------------------------------------------------------
# The program

OPTIONS = {
    "greedy": [],
    "sampled": "--temperature 1.2 --top-p .95 --seed 5 --logit-bias 299=1 --stop a".split(),
}
TREE_OPTIONS = "--tree-depth 2 --tree-top-k 2 --tree-total-tokens 6 --lookup 0".split()


@pytest.fixture(scope="module")
def models(runs: Runs) -> list[str]:
    return ["--target", runs.model("target"), "--draft", runs.model("poss2"), *TREE_OPTIONS]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    return write_lines(path, *[{"prompt": prompt} for prompt in PROMPTS])


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, dict[str, Any]]:
    main([*arguments, "--max-new-tokens", str(N)])
    text, _, last = capsys.readouterr().out.removesuffix("\n").rpartition("\n")
    return text, json.loads(last) | {"seconds_with_compilation": 0}


@pytest.mark.parametrize("kind", OPTIONS)
def test_streamed_text_is_what_is_printed_otherwise(models, prompts, kind, capsys) -> None:
    arguments = [*models, "--prompts", prompts, *OPTIONS[kind]]
    assert printed(capsys, *arguments, "--stream") == printed(capsys, *arguments)


def test_drafts_are_marked(models, answers, monkeypatch, capsys) -> None:
    set_colours(monkeypatch)
    options = ["--max-new-tokens", str(N), "--stream", "--show-drafts"]
    main([*models, "--prompt", PROMPTS[0], *options])
    captured = capsys.readouterr()
    before, after = BRACKETS
    assert captured.err == f"accepted drafts look {before}like this{after}\n"
    text, _, _ = captured.out.removesuffix("\n").rpartition("\n")
    answer = answers["greedy"][0]
    assert text.replace(before, "").replace(after, "") == answer.text
    accepting = sum(count > 0 for count in answer.accepted_per_round)
    assert accepting == text.count(before) == text.count(after) > 0
    assert not text.startswith(before)  # the first token is the target's own


def set_colours(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("is_terminal", "variables", "marks"),
    [
        (False, {}, BRACKETS),
        (False, {"FORCE_COLOR": "1"}, COLOUR),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, BRACKETS),
        (True, {}, COLOUR),
        (True, {"NO_COLOR": "1"}, BRACKETS),
    ],
)
def test_where_marks_are_colours(is_terminal, variables, marks, monkeypatch) -> None:
    set_colours(monkeypatch, **variables)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert text_marks() == marks


def test_terminals_obey_nothing_in_a_text(monkeypatch, capsys) -> None:
    """Such as a title, a cursor moved up, or letters turned around; files get it as it is."""
    text = "a\x1b]0;title\x07\x9b2A\r\x7f\u202eb\n\té\u200d中"
    chunk = Chunk([Piece(text, 0)], [], [])
    Screen(shows_drafts=False).show(chunk)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    Screen(shows_drafts=False).show(chunk)
    shown = r"a\x1b]0;title\x07\x9b2A\r\x7f\u202eb" + "\n\té\u200d中"
    assert capsys.readouterr().out == shown


def test_interrupted_stream_keeps_what_was_printed_and_the_finished_answers(
    models, prompts, answers, tmp_path, monkeypatch, capsys
):
    first, second = answers["greedy"][:2]
    show, shown = Screen.show, []

    def interrupted(self: Screen, chunk: Chunk) -> None:
        show(self, chunk)
        shown.append(chunk)
        if len(shown) == len(first.accepted_per_round) + 1 + 3:  # in the second answer
            raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "show", interrupted)
    output = tmp_path / "answers.jsonl"
    options = ["--prompts", prompts, "--max-new-tokens", str(N), "--output", str(output)]
    with pytest.raises(KeyboardInterrupt):
        main([*models, *options, "--stream"])
    text, _, last = capsys.readouterr().out.removesuffix("\n").rpartition("\n")
    begun = "".join(chunk.text for chunk in shown[-3:])
    assert begun and (second.text or "").startswith(begun)
    assert text == f"{first.text}\n{begun}"
    result = json.loads(last)
    assert (result["interrupted"], result["answers"]) == (True, 1)
    (line,) = map(json.loads, output.read_text().splitlines())
    assert line["text"] == first.text


def test_target_without_tokenizer_has_no_text_to_stream(runs: Runs, tmp_path: Path) -> None:
    folder = copy_model(runs.model("target"), tmp_path / "model", tokenizer_sha256=None)
    (tmp_path / "model" / "tokenizer.json").unlink()
    prompts = write_lines(tmp_path / "prompts", {"prompt_ids": [1]})
    error = refusal(main, "--target", folder, "--prompts", prompts, "--stream")
    assert error == "--stream shows text, but this target has no tokenizer; leave it out"
