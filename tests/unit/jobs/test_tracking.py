"""The laws of tracking: one store that works, one run per artifact, metrics that none loses."""

import re
import threading
from pathlib import Path

import mlflow
import pytest

from ray_jobs.runtime.config import JobConfig, Tracking
from ray_jobs.runtime.tracking import RunLog, tracking_uri
from tests import ROOT


def config_of(folder: Path, uri: str | None = None) -> JobConfig:
    return JobConfig(out=str(folder / "out"), tracking=Tracking(uri=uri))


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns"])
def test_a_file_store_gets_a_clear_message(tmp_path, uri):
    """mlflow/mlflow#23634: MLflow 3.13 and later raise on them."""
    with pytest.raises(ValueError, match=r"tracking\.uri=.*file stores are gone.*sqlite:///"):
        tracking_uri(config_of(tmp_path, uri))


def test_by_default_the_store_is_sqlite_beside_the_output(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(config_of(tmp_path)) == f"sqlite:///{tmp_path}/mlflow.db"


def only_run(config: JobConfig) -> str:
    """The id of the one run in the store."""
    client = mlflow.MlflowClient(config.tracking.uri)
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run.info.run_id


def test_a_resumed_stage_continues_its_run(tmp_path):
    """mlflow/mlflow#11782: one run per logical training."""
    config = config_of(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    for _ in range(2):
        log = RunLog(config, stage="train")
        with log.run("f" * 64):
            log.log_metrics({"loss": 1.0}, step=1)
            log.log_history({1: {"loss": 2.0}, 2: {"loss": 3.0}})
    history = mlflow.MlflowClient(config.tracking.uri).get_metric_history(only_run(config), "loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 3.0)]


def test_four_concurrent_writers_lose_no_metric(tmp_path):
    """mlflow/mlflow#5917: "database is locked"."""
    config = config_of(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    with RunLog(config, stage="train").run("f" * 64):
        run_id = only_run(config)

    def log(writer: int) -> None:
        client = mlflow.MlflowClient(config.tracking.uri)
        for step in range(10):
            client.log_metric(run_id, f"metric-{writer}", step, step=step)

    writers = [threading.Thread(target=log, args=(writer,)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    client = mlflow.MlflowClient(config.tracking.uri)
    for writer in range(4):
        steps = [point.step for point in client.get_metric_history(run_id, f"metric-{writer}")]
        assert sorted(steps) == list(range(10))


def test_the_server_of_the_recipe_answers_to_its_names_with_and_without_port():
    """mlflow/mlflow#22095, #18574: unknown Host headers get 403."""
    recipe = (ROOT / "cluster/mlflow.yaml").read_text()
    found = re.search(r"--allowed-hosts=(\S+)", recipe)
    assert found is not None
    hosts = set(found[1].split(","))
    names = {host.partition(":")[0] for host in hosts}
    assert hosts == names | {f"{name}:5000" for name in names}
    assert "scone-mlflow" in names


def test_the_store_of_one_stage_is_not_that_of_the_next(tmp_path, monkeypatch):
    """MLflow writes the address of its store to the environment."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("one", "two"):
        config = config_of(tmp_path / name)
        with RunLog(config, stage="train").run("f" * 64):
            pass
        assert (tmp_path / name / "mlflow.db").exists()
