"""Comparing a model folder with its own checksums."""

from pathlib import Path

from poss_jax.checkpoint.folder import load_item
from poss_jax.checkpoint.record import ModelRecord, read_record
from poss_jax.checkpoint.sums import SUMS_FILE, check_file, hash_item, read_sums
from poss_jax.config.reading import UserError
from poss_jax.model.parameters import item_shapes


def verify_model(folder: str | Path) -> ModelRecord:
    """Compares every file and every array of a model folder with its checksum.

    Loading does not do that: it would read a large model twice.

    Returns:
      What `model.json` says.

    Raises:
      UserError: names the first file or item that is missing, unreadable or another, or says that
        the folder was written before there were checksums.
    """
    folder = Path(folder)
    record = read_record(folder)
    names = item_shapes(record.config)
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
