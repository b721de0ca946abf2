"""SCONE models for vLLM, found through the entry point group `vllm.general_plugins`."""

BASES = ("LlamaForCausalLM",)
"""Architectures of vLLM that `model.py` extends."""


def register() -> None:
    """Make `Scone<Base>` known to vLLM; it calls this in each of its processes."""
    from vllm import ModelRegistry  # only vLLM's own processes get here

    for base in BASES:
        ModelRegistry.register_model(f"Scone{base}", f"ray_jobs.vllm_plugin.model:Scone{base}")
