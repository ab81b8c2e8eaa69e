"""Drafts by depth: against validation and decoding, by hand, and for a draft that knows all."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import exact_pair, random_draft, tiny_llama
from programs import Runs, write_lines

from infer.bench.by_depth import (
    decode,
    describe_draft,
    follow,
    lay_out,
    study,
)
from poss_jax.checkpoint.folder import load_draft, load_target
from poss_jax.checkpoint.record import new_record
from poss_jax.checkpoint.writing import target_identity, write_model
from poss_jax.config.bench import BenchConfig
from poss_jax.config.models import DraftConfig
from poss_jax.config.training import ObjectiveConfig
from poss_jax.learn.task import DraftTask
from poss_jax.learn.validation import add_up, draft_metrics, make_draft_validation
from poss_jax.model.documents import TrainBatch
from poss_jax.model.parameters import split_items
from poss_jax.model.target import stack_layers

R, N = 3, 14


@pytest.fixture(scope="module")
def certain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a target, `knowing` (it predicts the target's very features) and `random`."""
    folder = tmp_path_factory.mktemp("certain")
    llama = tiny_llama(rms_norm_eps=0.0, max_position_embeddings=64)
    config = DraftConfig(layer=replace(llama, num_layers=1), positions_per_specialist=(1, 2))
    target, knowing = exact_pair(llama, config, sharpness=1.0, num_flipped=0, seed=0)
    identity = target_identity("tiny", None, target["embed"]["weight"], target["head"]["weight"])
    drawn = random_draft(config)
    for name, shape, params in (
        ("target", llama, target),
        ("knowing", config, knowing),
        ("random", config, drawn),
    ):
        record = new_record(shape, identity, tokenizer_from=None)
        write_model(folder / name, record, split_items(shape, params), tokenizer_from=None)
    write_lines(folder / "prompts.jsonl", *({"prompt_ids": [n, n + 7]} for n in range(4)))
    return folder


@pytest.mark.slow
def test_a_draft_that_knows_the_target(certain: Path) -> None:
    """No drift, everything accepted, and no difference between training and decoding."""
    drafts = {name: str(certain / name) for name in ("knowing", "random")}
    prompts, target = str(certain / "prompts.jsonl"), str(certain / "target")
    config = BenchConfig(target=target, drafts=drafts, prompts=prompts, max_new_tokens=N)
    report = study(config, R)
    knowing, drawn = report["drafts"].values()
    unknown = {"low": [None] * R, "high": [None] * R}  # of fewer than eight questions
    sure = {"value": [1.0] * R, **unknown}
    numbers = dict(knowing["by_depth"])
    assert max(map(abs, numbers.pop("feature_distance")["value"])) < 1e-6
    assert numbers.pop("gap") == {"value": [0.0] * R, **unknown}
    assert numbers.pop("feature_cosine")["value"] == pytest.approx([1.0] * R)
    assert numbers == dict.fromkeys(numbers, sure)
    assert knowing["simulated_acceptance_length"]["value"] == 1 + R
    assert knowing["rounds_as_predicted"] == drawn["rounds_as_predicted"] == 1
    assert drawn["by_depth"]["feature_distance"]["value"][0] > 0.1

    (pair,) = report["pairs"]
    gain = [draft["decoded_acceptance_length"]["value"] for draft in (knowing, drawn)]
    assert pair["drafts"] == ("knowing", "random")
    assert pair["difference"]["value"] == pytest.approx(gain[1] - gain[0]) and gain[1] < gain[0]
    assert 2 / 2**4 <= pair["p_value"] < 1  # all signs of four questions


@pytest.mark.parametrize("name", [pytest.param("eagle", marks=pytest.mark.slow), "poss2"])
def test_numbers_are_those_of_validation(runs: Runs, tmp_path: Path, name: str) -> None:
    """Of all texts as one batch; and by their definitions, text by text and chain by chain."""
    lines = [{"prompt": f"def area_{n}(width"} for n in range(3)]
    prompts = write_lines(tmp_path / "prompts.jsonl", *lines)
    drafts = {name: runs.model(name)}
    config = BenchConfig(
        target=runs.model("target"), drafts=drafts, prompts=prompts, max_new_tokens=N
    )
    texts, _, answers = decode(config, R)
    record, target = load_target(config.target)
    target |= {"layers": stack_layers(target["layers"])}
    rows = lay_out(texts)
    followed = follow(config, name, record, target, rows, R)
    found = describe_draft(texts, answers[name], followed)
    values = {key: number["value"] for key, number in found["by_depth"].items()}

    draft_record, draft = load_draft(config.drafts[name], target=record)
    draft |= {"specialists": stack_layers(draft["specialists"])}
    task = DraftTask(record.llama, draft_record.draft, ObjectiveConfig())
    validate = make_draft_validation(task, R)
    batch = TrainBatch(*map(jnp.asarray, (rows.tokens, rows.loss_mask, rows.documents)))
    wanted = draft_metrics(add_up([jax.jit(validate)(draft, target, batch)])[0])
    for key in ("agreement", "cumulative_acceptance", "feature_cosine", "feature_distance"):
        np.testing.assert_allclose(values[key], wanted[key], rtol=1e-5, err_msg=key)
    length = found["simulated_acceptance_length"]["value"]
    assert length == pytest.approx(wanted["simulated_acceptance_length"])

    chains, rounds = [], []  # drafted tokens that each accepts
    for (text,), (answer,), tokens in zip(texts, answers[name], followed.tokens, strict=True):
        ids = [*text.prompt_ids, *text.output_ids]
        for start in range(len(text.prompt_ids) - 1, len(ids) - 2 - R + 1):
            hits = [tokens[d, start + d] == ids[start + d + 2] for d in range(R)]
            chains.append([*hits, False].index(False))
        rounds += zip(answer.accepted_per_round, answer.offered_per_round, strict=True)
    for d in range(R):
        before = [chain for chain in chains if chain >= d]
        share = np.mean([chain > d for chain in before]) if before else None
        assert values["conditional_acceptance"][d] == pytest.approx(share)
        offered = [reached for reached, limit in rounds if limit > d]
        share = np.mean([reached > d for reached in offered]) if offered else None
        assert values["decoded_conditional_acceptance"][d] == pytest.approx(share)
    assert found["rounds_as_predicted"] == 1
