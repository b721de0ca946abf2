"""MLflow: one run per finished artifact, found again by its fingerprint when a stage is resumed."""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager

import mlflow

from ray_jobs.runtime.config import JobConfig
from scone_core.artifacts import storage
from scone_core.artifacts.manifests import Manifest

FINGERPRINT_TAG = "scone.fingerprint"


def tracking_uri(config: JobConfig) -> str:
    """The tracking store of a run.

    Raises:
        ValueError: a file store, which MLflow no longer supports.
    """
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        folder = (
            os.path.dirname(os.path.abspath(config.out))
            if storage.is_local(config.out)
            else os.getcwd()
        )
        uri = f"sqlite:///{folder}/mlflow.db"
    if not uri.startswith(("sqlite:", "http://", "https://", "postgresql", "mysql", "databricks")):
        raise ValueError(
            f"tracking.uri={uri!r}: MLflow file stores are gone; "
            "use sqlite:///<absolute path>.db or the address of an MLflow server"
        )
    return uri


@contextmanager
def stage_run(config: JobConfig, *, stage: str, fingerprint: str) -> Generator[mlflow.ActiveRun]:
    """The MLflow run of a stage: a new one, or the one that an interrupted attempt with this
    fingerprint began.

    Call it on the driver only; log inside with MLflow's own functions.
    """
    mlflow.set_tracking_uri(tracking_uri(config))
    _select_experiment(config)
    earlier = mlflow.search_runs(
        filter_string=f"tags.`{FINGERPRINT_TAG}` = '{fingerprint}'",
        max_results=1,
        output_format="list",
    )
    name = f"{stage} {os.path.basename(config.out.rstrip('/'))}"
    run_id = earlier[0].info.run_id if earlier else None
    with mlflow.start_run(run_id=run_id, run_name=None if earlier else name) as run:
        mlflow.set_tags(
            {FINGERPRINT_TAG: fingerprint, "scone.stage": stage, "scone.out": config.out}
        )
        mlflow.log_params(
            {key: str(value)[:500] for key, value in config.semantic_fields().items()}
        )
        yield run


def log_manifest(manifest: Manifest) -> None:
    """Attach a manifest to the active run."""
    mlflow.log_dict(manifest.model_dump(mode="json"), "manifest.json")


def register_model(config: JobConfig, manifest: Manifest) -> None:
    """Put the model at `config.out` into MLflow's registry, once: the weights stay where they are,
    the version names their place and fingerprint.
    """
    name = f"{config.tracking.experiment}-{os.path.basename(config.out.rstrip('/'))}"
    run = mlflow.active_run()
    assert run is not None, "the stage is tracked"
    versions = mlflow.search_model_versions(filter_string=f"run_id = '{run.info.run_id}'")
    if versions:
        return
    tags = {FINGERPRINT_TAG: manifest.fingerprint, "scone.out": config.out}
    model = mlflow.create_external_model(name=name, source_run_id=run.info.run_id, tags=tags)
    mlflow.register_model(f"models:/{model.model_id}", name, tags=tags)


def log_config(config: JobConfig) -> None:
    """Attach the whole configuration to the active run, resources and paths included."""
    mlflow.log_dict(config.model_dump(mode="json"), "config.json")


def metric_name(name: str) -> str:
    """`name` in letters that MLflow takes; names of files have others."""
    return re.sub(r"[^\w./ -]", "_", name)


def _select_experiment(config: JobConfig) -> None:
    """Artifacts of a local SQLite store lie beside it; a server decides for itself."""
    uri = mlflow.get_tracking_uri()
    if (
        uri.startswith("sqlite:///")
        and mlflow.get_experiment_by_name(config.tracking.experiment) is None
    ):
        folder = os.path.dirname(uri.removeprefix("sqlite:///"))
        mlflow.create_experiment(
            config.tracking.experiment, artifact_location=f"file://{folder}/mlflow-artifacts"
        )
    mlflow.set_experiment(config.tracking.experiment)
