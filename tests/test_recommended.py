"""Sampling defaults: what a model's authors recommend, unless the user says otherwise."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from programs import Runs, copy_model, generate, refusal, write_lines

from infer.chat_session import Chat
from infer.generate import main as generate_main
from poss_jax import Engine, SamplingConfig
from poss_jax.bundled import default
from poss_jax.bundled.default import recommended_sampling
from poss_jax.checkpoint.record import FORMAT_VERSION
from poss_jax.config.decoding import ChatConfig, SamplingOptions, ServeConfig
from poss_jax.program.options import choose_sampling
from poss_jax.serving.bodies import CompletionRequest
from poss_jax.serving.requests import read_completion

FIELDS: dict[str, Any] = {"temperature": 0.25, "top_p": 0.9, "top_k": 7}
RECOMMENDED = {"do_sample": True, **FIELDS}
CHOSEN = SamplingConfig(**FIELDS)


@pytest.fixture(scope="module")
def target(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("recommended") / "model"
    copy_model(runs.model("target"), folder)
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return str(folder)


@pytest.fixture(scope="module")
def engine(target: str) -> Engine:
    return Engine.load(target)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (None, {}),
        ({"eos_token_id": 2}, {}),
        (RECOMMENDED, FIELDS),
        ({"do_sample": True, "top_k": None, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
    ],
)
def test_recommendation_is_the_generation_config(tmp_path, values, expected) -> None:
    if values is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert recommended_sampling(tmp_path) == SamplingConfig(**expected)


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"do_sample": True, "top_p": 2}])
def test_malformed_recommendation_is_one_line(runs, tmp_path, values) -> None:
    folder = tmp_path / "model"
    copy_model(runs.model("target"), folder)
    (folder / "generation_config.json").write_text(json.dumps(values))
    error = refusal(generate_main, "--target", str(folder), "--prompt", "x")
    assert error.startswith(f"{folder}/generation_config.json: t")


def test_default_target_samples_as_its_model_card_says(tmp_path: Path) -> None:
    folder = tmp_path / f"{default._NAME}-v{FORMAT_VERSION}"
    expected = SamplingConfig(temperature=0.2, top_p=0.9)
    assert default.recommended_sampling(folder) == expected
    assert default.recommended_sampling(tmp_path / "another") == SamplingConfig()


def test_generate_chat_and_server_share_the_defaults(engine, target, tmp_path) -> None:
    assert engine.recommended == CHOSEN
    (line,) = generate(target, None, tmp_path, "--prompt", "def")
    assert SamplingConfig(**line["sampling"]) == CHOSEN
    assert Chat(engine, ChatConfig()).sampling == CHOSEN
    (prompt,) = read_completion(engine, ServeConfig(), CompletionRequest(prompt="d")).prompts
    assert prompt.sampling == SamplingConfig(**FIELDS, seed=prompt.sampling.seed)


def test_prompts_win_over_options_and_options_over_the_model(target: str, tmp_path: Path) -> None:
    records = {"prompt": "def", "sampling": {"top_k": 0}}, {"prompt": "def"}
    words = ["--prompts", write_lines(tmp_path / "prompts.jsonl", *records)]
    lines = generate(target, None, tmp_path, *words, "--temperature", "0", "--top-k", "3")
    names = ("temperature", "top_k", "top_p")
    chosen = [[line["sampling"][name] for name in names] for line in lines]
    assert chosen == [[0.0, 0, 0.9], [0.0, 3, 0.9]]


def test_requests_win_over_the_servers_options_and_these_over_the_model(engine: Engine) -> None:
    config = ServeConfig(sampling=SamplingOptions(top_p=0.5))
    body = CompletionRequest(prompt="d", temperature=0)
    (prompt,) = read_completion(engine, config, body).prompts
    assert prompt.sampling == SamplingConfig(
        temperature=0.0, top_p=0.5, top_k=7, seed=prompt.sampling.seed
    )


def test_settings_are_shown_at_the_start(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    choose_sampling(SamplingOptions(top_p=0.5), engine)
    choose_sampling(SamplingOptions(temperature=0.0, top_p=0.5, top_k=0), engine)
    assert [record.getMessage() for record in caplog.records] == [
        "sampling: temperature 0.25, top_k 7, top_p 0.5 (the model's own temperature, top_k)",
        "sampling: temperature 0.0, top_p 0.5",
    ]
