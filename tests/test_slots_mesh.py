"""The scheduler on several devices and in several processes: the texts of one device."""

import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from isolation import QUICK_COMPILATION
from serving import Program, free_port, started, until
from test_mesh import E3, EIGHT, POSS, SAMPLED, TREE, random_engine

from infer import serve
from poss_jax import Engine, SamplingConfig, UserError
from poss_jax.config.decoding import EngineConfig, ServeConfig
from poss_jax.config.models import MeshConfig
from poss_jax.engine import leader
from poss_jax.engine.batch import score_prompt
from poss_jax.engine.grammar import Grammar
from poss_jax.engine.leader import Leader, follow
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.scheduler import Scheduler
from poss_jax.engine.slots import Slots
from poss_jax.program.running import UNEXPECTED

REQUESTS = [  # prompt, new tokens, settings
    ([1, 2, 3], 12, SamplingConfig()),
    ([4, 5, 6, 7], 20, SAMPLED),
    ([8], 5, SamplingConfig(temperature=1, seed=4)),
    ([5] * 90, 30, SamplingConfig(frequency_penalty=0.5, presence_penalty=0.5)),
    ([9, 10], 9, SamplingConfig(temperature=0.7, seed=9, logit_bias={3: 2.0})),
    ([7] * 20, 1, SamplingConfig()),
]


def prepare_all(engine: Engine) -> list[PreparedPrompt]:
    return [engine.prepare(*request) for request in REQUESTS]


def serve_all(scheduler: Scheduler, engine: Engine) -> list[Any]:
    streams = [scheduler.submit(prompt) for prompt in prepare_all(engine)]
    return [list(stream)[-1].answer for stream in streams]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "vocabulary", "sizes"),
    [(POSS, None, (4,)), (E3, tuple(range(0, 256, 2)), (1, 4))],
    ids=["heads", "2 heads"],
)
def test_eight_devices_serve_the_texts_of_one_and_compile_nothing(draft, vocabulary, sizes) -> None:
    alike = {"vocabulary": vocabulary, "num_layers": 1 + max(draft.aux_layers, default=0)}
    engine, alone = (random_engine(draft, mesh, **alike) for mesh in (EIGHT, None))
    scheduler = Scheduler(Slots(engine, sizes=sizes, max_length=128))
    try:
        scheduler.warm_up()
        answers = serve_all(scheduler, engine)
        assert scheduler.stats.compilations == 0
    finally:
        scheduler.close()
    assert answers == alone.decode(prepare_all(alone), batch_size=len(REQUESTS))


def test_slots_are_made_in_parts() -> None:
    slots = Slots(random_engine(POSS, EIGHT), sizes=(1, 4), max_length=128)
    cache = slots.state.target_cache.k[0]
    assert cache.sharding.shard_shape(cache.shape) == (1, 1, cache.shape[2], 8)


def test_groups_that_split_the_batch_are_refused() -> None:
    engine = random_engine(POSS, MeshConfig(data=2, tensor=4))
    with pytest.raises(UserError, match=r"^mesh\.data 2: a server takes one group of devices; .*$"):
        Slots(engine, sizes=(1,))


