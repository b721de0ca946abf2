"""The laws of the workers' network: the interface is an option, and an error names it."""

from pathlib import Path

import pytest
from ray.train.v2.api.exceptions import WorkerGroupError

from ray_jobs.runtime.command_line import root_cause
from ray_jobs.train.config import TrainConfig
from ray_jobs.train.train import explain_network, worker_environment


def config_of(tmp_path: Path, interface: str | None) -> TrainConfig:
    return TrainConfig(
        out=str(tmp_path), train_tokens="t", validation_tokens="v", network_interface=interface
    )


def test_the_interface_reaches_both_backends(tmp_path):
    environment = worker_environment(config_of(tmp_path, "eth7"))
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "eth7"
    assert "GLOO_SOCKET_IFNAME" not in worker_environment(config_of(tmp_path, None))


def test_a_failed_rendezvous_names_the_option(tmp_path):
    """sgl-project/sglang#3226, vllm-project/vllm#5094: the host name resolved to loopback."""
    cause = RuntimeError("Gloo connectFullMesh failed with [..] Connection refused")
    error = explain_network(
        WorkerGroupError("workers failed", {0: cause}), config_of(tmp_path, None)
    )
    assert isinstance(error, ConnectionError)
    assert "network_interface=None" in str(error)
    assert "--network-interface eth0" in str(error)


def test_other_failures_keep_their_own_reason(tmp_path):
    failed = WorkerGroupError("workers failed", {1: ValueError("sequence_length=3: too short")})
    assert explain_network(failed, config_of(tmp_path, None)) is failed
    with pytest.raises(ValueError, match="sequence_length=3"):
        raise root_cause(failed)
