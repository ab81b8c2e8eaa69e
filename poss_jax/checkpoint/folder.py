"""Model folders: written atomically, loaded to the device item by item, verified."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax

from poss_jax.checkpoint.items import ShardingFor, load_item, write_item
from poss_jax.checkpoint.record import TOKENIZER_FILES, ModelRecord, check_fit, read_record
from poss_jax.checkpoint.sums import SUMS_FILE, check_file, hash_item, read_sums, write_sums
from poss_jax.checkpoint.whole import whole_folder
from poss_jax.config.json_reading import check_own_file
from poss_jax.config.models import DraftConfig, Quantisation
from poss_jax.config.paths import AnyPath, as_path, local_files
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.model.parameters import join_items
from poss_jax.model.quantise import KINDS, pack, quantise_items
from poss_jax.shapes import Params


def write_model(
    folder: str | AnyPath,
    record: ModelRecord,
    items: Iterable[tuple[str, Params]],
    *,
    tokenizer_from: AnyPath | None,
) -> ModelRecord:
    """Writes a model folder atomically.

    Items are taken one at a time and written to a temporary sibling, renamed at the end. SHA256SUMS
    covers model.json and the tokenizer's files; model.json covers the weights.

    Args:
      items: (name, nested dict of arrays) of every item of the model, in any order.
      tokenizer_from: folder whose tokenizer files are copied; None: no tokenizer.

    Returns:
      The record as written, with the checksums of the weights.

    Raises:
      UserError: the folder is not empty or cannot be written, or an item does not fit the config.
    """
    with whole_folder(folder) as partial:
        sums = _write_items(partial, record.items, items)
        record = replace(record, weights_sha256=sums)
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, partial)
        (partial / "model.json").write_text(json.dumps(config_to_dict(record), indent=2) + "\n")
        write_sums(partial, [path.name for path in partial.iterdir() if path.is_file()])
    return record


def _write_items(
    partial: Path, shapes: dict[str, Params], items: Iterable[tuple[str, Params]]
) -> dict[str, str]:
    sums: dict[str, str] = {}
    for name, tree in items:
        sums[name] = write_item(partial, name, tree, shapes.get(name, {}))
        del tree  # freed before the next item is made
    missing = sorted(shapes.keys() - sums.keys())
    if missing:
        raise UserError(f"model has no items {', '.join(missing)}; give every item")
    return sums


def copy_tokenizer(source: AnyPath, folder: Path) -> None:
    """Copies the tokenizer's files, if there are any.

    Raises:
      UserError: what `check_own_file` refuses.
    """
    with local_files(source, TOKENIZER_FILES) as local:
        for name in TOKENIZER_FILES:
            check_own_file(local / name)
            if (local / name).is_file():
                shutil.copyfile(local / name, folder / name)


# --------------------------------------------------------------------------------------------------
# Reading


def read_target(folder: str | AnyPath) -> ModelRecord:
    """Reads the record of a target's folder, without its weights.

    Raises:
      UserError: what `read_record` refuses, or a draft.
    """
    return read_family(folder, "target")


def read_dense(folder: str | AnyPath) -> ModelRecord:
    """Reads the record of a target's folder whose weights no quantisation has rounded.

    Models are trained, and drafts analysed, with such a target.

    Raises:
      UserError: what `read_target` refuses, or a quantised target.
    """
    record = read_target(folder)
    if record.quantised is None:
        return record
    command: list[str] = record.provenance.get("command", [])
    source = dict(pairwise(command)).get("--source", "SOURCE")
    raise UserError(
        f"target {folder} is quantised to {record.quantised}, which no model is trained with; give "
        f"the target it was made from: poss convert target --source {source} --output DIR"
    )


def read_draft(
    folder: str | AnyPath, *, target: ModelRecord, allow_target_mismatch: bool = False
) -> ModelRecord:
    """Reads the record of a draft's folder, without its weights.

    Args:
      allow_target_mismatch: accept a draft made for other weights of the same shape.

    Raises:
      UserError: what `read_record` refuses, a target, or a draft that does not fit this target.
    """
    record = read_family(folder, "draft")
    assert isinstance(record.config, DraftConfig)
    check_fit(f"draft {folder}", record.config, target)
    if max(record.config.aux_layers, default=0) >= (num_layers := target.llama.num_layers):
        raise UserError(
            f"draft {folder} reads the inputs of layers {list(record.config.aux_layers)}, from 0, "
            f"the target {target.target.name} has {num_layers}; use the target it was trained for"
        )
    if not allow_target_mismatch and not record.target.same_weights(target.target):
        raise UserError(
            f"draft {folder} was made for {record.target.name}, got the target "
            f"{target.target.name} with another embedding or head; use its own target, or set "
            "allow_target_mismatch (--allow-target-mismatch)"
        )
    return record


def load_target(
    folder: str | AnyPath,
    dtype: Any = None,
    *,
    with_layers: bool = True,
    sharding: jax.sharding.Sharding | ShardingFor | None = None,
    quantise: Quantisation | None = None,
) -> tuple[ModelRecord, Params]:
    """Loads a target straight to its devices.

    Args:
      dtype: dtype of every array; None keeps what is stored.
      with_layers: load the layers; False returns the rest.
      quantise: type to round the stored matrices to; None keeps them.

    Returns:
      The record, with the requested quantisation, and {"embed", "layers": list, "norm",
      "head"}; a tied head is the embedding's array, unless it is quantised.

    Raises:
      UserError: what `read_record` refuses, a draft, a missing or damaged item, or a quantisation
        that is unknown or of a target that is quantised already.
    """
    record = read_target(folder)
    if quantise is not None:
        check_quantisation(folder, record, quantise)
    names = [name for name in record.items if with_layers or "layers/" not in name]
    params = _load_params(folder, record, dtype, sharding, names, quantise)
    params.setdefault("head", {"weight": params["embed"]["weight"]})
    return replace(record, quantised=record.quantised or quantise), params


def check_quantisation(origin: str | AnyPath, record: ModelRecord, kind: str) -> None:
    """Raises UserError for an unknown quantisation, or one of a quantised target."""
    if kind not in KINDS:
        raise UserError(f"quantise: want {' or '.join(KINDS)}, got {kind!r}")
    if record.quantised is not None:
        raise UserError(
            f"target {origin} is quantised to {record.quantised} already; leave out quantise, or "
            "give the target it was made from"
        )


def load_draft(
    folder: str | AnyPath,
    dtype: Any = None,
    *,
    target: ModelRecord,
    allow_target_mismatch: bool = False,
    sharding: jax.sharding.Sharding | ShardingFor | None = None,
) -> tuple[ModelRecord, Params]:
    """Loads a draft straight to its devices, with the arguments of `read_draft` and `load_target`.

    Returns:
      The record, and {"fc", "specialists": list}.

    Raises:
      UserError: what `read_record` refuses, a target, a draft that does not fit this target, or
        a missing or damaged item.
    """
    record = read_draft(folder, target=target, allow_target_mismatch=allow_target_mismatch)
    return record, _load_params(folder, record, dtype, sharding, record.items)


def verify_model(folder: str | AnyPath) -> ModelRecord:
    """Compares every file and every array of a model folder with its checksum.

    Loading does not, since it would read a large model twice.

    Returns:
      The record in `model.json`.

    Raises:
      UserError: names the first file or item that is missing, unreadable or changed, or says that
        the folder is too old to have checksums.
    """
    folder = as_path(folder)
    record = read_record(folder)
    names = record.items
    sums, weights = read_sums(folder), record.weights_sha256 or {}
    if "model.json" not in sums or weights.keys() != names.keys():
        raise UserError(
            f"{folder} has no complete checksums ({SUMS_FILE} about model.json, and there "
            "weights_sha256 about every item); convert the model again"
        )
    for name, want in sums.items():
        check_file(folder / name, want)
    for name in names:
        if hash_item(load_item(folder, record, name)) != weights[name]:
            raise UserError(
                f"{folder}: the weights of item {name} are not those that were written; "
                "copy or convert the model again"
            )
    return record


def read_family(folder: str | AnyPath, family: str) -> ModelRecord:
    """Reads the record of a target's or a draft's folder; refuses the other family."""
    record = read_record(folder, family)
    if record.family != family:
        raise UserError(f"{folder}: want a {family}, got a {record.family}; give the other folder")
    return record


def _load_params(
    folder: str | AnyPath,
    record: ModelRecord,
    dtype: Any,
    sharding: jax.sharding.Sharding | ShardingFor | None,
    names: Iterable[str],
    quantise: Quantisation | None = None,
) -> Params:
    stored = None if quantise else dtype
    items = ((name, load_item(folder, record, name, stored, sharding=sharding)) for name in names)
    if quantise is not None:
        is_tied = record.llama.tie_embeddings
        items = quantise_items(items, quantise, dtype=dtype, is_tied=is_tied)
    return join_items((name, pack(item)) for name, item in items)
