"""SCONE models for vLLM, found through the entry point group `vllm.general_plugins`."""

import os
import sys

BASES = ("LlamaForCausalLM",)
"""Architectures of vLLM that `model.py` extends."""


def register() -> None:
    """Make `Scone<Base>` known to vLLM; it calls this in each of its processes."""
    from vllm import ModelRegistry  # only vLLM's own processes get here

    for base in BASES:
        ModelRegistry.register_model(f"Scone{base}", f"{__name__}.model:Scone{base}")
    _tell_children_the_cluster()


def _tell_children_the_cluster() -> None:
    """The engine runs in child processes, which learn of the cluster from their environment."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
