"""The layouts of EAGLE-3 drafts and of PosS on EAGLE-3, as they are exported."""

from dataclasses import replace
from typing import Any

from poss_jax.config.models import DraftConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.config_json import layer_json, target_config_json
from poss_jax.convert.eagle3 import AUX_KEY
from poss_jax.convert.layouts import Layout, Outgoing, other_widths
from poss_jax.model.families.eagle3 import default_aux_layers

# Number of tokens to draft that a file of speculators suggests where the trained depth is unknown.
_USUAL_TOKENS = 3


def _describe_official(draft: Outgoing) -> dict[str, Any]:
    layer = draft.config.layer
    wrong = [*_other_norms(draft), *layer.extras, *_other_aux_layers(draft)]
    if layer.rope.type == "llama3":
        wrong.append("rope llama3")
    return _describe(draft, wrong + other_widths(layer))


def _describe_poss(draft: Outgoing) -> dict[str, Any]:
    wrong = [*_other_norms(draft), *draft.config.layer.extras, *_other_aux_layers(draft)]
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
    values["eagle_config"] = {AUX_KEY: [layer - 1 for layer in config.aux_layers]}
    if config.fc_norm:
        values["fc_norm"] = True
    # An ordinary draft has no such key: engines take true for what speculators means.
    return values if config.output_norm else values | {"norm_output": False}


def _describe_speculators(draft: Outgoing) -> dict[str, Any]:
    config = draft.config
    wrong = [*([] if config.output_norm else ["output_norm None"]), *_other_counts(draft)]
    layer = replace(config.layer, num_layers=1, tie_embeddings=False)  # its head is its own
    inner = target_config_json(layer, draft.dtype)
    if inner["model_type"] not in ("llama", "qwen3"):
        wrong.append(f"layers of {inner['model_type']}")
    _refuse(draft, wrong)
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": _propose(draft),
        "transformer_layer_config": inner | draft.metadata(),
        "draft_vocab_size": _head_size(config),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.fc_norm == "whole",
        "fc_norm": config.fc_norm == "each",
        "norm_output": config.output_norm == "fed_back",
        AUX_KEY: list(config.aux_layers),
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": draft.dtype,
    }


def _propose(draft: Outgoing) -> dict[str, Any]:
    """Describes to speculators and vLLM which target a draft is for and how far it drafts."""
    depth, target = draft.config.trained_depth, draft.target
    verifier = {
        "name_or_path": target.target.name,
        "architectures": target_config_json(target.llama, draft.dtype)["architectures"],
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth if depth > 1 else _USUAL_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": verifier,
    }


def _describe(draft: Outgoing, wrong: list[str]) -> dict[str, Any]:
    """Describes a draft of SpecForge's class, which the official code and the engines read, too."""
    _refuse(draft, wrong)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layer_json(draft.config.layer, draft.dtype),
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "draft_vocab_size": _head_size(draft.config),
        **draft.metadata(),
    }


def _head_size(config: DraftConfig) -> int:
    return config.head_size or config.layer.vocab_size


def _other_norms(draft: Outgoing, *known: tuple[str, Any]) -> list[str]:
    """Lists the norms of a draft that are neither the usual ones nor known to a layout."""
    own = draft.config.other_norms.items()
    return [f"{field} {value}" for field, value in own if (field, value) not in known]


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
            f"{draft.origin}: the layout has no place for {', '.join(wrong)}; give another one, "
            "such as speculators, or keep the draft with poss_jax"
        )


_ENGINES = "vLLM and SGLang"

EAGLE3_LAYOUTS = (
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
        readers="the PosS authors' forks of SpecForge and vLLM",
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
        readers=f"SpecForge (to train on), {_ENGINES}",
        describe=_describe_specforge,
        is_single=True,
        layer="midlayer",
        has_embedding=True,
        maps="always",
    ),
    Layout(
        "sglang",
        family="eagle3",
        readers="SGLang",
        describe=_describe_specforge,
        is_single=True,
        layer="midlayer",
        maps="always",
    ),
    Layout(
        "speculators",
        family="eagle3",
        readers="speculators and vLLM",
        describe=_describe_speculators,
        is_single=True,
        has_embedding=True,
        maps="subset",
    ),
)
"""The layouts of EAGLE-3's family; a draft takes the first that holds as many specialists."""
