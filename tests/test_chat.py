"""A conversation in the terminal: answers are the engine's own, commands do what they say."""

import io
import re
import sys
from collections.abc import Sequence

import pytest
from programs import Runs, copy_model, refusal

import poss_jax
from infer.chat import main
from infer.chat_session import Answered, Chat, compare, read_lines
from poss_jax.config.decoding import ChatConfig, EngineConfig
from poss_jax.engine.answers import Chunk
from poss_jax.engine.prompts import PreparedPrompt, with_seed
from poss_jax.program.running import BRACKETS, BRACKETS_OF_COPIES

N = 6
TREE = poss_jax.TreeConfig(depth=3, top_k=2, total_tokens=6)
FIRST, SECOND = ({"role": "user", "content": text} for text in ("def area_7", "def area_3"))


@pytest.fixture(scope="module")
def engine(runs: Runs) -> poss_jax.Engine:
    return poss_jax.Engine.load(runs.model("target"), runs.model("poss2"), EngineConfig(tree=TREE))


@pytest.fixture(autouse=True)
def no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def chat_session(engine: poss_jax.Engine, **settings: object) -> Chat:
    return Chat(engine, ChatConfig(target="t", max_new_tokens=N, plain=True, **settings))


def said(capsys: pytest.CaptureFixture[str], chat: Chat, *lines: str) -> list[str]:
    """The program's output without times."""
    capsys.readouterr()
    for line in lines:
        chat.take(line)
    out = re.sub(r"\d+\.\d+ (s|tokens/s|x)\b", r"_ \1", capsys.readouterr().out)
    return out.removesuffix("\n").split("\n")


def answer(engine: poss_jax.Engine, messages: Sequence[dict[str, str]], index: int = 0) -> str:
    sampling = with_seed(poss_jax.SamplingConfig(), index)
    (one,) = engine.generate([messages], max_new_tokens=N, sampling=[sampling])
    return one.text or ""


def test_the_program_answers_the_lines_of_a_pipe(runs, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("def area_7\n\n/compare\n/quit\nnever read\n"))
    tree = "--tree-depth 3 --tree-top-k 2 --tree-total-tokens 6".split()
    models = ["--target", runs.model("target"), "--draft", runs.model("poss2")]
    main([*models, *tree, "--max-new-tokens", str(N)])
    captured = capsys.readouterr()
    marks = "accepted drafts look {}like this{}, copies from prompt and answer {}like this{}\n"
    assert captured.err == marks.format(*BRACKETS, *BRACKETS_OF_COPIES)
    assert [line for line in captured.out.splitlines() if line.startswith(">")] == [
        "> def area_7",
        "> ",
        "> /compare",
        "> /quit",
    ]
    assert "x as fast; the texts are equal" in captured.out and "never" not in captured.out


def test_answers_join_the_conversation_and_compare_repeats_the_last(engine, capsys) -> None:
    chat, text = chat_session(engine), answer(engine, [FIRST])
    *shown, line = said(capsys, chat, FIRST["content"])
    assert shown == text.split("\n")
    assert re.fullmatch(rf"{N} tokens in _ s, _ tokens/s, \d\.\d\d tokens per pass", line)
    *again, line, ratio = said(capsys, chat, "/compare")
    assert again == shown and line.endswith(", 1.00 tokens per pass")
    assert ratio == "with drafts _ s, without _ s: _ x as fast; the texts are equal"
    said(capsys, chat, SECOND["content"])
    asked = [FIRST, {"role": "assistant", "content": text}, SECOND]
    second = {"role": "assistant", "content": answer(engine, asked, index=1)}
    assert chat.turns == [*asked, second]


def test_reset_and_system_begin_anew(engine, capsys) -> None:
    chat = chat_session(engine)
    said(capsys, chat, FIRST["content"], "/reset")
    assert (chat.turns, chat.last) == ([], None)
    said(capsys, chat, "/system Be brief.", FIRST["content"])
    system = {"role": "system", "content": "Be brief."}
    assert chat.last and chat.last.prompt.ids == engine.encode([system, FIRST])
    said(capsys, chat, "/system")
    assert chat.system is None


