"""Grammars that would take all time or memory are refused, and delay nobody else for long."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event, Thread
from typing import Any

import pytest
from serving import Served, request_bytes, serving, until
from test_grammar import SMALL, draw_engine
from test_scheduler_warm_up import Gate, answer_of, compiling, until_sizes
from tokenizer_pool import VOCAB_SIZE, tokenizer_of

from poss_jax import UserError
from poss_jax.engine import grammar as grammars
from poss_jax.engine import grammar_trials
from poss_jax.engine.grammar import Grammar, GrammarCompiler
from poss_jax.engine.grammar_trials import Trial
from poss_jax.engine.slots import Slots

CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer_of("added"), VOCAB_SIZE, [1])


def multiple(of: int) -> Grammar:
    return Grammar.json_schema({"type": "integer", "multipleOf": of})


@pytest.mark.quick
@pytest.mark.parametrize(
    "grammar",
    [
        multiple(999_983),
        Grammar.lark(" \n" * 30_000 + 'root ::= "a"'),  # before it is even read
    ],
    ids=["multiple", "blanks"],
)
def test_what_takes_long_is_refused(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(UserError, match="compiles within 1 s, this one takes longer; simplify"):
        compiler.submit(grammar).result(300)


def test_what_takes_much_memory_is_refused(compiler, monkeypatch) -> None:
    monkeypatch.setattr(grammars, "_CPU_SECONDS", (60.0,))
    with pytest.raises(UserError, match="at most 64 MiB, this one takes more"):
        compiler.submit(multiple(399_989)).result(300)


def test_a_killed_process_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.submit(Grammar.regex("a")).result(300)
    process = compiler._trials._process
    assert process is not None
    process.kill()
    process.wait()
    compiler.submit(Grammar.regex("ab")).result(300)


KILLED = """
import os, signal, sys
from pathlib import Path
folder = Path({folder!r})
sys.path.insert(0, str(folder))
import grammar_trials

def kill_first(*trial, go_on=grammar_trials._try):
    count = len([*folder.glob("killed*")])
    if count == {num_kills}:
        go_on(*trial)
    (folder / f"killed{{count}}").touch()
    os.kill(os.getpid(), signal.SIGKILL)

