"""The model folder, our format on disk: `model.json`, the tokenizer's files, and the weights.

record.py      what model.json says: config, target identity, provenance
sums.py        checksums of arrays and of files
folder.py      writing a model, and loading it to the device
whole.py       a folder that is written all or nothing
locks.py       one writer at a time
integrity.py   comparing a folder with its checksums
"""

from poss_jax.checkpoint.folder import (
    copy_tokenizer,
    describe_item,
    failed_write,
    load_draft,
    load_item,
    load_target,
    read_draft,
    read_target,
    write_model,
)
from poss_jax.checkpoint.integrity import verify_model
from poss_jax.checkpoint.locks import hold_lock, sole_writer
from poss_jax.checkpoint.record import (
    FORMAT_VERSION,
    TOKENIZER_FILES,
    ModelRecord,
    TargetIdentity,
    check_fit,
    new_record,
    provenance,
    read_record,
    target_identity,
    tokenizer_hashes,
)
from poss_jax.checkpoint.sums import (
    SUMS_FILE,
    check_file,
    find_damage,
    list_files,
    read_sums,
    write_sums,
)
from poss_jax.checkpoint.whole import refuse_non_empty, whole_folder, write_file

__all__ = [
    "FORMAT_VERSION",
    "SUMS_FILE",
    "TOKENIZER_FILES",
    "ModelRecord",
    "TargetIdentity",
    "check_file",
    "check_fit",
    "copy_tokenizer",
    "describe_item",
    "failed_write",
    "find_damage",
    "hold_lock",
    "list_files",
    "load_draft",
    "load_item",
    "load_target",
    "new_record",
    "provenance",
    "read_draft",
    "read_record",
    "read_sums",
    "read_target",
    "refuse_non_empty",
    "sole_writer",
    "target_identity",
    "tokenizer_hashes",
    "verify_model",
    "whole_folder",
    "write_file",
    "write_model",
    "write_sums",
]
