"""Draft trees by batch size: which apply, and their files, written by hand or tuned with a draft.

tuned: {device: cpu, draft: 3f0c...}      only in tuned files
1: {depth: 4, top_k: 2, total_tokens: 8}
16: null
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from poss_jax.checkpoint.record import ModelRecord
from poss_jax.checkpoint.whole import write_output
from poss_jax.config.models import TreeConfig
from poss_jax.config.numbers import INT32_MAX
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import UserError, build_config, read_yaml, shorten
from poss_jax.engine.device import Trees, default_tree, fit_tree
from poss_jax.shapes import Params

_LOG = logging.getLogger(__package__)
_TUNED = "tuned"


class Tuned(NamedTuple):
    """Tuned trees and draft vocabulary of a draft.

    Attributes:
      trees: trees by batch size.
      draft_vocabulary: file of the fastest draft vocabulary; None: the whole head.
    """

    trees: Trees
    draft_vocabulary: AnyPath | None


def choose_trees(wanted: TreeConfig | Trees | None, draft: Params | None = None) -> Trees:
    """Trees per batch size: the wanted ones, else the device's default; clamped to the draft.

    Args:
      wanted: what was given or, failing that, tuned.
      draft: parameters of the draft; without one nothing is clamped.
    """
    wanted = wanted or default_tree()
    trees = {1: wanted} if isinstance(wanted, TreeConfig) else wanted
    if not draft:
        return trees
    num_tokens = draft["head"]["weight"].shape[0]
    return {size: tree and fit_tree(tree, num_tokens) for size, tree in trees.items()}


def read_trees(path: AnyPath) -> Trees:
    """Reads a YAML file of trees by batch size; `none` stands for no draft at any size.

    Raises:
      UserError: it cannot be read, or holds something else.
    """
    if str(path) == "none":
        return {1: None}
    return _check_trees(path, read_yaml(path))


def _check_trees(path: AnyPath, sizes: Mapping[Any, Any]) -> Trees:
    trees: dict[int, TreeConfig | None] = {}
    for size, values in sizes.items():
        where = f"{path}: {str(size)[:40]}"
        if size == _TUNED:
            continue
        if type(size) is not int or not 1 <= size <= INT32_MAX:
            raise UserError(f"{where}: want a batch size, a whole number from 1 on")
        if not isinstance(values, dict | None):
            raise UserError(
                f"{where}: want depth, top_k and total_tokens, or null; got {shorten(values)}"
            )
        trees[size] = None
        if values is not None:
            values = asdict(default_tree()) | values
            trees[size] = build_config(TreeConfig, values, origin=where)
    if not trees:
        raise UserError(f"{path}: want batch sizes and their trees, got none")
    return trees


def tuned_file(draft: str | AnyPath, mesh: Mesh | None = None) -> AnyPath:
    """Path of the trees tuned for a draft on this kind of device or mesh."""
    slug = re.sub("[^a-z0-9]+", "-", _devices(mesh).lower()).strip("-")
    return as_path(draft) / f"trees.{slug}.yaml"


def vocabulary_file(trees: AnyPath) -> AnyPath:
    """Path of the draft vocabulary that belongs to a file of tuned trees."""
    return trees.with_suffix(".vocabulary.json")


def find_tuned(draft: str | AnyPath, record: ModelRecord, mesh: Mesh | None = None) -> Tuned | None:
    """Reads what was tuned for a draft on this kind of device; None if nothing was.

    A file made for other weights, another kind of device or another mesh is skipped with a line
    that says so.

    Args:
      draft: model folder of the draft.
      record: record of the draft.
      mesh: devices that decode; None: one.

    Raises:
      UserError: the file is broken.
    """
    path = tuned_file(draft, mesh)
    if not path.is_file():
        others = sorted(as_path(draft).glob("trees.*.yaml"))
        if others:
            _LOG.warning(
                "%s was tuned on another kind of device than this one, %s; using the default tree "
                "(infer.tune tunes it here)",
                others[0],
                _devices(mesh),
            )
        return None
    values = read_yaml(path)
    trees, tuned = _check_trees(path, values), values.get(_TUNED)
    if not isinstance(tuned, dict):
        raise UserError(f"{path}: want the section {_TUNED}; give the file with --trees instead")
    for key, here in _identity(record, mesh).items():
        if tuned.get(key) != here:
            _LOG.warning(
                "%s was tuned for another %s (%s, here %s); using the default tree",
                path,
                key,
                shorten(tuned.get(key)),
                here,
            )
            return None
    file = vocabulary_file(path) if tuned.get("draft_vocabulary") else None
    if file is not None and not file.is_file():
        _LOG.warning("%s was tuned with %s, which is gone; using the default tree", path, file)
        return None
    _LOG.warning("trees by batch size: %s, tuned for this draft and device", path)
    return Tuned(trees, file)


def write_tuned(
    path: AnyPath,
    trees: Trees,
    record: ModelRecord,
    *,
    about: Mapping[str, Any],
    comments: Mapping[int, str],
    mesh: Mesh | None = None,
) -> None:
    """Writes trees so that `read_trees` and `find_tuned` read them; written atomically.

    Args:
      path: file to write or to replace.
      trees: trees by batch size.
      record: record of the draft.
      about: how they were tuned, JSON-compatible.
      comments: a line for the reader per batch size.
      mesh: devices that they were tuned on; None: one.

    Raises:
      UserError: it cannot be written.
    """
    lines = ["# Batch size -> draft tree; null decodes without the draft. Made by infer.tune."]
    tuned = _identity(record, mesh) | dict(about)
    lines.append(f"{_TUNED}: {json.dumps(tuned)}")  # JSON is valid YAML
    for size, tree in sorted(trees.items()):
        lines.append(f"{size}: {json.dumps(tree and asdict(tree))}  # {comments[size]}")
    write_output(path, "".join(line + "\n" for line in lines), name="trees")


def _identity(record: ModelRecord, mesh: Mesh | None) -> dict[str, str]:
    """Identifies the devices and the draft that trees are tuned for."""
    return {"device": _devices(mesh), "draft": record.fingerprint}


def _devices(mesh: Mesh | None) -> str:
    """Names the kind of device and the mesh."""
    sizes = () if mesh is None else [f"{axis}={mesh.shape[axis]}" for axis in ("data", "tensor")]
    return " ".join([_device_kind(), *sizes])


def _device_kind() -> str:
    return jax.devices()[0].device_kind