class Store:
    """Stands in for the key-value store of `jax.distributed`; never waits."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_timeouts = 0

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        assert key not in self.values
        self.values[key] = value

    def key_value_delete(self, key: str) -> None:
        del self.values[key]

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        assert milliseconds > 0
        if self.num_timeouts:
            self.num_timeouts -= 1
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed")
        return self.values[key]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(leader, "_store", lambda: store)
    return store


def test_a_follower_holds_the_texts_of_the_leader(store, monkeypatch) -> None:
    engine = random_engine(POSS, None, num_layers=1)
    ours, theirs = (
        Slots(engine, sizes=(1, 4), max_length=128, max_prefix_bytes=2**20) for _ in range(2)
    )
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        scheduler = Scheduler(ours)
    try:
        expected = engine.decode(prepare_all(engine), batch_size=len(REQUESTS))
        assert [serve_all(scheduler, engine) for _ in range(2)] == [expected] * 2
        assert scheduler.stats.cached_tokens >= 64
        with pytest.raises(UserError, match=r"^update_weights: want a server of one process, .*$"):
            scheduler.update_weights({})
    finally:
        scheduler.close()
    store.num_timeouts = 2
    follow(theirs)
    assert theirs.size == ours.size and len(theirs.prefixes) == len(ours.prefixes) > 0
    for a, b in zip(jax.tree.leaves(theirs.state), jax.tree.leaves(ours.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_followers_are_dismissed_when_the_scheduler_fails(store, monkeypatch) -> None:
    slots = Slots(random_engine(POSS, None), sizes=(1,), max_length=128)
    monkeypatch.setattr(slots, "begin", lambda prompt: 1 / 0)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        scheduler = Scheduler(slots)
    scheduler.submit(PreparedPrompt([1], 1))
    scheduler._thread.join(10)
    monkeypatch.setattr(slots, "begin", lambda prompt: None)
    follow(slots)


def test_old_steps_leave_the_store_and_a_lost_leader_is_an_error(store, monkeypatch) -> None:
    monkeypatch.setattr(leader, "_KEPT", 3)
    slots = FakeSlots()
    told: Any = Leader(slots)
    for first in range(5):
        told.extend(first, first + 1)
    assert sorted(store.values) == [f"poss_jax/steps/{index}" for index in (2, 3, 4)]
    assert told.size == 7
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        follow(slots)


class FakeSlots(Slots):
    """Takes steps and does nothing."""

    def __init__(self) -> None:
        self.size = 7

    def extend(self, first: int, last: int) -> None:
        assert first + 1 == last


def test_several_processes_have_one_grid_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServeConfig()
    assert serve._on_all_devices(config) is config
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert serve._on_all_devices(config).mesh == MeshConfig(data=1, tensor=-1)
    given = ServeConfig(mesh=EIGHT)
    assert serve._on_all_devices(given).mesh == EIGHT
    with pytest.raises(UserError, match=r"^mesh data=1 .*: want all 8 devices of 2 processes; .*$"):
        serve._on_all_devices(ServeConfig(mesh=MeshConfig(data=1)))


@contextmanager
def server_of_two(models: Path) -> Iterator[tuple[str, list[Program]]]:
    """Two processes with a device each that serve one model: address and processes."""
    port = free_port()
    environment = {
        "XLA_FLAGS": QUICK_COMPILATION,
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }
    pair = [str(models / "target"), "--draft", str(models / "draft")]
    options = ["--port", str(port), "--batch-size", "2", "slots=[2]", "max_logprobs=1"]
    tree = [f"tree.{key}={value}" for key, value in vars(TREE).items()]
    command = ["-m", "infer.serve", "--target", *pair, *options, *tree]
    with ExitStack() as stack:
        programs = [
            stack.enter_context(started(command, **environment, JAX_PROCESS_ID=str(index)))
            for index in range(2)
        ]
        address = f"http://127.0.0.1:{port}"
        until(lambda: is_ready(address, programs), seconds=240)
        yield address, programs


def is_ready(address: str, programs: list[Program]) -> bool:
    assert all(program.process.poll() is None for program in programs)
    with suppress(httpx.TransportError):
        return httpx.get(f"{address}/ready").is_success
    return False


def ask(address: str, **body: Any) -> dict[str, Any]:
    body |= {"return_token_ids": True}
    reply = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    return reply.raise_for_status().json()["choices"][0]


def check_grammars(address: str, engine: Engine) -> None:
    pattern = "[a-z]{3,9}-[0-9]{2}"
    sampling = SamplingConfig(temperature=1.0, seed=6)
    prompt = Grammar.regex(pattern).constrain(engine.prepare([1, 2, 3], 20, sampling), engine)
    (answer,) = engine.decode([prompt])
    asked = {"prompt": [1, 2, 3], "max_tokens": 20, "temperature": 1, "seed": 6}
    got = ask(address, **asked, structured_outputs={"regex": pattern})
    assert got["token_ids"] == answer.output_ids
    assert re.fullmatch(pattern, got["text"])


def check_scores(address: str, engine: Engine) -> None:
    prompt = np.random.default_rng(0).integers(3, 270, 90).tolist()  # two chunks
    got = ask(address, prompt=prompt, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]
    values = [one[str(token)]["logprob"] for one, token in zip(got[1:], prompt[1:], strict=True)]
    want = [one.chosen for one in score_prompt(engine, prompt)]
    np.testing.assert_allclose(values, want, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "codes"),
    [
        (signal.SIGTERM, [{0}, {0}]),
        # JAX aborts the other process, unless that finds the store of steps gone first.
        (signal.SIGKILL, [{-signal.SIGKILL}, {-signal.SIGABRT, UNEXPECTED}]),
    ],
)
def test_two_processes_serve_one_model_and_end_together(fixtures, told, codes) -> None:
    models = fixtures / "format_v1"
    engine = Engine.load(models / "target", models / "draft", EngineConfig(tree=TREE))
    drawn = {"temperature": 1, "seed": 5, "top_p": 0.9, "presence_penalty": 0.5}
    with server_of_two(models) as (address, programs):
        for prompt, one in [([1, 2, 3], {"temperature": 0}), ([4] * 70, drawn)]:
            (answer,) = engine.generate([prompt], max_new_tokens=12, sampling=SamplingConfig(**one))
            got = ask(address, prompt=prompt, max_tokens=12, **one)
            assert got["token_ids"] == answer.output_ids
        check_grammars(address, engine)
        check_scores(address, engine)
        programs[0].process.send_signal(told)
        logs = [program.said for program in programs]
        for program, wanted in zip(programs, codes, strict=True):
            assert program.process.wait(60) in wanted, logs
    assert "listening at" in logs[0] and "listening at" not in logs[1]
