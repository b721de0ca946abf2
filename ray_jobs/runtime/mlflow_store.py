"""records -> an MLflow tracking store: each record is there once, however often it is sent."""

import logging
import os
import re
import tempfile
from functools import cached_property
from pathlib import Path

import mlflow
import sqlalchemy
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag

from ray_jobs.runtime.records import Begin, End, File, Metrics, Model, Params, Record

FINGERPRINT_TAG = "scone.fingerprint"
TRACKING_URI = "MLFLOW_TRACKING_URI"
"""The environment variable in which users name a store for all stages."""
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "6",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
"""Environment that MLflow reads, unless the user has set it: a server that does not answer is
noticed after 15 s at most. MLflow's own defaults wait for many minutes, and here nothing is lost.
"""


class MlflowStore:
    """The runs of one experiment in a tracking store. Every method may raise whatever the store's
    database, network or file system raises.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        """Nothing is opened yet."""
        self.uri, self._experiment = uri, experiment
        self._run_ids: dict[str, str] = {}
        self._logged: dict[tuple[str, str], set[int]] = {}

    def send(self, record: Record) -> None:
        """Log `record` to the run of its fingerprint, which is begun where there is none."""
        try:
            self._send(record, self._run_id(record))
        except Exception:
            self._run_ids.clear()  # the store may answer again with another content
            self._logged.clear()
            raise

    def _send(self, record: Record, run_id: str) -> None:
        match record.content:
            case Begin(name=name, tags=tags):
                self._client.update_run(run_id, status="RUNNING", name=name)
                self._client.log_batch(run_id, tags=[RunTag(*tag) for tag in tags.items()])
            case Params(values=values):
                known = self._client.get_run(run_id).data.params  # a second value is refused
                new = [Param(*item) for item in values.items() if item[0] not in known]
                self._client.log_batch(run_id, params=new)
            case Metrics() as metrics:
                self._log_metrics(run_id, metrics, record.time_ms)
            case File(name=name, content=content):
                self._log_file(run_id, name, content)
            case Model() as model:
                self._register(run_id, model)
            case End(status=status):
                self._client.set_terminated(run_id, status, end_time=record.time_ms)

    def _run_id(self, record: Record) -> str:
        if record.fingerprint not in self._run_ids:
            found = self._client.search_runs(
                [self._experiment_id],
                f"tags.`{FINGERPRINT_TAG}` = '{record.fingerprint}'",
                max_results=1,
            )
            run = found[0] if found else self._create_run(record)
            self._run_ids[record.fingerprint] = run.info.run_id
        return self._run_ids[record.fingerprint]

    def _create_run(self, record: Record) -> Run:
        return self._client.create_run(
            self._experiment_id,
            start_time=record.time_ms,
            tags={FINGERPRINT_TAG: record.fingerprint},
        )

    def _log_metrics(self, run_id: str, metrics: Metrics, time_ms: int) -> None:
        new = [
            Metric(metric_name(name), value, time_ms, step)
            for step, values in metrics.values.items()
            for name, value in values.items()
            if step not in self._steps(run_id, metric_name(name))
        ]
        self._client.log_batch(run_id, metrics=new)
        for metric in new:
            self._steps(run_id, metric.key).add(metric.step)

    def _steps(self, run_id: str, name: str) -> set[int]:
        """The steps for which the run has a figure `name`."""
        if (run_id, name) not in self._logged:
            history = self._client.get_metric_history(run_id, name)
            self._logged[run_id, name] = {metric.step for metric in history}
        return self._logged[run_id, name]

    def _log_file(self, run_id: str, name: str, content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(name).name
            path.write_bytes(content)
            self._client.log_artifact(run_id, str(path), os.path.dirname(name) or None)

    def _register(self, run_id: str, model: Model) -> None:
        """A version of `model` that points to this run, unless there is one. MLflow's own
        `register_model` does the same and prints lines.
        """
        if self._client.search_model_versions(f"run_id = '{run_id}'"):
            return
        external = mlflow.create_external_model(
            name=model.name,
            source_run_id=run_id,
            tags=model.tags,
            experiment_id=self._experiment_id,
        )
        if not self._client.search_registered_models(f"name = '{model.name}'"):
            self._client.create_registered_model(model.name)
        self._client.create_model_version(
            model.name,
            f"models:/{external.model_id}",
            run_id=run_id,
            tags=model.tags,
            await_creation_for=0,
            model_id=external.model_id,
        )

    @cached_property
    def _client(self) -> MlflowClient:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        for name in ("alembic", "mlflow"):  # they tell how they make tables
            logging.getLogger(name).setLevel(logging.WARNING)
        _require_database(self.uri)
        _set_tracking_uri(self.uri)
        return MlflowClient(self.uri)

    @cached_property
    def _experiment_id(self) -> str:
        """The id of the experiment, which is made where there is none. The files of a local SQLite
        store are kept beside it; a server decides for itself.
        """
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return found.experiment_id
        location = None
        if self.uri.startswith("sqlite:///"):
            folder = os.path.dirname(self.uri.removeprefix("sqlite:///"))
            location = f"file://{folder}/mlflow-artifacts"
        return self._client.create_experiment(self._experiment, artifact_location=location)


def metric_name(name: str) -> str:
    """`name` in letters that MLflow takes; names of files have others."""
    return re.sub(r"[^\w./ -]", "_", name)


def _set_tracking_uri(uri: str) -> None:
    """Name the store to MLflow's global functions. MLflow also writes the name to the environment,
    where the next stage of this process would take it for the user's choice.
    """
    chosen_by_user = os.environ.get(TRACKING_URI)
    mlflow.set_tracking_uri(uri)
    if chosen_by_user is None:
        os.environ.pop(TRACKING_URI, None)
    else:
        os.environ[TRACKING_URI] = chosen_by_user


def _require_database(uri: str) -> None:
    """Raise at once when a database does not answer: MLflow tries ten times, over 100 s."""
    if uri.startswith(("http://", "https://", "databricks")):
        return
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    engine = sqlalchemy.create_engine(uri)
    try:
        sqlalchemy.inspect(engine).get_table_names()
    finally:
        engine.dispose()
