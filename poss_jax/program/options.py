"""Turns a program's settings into its engine, default models and checked outputs."""

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from poss_jax.bundled.default import default_drafts, default_target
from poss_jax.config.decoding import SMOLLM2, AnswerConfig, BenchConfig
from poss_jax.config.numbers import INT32_MAX
from poss_jax.config.paths import as_path, local_path
from poss_jax.config.reading import UserError, shorten
from poss_jax.engine.engine import Engine
from poss_jax.engine.trees import read_trees


def load_engine(config: AnswerConfig) -> Engine:
    """Loads the models of a config; the default target comes with a draft.

    Raises:
      UserError: what `Engine.load` or `read_trees` refuses.
    """
    target, draft = config.target, config.draft
    if target == SMOLLM2:
        target, draft = default_target(), draft or next(iter(default_drafts().values()), None)
    return Engine.load(
        target,
        draft,
        tree=config.tree if config.trees is None else read_trees(as_path(config.trees)),
        max_length=config.max_length,
        drafting=config.drafting,
        allow_target_mismatch=config.allow_target_mismatch,
        draft_vocabulary=config.draft_vocabulary,
        quantise=config.quantise,
        mesh=config.mesh,
    )


def with_default_models(config: BenchConfig) -> BenchConfig:
    """Names the folders of the default target, and of its drafts if no others are given.

    Raises:
      UserError: what `default_target` refuses.
    """
    if config.target != SMOLLM2:
        return config
    drafts = config.drafts or {name: str(folder) for name, folder in default_drafts().items()}
    return replace(config, target=str(default_target()), drafts=drafts)


def at_least(least: int) -> Callable[[str], int]:
    """Makes the type of an option that is a whole number with a lower bound."""

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= INT32_MAX:
            got = shorten(text)
            raise argparse.ArgumentTypeError(f"want a number, at least {least}, got {got}")
        return int(text)

    return parse


def check_writable(path: Path, *, is_folder: bool = False) -> None:
    """Raises UserError if no output can be made at a path, before any work is spent on it."""
    local_path(path, "output")
    if path.exists() and path.is_dir() != is_folder:
        is_what = "a file" if is_folder else "a folder"
        raise UserError(f"output {path} is {is_what}; choose another place")
    places = [path.absolute()] * is_folder + [*path.absolute().parents]
    place = next(place for place in places if place.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise UserError(f"output {path}: {place} is not a writable folder; choose another place")


def check_new_file(path: Path) -> None:
    """Raises UserError if an output file exists already, or cannot be made."""
    if path.exists():
        raise UserError(f"output {path} exists; name another file or remove it")
    check_writable(path)
