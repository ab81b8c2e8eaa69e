"""Llama-family targets in Hugging Face's layout."""

from collections.abc import Mapping
from pathlib import Path

from poss_jax.checkpoint import new_record, target_identity
from poss_jax.config import LlamaConfig, UserError
from poss_jax.convert.hf_config import read_llama_config
from poss_jax.convert.names import slots_by_key, source_key
from poss_jax.convert.plan import Conversion, DType, Reader, check_keys
from poss_jax.convert.refusals import refuse_adapter, refuse_draft, refuse_tensors
from poss_jax.convert.source import LazyTensor, open_source, open_tensors
from poss_jax.model.parameters import item_shapes

_EMBED = source_key("embed", ("weight",))
_HEAD = source_key("head", ("weight",))

# A buffer that old checkpoints carry along.
_INVERSE_FREQUENCIES = "self_attn.rotary_emb.inv_freq"


def plan_target(source: str, *, revision: str | None = None, dtype: DType = "keep") -> Conversion:
    """Opens and checks a target; nothing is written yet.

    Args:
      source: folder or Hub id.
      revision: on the Hub.
      dtype: what to store.

    Raises:
      UserError: anything in the source that we do not know or that does not fit its config.
    """
    opened = open_source(source, revision)
    refuse_adapter(opened.folder)
    config = read_llama_config(opened.folder)
    tensors = open_tensors(opened.folder)
    slots = slots_by_key(item_shapes(config))
    dropped = check_target(config, tensors, str(opened.folder))
    reader = Reader(tensors, dtype)
    if config.tie_embeddings and _HEAD in tensors:
        _check_tied(opened.folder, tensors)
    embedding = tensors[_EMBED].read()
    head = embedding if config.tie_embeddings else tensors[_HEAD].read()
    identity = target_identity(opened.name, opened.revision, embedding, head)
    return Conversion(
        record=new_record(config, identity, tokenizer_from=opened.folder),
        rows=reader.rows(slots, dropped),
        items=reader.items(slots),
        num_items=len(item_shapes(config)),
        tokenizer_from=opened.folder,
    )


def check_target(
    config: LlamaConfig, tensors: Mapping[str, LazyTensor], origin: str
) -> dict[str, str]:
    """Compares the names, shapes and types of the weights with the config; reads none of them.

    Args:
      config: of the target.
      tensors: by key.
      origin: the source, for messages.

    Returns:
      Keys that are known and not stored, and why.

    Raises:
      UserError: what cannot be converted, or every key that does not fit.
    """
    refuse_tensors(tensors, origin)
    refuse_draft(tensors, origin)
    dropped = _dropped(config, tensors)
    check_keys(
        origin,
        tensors,
        wanted={key: slot.shape for key, slot in slots_by_key(item_shapes(config)).items()},
        optional={key: shape for key, (shape, _) in dropped.items()},
    )
    return {key: why for key, (_, why) in dropped.items()}


def _dropped(
    config: LlamaConfig, tensors: Mapping[str, LazyTensor]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Keys we know and do not store: wanted shape, and why."""
    dropped: dict[str, tuple[tuple[int, ...], str]] = {
        key: ((config.head_dim // 2,), "follows from the config")
        for key in tensors
        if key.endswith(_INVERSE_FREQUENCIES)
    }
    if config.tie_embeddings and _HEAD in tensors:
        dropped[_HEAD] = ((config.vocab_size, config.hidden_size), "tied to the embedding")
    return dropped


def _check_tied(folder: Path, tensors: dict[str, LazyTensor]) -> None:
    if (tensors[_EMBED].read() != tensors[_HEAD].read()).any():
        raise UserError(
            f"{folder}: config.json ties the embeddings, got another {_HEAD}; "
            "set tie_word_embeddings to what the model was trained with"
        )
