"""A first specialist with a wider MLP: its arithmetic, its start, its training and its files."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from models import (
    IDENTITY,
    make_engine,
    random_draft,
    random_target,
    random_tokens,
    stacked,
    tiny_llama,
)
from oracle import Shape
from plain_chain import check_chains, predict_eagle
from programs import POSS2, Runs, config_file, generate, refusal
from test_eagle3_variants import CONFIG as OF_EAGLE3
from test_eagle3_variants import STEPS, T, draft_chains, train_chains

from infer.bench import costs
from infer.bench.costs import Workload
from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import new_record, read_record
from poss_jax.config.models import DraftConfig, MeshConfig, TreeConfig
from poss_jax.convert.__main__ import main as convert
from poss_jax.engine.engine import Engine
from poss_jax.model.parameters import place_tree
from poss_jax.model.quantise import Quantised, quantise_target
from poss_jax.model.sharding import make_mesh
from poss_jax.model.specialists import attach, deepen
from train.main import main

LLAMA = tiny_llama()
PLAIN = DraftConfig(layer=LLAMA, positions_per_specialist=(2, 1), trained_depth=3)
WIDE = replace(PLAIN, widths_per_specialist=(3,))
BOTH = replace(WIDE, positions_per_specialist=(1, 2), layers_per_specialist=(2,))
PROMPTS = [[1, 2, 3], [9]]
RUN = POSS2 | {
    "specialists": {
        "positions_per_specialist": [1, 2],
        "widths_per_specialist": [2, 1],
        "depth": 3,
    },
    "num_tokens": 6 * 64,
}


@pytest.mark.parametrize("config", [WIDE, BOTH], ids=["wide", "wide and deep"])
def test_training_and_drafting_equal_a_float64_forward(config: DraftConfig) -> None:
    check_chains(config, predict_eagle, atol=3e-5)


def test_chains_of_eagle3_draft_what_they_are_trained_to() -> None:
    """And the wide MLPs take part in the first specialist's steps alone."""
    config = replace(OF_EAGLE3, widths_per_specialist=(2,))
    target, draft = random_target(LLAMA), random_draft(config)
    tokens = random_tokens(LLAMA, 1, T + STEPS)
    features = jax.random.normal(jax.random.key(0), (1, T, 3 * LLAMA.hidden_size))
    embedded = target["embed"]["weight"][tokens[0, 1:]]
    narrow = {name: part for name, part in draft.items() if name != "wide"}
    trained, without = (
        train_chains(config, attach(stacked(one), target), embedded[:T], features)
        for one in (draft, narrow)
    )
    chain = jax.jit(draft_chains, static_argnums=0)(config, attach(draft, target), tokens, features)
    for step, got in enumerate(chain):
        np.testing.assert_allclose(trained[step, : T - step], got[: T - step], atol=2e-4)
    assert np.abs(trained[0] - without[0]).max() > 0.1


def test_speculative_equals_autoregressive() -> None:
    tree = TreeConfig(depth=3, top_k=3, total_tokens=10)
    Shape(LLAMA, BOTH, tree, 3, is_sampled=True).check_pairs()


def test_a_draft_is_widened_without_a_jump() -> None:
    target, draft = random_target(LLAMA), random_draft(PLAIN)
    grown = deepen(draft, WIDE, jax.random.key(0))
    assert len(grown["wide"]) == 2 and grown["wide"][0]["up"]["weight"].any()
    tree = TreeConfig(depth=3, top_k=3, total_tokens=9)
    plain, wide = (
        make_engine(LLAMA, target, config, one, tree=tree).generate(
            PROMPTS, max_new_tokens=20, batch_size=2
        )
        for one, config in ((draft, PLAIN), (grown, WIDE))
    )
    assert plain == wide and sum(plain[0].accepted_per_round) > 0


def test_a_wide_draft_of_8_bits_writes_the_same_texts() -> None:
    target = quantise_target(random_target(LLAMA), "int8")
    record = new_record(LLAMA, IDENTITY, tokenizer_from=None, quantised="int8")
    alone = Engine(record, target, tree=TreeConfig(depth=2, top_k=2, total_tokens=5))
    wide = alone.with_draft(new_record(WIDE, IDENTITY, tokenizer_from=None), random_draft(WIDE))
    assert all(isinstance(one["down"]["weight"], Quantised) for one in wide.weights.draft["wide"])
    texts, drafted = (
        [one.output_ids for one in engine.generate(PROMPTS, max_new_tokens=20, batch_size=2)]
        for engine in (alone, wide)
    )
    assert texts == drafted


def test_every_parameter_has_a_place_on_a_mesh() -> None:
    draft, mesh = random_draft(BOTH), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert jax.tree.structure(place_tree(draft, mesh)) == jax.tree.structure(draft)


def test_the_cost_card_reads_the_wide_mlps_where_they_are() -> None:
    work = Workload(target=LLAMA, tree=TreeConfig(depth=3, top_k=1, total_tokens=4), cache_bytes=0)
    mlp = 3 * LLAMA.hidden_size * LLAMA.intermediate_size
    plain, wide, both, deep = (
        replace(work, draft=config)
        for config in (PLAIN, WIDE, BOTH, replace(BOTH, widths_per_specialist=(1,)))
    )
    more = [costs.draft_level(wide, d).bytes - costs.draft_level(plain, d).bytes for d in range(3)]
    assert more == [4 * 2 * mlp, 4 * 2 * mlp, 0]
    assert costs.commit(wide).bytes == costs.commit(plain).bytes
    assert costs.draft_level(both, 0).bytes == costs.draft_level(deep, 0).bytes
    assert costs.commit(both).bytes - costs.commit(deep).bytes == 4 * 2 * mlp


def test_a_run_trains_the_wide_mlps_and_the_texts_stay(runs: Runs, tmp_path: Path) -> None:
    main(["--config", config_file(runs, tmp_path, RUN, init_draft=runs.model("eagle"))])
    model, target = tmp_path / "run/model", runs.model("target")
    record, draft = load_draft(model, target=read_record(target))
    assert (record.method, record.draft.widths_per_specialist) == ("poss12-wide2", (2, 1))
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(draft["wide"]))
    prompts = ["--prompt", "def area_7", "--tree", "2/2/5"]
    alone = generate(target, None, tmp_path, *prompts)
    drafted = generate(target, str(model), tmp_path, *prompts)
    assert [one["text"] for one in drafted] == [one["text"] for one in alone]
    arguments = ["--model", str(model), "--target", target, "--output", str(tmp_path / "out")]
    assert "no layout holds a specialist 2 times as wide" in refusal(convert, "export", *arguments)


@pytest.mark.parametrize("widths", [(1, 2), (2, 1, 1)])
def test_only_the_first_may_be_wide(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="only the first specialist may be wider, got"):
        replace(PLAIN, widths_per_specialist=widths)
