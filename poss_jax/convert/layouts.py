"""The layouts that models are exported in, and config.json as each of them wants it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from poss_jax.checkpoint.record import ModelRecord
from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.convert.drafts import AUX_KEY
from poss_jax.convert.hf import CONFIG_KEYS, write_rope
from poss_jax.convert.reading import METADATA, DraftMetadata
from poss_jax.convert.source import HUB_ID
from poss_jax.model.families import family_of
from poss_jax.model.families.eagle3 import default_aux_layers

_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class Outgoing:
    """A draft that is about to be exported."""

    origin: str  # its folder and the layout, for messages
    # Its shape; if one specialist was chosen, the shape of this specialist alone.
    config: DraftConfig
    vocabulary: tuple[int, ...] | None  # target id of every token it can propose; None: all of them
    target: ModelRecord
    dtype: str  # type that `fc` is written in
    # Folder or Hub id of the target's PyTorch checkpoint; None: the target's name, if that is a Hub
    # id.
    verifier: str | None = None

    def metadata(self, *, vocabulary: tuple[int, ...] | None = None) -> dict[str, Any]:
        """Contents of config.json about a draft under `METADATA`, for our own converter."""
        is_told = family_of(self.config).may_share_kv and self.config.kv == "shared"
        metadata = DraftMetadata(
            positions_per_specialist=self.config.positions_per_specialist,
            trained_depth=self.config.trained_depth,
            draft_vocabulary=vocabulary,
            kv="shared" if is_told else None,
        )
        return {METADATA: {k: v for k, v in config_to_dict(metadata).items() if v is not None}}


@dataclass(frozen=True)
class Layout:
    """A layout that the drafts of one family are written in."""

    name: str  # name to choose it by
    family: str  # family of its drafts, see `DraftConfig`
    readers: str  # programs that read it, for the model card
    # Draft -> config.json; refuses a draft that the layout cannot hold.
    describe: Callable[[Outgoing], dict[str, Any]]
    is_single: bool = False  # whether it holds one specialist
    is_stack: bool = False  # whether this specialist may have several layers
    layer: str = "layers.{}"  # key of a layer; `{}` stands for its number
    # Whether it holds a copy of the target's embedding; all hold a draft's own.
    has_embedding: bool = False
    # When it holds `d2t` and `t2d`; `subset`: if the draft's vocabulary is a part.
    maps: Literal["never", "subset", "always"] = "never"
    names_verifier: bool = False  # whether its config.json says where the target's checkpoint is
    note: str = ""  # what users of the files should know, for the model card

    def key(self, name: str) -> str:
        """Renames a layer's PyTorch key as the layout calls layers."""
        return _LAYER.sub(lambda match: f"{self.layer.format(match[1])}.", name)


def other_widths(layer: LlamaConfig) -> list[str]:
    """Names the width of all heads together, if it differs from the layer's."""
    if layer.num_heads * layer.head_dim == layer.hidden_size:
        return []
    return [f"{layer.num_heads} heads of {layer.head_dim} for a width of {layer.hidden_size}"]


# --------------------------------------------------------------------------------------------------
# Layers and targets, for transformers 4 and 5


def target_config_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Describes a target, with weights of this type, to `transformers` 4 and 5.

    Raises:
      UserError: no family of Hugging Face has these biases and norms.
    """
    family = _family(config)
    values = {"architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family}
    values |= layer_json(config, dtype) | {"tie_word_embeddings": config.tie_embeddings}
    if family == "phi3":  # its own default for padding lies beyond a small vocabulary
        return values | {"sliding_window": None, "pad_token_id": None}
    if family != "llama":
        values |= {"use_sliding_window": False}
    if family != "qwen2":
        values |= {"attention_bias": config.qkv_bias}
    return values | ({"mlp_bias": config.mlp_bias} if family == "llama" else {})


def _family(config: LlamaConfig) -> str:
    """Finds the family whose own code has these projections, biases and norms."""
    if config.fused_projections:
        wrong = config.extras
        if config.rope.type not in ("default", "longrope"):
            wrong.append(f"rope type {config.rope.type}")
        if wrong:
            raise UserError(
                f"Phi-3, which has fused projections, has no {', '.join(wrong)}; such a target "
                "stays with poss_jax"
            )
        return "phi3"
    if config.qk_norm and config.qkv_bias == config.o_bias and not config.mlp_bias:
        return "qwen3"
    if not config.qk_norm and config.qkv_bias == config.o_bias:
        return "llama"
    if not config.qk_norm and config.qkv_bias and not config.mlp_bias:
        return "qwen2"
    raise UserError(
        f"no family of transformers has qkv_bias {config.qkv_bias}, o_bias {config.o_bias}, "
        f"qk_norm {config.qk_norm} and mlp_bias {config.mlp_bias} together; such a target stays "
        "with poss_jax"
    )


def layer_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Describes the layers of a model, of any kind."""
    stop_ids = list(config.eos_token_ids)
    return {
        **{key: getattr(config, field) for field, key in CONFIG_KEYS.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **write_rope(config),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": stop_ids if len(stop_ids) > 1 else next(iter(stop_ids), None),
        "torch_dtype": dtype,
        "dtype": dtype,
    }


# --------------------------------------------------------------------------------------------------
# EAGLE-2, HASS and PosS


def _describe_eagle(draft: Outgoing) -> dict[str, Any]:
    """Describes a draft to the original code, and to our own converter."""
    config, layer = draft.config, draft.config.layer
    _refuse(draft, [field for field in layer.extras if field != "qkv_bias"] + other_widths(layer))
    # With several specialists vLLM runs it as EAGLE-3 (examples/vllm), on the last hidden state.
    features = {"eagle_config": {"use_aux_hidden_state": False}}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **(features if config.num_specialists > 1 else {}),
        **layer_json(layer, draft.dtype),
        "num_hidden_layers": 1,  # for any number of specialists, as in the published drafts
        "tie_word_embeddings": layer.tie_embeddings,
        "pad_token_id": 0,
        "qkv_bias": layer.qkv_bias,
        "bias": config.fc_bias,
        **draft.metadata(vocabulary=draft.vocabulary),
    }


