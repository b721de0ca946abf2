"""served/v1 -> an OpenAI-compatible API: vLLM engines behind Ray Serve LLM.

serve run ray_jobs.serve_scone:app model=/data/run/served
serve deploy cluster/serve.yaml
"""

import os
from typing import Any, Literal

from pydantic import Field, field_validator
from ray.serve import Application

from ray_jobs.serve.lookup import Placement
from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.serving.served_folder import read_section
from scone_core.table.tiers import ALL_MAPPED, Tiers


class ServeConfig(Frozen):
    """Arguments of the application."""

    model: str
    """Folder of a served/v1 artifact, at the same path on every node."""
    model_id: str = "scone"
    """The name under which clients ask for the model."""
    placement: Placement = "local"
    """local: engines map the table themselves. actor: they ask the lookup actor of their node.
    nodes: they ask the actors of all nodes, each of which holds a part of the table.
    """
    tiers: Tiers = ALL_MAPPED
    """Rows that are locked in memory, and those that are read from disk; by default all are mapped.
    """
    num_replicas: int = Field(default=1, ge=1)
    device: Literal["cpu", "gpu"] = "cpu"
    cpus_per_replica: int = Field(default=1, ge=1)
    """CPUs that Ray reserves for an engine."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and activations; auto is vLLM's choice, which runs float32 weights in bfloat16."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together; by default what the model was built for."""
    kv_cache_gib: int = Field(default=1, ge=1)
    """KV cache of an engine on CPUs; on GPUs vLLM takes what is left of the memory."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments of vLLM, by their names in Python."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of an engine's processes."""

    @field_validator("model")
    @classmethod
    def _make_absolute(cls, path: str) -> str:
        """Engines run in other working folders."""
        return os.path.abspath(path) if storage.is_local(path) else path


def app(config: ServeConfig) -> Application:
    """The application with the routes /v1/models, /v1/completions, /v1/chat/completions, ...

    Raises:
        ArtifactError: the folder's f-grams, table or tokenizer are missing or not its own.
    """
    return openai_app([config])


def openai_app(configs: list[ServeConfig]) -> Application:
    """One API in front of several models."""
    from ray.serve.llm import build_openai_app  # imports vLLM: ten seconds, not for every importer

    from ray_jobs.serve.openai_ingress import Ingress

    return build_openai_app(
        {
            "llm_configs": [engine_config(config) for config in configs],
            "ingress_cls_config": {"ingress_cls": Ingress},
            "ingress_deployment_config": {"ray_actor_options": {"num_cpus": 0}},
        }
    )


def engine_config(config: ServeConfig) -> dict[str, Any]:
    """The fields of Ray's LLMConfig; a folder without f-grams is served as the plain model it is.

    Raises:
        ArtifactError: the folder's f-grams, table or tokenizer are missing or not its own.
    """
    if section := read_section(config.model):
        section.open_index()
        section.open_table()
    worker = {"cpu": "SconeCPUWorker", "gpu": "SconeGPUWorker"}[config.device]
    return {
        "model_loading_config": {"model_id": config.model_id, "model_source": config.model},
        "callback_config": {"callback_class": "ray_jobs.serve.local_model.LocalModel"},
        "accelerator_config": {"kind": config.device},
        "placement_group_config": {"bundles": [_resources(config)]},
        "deployment_config": {
            "num_replicas": config.num_replicas,
            "ray_actor_options": {"num_cpus": 0},
        },
        "engine_kwargs": {
            "dtype": config.dtype,
            "worker_cls": f"ray_jobs.serve.vllm_plugin.runner.{worker}",
            "async_scheduling": False,
            "additional_config": {"placement": config.placement, **_tiers(config)},
            **({"max_model_len": config.max_model_len} if config.max_model_len else {}),
            **config.engine,
        },
        "runtime_env": {"env_vars": _environment(config)},
    }


def _tiers(config: ServeConfig) -> dict[str, Any]:
    return {} if config.tiers == ALL_MAPPED else {"tiers": config.tiers.model_dump()}


def _resources(config: ServeConfig) -> dict[str, float]:
    gpus = {"GPU": 1} if config.device == "gpu" else {}
    return {"CPU": config.cpus_per_replica, **gpus}


def _environment(config: ServeConfig) -> dict[str, str]:
    """Of the replica and of the engine processes that it starts."""
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **config.env,
    }
