"""The engine as users hold it: loading, prompts of every kind, limits, stop tokens, refusals."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from programs import Runs, copy_model
from watch import Watch

from poss_jax import Engine, Generation, SamplingConfig, TreeConfig, UserError
from poss_jax.checkpoint.folder import load_target
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import MeshConfig
from poss_jax.decode import speculate
from poss_jax.decode.sampling import OF_OUTPUT
from poss_jax.engine.batch import FixedBatch, score_prompt
from poss_jax.engine.device import least_bytes
from poss_jax.engine.prompts import prompt_seed, sampling_per_prompt
from poss_jax.engine.trees import fit_tree
from poss_jax.model.documents import encode
from poss_jax.model.sharding import bytes_per_device
from poss_jax.model.target import stack_layers

WATCHED = True  # see conftest.py
PROMPTS = ["def area_7", "def area_1_1(width, heig", [0, 5, 260]]
N = 24


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Engine:
    return Engine.load(runs.model("target"))


@pytest.fixture(scope="module")
def engine(runs: Runs) -> Engine:
    return Engine.load(runs.model("target"), runs.model("poss2"))


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[Generation]:
    return engine.generate(PROMPTS, max_new_tokens=N)


def outputs(answers: list[Generation]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


# --------------------------------------------------------------------------------------------------
# Answers


def test_answers_describe_themselves(engine: Engine, answers: list[Generation]) -> None:
    assert [answer.prompt_ids for answer in answers] == [engine.encode(p) for p in PROMPTS]
    assert answers[2].prompt_ids == PROMPTS[2]
    for answer in answers:
        assert answer.stop_reason == "length" and len(answer.output_ids) == N
        assert answer.text == engine.tokenizer.decode(answer.output_ids)
        # One token comes from the prompt; the last round may be cut just before its bonus token.
        emitted = 1 + sum(count + 1 for count in answer.accepted_per_round)
        assert emitted - N in (0, 1)
        assert answer.mean_acceptance_length == np.mean(answer.accepted_per_round) + 1
        offered = zip(answer.accepted_per_round, answer.offered_per_round, strict=True)
        assert all(0 <= taken <= most <= 4 for taken, most in offered)


def test_draft_changes_speed_but_not_output(plain: Engine, answers: list[Generation]) -> None:
    expected = plain.generate(PROMPTS, max_new_tokens=N)
    assert outputs(answers) == outputs(expected)
    assert all(answer.accepted_per_round == [0] * (N - 1) for answer in expected)
    assert max(answer.mean_acceptance_length for answer in answers) > 1.5


def test_trees_are_watched(engine: Engine, watched_programs: Watch) -> None:
    """No other test has this tree, whose program would be another watch's or nobody's."""
    own = engine.with_tree(TreeConfig(depth=1, top_k=3, total_tokens=3))
    own.generate(PROMPTS[:1], max_new_tokens=4)
    watched_programs.check(at_least=1)


def test_stops_at_the_first_stop_token(runs: Runs, answers: list[Generation]) -> None:
    output = answers[1].output_ids
    first = {token: output.index(token) for token in output}
    stop = max(first, key=first.__getitem__)  # the one that comes last for the first time
    for draft in (None, runs.model("poss2")):
        engine = Engine.load(runs.model("target"), draft)
        engine.stop_ids = [stop]
        (answer,) = engine.generate([answers[1].prompt_ids], max_new_tokens=N)
        assert 0 < first[stop] < N - 1
        assert answer.output_ids == output[: first[stop] + 1]
        assert answer.stop_reason == "stop"
        assert answer.text == engine.tokenizer.decode(output[: first[stop]])


def test_stop_ids_are_those_of_config_and_tokenizer(runs: Runs, tmp_path: Path) -> None:
    folder = copy_model(runs.model("target"), tmp_path / "model", config={"eos_token_ids": [9, 5]})
    assert Engine.load(folder).stop_ids == [1, 5, 9]
    assert Engine(*load_target(folder)).stop_ids == [5, 9]
    assert Engine(*load_target(runs.model("target"))).stop_ids == []


# --------------------------------------------------------------------------------------------------
# Prompts


def test_chat_template_and_text_do_not_double_the_bos(engine: Engine) -> None:
    messages = [{"role": "user", "content": "def area_1"}]
    chat = engine.encode(messages)
    assert engine.tokenizer.decode(chat) == "<s>### user\ndef area_1\n### assistant\n"
    assert chat.count(0) == 1
    assert engine.encode("<s>def") == engine.encode("def") == [0, *engine.encode("def")[1:]]


@pytest.mark.parametrize("template", [None, ""])
def test_chats_want_a_template(runs: Runs, template: str | None) -> None:
    engine = Engine.load(runs.model("target"))
    engine.tokenizer.chat_template = template
    with pytest.raises(
        UserError, match=r"want a tokenizer with a chat template, .*; give `prompt`"
    ):
        engine.encode([{"role": "user", "content": "text"}])


MESSAGE = {"role": "user", "content": "a"}
NO_MESSAGE = "messages: want a role and a content of text in each"
NO_PROMPT = "prompt: want text, a list of token ids or a list of"


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], "prompt: want at least one token, got an empty prompt"),
        ("<s>", "prompt: want at least one token, got none from '<s>'"),
        ([0, 300], "prompt: want token ids of 0 to 299, got 300; tokenise with the target's own"),
        ([-1], "prompt: want token ids of 0 to 299, got -1"),
        ([7] * 233, "prompt of 233 tokens and 24 new ones do not fit a length of 256; shorten"),
        ([MESSAGE, 5], NO_MESSAGE),
        ([MESSAGE, {"content": "a"}], NO_MESSAGE),
        ([MESSAGE, {"role": "", "content": "a"}], NO_MESSAGE),
        ([MESSAGE, {"role": "user", "content": None}], NO_MESSAGE),
        (5, NO_PROMPT),
        (MESSAGE, NO_PROMPT),
    ],
    ids=repr,
)
def test_prompts_that_are_refused(plain, monkeypatch, prompt: Any, error: str) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside of tests
    with pytest.raises(UserError, match=f"(^|: ){re.escape(error)}"):
        plain.generate([[1], prompt], max_new_tokens=24)


def test_text_with_a_token_that_the_target_does_not_embed(runs: Runs) -> None:
    engine = Engine.load(runs.model("target"))
    engine.tokenizer.add_tokens(["<image>"])
    with pytest.raises(UserError, match="want token ids of 0 to 299, got 300"):
        engine.encode("what is on <image>?")


BIASED = [SamplingConfig(), SamplingConfig(logit_bias={300: 1})]


@pytest.mark.parametrize(
    ("prompts", "settings", "error"),
    [
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: want at least 1, got 0"),
        ([[1]], {"batch_size": 0}, "batch_size: want at least 1, got 0"),
        ("def", {}, "prompts: want a list, got one text; put it into a list"),
        ([[1]], {"stop": "ab"}, "stop: want a list of strings, got one string"),
        (["a", "b"], {"sampling": BIASED}, "logit_bias: want token ids of 0 to 299, got 300"),
    ],
    ids=repr,
)
def test_calls_that_are_refused(plain, monkeypatch, prompts, settings, error) -> None:
    """Before anything is decoded."""
    monkeypatch.setattr(FixedBatch, "start", None)
    with pytest.raises(UserError, match=error):
        plain.generate(prompts, **{"max_new_tokens": 1} | settings)


def test_max_length_can_be_set(runs: Runs, caplog) -> None:
    def load(max_length: int | None) -> Engine:
        return Engine.load(runs.model("target"), settings=EngineConfig(max_length=max_length))

    assert len(load(30).prepare([7] * 6, 24).ids) == 6
    with pytest.raises(UserError, match=r"do not fit a length of 30; .* or raise max_length"):
        load(30).prepare([7] * 7, 24)
    with pytest.raises(UserError, match=r"^max_length: want 2 or more, .*, got 1$"):
        load(1)
    most = load(None).max_length
    assert not caplog.messages
    assert load(most + 1).max_length == most + 1
    assert f"max_length {most + 1} is more than the {most} tokens" in caplog.text


# --------------------------------------------------------------------------------------------------
# Batches of requests that differ

SETTINGS = [  # a bias each, so that all shapes fit one program
    SamplingConfig(temperature=1.2, top_p=0.95, logit_bias={9: 1}, seed=5),
    SamplingConfig(),
    SamplingConfig(temperature=0.7, top_k=5, repetition_penalty=1.3, logit_bias={9: 1}, seed=4),
    SamplingConfig(temperature=1, min_p=0.02, logit_bias={7: -1}, seed=5),
]
MIXED = [*PROMPTS, "def area_1_1(width, heig"]
SMALL = TreeConfig(depth=3, top_k=2, total_tokens=6)


@pytest.fixture(scope="module")
def small(runs: Runs) -> Engine:
    return Engine.load(runs.model("target"), runs.model("poss2"), EngineConfig(tree=SMALL))


def test_a_request_has_one_answer_alone_and_in_any_batch(small: Engine) -> None:
    alone = small.generate(MIXED, max_new_tokens=N, sampling=SETTINGS)
    assert len({answer.text for answer in alone}) == len(alone)
    call = {"max_new_tokens": N, "batch_size": 3}
    assert small.generate(MIXED, sampling=SETTINGS, **call) == alone
    turned = small.generate(MIXED[::-1], sampling=SETTINGS[::-1], **call)
    assert turned[::-1] == alone


def test_sampled_answers_need_no_draft(small: Engine, plain: Engine) -> None:
    call = {"max_new_tokens": N, "sampling": SETTINGS}
    assert outputs(plain.generate(MIXED, **call)) == outputs(small.generate(MIXED, **call))


def test_rows_stop_at_limits_of_their_own(small: Engine) -> None:
    pairs = zip(MIXED[:3], SETTINGS[:3], strict=True)
    prompts = [small.prepare(prompt, N, settings) for prompt, settings in pairs]
    whole = small.decode(prompts, batch_size=3)
    limits = [N, 1, 7]
    shorter = [p._replace(max_new_tokens=n) for p, n in zip(prompts, limits, strict=True)]
    answers = small.decode(shorter, batch_size=3)
    expected = [ids[:limit] for ids, limit in zip(outputs(whole), limits, strict=True)]
    assert outputs(answers) == expected
    assert answers[0] == whole[0]


def test_prompts_that_share_settings_have_seeds_of_their_own() -> None:
    shared = SamplingConfig(temperature=1, seed=7)
    first, second, third = sampling_per_prompt(shared, 3)
    assert first == shared
    assert second == replace(shared, seed=prompt_seed(7, 1))
    seeds = {prompt_seed(seed, index) for seed in range(20) for index in range(20)}
    assert len(seeds) == 400 and all(0 <= seed < 2**32 for seed in seeds)
    assert sampling_per_prompt([third, first], 2) == [third, first]
    with pytest.raises(UserError, match=r"one for all or one per prompt \(3\), got 2"):
        sampling_per_prompt([third, first], 3)


# --------------------------------------------------------------------------------------------------
# Trees and drafts


def test_trees_are_chosen_by_batch_size(runs: Runs) -> None:
    trees = {2: SMALL, 4: None}
    engine = Engine.load(runs.model("target"), runs.model("poss2"), EngineConfig(tree=trees))
    chosen = [engine.decode_config(N, batch_size) for batch_size in (1, 2, 3, 4, 9)]
    assert [config.tree for config in chosen[:3]] == [SMALL] * 3
    assert [config.draft is None for config in chosen] == [False, False, False, True, True]


def test_tree_that_asks_for_too_much_is_clamped_and_said_once(runs, caplog) -> None:
    tree = TreeConfig(depth=2, top_k=3, total_tokens=60)
    engine = Engine.load(runs.model("target"), runs.model("poss2"), EngineConfig(tree=tree))
    assert engine.trees[1] == TreeConfig(depth=2, top_k=3, total_tokens=3 + 9 + 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.name == "poss_jax.engine"
    assert record.getMessage().endswith(
        "2/3/60 (depth/top_k/total_tokens) asks for more than can be drafted; using 2/3/13"
    )


@pytest.mark.parametrize(
    ("asked", "vocabulary", "fitted"),
    [
        ((4, 4, 16), 300, (4, 4, 16)),
        ((1, 10, 12), 300, (1, 10, 11)),
        ((6, 10, 60), 4, (6, 4, 60)),
        ((1, 10, 60), 4, (1, 4, 5)),
    ],
)
def test_fitting_a_tree(asked, vocabulary, fitted, caplog) -> None:
    names = ("depth", "top_k", "total_tokens")
    tree = fit_tree(TreeConfig(**dict(zip(names, asked, strict=True))), vocabulary)
    assert (tree.depth, tree.top_k, tree.total_tokens) == fitted
    assert len(caplog.records) == (asked != fitted)


@pytest.mark.parametrize(
    ("settings", "left_out", "num_biased"),
    [
        ([{"temperature": 1.0}, {}], True, 0),
        ([{"temperature": 1.0}, {"logit_bias": {5: 1.0}}], True, 300),
        ([{"min_tokens": 2}, {}], False, 0),
        ([{"frequency_penalty": 0.5}, {"presence_penalty": 0.5}], False, 0),
    ],
)
def test_settings_that_no_prompt_has_are_not_compiled(
    plain: Engine, settings, left_out: bool, num_biased: int
) -> None:
    prompts = [plain.prepare([1], N, SamplingConfig(**given)) for given in settings]
    sampling = FixedBatch(plain, prompts, batch_size=3).request.sampling
    assert sampling is not None
    assert [getattr(sampling, name) is None for name in OF_OUTPUT] == [left_out] * 3
    assert sampling.bias_ids.shape == sampling.bias.shape == (3, num_biased)


# --------------------------------------------------------------------------------------------------
# Memory


def test_the_least_memory_is_less_than_what_is_held(engine: Engine) -> None:
    batch = FixedBatch(engine, [engine.prepare([1, 2, 3], N)], batch_size=3)
    config, request = batch.config, batch.request
    counted = least_bytes(engine.weights, config, batch_size=3)
    state = jax.jit(speculate.start, static_argnums=1)(engine.weights, config, request)
    held = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves((engine.weights, request, state))}
    logits_and_candidates = 3 * (4 * config.tree.num_nodes * 300 + 8 * config.tree.num_candidates)
    assert 0.9 < counted / (sum(held.values()) + logits_and_candidates) <= 1


def test_what_cannot_fit_is_refused_before_it_is_tried(plain, monkeypatch) -> None:
    monkeypatch.setattr(FixedBatch, "start", None)
    call = {"max_new_tokens": N, "batch_size": 10_000_000}
    with pytest.raises(UserError, match="batch_size 10000000 and room for 256 tokens of prompt"):
        plain.generate(PROMPTS, **call)
    monkeypatch.setattr("poss_jax.engine.device.device_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"at least 0\.0 GiB, the device has 0\.0 GiB; lower batch"):
        plain.stream("def", max_new_tokens=N)
    monkeypatch.setattr("poss_jax.engine.device.device_memory", lambda: None)
    FixedBatch(plain, [plain.prepare([1], N)])


@pytest.mark.parametrize(("quantise", "tensor"), [(None, 4), ("int8", 1)])
def test_a_target_that_cannot_fit_is_not_read(runs, monkeypatch, quantise, tensor) -> None:
    call = {"mesh": MeshConfig(tensor=tensor), "dtype": jnp.bfloat16}
    call["settings"] = EngineConfig(quantise=quantise)
    memory = "poss_jax.engine.device.device_memory"
    leaves = jax.tree.leaves(Engine.load(runs.model("target"), **call).weights.target)
    needed = bytes_per_device(list({id(leaf): leaf for leaf in leaves}.values()))
    monkeypatch.setattr(memory, lambda: needed)
    Engine.load(runs.model("target"), **call)
    monkeypatch.setattr(memory, lambda: needed - 1)
    monkeypatch.setattr("poss_jax.engine.models.load_target", None)
    advice = "spread" if quantise else "quantise it"
    with pytest.raises(UserError, match=f"at least 0.0 GiB of each device, .* 0.0 GiB; {advice}"):
        Engine.load(runs.model("target"), **call)


TEXT = np.random.default_rng(0).integers(3, 300, 200).tolist()


@pytest.fixture(scope="module")
def expected(runs: Runs) -> np.ndarray:
    """Log-probabilities after each token [T V]."""
    record, params = load_target(runs.model("target"), jnp.float32)
    layers = {"layers": stack_layers(params["layers"])}
    features = encode(params | layers, record.llama, jnp.asarray([TEXT]))
    return np.asarray(jax.nn.log_softmax(features[0] @ params["head"]["weight"].T, axis=-1))


@pytest.mark.parametrize("settings", [{}, {"mesh": MeshConfig(data=4, tensor=2)}], ids=str)
def test_prompts_are_scored_as_one_pass_scores_them(runs, expected, settings) -> None:
    engine = Engine.load(runs.model("target"), runs.model("poss2"), **settings)
    for length in (1, 2, 32, 33, 200) if not settings else (33,):  # a chunk has 32
        found = score_prompt(engine, TEXT[:length], num_logprobs=3, max_length=256)
        assert len(found) == length - 1
        for row, token, one in zip(expected, TEXT[1:], found, strict=False):
            best = np.argsort(-row, kind="stable")[:3]
            assert one.ids == best.tolist()
            np.testing.assert_allclose([one.chosen, *one.top], row[[token, *best]], atol=2e-5)
