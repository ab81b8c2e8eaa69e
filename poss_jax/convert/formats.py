"""The formats of checkpoints: one row of `FORMATS` each, with its signs and its reader.

A format that is recognised and cannot be converted is a row without a reader: a guess would run,
and run wrongly. `read_checkpoint` recognises, refuses and checks a checkpoint, for converting and
for inspecting alike; no weight is read.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.reading import UserError, build_config, cut, shorten
from poss_jax.convert.hf import (
    DraftMetadata,
    assume_fc_bias,
    contradiction,
    count_layers,
    read_eagle3_settings,
    read_layer,
    read_metadata,
    read_target_config,
)
from poss_jax.convert.names import (
    DRAFT_EMBEDDING,
    DRAFT_HEAD,
    FC,
    FC_BIAS,
    QUERY,
    Slot,
    join_rows,
    slots_by_key,
    source_key,
)
from poss_jax.convert.source import LazyTensor, Source

Family = Literal["target", "draft"]
Sign = Callable[[Source], str | None]
"""Returns what shows a format in a checkpoint, in words; None where nothing does."""

HEAD = source_key("head", ("weight",))

# Copies of the target's weights that some layouts of drafts hold: key -> item of the target.
_COPIES = {DRAFT_EMBEDDING: "embed", DRAFT_HEAD: "head"}

# Keys of an EAGLE-3 draft that are read by themselves -> the reason why they are not stored.
_MAPS = {"d2t": "becomes the draft vocabulary", "t2d": "follows from d2t"}

UNPLACED = (0, 0, 0)
"""Inner states of the target, in the config of a draft that leaves them to the target's depth."""

_READABLE = ("float32", "bfloat16", "float16")
_MAX_LISTED = 50


@dataclass(frozen=True)
class Reading:
    """A checkpoint whose weights have the names, shapes and types that its config wants.

    Attributes:
      source: files it was read from.
      config: shape of the model; in that of a draft every specialist has one position for now,
        see `plan.place_specialists`.
      slots: place in our format, by key.
      dropped: reason why a key is known and not stored, by key.
      copies: item of the target that a key of a draft must equal, by key.
      assumed: one line for each thing that the files do not say.
      metadata: what our own export of a draft says beyond its layout.
      read_vocabulary: reads the target id of every token that a draft can propose; None means all.
    """

    source: Source
    config: LlamaConfig | DraftConfig
    slots: Mapping[str, Slot]
    dropped: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    metadata: DraftMetadata | None = None
    read_vocabulary: Callable[[], tuple[int, ...] | None] = lambda: None


@dataclass(frozen=True)
class Format:
    """A layout that checkpoints have.

    Attributes:
      name: name with its article, for messages.
      in_config: signs in the small files; any of them is enough.
      in_weights: signs that need the names of the weights too.
      read: its reader; None if it cannot be converted.
      family: family of what its reader gives.
      why_not: what to do with it where it cannot be converted, or not by the command in use.
    """

    name: str
    why_not: str
    in_config: tuple[Sign, ...] = ()
    in_weights: tuple[Sign, ...] = ()
    read: Callable[[Source], Reading] | None = None
    family: Family | None = None


def read_checkpoint(source: Source, family: Family | None = None) -> Reading:
    """Recognises a checkpoint and checks its config and the names of its weights.

    Args:
      source: where its files are.
      family: family it must be of; None accepts both.

    Raises:
      UserError: a format that cannot be converted, a checkpoint of the other family, or anything
        in it that is unknown or does not fit its config.
    """
    read = recognise(source, family).read
    assert read is not None  # a format without a reader was refused
    return read(source)


def recognise(source: Source, family: Family | None = None) -> Format:
    """Finds the format of a checkpoint; signs in the config come first, for they are cheap.

    Raises:
      UserError: as `read_checkpoint`; names the format and the sign.
    """
    signs = [(form, sign) for form in FORMATS for sign in form.in_config]
    signs += [(form, sign) for form in FORMATS for sign in form.in_weights]
    for form, sign in signs:
        shown = sign(source)
        if shown is None:
            continue
        if form.read is None or family not in (None, form.family):
            raise UserError(f"{source.folder}: holds {form.name} ({cut(shown)}); {form.why_not}")
        return form
    # Without any sign, the keys that are missing will be listed.
    return next(form for form in FORMATS if form.family == (family or "target"))


