"""Draft trees by batch size: which apply, and their files, written by hand or tuned with a draft.

`choose_trees` decides once, when an engine gets its draft: trees that were given, else tuned ones,
else the device's default, clamped to the draft. `tree_for` looks one up.

A file of trees:

    tuned: {device: cpu, draft: 3f0c...}      only in tuned files
    1: {depth: 4, top_k: 2, total_tokens: 8}
    16: null
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
from jax.sharding import Mesh

from poss_jax.checkpoint.record import ModelRecord
from poss_jax.checkpoint.whole import write_output
from poss_jax.config.models import ACCELERATOR_TREE, CPU_TREE, Drafting, TreeConfig, Trees
from poss_jax.config.numbers import INT32_MAX
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import UserError, build_config, read_yaml, shorten
from poss_jax.shapes import Params

_LOG = logging.getLogger(__package__)
_TUNED = "tuned"
_LOOKUP = 8

ACCELERATOR_TREES: Trees = {
    1: ACCELERATOR_TREE,
    4: TreeConfig(depth=6, top_k=4, total_tokens=24),
    12: TreeConfig(depth=4, top_k=2, total_tokens=8),
    32: TreeConfig(depth=3, top_k=1, total_tokens=4),
    96: TreeConfig(depth=2, top_k=1, total_tokens=3),
    128: None,
}
"""Trees of an accelerator: as many nodes in all as it verifies in about the time of one.

By the cost card (docs/results/trees.md); on an H100, 6/10/60 for 16 requests
would be slower than no draft.
"""


def default_tree() -> TreeConfig:
    """Default tree for this kind of device."""
    return CPU_TREE if jax.default_backend() == "cpu" else ACCELERATOR_TREE


def default_lookup(drafting: Drafting) -> int:
    """Default number of copies with a draft: some on CPU, where no kind of task timed was slower.

    The numbers are in docs/results/lookup.md; accelerators have not been timed.
    """
    return _LOOKUP if jax.default_backend() == "cpu" and drafting != "sampled" else 0


def choose_trees(chosen: TreeConfig | Trees | None, draft: Params | None = None) -> Trees:
    """Trees per batch size: the wanted ones, else the device's default; clamped to the draft.

    Args:
      chosen: what was given or, failing that, tuned.
      draft: parameters of the draft; without one nothing is clamped.
    """
    defaults = {1: CPU_TREE} if jax.default_backend() == "cpu" else ACCELERATOR_TREES
    trees = {1: chosen} if isinstance(chosen, TreeConfig) else chosen or defaults
    if not draft:
        return trees
    num_tokens = draft["head"]["weight"].shape[0]
    return {size: tree and fit_tree(tree, num_tokens) for size, tree in trees.items()}


def fit_tree(tree: TreeConfig, draft_vocab_size: int) -> TreeConfig:
    """Clamps a tree to what can be drafted; logs if it did."""
    fitted = replace(tree, top_k=min(tree.top_k, draft_vocab_size))
    fitted = replace(fitted, total_tokens=fitted.num_nodes)
    if fitted != tree:
        _LOG.warning(
            "tree %s (depth/top_k/total_tokens) asks for more than can be drafted; using %s",
            tree.name,
            fitted.name,
        )
    return fitted


def tree_for(trees: Trees, batch_size: int) -> TreeConfig | None:
    """Tree of the largest listed batch size not above the given one; else of the smallest."""
    below = [size for size in trees if size <= batch_size]
    return trees[max(below) if below else min(trees)]


def cover_trees(trees: Sequence[TreeConfig | None]) -> TreeConfig | None:
    """The smallest tree whose arrays can hold each of these; None if none drafts."""
    drafted = [asdict(tree) for tree in trees if tree is not None]
    if not drafted:
        return None
    return TreeConfig(**{name: max(tree[name] for tree in drafted) for name in drafted[0]})


def read_trees(path: AnyPath) -> Trees:
    """Reads a YAML file of trees by batch size; `none` stands for no draft at any size.

    Raises:
      UserError: it cannot be read, or holds something else.
    """
    if str(path) == "none":
        return {1: None}
    trees: dict[int, TreeConfig | None] = {}
    for size, values in read_yaml(path).items():
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


def find_tuned(
    draft: str | AnyPath, record: ModelRecord, mesh: Mesh | None = None
) -> tuple[Trees, AnyPath | None] | None:
    """Reads what was tuned for a draft on this kind of device; None if nothing was.

    A file made for other weights, another kind of device or another mesh is skipped with a line
    that says so.

    Returns:
      Trees by batch size, and the file of the fastest draft vocabulary, or None for the whole head.

    Raises:
      UserError: the file is broken.
    """
    path = tuned_file(draft, mesh)
    if not path.is_file():
        here = f"{_devices(mesh)} (poss tune tunes it here)"
        for foreign in sorted(as_path(draft).glob("trees.*.yaml"))[:1]:
            _skip(foreign, f"on another kind of device than this one, {here}")
        return None
    trees, tuned = read_trees(path), read_yaml(path).get(_TUNED)
    if not isinstance(tuned, dict):
        raise UserError(f"{path}: want the section {_TUNED}; give the file with --trees instead")
    for key, here in _identity(record, mesh).items():
        if tuned.get(key) != here:
            return _skip(path, f"for another {key} ({shorten(tuned.get(key))}, here {here})")
    file = vocabulary_file(path) if tuned.get("draft_vocabulary") else None
    if file is not None and not file.is_file():
        return _skip(path, f"with {file}, which is gone")
    _LOG.warning("trees by batch size: %s, tuned for this draft and device", path)
    return trees, file


def _skip(path: AnyPath, how: str) -> None:
    """Logs how a file that is not used was tuned."""
    _LOG.warning("%s was tuned %s; using the default tree", path, how)


def write_tuned(
    path: AnyPath,
    trees: Trees,
    record: ModelRecord,
    *,
    header: Mapping[str, Any],
    comments: Mapping[int, str],
    mesh: Mesh | None = None,
) -> None:
    """Writes trees so that `read_trees` and `find_tuned` read them; written atomically.

    Args:
      header: how they were tuned, JSON-compatible.
      comments: a line for the reader per batch size.

    Raises:
      UserError: it cannot be written.
    """
    lines = ["# Batch size -> draft tree; null decodes without the draft. Made by poss tune."]
    tuned = _identity(record, mesh) | dict(header)
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
    return " ".join([jax.devices()[0].device_kind, *sizes])