# --------------------------------------------------------------------------------------------------
# EAGLE-3, and PosS on it


def _describe_official(draft: Outgoing) -> dict[str, Any]:
    layer = draft.config.layer
    wrong = [*_other_norms(draft), *layer.extras, *_other_aux_layers(draft)]
    if layer.rope.type in ("llama3", "yarn"):
        wrong.append(f"rope {layer.rope.type}")
    return _describe(draft, wrong + other_widths(layer))


def _describe_poss(draft: Outgoing) -> dict[str, Any]:
    wrong = [*_other_norms(draft), *draft.config.layer.extras, *_other_aux_layers(draft)]
    wrong += ["an own embedding"] if draft.config.has_embedding else []
    # As many as there are specialists, which the authors' vLLM needs.
    return _describe(draft, wrong) | {"num_hidden_layers": draft.config.num_specialists}


def _describe_specforge(draft: Outgoing) -> dict[str, Any]:
    config = draft.config
    wrong = [
        *_other_norms(draft, ("fc_norm", "each"), ("output_norm", None)),
        *draft.config.layer.extras,
        *_other_counts(draft),
    ]
    if 0 in config.aux_layers:
        wrong.append("aux_layers 0, the output of no layer")
    values = _describe(draft, wrong)
    if _other_aux_layers(draft):
        # vLLM takes the first list, by the layers' inputs; SGLang and SpecForge the second.
        values[AUX_KEY] = list(config.aux_layers)
        values["eagle_config"] = {AUX_KEY: [layer - 1 for layer in config.aux_layers]}
    if config.fc_norm:
        values["fc_norm"] = True
    # An ordinary draft has no such key: engines take true for what speculators means.
    return values if config.output_norm else values | {"norm_output": False}


def _describe_speculators(draft: Outgoing) -> dict[str, Any]:
    config = draft.config
    wrong = [*([] if config.output_norm else ["output_norm None"]), *_other_counts(draft)]
    num_layers = config.layers_per_specialist[0]
    layer = replace(config.layer, num_layers=num_layers, tie_embeddings=False)  # own head
    inner = target_config_json(layer, draft.dtype)
    if config.trained_window is not None:
        inner |= {"sliding_window": config.trained_window, "use_sliding_window": True}
        inner |= {"layer_types": ["sliding_attention"] * num_layers}
    if inner["model_type"] not in ("llama", "qwen3"):
        wrong.append(f"layers of {inner['model_type']}")
    _refuse(draft, wrong)
    is_parallel = config.mask_token is not None
    kind = "PEagle" if is_parallel else "Eagle3"
    return {
        "architectures": [f"{kind}Speculator"],
        "speculators_model_type": kind.lower(),
        "speculators_config": _propose(draft, kind.lower()),
        **({"mask_token_id": config.mask_token} if is_parallel else {}),
        "transformer_layer_config": inner | draft.metadata(),
        "draft_vocab_size": config.head_size or config.layer.vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.fc_norm == "whole",
        "fc_norm": config.fc_norm == "each",
        "norm_output": config.output_norm == "fed_back",
        AUX_KEY: list(config.aux_layers),
        "target_hidden_size": config.target_size,
        "embed_requires_grad": config.has_embedding,
        "tie_word_embeddings": False,
        "torch_dtype": draft.dtype,
    }


