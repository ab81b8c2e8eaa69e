"""Validation's reports against NumPy and the definitions; predictions laid out to be looked at."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import (
    predict_depths,
    random_draft,
    random_target,
    random_tokens,
    rounding,
    stacked,
    tiny_llama,
)

from poss_jax.config.models import DraftConfig
from poss_jax.config.training import ObjectiveConfig, StepConfig
from poss_jax.data.rows import Rows
from poss_jax.learn.step import target_loss
from poss_jax.learn.task import DraftTask, prepare_draft_data
from poss_jax.learn.validation import (
    Predictions,
    add_up,
    count_accepted,
    draft_metrics,
    make_draft_validation,
    make_target_validation,
)
from poss_jax.model.documents import TrainBatch, encode
from train.loop import format_samples

B, T, R = 4, 12, 3
LLAMA = tiny_llama(num_layers=1, vocab_size=19, hidden_size=16, head_dim=4)
STEP = StepConfig(vocabulary_chunk=5, attention_block=7)
TASK = DraftTask(
    target=LLAMA,
    draft=DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2), trained_depth=R),
    objective=ObjectiveConfig(top_k=3, probability_weight=0.5),
    step=STEP,
)
# Rows with one document, two, and padding; the first two hold a fifth of the trained tokens.
MASK = np.random.default_rng(3).random((B, T)) < np.array([[0.3], [0.3], [0.9], [0.9]])
DOCUMENTS = np.array([[1] * 12, [1] * 5 + [2] * 7, [1] * 12, [1] * 9 + [0] * 3])
TOKENS = random_tokens(LLAMA, B, T)
BATCH = TrainBatch(TOKENS, jnp.asarray(MASK), jnp.asarray(DOCUMENTS, jnp.int32))


@pytest.fixture(scope="module")
def target():
    return stacked(random_target(LLAMA))


@pytest.fixture(scope="module")
def draft():
    return stacked(random_draft(TASK.draft))


def part(rows: slice) -> TrainBatch:
    return jax.tree.map(lambda array: array[rows], BATCH)


def chain_lengths(hits, mask) -> list[int]:
    """By the definition: tokens accepted in sequence from every start."""
    depth, batch, size = hits.shape
    lengths = []
    for row, start in np.ndindex(batch, size - depth + 1):
        if mask[row, start : start + depth].all():
            chain = [hits[d, row, start + d] for d in range(depth)]
            lengths.append(chain.index(False) if False in chain else depth)
    return lengths


def test_accepted_of_any_hits():
    """Chains of a row that is not trained are left out."""
    rng = np.random.default_rng(0)
    hits, mask = rng.random((4, 3, 40)) < 0.7, rng.random((3, 40)) < 0.9
    accepted, num_chains = jax.jit(count_accepted)(jnp.asarray(hits), jnp.asarray(mask))
    lengths = chain_lengths(hits, mask)
    assert num_chains == len(lengths)
    assert accepted.tolist() == [sum(length > d for length in lengths) for d in range(4)]


def test_draft_by_depth(target, draft):
    """Rows that read and predict trained tokens count; chains stay in their document."""
    sums, shown = jax.jit(make_draft_validation(TASK, R))(draft, target, BATCH)
    out = draft_metrics(add_up([(sums, shown)])[0])
    data = jax.jit(prepare_draft_data, static_argnums=1)(target, TASK, BATCH)
    predicted = np.asarray(
        jax.jit(lambda draft: predict_depths(draft, TASK.draft, data.inputs, R, block=7))(draft)
    )
    head, wanted = np.asarray(target["head"]["weight"]), np.asarray(data.targets.features)
    mask = np.zeros((B, T), bool)
    mask[:, :-2] = MASK[:, 1:-1] & MASK[:, 2:] & (DOCUMENTS[:, :-2] == DOCUMENTS[:, 2:])
    mask &= DOCUMENTS > 0
    drafted, chosen = np.argmax(predicted @ head.T, axis=-1), np.argmax(wanted @ head.T, axis=-1)
    np.testing.assert_array_equal(shown.tokens, drafted)
    np.testing.assert_array_equal(np.where(mask, shown.labels, 0), np.where(mask, chosen, 0))
    np.testing.assert_array_equal(shown.is_trained, mask)

    hits = (drafted == chosen) & mask
    lengths = chain_lengths(hits, mask)
    cumulative = [np.mean([length > d for length in lengths]) for d in range(R)]
    a, b = predicted[:, mask], wanted[mask]
    cosine = (a * b).sum(axis=-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    size = np.abs(a - b)
    feature = np.where(size < 1, 0.5 * size**2, size - 0.5)
    assert hits.any(axis=(1, 2)).all() and 0 < cumulative[0] < 1

    def near(name, want):
        np.testing.assert_allclose(out[name], want, rtol=2e-6)

    near("agreement", [hit[mask].mean() for hit in hits])
    near("cumulative_acceptance", cumulative)
    near("simulated_acceptance_length", 1 + np.mean(lengths))
    near("feature_cosine", cosine.mean(axis=1))
    distance = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
    near("feature_distance", distance.mean(axis=1))
    near("feature_loss", feature.mean(axis=(1, 2)))
    terms = [np.array(out[f"{name}_loss"]) for name in ("feature", "probability", "top_k")]
    near("validation_loss", terms[0] + 0.5 * terms[1] + terms[2])


def test_batches_count_by_their_trained_rows(target, draft):
    validate = jax.jit(make_draft_validation(TASK, R))
    whole, first = (validate(draft, target, rows) for rows in (BATCH, part(slice(2))))
    total, shown = add_up([first, validate(draft, target, part(slice(2, 4)))])
    want, got = draft_metrics(add_up([whole])[0]), draft_metrics(total)
    assert got.keys() == want.keys()
    for name, value in got.items():
        # A cosine near 0 is a sum of terms of either sign, up to 1.
        near = rounding(BATCH.tokens.size)
        np.testing.assert_allclose(value, want[name], rtol=near, atol=1e-7, err_msg=name)
    parts = [validate(draft, target, part(rows)) for rows in (slice(2), slice(2, 4))]
    halves = [draft_metrics(add_up([result])[0]) for result in parts]
    means = np.mean([half["validation_loss"] for half in halves], axis=0)
    assert (np.abs(means / want["validation_loss"] - 1) > 1e-3).any()  # a mean of means is wrong
    assert shown.tokens.shape == (R, 2, T)


def test_nothing_to_learn_is_nothing_learnt(target, draft):
    nothing = BATCH.replace(loss_mask=jnp.zeros((B, T), bool))
    result = jax.jit(make_draft_validation(TASK, R))(draft, target, nothing)
    out = draft_metrics(add_up([result])[0])
    assert out["simulated_acceptance_length"] == 1
    assert out["validation_loss"] == out["agreement"] == [0.0] * R


def test_target(target):
    sums, shown = jax.jit(make_target_validation(LLAMA, STEP, jnp.float32))(target, BATCH)
    features = jax.jit(encode, static_argnums=1)(target, LLAMA, TOKENS, BATCH.documents)
    chosen = np.argmax(np.asarray(features) @ np.asarray(target["head"]["weight"]).T, axis=-1)
    loss = jax.jit(target_loss, static_argnums=(2, 3))(target, BATCH, LLAMA, STEP)
    assert sums.loss == loss and int(sums.num_trained) == shown.is_trained.sum() > 0
    np.testing.assert_array_equal(shown.tokens[0], chosen)
    np.testing.assert_array_equal(shown.labels[:, :-1], TOKENS[:, 1:])


# --------------------------------------------------------------------------------------------------
# Samples


LETTERS = "abcdefghijklmnop|\n"


def stage(text: str, documents: str, lookahead: int) -> Any:
    tokens = np.array([[LETTERS.index(letter) for letter in text]])
    rows = Rows(tokens, np.ones(tokens.shape, bool), np.array([[int(d) for d in documents]]))
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(LETTERS[i] for i in ids))
    return SimpleNamespace(validation_rows=rows, lookahead=lookahead, tokenizer=tokenizer)


def predictions(labels: str, trained: str, *by_depth: str) -> Predictions:
    def ids(text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    return Predictions(
        tokens=np.array([[ids(depth)] for depth in by_depth]),
        labels=np.array([ids(labels)]),
        is_trained=np.array([[mark == "x" for mark in trained]]),
    )


def test_a_draft_is_shown_from_the_token_after_its_feature() -> None:
    # The chain from row 1 reads a, b and c; its depths sit at rows 1 and 2 and predict d and e.
    shown = predictions("cdefgh", " xx   ", "..d...".replace(".", "a"), "aagaaa")
    shown = shown._replace(tokens=np.array(shown.tokens))
    shown.tokens[0, 0, 1] = LETTERS.index("d")
    out = format_samples(stage("abcdef", "111111", 2), shown, num_samples=4)
    assert out.splitlines()[2:] == [
        "## Row 0",
        "",
        "| text before | depth 0 | depth 1 |",
        "|---|---|---|",
        "| `` abc `` | `` d `` | ~~`` g ``~~ `` e `` |",
    ]


def test_text_before_is_of_the_same_document_and_shows_signs_of_tables_and_line_ends() -> None:
    shown = predictions("bcdefg", "    x ", "aaaaaf")
    line = format_samples(stage("abcdef", "111222", 1), shown, num_samples=1).splitlines()[-1]
    assert line == "| `` de `` | ~~`` a ``~~ `` f `` |"
    shown = predictions("||||||", "   x  ", "\n\n\n\n\n\n")
    line = format_samples(stage("ab|\nef", "111111", 1), shown, num_samples=1).splitlines()[-1]
    assert line == "| `` ab\\|\\n `` | ~~`` \\n ``~~ `` \\| `` |"


@pytest.mark.parametrize(
    ("trained", "rows"),
    [
        ("xxxxxxxxxxxx", [0, 3, 7, 10]),
        (" xx xx      ", [1, 4]),
        (" x x x x x x", []),  # two depths need two rows
    ],
)
def test_places_are_spread_over_what_is_trained(trained: str, rows: list[int]) -> None:
    text = "abcdefghijkl"
    out = format_samples(stage(text, "1" * 12, 1), predictions(text, trained, text, text), 1)
    lines = out.splitlines()[6:]
    assert [line.split(" ")[2] for line in lines] == [text[: row + 1] for row in rows]
