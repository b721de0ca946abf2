"""A training by one rank in this process: the same worker, engine and export, without Ray."""

import os

import torch

from ray_jobs.train.config import TrainConfig
from ray_jobs.train.tally import Report
from ray_jobs.train.train import check_inputs, checkpoint_manifest
from ray_jobs.train.worker import Worker
from scone_core.artifacts.folders import claim, publish, shared_fields
from scone_core.artifacts.manifests import CheckpointManifest


def train_here(config: TrainConfig) -> list[Report]:
    """Train and publish; all reports. `config` has one worker."""
    inputs = check_inputs(config)
    claim(CheckpointManifest, config.out, config, inputs)
    shared = shared_fields(CheckpointManifest, config, inputs)
    if not torch.distributed.is_initialized():  # DeepSpeed keeps the group of its first engine
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    reports: list[Report] = []
    try:
        Worker(config, shared["fingerprint"], rank=0, num_ranks=1, send=reports.append).train()
    finally:
        del os.environ["LOCAL_RANK"]
    publish(config.out, checkpoint_manifest(config, shared))
    return reports
