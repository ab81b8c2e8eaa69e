"""The model folder, our format on disk: `model.json`, the tokenizer's files, and the weights.

record.py   what model.json says: config, target identity, provenance
items.py    which weight items a model has, their key paths and shapes
folder.py   writing a folder, all or nothing, and loading it to the device
"""

from poss_jax.checkpoint.folder import (
    describe_item,
    load_draft,
    load_item,
    load_target,
    refuse_non_empty,
    write_model,
)
from poss_jax.checkpoint.items import (
    count_parameters,
    draft_shapes,
    flatten_item,
    item_shapes,
    join_items,
    split_items,
    target_shapes,
)
from poss_jax.checkpoint.record import (
    FORMAT_VERSION,
    TOKENIZER_FILES,
    ModelRecord,
    TargetIdentity,
    check_fit,
    new_record,
    provenance,
    read_json,
    read_record,
    target_identity,
    tokenizer_hashes,
)

__all__ = [
    "FORMAT_VERSION",
    "TOKENIZER_FILES",
    "ModelRecord",
    "TargetIdentity",
    "check_fit",
    "count_parameters",
    "describe_item",
    "draft_shapes",
    "flatten_item",
    "item_shapes",
    "join_items",
    "load_draft",
    "load_item",
    "load_target",
    "new_record",
    "provenance",
    "read_json",
    "read_record",
    "refuse_non_empty",
    "split_items",
    "target_identity",
    "target_shapes",
    "tokenizer_hashes",
    "write_model",
]
