"""The formats of checkpoints: one row of `FORMATS` each, with its signs and its reader.

A format that is recognised and cannot be converted is a row without a reader: a guess would run,
and run wrongly. `read_checkpoint` recognises, refuses and checks a checkpoint, for converting and
for inspecting alike; no weight is read.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from poss_jax.config.reading import UserError, cut, shorten
from poss_jax.convert.drafts import has_eagle3_config, has_eagle3_weights, read_draft, read_eagle3
from poss_jax.convert.hf import read_target
from poss_jax.convert.reading import FC, Reading, Sign, model_names, named
from poss_jax.convert.source import Source

Family = Literal["target", "draft"]


@dataclass(frozen=True)
class Format:
    """A layout that checkpoints have."""

    name: str  # name with its article, for messages
    why_not: str  # what to do if it cannot be converted, or not by the command in use
    in_config: tuple[Sign, ...] = ()  # signs in the small files; any of them is enough
    in_weights: tuple[Sign, ...] = ()  # signs that need the names of the weights too
    read: Callable[[Source], Reading] | None = None  # its reader; None if it cannot be converted
    family: Family | None = None  # family of what its reader gives
    brief: str = ""  # what such a model does, for those who do not know its name

    def __str__(self) -> str:
        return f"{self.name}, which {self.brief}" if self.brief else self.name


def read_checkpoint(source: Source, family: Family | None = None) -> Reading:
    """Recognises a checkpoint and checks its config and the names of its weights.

    Signs in the config come first, since they are cheap.

    Args:
      family: family it must be of; None accepts both.

    Raises:
      UserError: a format that cannot be converted, a checkpoint of the other family, or anything
        in it that is unknown or does not fit its config.
    """
    form, shown = find_format(source)
    if form is None:  # the keys that are missing will be listed
        form = next(form for form in FORMATS if form.family == (family or "target"))
    elif form.read is None or family not in (None, form.family):
        raise UserError(f"{source.folder}: holds {form.name} ({cut(shown)}); {form.why_not}")
    assert form.read is not None
    return form.read(source)


def find_format(source: Source) -> tuple[Format | None, str]:
    """Finds the first format with a sign in a checkpoint, and the sign; None without any."""
    signs = [(form, sign) for form in FORMATS for sign in form.in_config]
    signs += [(form, sign) for form in FORMATS for sign in form.in_weights]
    matches = ((form, sign(source)) for form, sign in signs)
    return next(((form, shown) for form, shown in matches if shown is not None), (None, ""))


# --------------------------------------------------------------------------------------------------
# Signs


def has_setting(*keys: str) -> Sign:
    """Finds a key of config.json with a value other than null, false and 0."""

    def sign(source: Source) -> str | None:
        values = source.settings
        return next((f"{key} {shorten(values[key])}" for key in keys if values.get(key)), None)

    return sign


def has_key(pattern: str, *, in_drafts: bool = False) -> Sign:
    """Finds a weight whose plain name holds the pattern, in drafts alone or in any model."""
    find, is_fusion = re.compile(pattern).search, re.compile(r"(fusion_)?fc\.").match

    def sign(source: Source) -> str | None:
        if in_drafts and not any(map(is_fusion, source.names)):
            return None
        return next((key for name, key in source.names.items() if find(name)), None)

    return sign


def has_type(pattern: str) -> Sign:
    """Finds a weight of a type that fits the pattern."""
    fits = re.compile(pattern).fullmatch
    return lambda source: next(
        (f"{key} of type {t.dtype}" for key, t in source.tensors.items() if fits(t.dtype)), None
    )


def is_adapter(source: Source) -> str | None:
    """Tells a LoRA adapter by its file."""
    name = "adapter_config.json"
    is_alone = not (source.folder / "config.json").is_file()
    return name if is_alone and (source.folder / name).is_file() else None


def is_of_speculators(pattern: str) -> Sign:
    """Finds a kind and class of vLLM's speculators, except EAGLE-1."""
    find = re.compile(pattern, re.IGNORECASE).search

    def sign(source: Source) -> str | None:
        for values in (source.values, source.settings):
            kind = values.get("speculators_model_type")
            shown = ": ".join([str(kind), *model_names(values)[:1]])
            if kind not in (None, "eagle") and find(shown):
                return shown
        return None

    return sign