def test_temperature_draws_with_a_seed_per_question(engine, capsys) -> None:
    chat = chat_session(engine)
    assert said(capsys, chat, "/temperature 1.5") == ["temperature 1.5"]
    said(capsys, chat, FIRST["content"], "/reset", FIRST["content"])
    wanted = with_seed(poss_jax.SamplingConfig(temperature=1.5), 1)
    assert chat.last and chat.last.prompt.sampling == wanted
    (whole,) = engine.generate([[FIRST]], max_new_tokens=N, sampling=[wanted])
    assert chat.last.chunk.output_ids == whole.output_ids


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/what", "'/what': want one of /compare, "),
        ("/compare", "/compare: want a question that was answered; ask one"),
        ("/reset now", "/reset: want nothing behind it, got 'now'"),
        ("/temperature", "/temperature: want a number, got ''"),
        ("/temperature -1", "/temperature: temperature: Input should be greater than or equal to"),
        ("word " * 300, "prompt of "),
    ],
)
def test_a_mistake_is_one_line_and_the_conversation_goes_on(engine, line, error, capsys) -> None:
    chat = chat_session(engine)
    (shown,) = said(capsys, chat, line)
    assert shown.startswith(f"error: {error}")
    assert chat.turns == []


def test_the_oldest_turns_make_room(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    engine = poss_jax.Engine.load(runs.model("target"), settings=EngineConfig(max_length=96))
    chat = chat_session(engine)
    lines = said(capsys, chat, *[f"def area_{n}(width)" for n in range(6)])
    assert any("the conversation is long: " in line for line in lines)
    assert chat.turns[0]["role"] == "user" and 2 <= len(chat.turns) < 12
    assert chat.last and len(chat.last.prompt.ids) + N <= 96
    kept = engine.encode(chat.turns[:-1])
    assert chat.last.prompt.ids == kept


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(engine, monkeypatch, capsys) -> None:
    chat = chat_session(engine)
    show, shown = chat._screen.show, []

    def interrupted(chunk: Chunk) -> None:
        if shown:
            raise KeyboardInterrupt
        shown.append(chunk)
        show(chunk)

    monkeypatch.setattr(chat._screen, "show", interrupted)
    assert said(capsys, chat, FIRST["content"])[-1].endswith(", stopped")
    assert chat.turns[-1]["content"] == shown[0].text
    (error,) = said(capsys, chat, SECOND["content"])  # before its first word
    assert error == "error: stopped before the first word; ask again"
    assert len(chat.turns) == 2


def test_ctrl_c_where_a_line_is_typed_is_no_end(monkeypatch, capsys) -> None:
    typed = iter([KeyboardInterrupt(), "hello", EOFError()])

    def read(prompt: str) -> str:
        got = next(typed)
        if isinstance(got, BaseException):
            raise got
        return got

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert list(read_lines()) == ["hello"]
    assert capsys.readouterr().out == "\nCtrl-D leaves\n\n"


def answered(ids: list[int], *, seconds: float, is_stopped: bool = False) -> Answered:
    return Answered(PreparedPrompt([0], 9), Chunk([], ids, [0] * len(ids)), 1, seconds, is_stopped)


def test_comparison() -> None:
    plain, other = (answered([1, 2, end, 4], seconds=seconds) for end, seconds in ((3, 2), (9, 1)))
    shown = compare(other, plain)
    assert shown.startswith("with drafts 1.0 s, without 2.0 s: 2.00 x as fast; ")
    assert shown.endswith("; the texts differ from token 3 on, as near ties can")
    shown = compare(answered([1, 2], seconds=1, is_stopped=True), plain)
    assert shown.startswith("with drafts 2.0 tokens/s, without 2.0 tokens/s: 1.00 x as fast; ")
    assert shown.endswith("; the texts are equal for 2 tokens")
    free = compare(other, answered([5], seconds=2), has_own_texts=True)
    assert free.endswith("; sampled drafts change the text")


def test_a_target_without_a_chat_template_is_refused(runs, tmp_path, monkeypatch) -> None:
    folder = copy_model(runs.model("target"), tmp_path / "base")  # type: ignore[operator]
    for file in (tmp_path / "base").glob("chat_template*"):  # type: ignore[operator]
        file.unlink()
    error = refusal(main, "--target", folder)
    assert "want a model with a chat template" in error and "poss generate" in error
