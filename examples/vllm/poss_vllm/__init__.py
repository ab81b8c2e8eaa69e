"""A plugin of vLLM 0.32: PosS drafts with all their specialists."""


def register() -> None:
    """Puts our classes where vLLM looks for EAGLE-3 drafts; vLLM calls it in each process.

    Drafts of one specialist get vLLM's own class all the same.
    """
    from vllm import ModelRegistry

    models = "poss_vllm.specialists"
    ModelRegistry.register_model("LlamaForCausalLMEagle3", f"{models}:Eagle3Specialists")
    ModelRegistry.register_model("Eagle3LlamaForCausalLM", f"{models}:EagleSpecialists")
