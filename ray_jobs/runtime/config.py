"""What every stage's configuration has: where it runs, where it is tracked, what it writes."""

import os
from typing import TypeVar

from pydantic import Field

from scone_core.artifacts.config import Frozen, OutputPath, Resource, StageConfig


class Cluster(Frozen):
    """Where a stage runs. With RAY_ADDRESS set (as `ray job submit` does) it joins that cluster
    instead.
    """

    num_cpus: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    """CPUs of the local Ray."""
    object_store_mb: int = Field(default=1024, ge=80)
    """Object store of the local Ray, MiB."""


class Tracking(Frozen):
    """Where MLflow records the run."""

    uri: str | None = None
    """sqlite:///<absolute path>.db or http(s)://; by default MLFLOW_TRACKING_URI, else mlflow.db
    beside `out`.
    """
    experiment: str = "scone"


class JobConfig(StageConfig):
    """Base of the configurations of the stages that run on Ray."""

    out: OutputPath
    """Folder or URI of the artifact that this stage writes."""
    cluster: Resource[Cluster] = Cluster()
    tracking: Resource[Tracking] = Tracking()


Config = TypeVar("Config", bound=JobConfig)