# --------------------------------------------------------------------------------------------------
# Signs


def model_names(values: Mapping[str, Any]) -> list[str]:
    """Lists what config.json calls the model: its classes, then its type."""
    classes = values.get("architectures")
    names = [*classes] if isinstance(classes, list) else []
    return [str(name) for name in (*names, values.get("model_type")) if name is not None]


def _name(pattern: str) -> Sign:
    """Finds a name of the model that holds the pattern."""
    find = re.compile(pattern, re.IGNORECASE).search
    return lambda source: next(filter(find, model_names(source.settings)), None)


def _setting(*keys: str) -> Sign:
    """Finds a key of config.json with a value other than null, false and 0."""

    def sign(source: Source) -> str | None:
        values = source.settings
        return next((f"{key} {shorten(values[key])}" for key in keys if values.get(key)), None)

    return sign


def _key(pattern: str, *, in_drafts: bool = False) -> Sign:
    """Finds a weight whose plain name holds the pattern, in drafts alone or in any model."""
    find, is_fusion = re.compile(pattern).search, re.compile(r"(fusion_)?fc\.").match

    def sign(source: Source) -> str | None:
        if in_drafts and not any(map(is_fusion, source.names)):
            return None
        return next((key for name, key in source.names.items() if find(name)), None)

    return sign


def _type(pattern: str) -> Sign:
    """Finds a weight of a type that fits the pattern."""
    fits = re.compile(pattern).fullmatch
    return lambda source: next(
        (f"{key} of type {t.dtype}" for key, t in source.tensors.items() if fits(t.dtype)), None
    )


def _adapter_file(source: Source) -> str | None:
    name = "adapter_config.json"
    is_alone = not (source.folder / "config.json").is_file()
    return name if is_alone and (source.folder / name).is_file() else None


def _class_of_speculators(pattern: str) -> Sign:
    """Finds a class of vLLM's speculators, other than that of EAGLE-1."""
    find = re.compile(pattern, re.IGNORECASE).search

    def sign(source: Source) -> str | None:
        for values in (source.values, source.settings):
            kind = values.get("speculators_model_type")
            shown = ": ".join([str(kind), *model_names(values)[:1]])
            if kind not in (None, "eagle") and find(shown):
                return shown
        return None

    return sign


