"""The connection to Ray."""

import logging
import os

import ray
import ray.data

from ray_jobs.runtime.config import Cluster
from scone_core.machine.sorting import sorting_environment

LOG_LEVELS = {
    "ray.data": logging.WARNING,
    "ray.data._internal.progress": logging.ERROR,  # says that progress bars are off
}


def connect(cluster: Cluster) -> None:
    """Join the cluster of RAY_ADDRESS or start a local Ray with explicit CPUs and object store."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.raise_original_map_exception = True
    context.issue_detectors_config.detectors = []
    for name, level in LOG_LEVELS.items():
        logging.getLogger(name).setLevel(level)
    if ray.is_initialized():
        return
    environment = sorting_environment()
    if os.environ.get("RAY_ADDRESS"):
        runtime_env = {"env_vars": environment} if environment else None
        ray.init(logging_level=logging.WARNING, runtime_env=runtime_env)
        return
    os.environ.update(environment)  # the local Ray inherits it
    ray.init(
        address="local",
        num_cpus=cluster.num_cpus,
        object_store_memory=cluster.object_store_mb << 20,
        include_dashboard=False,
        log_to_driver=False,  # errors of tasks come as exceptions, the rest is in Ray's log files
        logging_level=logging.WARNING,
    )
