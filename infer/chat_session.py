"""The conversation of `poss chat`: its answers, its commands, and the lines that are typed."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import reduce
from operator import add
from typing import NamedTuple

import jax

from poss_jax.config.decoding import ChatConfig, SamplingConfig
from poss_jax.config.paths import cache_folder
from poss_jax.config.reading import UserError, build_config, shorten
from poss_jax.engine.answers import Chunk
from poss_jax.engine.batch import FixedBatch
from poss_jax.engine.dialogue import Message
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt, PromptTooLong, with_seed
from poss_jax.program.options import choose_sampling, load_engine
from poss_jax.program.output import waiting
from poss_jax.program.running import DIM, has_colours

from .generate_run import Screen

_HISTORY_LINES = 1000


class Answered(NamedTuple):
    """An answer that was shown."""

    prompt: PreparedPrompt
    chunk: Chunk  # all rounds as one
    num_rounds: int  # after the token that the prompt alone gives
    seconds: float  # until its last word
    is_stopped: bool  # by Ctrl-C

    @property
    def tokens_per_second(self) -> float:
        """Speed of the whole answer, the reading of its prompt included."""
        return len(self.chunk.output_ids) / self.seconds

    def describe(self) -> str:
        """The line below an answer."""
        count, seconds = len(self.chunk.output_ids), self.seconds
        parts = [f"{count} tokens in {seconds:.1f} s", f"{self.tokens_per_second:.1f} tokens/s"]
        if self.num_rounds:
            parts.append(f"{(count - 1) / self.num_rounds:.2f} tokens per pass")
        return ", ".join(parts + ["stopped"] * self.is_stopped)


class Chat:
    """A conversation, and the commands that change it."""

    def __init__(self, engine: Engine, config: ChatConfig) -> None:
        self._engine, self._config = engine, config
        self._screen = Screen(
            shows_drafts=engine.draft_config is not None and not config.plain,
            shows_copies=engine.settings.lookup > 0 and not config.plain,
        )
        self._compiled: set[object] = set()
        self._num_asked = 0
        self.turns: list[Message] = []  # questions and answers
        self.system = config.system  # None leaves it to the chat template
        self.sampling = choose_sampling(config.sampling, engine)  # questions get their own seeds
        self.last: Answered | None = None  # None: there is none to compare

    def get_ready(self) -> None:
        """Compiles what a first question needs."""
        self._compile(self._engine, self._prepare({"role": "user", "content": "Hello"}))

    def take(self, line: str) -> None:
        """Answers a question, or runs a command."""
        name, _, text = line.partition(" ")
        try:
            if not line.startswith("/"):
                question = {"role": "user", "content": line}
                prompt = self._prepare(question)
                self._num_asked += 1
                self.last = self._answer(self._engine, prompt)
                self.turns += [question, {"role": "assistant", "content": self.last.chunk.text}]
                say(self.last.describe())
                return
            if name not in COMMANDS:
                raise UserError(f"{shorten(name)}: want one of {', '.join(COMMANDS)}")
            run, argument = COMMANDS[name]
            if text.strip() and not argument:
                raise UserError(f"{name}: want nothing behind it, got {shorten(text.strip())}")
            run(self, text.strip())
        except UserError as error:
            say(f"error: {error}")

    # ----------------------------------------------------------------------------------------------
    # Answers

    def _prepare(self, question: Message) -> PreparedPrompt:
        """Appends a question to the conversation; drops the oldest turns if it gets too long."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        sampling = with_seed(self.sampling, self._num_asked)
        turns = self.turns
        while True:
            try:
                messages = [*system, *turns, question]
                prompt = self._engine.prepare(messages, self._config.max_new_tokens, sampling)
                break
            except PromptTooLong:
                if not turns:
                    raise
                turns = turns[2:]
        if len(turns) < len(self.turns):
            say(f"the conversation is long: {len(turns) // 2} answers of it are kept")
        self.turns = turns
        return prompt

    def _answer(self, engine: Engine, prompt: PreparedPrompt) -> Answered:
        """Shows an answer as it is written."""
        chunks, is_stopped, started = [], False, 0.0
        try:
            self._compile(engine, prompt)
            started = time.perf_counter()
            for chunk in engine.decode_rounds(prompt, stop=self._config.stop):
                self._screen.show(chunk)
                chunks.append(chunk)
        except KeyboardInterrupt:
            is_stopped = True
        seconds = time.perf_counter() - started
        self._screen.end_line()
        if not chunks:
            raise UserError("stopped before the first word; ask again")
        return Answered(prompt, reduce(add, chunks), len(chunks) - 1, seconds, is_stopped)

    def _compile(self, engine: Engine, prompt: PreparedPrompt) -> None:
        """Compiles the programs of an answer before it is timed."""
        batch = FixedBatch(engine, [prompt])
        program = batch.config, jax.tree.structure(batch.request)
        if program in self._compiled:
            return
        with waiting("getting ready (longer the first time) ..."):
            batch.compile()
        self._compiled.add(program)

    # ----------------------------------------------------------------------------------------------
    # Commands

    def compare(self, text: str) -> None:
        """Answers the last question again without drafts, and compares times and texts."""
        if self.last is None:
            raise UserError("/compare: want a question that was answered; ask one")
        if not self._engine.max_accepted:
            raise UserError("/compare: want a draft to compare with; start with --draft DIR")
        plain = self._answer(self._engine.with_tree({1: None}), self.last.prompt)
        say(plain.describe())
        say(compare(self.last, plain, has_own_texts=self._engine.settings.drafting == "sampled"))

    def reset(self, text: str) -> None:
        """Forgets the conversation."""
        self.turns, self.last = [], None
        say("the conversation starts over")

    def set_system(self, text: str) -> None:
        """Starts over with another system message; without TEXT, with the model's own."""
        self.system = text or None
        self.reset("")

    def set_temperature(self, text: str) -> None:
        """Samples at this temperature from now on; 0 takes the likeliest token."""
        try:
            settings = asdict(self.sampling) | {"temperature": float(text)}
        except ValueError as error:
            raise UserError(f"/temperature: want a number, got {shorten(text)}") from error
        self.sampling = build_config(SamplingConfig, settings, origin="/temperature")
        say(f"temperature {self.sampling.temperature:g}")

    def help(self, text: str) -> None:
        """Lists the commands."""
        for name, (run, argument) in COMMANDS.items():
            say(f"{f'{name} {argument}':16}{(run.__doc__ or '').splitlines()[0]}")
        say("/quit or Ctrl-D leaves, Ctrl-C stops an answer")


COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str]] = {
    "/compare": (Chat.compare, ""),
    "/temperature": (Chat.set_temperature, "X"),
    "/system": (Chat.set_system, "TEXT"),
    "/reset": (Chat.reset, ""),
    "/help": (Chat.help, ""),
}
"""Name -> what it does, and the argument it takes."""


def compare(drafted: Answered, plain: Answered, *, has_own_texts: bool = False) -> str:
    """Says how two answers to one prompt compare, whose texts may differ with sampled drafts."""
    is_cut = drafted.is_stopped or plain.is_stopped
    ratio = drafted.tokens_per_second / plain.tokens_per_second
    ours, theirs = (
        f"{answer.tokens_per_second:.1f} tokens/s" if is_cut else f"{answer.seconds:.1f} s"
        for answer in (drafted, plain)
    )
    speed = f"with drafts {ours}, without {theirs}: {ratio:.2f} x as fast"
    if has_own_texts:
        return f"{speed}; sampled drafts change the text"
    pairs = list(zip(drafted.chunk.output_ids, plain.chunk.output_ids, strict=False))
    differing = [index for index, (a, b) in enumerate(pairs) if a != b]
    if differing:
        return f"{speed}; the texts differ from token {differing[0] + 1} on, as near ties can"
    return f"{speed}; the texts are equal{f' for {len(pairs)} tokens' if is_cut else ''}"


def say(line: str) -> None:
    """Prints a line that is the program's, not the model's."""
    mark, end_mark = DIM if has_colours() else ("", "")
    print(f"{mark}{line}{end_mark}", flush=True)


@contextmanager
def _line_editing() -> Iterator[None]:
    """Lets the user edit lines, and keeps them for the next time."""
    readline = None
    if sys.stdin.isatty():
        with suppress(ImportError):  # it is not everywhere
            import readline
    if readline is None:
        yield
        return
    history = cache_folder() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)


def read_lines() -> Iterator[str]:
    """Yields what the user types up to /quit or the end; a pipe's lines are shown as if typed."""
    is_typed = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_typed else "").strip()
        except EOFError:
            print(end="\n" if is_typed else "")
            return
        except KeyboardInterrupt:
            if not is_typed:
                raise
            print("\nCtrl-D leaves")
            continue
        if not is_typed:
            print(f"> {line}", flush=True)
        if line == "/quit":
            return
        if line:
            yield line


def talk(config: ChatConfig) -> None:
    """Talks until the user leaves."""
    with waiting("loading the models ..."):
        engine = load_engine(config)
    if not getattr(engine.tokenizer, "chat_template", None):
        raise UserError(
            f"target {engine.record.target.name}: want a model with a chat template, this one has "
            "none; continue texts with poss generate --prompt TEXT --stream"
        )
    engine.check_stop(config.stop)
    chat = Chat(engine, config)
    chat.get_ready()
    say(f"{engine.record.target.name}: ask something; /help lists the commands, Ctrl-D leaves")
    with _line_editing():
        for line in read_lines():
            chat.take(line)
