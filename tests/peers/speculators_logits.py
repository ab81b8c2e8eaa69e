"""Runs speculators' EAGLE-3 class, in its own environment: reads jobs, writes arrays.

    python speculators_logits.py FOLDER

FOLDER/jobs.json holds jobs by name. A job has `draft`, the folder of a draft to load; or `make`,
keywords of `Eagle3SpeculatorConfig` for a draft to draw at random, which is saved in FOLDER/NAME.
`layer` are keywords of its layer, `verifier` is the folder of the target. FOLDER/NAME.npz holds
`features` and `tokens`; FOLDER/NAME.logits.npy gets the logits [steps, rows, tokens]. The last line
of the output is the version.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 4


def load(folder: Path) -> Any:
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return SpeculatorModel.from_pretrained(folder, config=config)


def make(folder: Path, job: dict[str, Any]) -> Any:
    import torch
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    layer = AutoConfig.for_model(**job["layer"])
    layer._attn_implementation = "sdpa"
    proposals = [GreedyTokenProposalConfig(speculative_tokens=STEPS)]
    is_parallel = "mask_token_id" in job["make"]
    about = SpeculatorsConfig(
        algorithm="peagle" if is_parallel else "eagle3",
        proposal_methods=proposals,
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(job["verifier"]),
    )
    of_config = PEagleSpeculatorConfig if is_parallel else Eagle3SpeculatorConfig
    config = of_config(transformer_layer_config=layer, speculators_config=about, **job["make"])
    model = (PEagleDraftModel if is_parallel else Eagle3DraftModel)(config)
    size, part = layer.vocab_size, config.draft_vocab_size
    ids = torch.arange(part) * (size // part)  # every second token, or all
    model.load_vocab_mappings(torch.isin(torch.arange(size), ids), ids - torch.arange(part))
    model.load_verifier_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_copy = name == "embed_tokens.weight" and not config.embed_requires_grad
            if name.startswith("verifier_") or is_copy:
                continue
            weight.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    return model


def run(model: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    import torch

    logits: list[torch.Tensor] = []
    model = model.eval().float()
    model.lm_head.register_forward_hook(lambda *call: logits.append(call[-1]))
    features = torch.from_numpy(arrays["features"])[None]
    tokens = torch.from_numpy(arrays["tokens"])[None]
    documents = torch.zeros_like(tokens)
    with torch.no_grad():
        if not hasattr(model, "mask_hidden"):
            model(features, tokens, documents, ttt_steps=STEPS)
            return torch.cat(logits).numpy()
        return run_parallel(model, logits, features, tokens, documents)


def run_parallel(model: Any, logits: Any, features: Any, tokens: Any, documents: Any) -> np.ndarray:
    """Runs P-EAGLE on every row at every depth, instead of on rows that it draws."""
    import torch
    from speculators.models.peagle import core

    rows, depths = torch.meshgrid(torch.arange(tokens.shape[1]), torch.arange(STEPS), indexing="ij")
    is_text = rows + depths < tokens.shape[1]
    order = depths[is_text].argsort(stable=True)  # depth 0 first
    rows, depths = rows[is_text][order], depths[is_text][order]
    core.generate_cod_sample_indices = lambda **_: (rows, depths)
    core.compute_metrics = lambda **_: (None, {})  # its loss wants a GPU
    final = torch.zeros(1, tokens.shape[1], model.hidden_size)
    model(features, tokens, documents, verifier_last_hidden_states=final)
    result = torch.full((STEPS, tokens.shape[1], logits[0].shape[-1]), torch.nan)
    result[depths, rows] = logits[0][0]
    return result.numpy()


def main() -> None:
    folder = Path(sys.argv[1])
    for name, job in json.loads((folder / "jobs.json").read_text()).items():
        model = load(Path(job["draft"])) if "draft" in job else make(folder / name, job)
        with np.load(folder / f"{name}.npz") as arrays:
            np.save(folder / f"{name}.logits.npy", run(model, dict(arrays)))
    print(version("speculators"))


if __name__ == "__main__":
    main()