def _propose(draft: Outgoing, algorithm: str) -> dict[str, Any]:
    """Describes to speculators and vLLM which target a draft is for and how far it drafts."""
    depth, target = draft.config.trained_depth, draft.target
    # Other programs find the target's checkpoint by a Hub id or a whole path.
    name = draft.verifier or target.target.name
    folder = Path(name).expanduser()
    if draft.verifier is not None and (folder / "config.json").is_file():
        name = str(folder.resolve())
    elif not HUB_ID.fullmatch(name):
        raise UserError(
            f"{draft.origin} says where the target's PyTorch checkpoint is, and {name} is no Hub "
            "id or folder with config.json; give --verifier DIR_OR_HUB_ID, such as an exported "
            "target"
        )
    architectures = target_config_json(target.llama, draft.dtype)["architectures"]
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth if depth > 1 else 3,  # 1: the trained depth is unknown
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": name, "architectures": architectures},
    }


def _describe(draft: Outgoing, wrong: list[str]) -> dict[str, Any]:
    """Describes a draft of SpecForge's class, which the official code and the engines read, too."""
    window, mask = draft.config.trained_window, draft.config.mask_token
    wrong = wrong if window is None else [*wrong, f"a sliding window of {window} rows"]
    _refuse(draft, wrong if mask is None else [*wrong, f"mask token {mask}"])
    fields = {"target_hidden_size": draft.config.target_size, "embed_requires_grad": True}
    fields = {key: value for key, value in fields.items() if value is not None}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layer_json(draft.config.layer, draft.dtype),
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "draft_vocab_size": draft.config.head_size or draft.config.layer.vocab_size,
        **(fields if draft.config.has_embedding else {}),
        **draft.metadata(),
    }


def _other_norms(draft: Outgoing, *expected: tuple[str, Any]) -> list[str]:
    """Lists the norms of a draft that are neither the usual ones nor known to a layout."""
    norms = draft.config.other_norms.items()
    return [f"{field} {value}" for field, value in norms if (field, value) not in expected]


def _other_counts(draft: Outgoing) -> list[str]:
    """Names the layers of the target that a draft reads, if they are not three."""
    layers = draft.config.aux_layers
    return [] if len(layers) == 3 else [f"aux_layers {list(layers)}"]


def _other_aux_layers(draft: Outgoing) -> list[str]:
    """Names the layers of the target that a draft reads, if they are not the usual ones."""
    layers = draft.config.aux_layers
    is_usual = layers == default_aux_layers(draft.target.llama.num_layers)
    return [] if is_usual else [f"aux_layers {list(layers)}"]


def _refuse(draft: Outgoing, wrong: list[str]) -> None:
    if wrong:
        raise UserError(
            f"{draft.origin}: the layout has no place for {', '.join(wrong)}; give another one "
            "(speculators for EAGLE-3), or keep the draft with poss_jax"
        )


# --------------------------------------------------------------------------------------------------
# Their rows

_ENGINES = "vLLM and SGLang"
_PLUGIN = "vLLM with the plugin examples/vllm of poss_jax"

LAYOUTS = (
    Layout(
        "eagle",
        family="eagle",
        readers="the original EAGLE and HASS code and vLLM",
        describe=_describe_eagle,
        is_single=True,
        has_embedding=True,
    ),
    Layout(
        "poss",
        family="eagle",
        readers=f"the original PosS code, and {_PLUGIN}",
        describe=_describe_eagle,
        has_embedding=True,
    ),
    Layout(
        "eagle3",
        family="eagle3",
        readers=f"the official EAGLE-3 code, {_ENGINES}",
        describe=_describe_official,
        is_single=True,
        layer="midlayer",
        maps="subset",
    ),
    Layout(
        "poss",
        family="eagle3",
        readers=f"the PosS authors' forks of SpecForge and vLLM, and {_PLUGIN}",
        describe=_describe_poss,
        maps="subset",
        note="The fork of vLLM chooses specialists only where the folder's name holds `poss`, and "
        "drafts with specialists after the first without the context, unlike their training.",
    ),
    Layout(
        "poss-midlayers",
        family="eagle3",
        readers="the first version of the PosS authors' fork of SpecForge",
        describe=_describe_poss,
        layer="midlayers.{}",
        maps="subset",
    ),
    Layout(
        "specforge",
        family="eagle3",
        readers="SpecForge (to train on) and SGLang, and by vLLM if the vocabulary is a part",
        describe=_describe_specforge,
        is_single=True,
        layer="midlayer",
        has_embedding=True,
        maps="always",
    ),
    Layout(
        "sglang",
        family="eagle3",
        readers=_ENGINES,
        describe=_describe_specforge,
        is_single=True,
        layer="midlayer",
        maps="subset",
    ),
    Layout(
        "speculators",
        family="eagle3",
        readers="speculators and vLLM",
        describe=_describe_speculators,
        is_single=True,
        is_stack=True,
        has_embedding=True,
        maps="subset",
        names_verifier=True,
    ),
)
"""Every layout that drafts are written in; a draft takes the first of its family that holds as many
specialists."""