def _quantisation(source: Source) -> str | None:
    values = source.settings
    settings = values.get("quantization_config") or values.get("compression_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return f"quantization_config with quant_method {shorten(method)}" if settings else None


def _eagle3(source: Source) -> str | None:
    """Tells EAGLE-3 by its names, or by twice or three times the width."""
    shapes = source.shapes
    fc_shape = shapes.get(FC, ())
    wide = (
        f"{key} {list(shapes[key])}"
        for key, times in ((FC, 3), (QUERY, 2))
        if len(fc_shape) == 2 and shapes.get(key, ())[1:] == (times * fc_shape[0],)
    )
    names = re.compile(r"(^|\.)(midlayers?\.|d2t$|t2d$|layers\.\d+\.hidden_norm\.)")
    return next(filter(names.search, source.names.values()), None) or next(wide, None)


def _eagle3_config(source: Source) -> str | None:
    """Tells EAGLE-3 by its config.json, unless the weights have EAGLE-2's layout."""
    is_eagle2 = {FC, QUERY} <= source.names.keys()
    return None if is_eagle2 else _EAGLE3_NAME(source)


def _whole_target(source: Source) -> str | None:
    found = {FC, "embed_tokens.weight", "norm.weight"} & source.names.keys()
    return f"norm.weight, and no {FC}" if found == {"embed_tokens.weight", "norm.weight"} else None


_EAGLE3_NAME = _name(r"eagle3")

# --------------------------------------------------------------------------------------------------
# Readers


def _read_target(source: Source) -> Reading:
    """Reads a target of the Llama family in Hugging Face's layout."""
    config = read_target_config(source)
    slots = slots_by_key(config)
    buffers = [key for key in source.tensors if key.endswith("self_attn.rotary_emb.inv_freq")]
    dropped = dict.fromkeys(buffers, "follows from the config")  # old checkpoints hold them
    optional: dict[str, tuple[int, ...]] = dict.fromkeys(buffers, (config.head_dim // 2,))
    if config.tie_embeddings and HEAD in source.tensors:
        dropped[HEAD] = "tied to the embedding"
        optional[HEAD] = (config.vocab_size, config.hidden_size)
    _check_keys(str(source.folder), source.tensors, slots, optional)
    return Reading(source, config, slots, dropped)


def _read_draft(source: Source) -> Reading:
    """Reads an EAGLE, EAGLE-2, HASS or PosS draft, with or without a wrapper and prefixes."""
    origin, name = str(source.folder), _EAGLE3_NAME(source)
    if name is not None:
        layout = f"have EAGLE-2's layout ({QUERY} {list(source.shapes[QUERY])})"
        raise contradiction(source, f"EAGLE-3 ({name})", layout)
    layer, assumed = read_layer(source)
    assumed += assume_fc_bias(source)
    values = {"layer": layer, "fc_bias": FC_BIAS in source.names}
    values |= {"positions_per_specialist": (1,) * count_layers(source)}
    config = build_config(DraftConfig, values, origin=origin)
    slots = slots_by_key(config)
    copies = dict.fromkeys(_COPIES, (layer.vocab_size, layer.hidden_size))
    plain = {name: source.tensors[key] for name, key in source.names.items()}
    _check_keys(origin, plain, slots, copies)
    return Reading(
        source,
        config,
        slots={source.names[name]: slot for name, slot in slots.items()},
        copies={source.names[name]: item for name, item in _COPIES.items() if name in source.names},
        assumed=tuple(assumed),
        metadata=read_metadata(source),
    )


def _read_eagle3(source: Source) -> Reading:
    """Reads an EAGLE-3 draft, or PosS on EAGLE-3, with or without prefixes."""
    origin = str(source.folder)
    layer, assumed = read_layer(source)
    settings = {"aux_layers": UNPLACED, **read_eagle3_settings(source)}
    values = {"layer": layer, "family": "eagle3", "kv": "shared", **settings}
    values |= {"positions_per_specialist": (1,) * count_layers(source)}
    config = build_config(DraftConfig, values, origin=origin)
    assert isinstance(config, DraftConfig)
    slots = slots_by_key(config)
    plain = {name: source.tensors[key] for name, key in source.names.items() if name not in _MAPS}
    embedding = {DRAFT_EMBEDDING: (layer.vocab_size, layer.hidden_size)}
    _check_keys(f"{origin}: read as an EAGLE-3 draft", plain, slots, embedding)
    names = source.names
    for name, want in (("d2t", "int64"), ("t2d", "bool")):
        if name in names and (got := source.tensors[names[name]].dtype) != want:
            raise UserError(
                f"{origin}: {names[name]}: want {want}, got {got}; give the draft's own files"
            )
    return Reading(
        source,
        config,
        slots={names[name]: slot for name, slot in slots.items()},
        dropped={names[name]: why for name, why in _MAPS.items() if name in names},
        copies={names[name]: "embed" for name in embedding if name in names},
        assumed=tuple(assumed),
        metadata=read_metadata(source),
        read_vocabulary=partial(_read_vocabulary, source, config),
    )


def _read_vocabulary(source: Source, config: DraftConfig) -> tuple[int, ...] | None:
    """Reads the target id of every token of an EAGLE-3 draft's head; None: it has them all."""
    V, Vd = config.layer.vocab_size, config.head_size
    if Vd is None or Vd == V:
        return None  # whatever the maps hold: the original does not look at them
    if "d2t" not in source.names:
        raise UserError(
            f"{source.folder}: draft_vocab_size {Vd} of {V} tokens, but the weights hold no d2t, "
            "which says of which; give the draft's own files"
        )
    offsets = source.tensors[source.names["d2t"]].read()
    ids = offsets.astype(np.int64) + np.arange(len(offsets))
    if offsets.shape != (Vd,) or ids.min() < 0 or ids.max() >= V or (np.diff(ids) <= 0).any():
        raise UserError(
            f"{source.folder}: d2t: want the offsets of {Vd} ascending ids below {V}; the file is "
            "damaged, or is that of another draft"
        )
    if "t2d" in source.names:
        known = source.tensors[source.names["t2d"]].read()
        if not np.array_equal(np.flatnonzero(known), ids):
            raise UserError(
                f"{source.folder}: t2d and d2t name different tokens; give the draft's own files"
            )
    return tuple(ids.tolist())


def _check_keys(
    origin: str,
    tensors: Mapping[str, LazyTensor],
    slots: Mapping[str, Slot],
    optional: Mapping[str, tuple[int, ...]],
) -> None:
    """Compares the names, shapes and types of the weights with what the config describes."""
    shapes = {**optional, **(wanted := join_rows(slots))}
    problems = [f"missing {key} {list(wanted[key])}" for key in wanted if key not in tensors]
    for key, tensor in tensors.items():
        where = f"in {tensor.file.name}"
        if key not in shapes:
            problems.append(f"unknown {key} {list(tensor.shape)} {where}")
        elif tensor.shape != shapes[key]:
            problems.append(f"{key} want {list(shapes[key])} got {list(tensor.shape)} {where}")
        elif tensor.dtype not in _READABLE:
            problems.append(f"{key} want {' or '.join(_READABLE)} got {tensor.dtype} {where}")
    if problems:
        listed = "; ".join(problems[:_MAX_LISTED])
        more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise UserError(
            f"{origin}: the weights do not fit what config.json describes: {listed}{more}; "
            "give the model's own files"
        )


# --------------------------------------------------------------------------------------------------
# The table

_NOT_YET = "not supported yet, give an EAGLE-2, HASS or PosS draft"

FORMATS = (
    Format(
        "a LoRA adapter",
        in_config=(_adapter_file,),
        in_weights=(_key(r"(^|\.)lora_(A|B|embedding_[AB])(\.|$)"),),
        why_not="merge it into its base model and convert the result",
    ),
    Format(
        "an EAGLE-3 draft of speculators",
        in_config=(_class_of_speculators(r"eagle3"),),
        why_not=_NOT_YET,
    ),
    Format(
        "a draft of speculators",
        in_config=(_class_of_speculators(r""),),
        why_not=_NOT_YET,
    ),
    Format(
        "an EAGLE-3 draft",
        in_weights=(_eagle3, _eagle3_config, _setting("draft_vocab_size")),
        read=_read_eagle3,
        family="draft",
        why_not="convert it with the draft command, and give its target here",
    ),
    Format(
        "quantised weights",
        in_config=(_quantisation,),
        in_weights=(
            _key(
                r"\.(qweight|qzeros|scales|g_idx|SCB|weight_scale(_inv)?|weight_packed"
                r"|weight\.(absmax|quant_map|quant_state\..*))$"
            ),
            _type(r"[UIF][48](_.*)?|u?int8|float8.*"),
        ),
        why_not="convert the model it was quantised from",
    ),
    Format(
        "a mixture of experts",
        in_config=(
            _name(r"moe|mixtral|llama4|deepseek_v|dbrx"),
            _setting("num_experts", "num_local_experts", "n_routed_experts"),
        ),
        in_weights=(_key(r"\.(experts|block_sparse_moe)\."),),
        why_not="only dense models can be converted",
    ),
    Format(
        "an EAGLE-1 draft of speculators with layers of its own",
        in_weights=(
            _key(
                r"^(embed_layernorm|embedding_layernorm|post_embedding_layernorm"
                r"|pre_lm_head_layernorm|fusion_fc|transformer)\.",
                in_drafts=True,
            ),
        ),
        why_not="give a draft of the original layout",
    ),
    Format(
        "an input norm",
        in_weights=(_key(r"\.input_layernorm\.", in_drafts=True),),
        why_not="no EAGLE-2, HASS or PosS draft has one, give the draft's own files",
    ),
    Format(
        "a draft",
        in_weights=(_key(r"^fc\."),),
        read=_read_draft,
        family="draft",
        why_not="convert it with the draft command, and give its target here",
    ),
    Format(
        "a whole target",
        in_weights=(_whole_target,),
        read=_read_target,
        family="target",
        why_not="convert it with the target command, and give the draft's own files here",
    ),
)
"""Every format we know, in the order in which their signs are looked for."""