grammar_trials._try = kill_first
grammar_trials.main()
"""


@pytest.mark.parametrize("num_kills", [1, 2])
def test_a_killed_trial_is_repeated_once(compiler, monkeypatch, tmp_path, num_kills) -> None:
    """As by a system without memory; the grammar is to blame for none of it."""
    (tmp_path / "trials.py").write_text(KILLED.format(folder=str(tmp_path), num_kills=num_kills))
    shutil.copy(grammar_trials.__file__, tmp_path)
    monkeypatch.setattr(grammar_trials, "__file__", str(tmp_path / "trials.py"))
    grammar = Grammar.regex(f"k{{{num_kills}}}")
    compiler._trials.close()
    try:
        if num_kills == 2:
            with pytest.raises(UserError, match="killed twice; try again"):
                compiler.submit(grammar).result(300)
        compiler.submit(grammar).result(300)
    finally:
        compiler._trials.close()
    assert len([*tmp_path.glob("killed*")]) == num_kills


class Tries:
    """Trials without a process: those of `slow` grammars last until they are let go."""

    def __init__(self) -> None:
        self.tried: list[tuple[str, float]] = []
        self.goes_on = Event()

    def run(self, grammar: Grammar, seconds: float) -> Trial:
        self.tried.append((grammar.name, seconds))
        if grammar.name == "slow":
            assert self.goes_on.wait(60)
            return Trial("time")
        return Trial("", source=grammar.source, num_bytes=2**20)


@pytest.fixture
def tries(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tries]:
    tries = Tries()
    monkeypatch.setattr(compiler, "_trials", tries)
    yield tries
    tries.goes_on.set()


def test_first_trials_come_before_long_ones(compiler: GrammarCompiler, tries: Tries) -> None:
    slow = [compiler.submit(Grammar.regex(f"x{index}", "slow")) for index in range(3)]
    fast = compiler.submit(Grammar.regex("fast", "fast"))
    tries.goes_on.set()
    fast.result(60)
    for one in slow:
        with pytest.raises(UserError, match="takes longer"):
            one.result(60)
    short, long = grammars._CPU_SECONDS
    assert tries.tried == [*[("slow", short)] * 3, ("fast", short), *[("slow", long)] * 3]


def test_who_left_is_not_served(compiler: GrammarCompiler, tries: Tries) -> None:
    slow = [compiler.submit(Grammar.regex(f"y{index}", "slow")) for index in range(50)]
    until(lambda: tries.tried)
    for one in slow:
        one.cancel()
    tries.goes_on.set()
    compiler.submit(Grammar.regex("other", "fast")).result(60)
    assert len(tries.tried) == 2


def test_what_is_kept_is_bounded(compiler, tries, monkeypatch) -> None:
    monkeypatch.setattr(grammars, "_MOST_KEPT_BYTES", 3 * 2**20)
    for index in range(8):
        compiler.submit(Grammar.regex(f"z{index}", "fast")).result(60)
    assert [json.loads(one.source) for one in compiler._kept][-2:] == [
        json.loads(Grammar.regex(f"z{index}").source) for index in (6, 7)
    ]
    assert len(compiler._kept) == 2
    compiler.submit(Grammar.regex("z6", "fast")).result(60)
    assert len(tries.tried) == 8  # a kept one is not tried again


@contextmanager
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, Event]]:
    """A server whose compiler waits for an event."""
    goes_on, compile_one = Event(), GrammarCompiler._compile

    def wait(self: GrammarCompiler, grammar: Grammar, trial: int) -> Any:
        assert goes_on.wait(60)
        return compile_one(self, grammar, trial)

    monkeypatch.setattr(GrammarCompiler, "_compile", wait)
    settings: Any = {"slots": (1,), "max_logprobs": 0, "max_length": 100, "drain_seconds": 1.0}
    with serving(draw_engine(SMALL), has_grammars=True, batch_size=1, **settings) as served:
        until(lambda: served.service.is_ready, seconds=300)
        try:
            yield served, goes_on
        finally:
            goes_on.set()


def test_a_grammar_waits_for_its_rounds_and_lets_others_pass(monkeypatch) -> None:
    """They are compiled next, and not by the thread that decodes."""
    engine, gate = draw_engine(SMALL), Gate(monkeypatch)
    with compiling(Slots(engine, sizes=(1, 2), max_length=100), gate) as scheduler:
        until_sizes(scheduler, gate, (1,))
        assert scheduler.compilation is not None
        grammar = Grammar.choice(["yes", "no"])
        guided = scheduler.submit(grammar.constrain(engine.prepare([5, 7], 40), engine))
        assert answer_of(scheduler.submit(engine.prepare([5, 7], 5))).stop_reason == "length"
        assert scheduler.num_waiting == 1
        while not scheduler.compilation.guided_sizes:
            gate.open(1)
            time.sleep(0.05)
        assert scheduler.compilation.sizes == (1,)
        assert answer_of(guided).text in ("yes", "no")
        assert scheduler.stats.compilations == 0


def test_other_requests_do_not_wait_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    with stuck(monkeypatch) as (served, goes_on):
        replies: list[Any] = []
        ask = {"prompt": "x", "max_tokens": 4} | CHOICE
        waiting = Thread(target=lambda: replies.append(served.post("/v1/completions", ask)))
        waiting.start()
        for fields in ({"prompt": "be strict now"}, {"prompt": "x", "user": "tool_choice" * 7000}):
            reply = served.post("/v1/completions", {"max_tokens": 2} | fields)
            assert reply.status_code == 200
        assert not replies
        goes_on.set()
        waiting.join(60)
        assert replies[0].json()["choices"][0]["text"] in ("yes", "no")


def test_a_client_that_leaves_takes_its_grammar_along(monkeypatch: pytest.MonkeyPatch) -> None:
    with stuck(monkeypatch) as (served, goes_on):
        compiled: list[str] = []
        read = GrammarCompiler._read
        monkeypatch.setattr(
            GrammarCompiler,
            "_read",
            lambda self, *one: compiled.append(one[0].source) or read(self, *one),
        )
        for index in range(6):
            body = {"prompt": "x", "structured_outputs": {"regex": f"left{index}"}}
            with closing(served.connect(request_bytes("/v1/completions", body))):
                time.sleep(0.2)
        until(lambda: served.server.server_state.connections == set())
        goes_on.set()
        ask = {"prompt": "x", "max_tokens": 4} | CHOICE
        assert served.post("/v1/completions", ask).status_code == 200
        assert len(compiled) <= 2  # the first was under way


def test_the_server_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with stuck(monkeypatch) as (served, _):
        body = {"prompt": "x"} | CHOICE
        with closing(served.connect(request_bytes("/v1/completions", body))):
            time.sleep(0.2)
            begun = time.monotonic()
            served.server.handle_exit(15, None)
            until(lambda: served.scheduler.is_closed)
        assert time.monotonic() - begun < 20
