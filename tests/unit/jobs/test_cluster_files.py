"""The files of cluster/ say what the programs they start understand."""

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import tyro
import yaml

from ray_jobs.count.config import CountConfig
from ray_jobs.precompute.config import PrecomputeConfig
from ray_jobs.runtime.config import JobConfig
from ray_jobs.serve.serve_scone import ServeConfig
from ray_jobs.train.config import TrainConfig
from tests import ROOT

CLUSTER = ROOT / "cluster"
STAGES: dict[str, type[JobConfig]] = {
    "count": CountConfig,
    "train": TrainConfig,
    "precompute": PrecomputeConfig,
}


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text())


@pytest.mark.parametrize("stage", STAGES)
def test_the_entrypoint_of_a_ray_job_is_a_command_line_of_its_stage(stage: str) -> None:
    python, script, *arguments = shlex.split(load(f"rayjob-{stage}.yaml")["spec"]["entrypoint"])
    assert python == "python"
    assert (CLUSTER.parent / "pipelines" / Path(script).name).exists()
    config = tyro.cli(STAGES[stage], args=arguments)
    assert config.out.startswith("/data/")


def test_both_serve_configs_have_the_arguments_of_the_app() -> None:
    of_kuberay = yaml.safe_load(load("rayservice.yaml")["spec"]["serveConfigV2"])
    for content in (load("serve.yaml"), of_kuberay):
        (application,) = content["applications"]
        assert application["import_path"] == "ray_jobs.serve_scone:app"
        ServeConfig.model_validate(application["args"])


def test_the_launcher_file_follows_rays_schema() -> None:
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(load("launcher.yaml"), json.loads(schema.read_text()))


def test_every_kubernetes_file_runs_the_installed_ray() -> None:
    for name in ("rayjob-count", "rayjob-train", "rayjob-precompute", "rayservice"):
        spec = load(f"{name}.yaml")["spec"]
        cluster = spec.get("rayClusterSpec") or spec["rayClusterConfig"]
        assert cluster["rayVersion"] == ray.__version__
