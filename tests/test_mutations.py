"""Planted mistakes, each of which the tests of this project must notice."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from golden import METHODS, load_golden
from test_golden import check_rounds
from test_lookup import check_look_up, check_tokens
from test_speculate import SHAPES, check_shape

from poss_jax.decode import drafting, lookup, speculate
from poss_jax.model import cache, target

pytestmark = pytest.mark.usefixtures("fresh_programs")


@pytest.mark.slow
def test_a_tree_mask_off_by_one_is_noticed(monkeypatch):
    def shifted(q, stored, length, own, can_attend):
        if can_attend is not None:  # not a prompt's chunk
            can_attend = jnp.roll(can_attend, 1, axis=2)
        return cache.attend_cached(q, stored, length, own, can_attend)

    check_shape(SHAPES["wide"], cases=1, seed=0)
    monkeypatch.setattr(target, "attend_cached", shifted)
    jax.clear_caches()
    with pytest.raises(AssertionError):
        check_shape(SHAPES["wide"], cases=5, seed=0)


@pytest.mark.quick
def test_a_commit_that_keeps_a_rejected_row_is_noticed(monkeypatch):
    def greedy_commit(cache_, rows, num_kept):
        return cache.commit_rows(cache_, rows, jnp.where(num_kept > 0, num_kept + 1, 0))

    monkeypatch.setattr(speculate, "commit_rows", greedy_commit)
    with pytest.raises(AssertionError):
        check_shape(SHAPES["wide"], cases=5, seed=0)


@pytest.mark.slow
def test_keys_of_the_wrong_specialist_are_noticed(monkeypatch, tmp_path):
    """The output stays right for any draft; the recorded trees show the mistake."""
    golden = load_golden(tmp_path, next(name for name in METHODS if name.startswith("poss")))
    original = drafting._enter_level

    def swapped(params, *rest):
        return original({**params, "specialists": params["specialists"][::-1]}, *rest)

    check_rounds(golden, "_small")
    monkeypatch.setattr(drafting, "_enter_level", swapped)
    jax.clear_caches()
    with pytest.raises(AssertionError):
        check_rounds(golden, "_small")


LOOKUP_MISTAKES = {
    "reads one token too far": ("jnp.minimum(following, last)", "following + 1"),
    "takes the end itself for a match": ("index < last, ids", "index <= last, ids"),
    "takes the first of equal runs": ("run * S + index", "run * S - index"),
    "takes the id behind the end for the last one": ("length[:, None] - 1", "length[:, None]"),
}


@pytest.mark.quick
@pytest.mark.parametrize("mistake", LOOKUP_MISTAKES)
def test_a_mistake_in_lookup_is_noticed(mistake):
    """Its copies may be wrong without a change of the output."""
    source, (right, wrong) = inspect.getsource(lookup.look_up), LOOKUP_MISTAKES[mistake]
    assert source.count(right) == 1
    scope = dict(vars(lookup))
    exec(source.replace(right, wrong), scope)
    with pytest.raises(AssertionError):
        check_look_up(jax.jit(scope["look_up"], static_argnums=2))


@pytest.mark.slow
def test_copies_below_the_draft_without_noise_are_noticed(monkeypatch):
    original = speculate.round_noise

    def shallow(config, request, state):
        return original(config, request, state).at[:, config.tree.depth + 1 :].set(0)

    monkeypatch.setattr(speculate, "round_noise", shallow)
    with pytest.raises(AssertionError):
        check_tokens("poss", is_sampled=True)