def is_quantised(source: Source) -> str | None:
    """Tells quantised weights by config.json."""
    values = source.settings
    settings = values.get("quantization_config") or values.get("compression_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return f"quantization_config with quant_method {shorten(method)}" if settings else None


def _whole_target(source: Source) -> str | None:
    names = {FC, "embed_tokens.weight", "norm.weight"} & source.names.keys()
    return f"norm.weight, and no {FC}" if names == {"embed_tokens.weight", "norm.weight"} else None


def _counts_experts(source: Source) -> str | None:
    """Tells experts by config.json, except of drafts, which keep keys of their target."""
    count = has_setting("num_experts", "num_local_experts", "n_routed_experts")(source)
    return None if count is None or has_key(r"^fc\.")(source) else count


# --------------------------------------------------------------------------------------------------
# The table

_NOT_YET = "not supported yet, give an EAGLE-2, EAGLE-3, P-EAGLE, HASS or PosS draft"

FORMATS = (
    Format(
        "a LoRA adapter",
        in_config=(is_adapter,),
        in_weights=(has_key(r"(^|\.)lora_(A|B|embedding_[AB])(\.|$)"),),
        why_not="merge it into its base model and convert the result",
    ),
    Format(
        "a P-EAGLE draft",
        in_config=(is_of_speculators(r"^peagle\b"), named(r"^p_?eagle")),
        in_weights=(has_key(r"^mask_hidden$"),),
        read=read_eagle3,
        family="draft",
        why_not="convert it with the draft command, and give its target here",
    ),
    Format(
        "a DSpark draft",
        in_config=(is_of_speculators(r"^dspark\b"), named(r"dspark")),
        in_weights=(has_key(r"^markov_head\."),),
        why_not=_NOT_YET,
        brief="is DFlash with a head that corrects each token by the one before, and one that "
        "predicts acceptance",
    ),
    Format(
        "a DFlash draft",
        in_config=(is_of_speculators(r"^dflash"), named(r"dflash")),
        why_not=_NOT_YET,
        brief="fills a block of masked positions in one pass, with the target's states as context",
    ),
    Format(
        "an MTP draft",
        in_config=(is_of_speculators(r"^mtp\b"), named(r"mtp")),
        in_weights=(has_key(r"^mtp(_layers)?\.|\.eh_proj\.weight$"),),
        why_not=_NOT_YET,
        brief="is a further layer of the target itself, for multi-token prediction: it reads the "
        "target's last state and the next token",
    ),
    Format(
        "a draft of speculators", in_config=(is_of_speculators(r"^(?!eagle3\b)"),), why_not=_NOT_YET
    ),
    Format(
        "a draft that drafts in parallel",
        in_weights=(has_key(r"^context_\w+\."),),
        why_not=_NOT_YET,
    ),
    Format(
        "a draft under ModelOpt's inner names",
        in_weights=(has_key(r"(^|\.)(eagle_module|input_embeds_norm)\."),),
        why_not="export it with ModelOpt and convert what that writes",
    ),
    Format(
        "an EAGLE-3 draft",
        in_weights=(
            is_of_speculators(r"^eagle3\b"),
            has_eagle3_weights,
            has_eagle3_config,
            has_setting("draft_vocab_size"),
        ),
        read=read_eagle3,
        family="draft",
        why_not="convert it with the draft command, and give its target here",
    ),
    Format(
        "quantised weights",
        in_config=(is_quantised,),
        in_weights=(
            has_key(
                r"\.(qweight|qzeros|scales|g_idx|SCB|weight_scale(_inv)?|weight_packed"
                r"|weight\.(absmax|quant_map|quant_state\..*))$"
            ),
            has_type(r"[UIF][48](_.*)?|u?int8|float8.*"),
        ),
        why_not="convert the model it was quantised from",
    ),
    Format(
        "a mixture of experts",
        in_config=(named(r"moe|mixtral|llama4|deepseek_v|dbrx"),),
        in_weights=(has_key(r"\.(experts|block_sparse_moe)\."), _counts_experts),
        why_not="only dense models can be converted",
    ),
    Format(
        "an EAGLE-1 draft of speculators with extra layers",
        in_weights=(
            has_key(
                r"^(embed_layernorm|embedding_layernorm|post_embedding_layernorm"
                r"|pre_lm_head_layernorm|fusion_fc|transformer)\.",
                in_drafts=True,
            ),
        ),
        why_not="give a draft of the original layout",
    ),
    Format(
        "an input norm",
        in_weights=(has_key(r"\.input_layernorm\.", in_drafts=True),),
        why_not="no EAGLE-2, HASS or PosS draft has one, give the draft's own files",
    ),
    Format(
        "a draft",
        in_weights=(has_key(r"^fc\."),),
        read=read_draft,
        family="draft",
        why_not="convert it with the draft command, and give its target here",
    ),
    Format(
        "a whole target",
        in_weights=(_whole_target,),
        read=read_target,
        family="target",
        why_not="convert it with the target command, and give the draft's own files here",
    ),
)
"""Every format we know, in the order in which their signs are looked for."""
