"""Laws of the stage frame: nothing is published before its record is durable, and no tracking store
holds a publication back or loses the record of one.
"""

import math
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest
from matplotlib.figure import Figure
from mlflow.entities import Run

from ray_jobs.runtime.config import JobConfig, Tracking
from ray_jobs.runtime.records import TRACKING, File, Spool
from ray_jobs.runtime.stage import run_stage
from ray_jobs.runtime.tracking import RunLog
from scone_core.artifacts.folders import SharedFields
from scone_core.artifacts.manifests import MANIFEST, ArtifactError, TokensManifest, load_manifest
from tests.programs.processes import free_port

Build = Callable[[SharedFields, RunLog], TokensManifest]

INPUTS = {"text": "abc"}
LOSSES = {10: 4.0, 20: 2.5, 30: math.nan}


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite store without runs; to make one takes seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def config(tmp_path: Path, empty_store: Path) -> JobConfig:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    return JobConfig(out=str(tmp_path / "artifact"), tracking=Tracking(uri=uri))


def unreachable(config: JobConfig) -> JobConfig:
    """The same stage with a tracking server that is down."""
    return config.replace(tracking=Tracking(uri=f"http://127.0.0.1:{free_port()}"))


def manifest_of(shared: SharedFields) -> TokensManifest:
    return TokensManifest(
        **shared,
        shards=(),
        tokenizer_sha256="",
        vocab_size=4,
        separator_id=0,
        num_documents=0,
        num_tokens=0,
        num_bytes_text=0,
        num_skipped_records={},
    )


def log_everything(log: RunLog) -> None:
    log.log_params({"engine": "rust"})
    for step, loss in LOSSES.items():
        log.log_metrics({"loss": loss, "perplexity/a, b.txt": 2.0}, step=step)
    log.log_text("a table", "tables/figures.txt")
    figure = Figure()
    figure.subplots().plot([1, 2])
    log.log_figure(figure, "plot.png")
    log.register_model()


def build(shared: SharedFields, log: RunLog) -> TokensManifest:
    log_everything(log)
    return manifest_of(shared)


def run(config: JobConfig, build: Build = build) -> TokensManifest:
    return run_stage(TokensManifest, config, INPUTS, build, stage="tokenize")


def refuse_to_build(shared: SharedFields, log: RunLog) -> TokensManifest:
    raise AssertionError("a finished artifact is not built again")


def logged(config: JobConfig) -> list[Run]:
    client = mlflow.MlflowClient(config.tracking.uri)
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    return [] if experiment is None else client.search_runs([experiment.experiment_id])


def require_all(config: JobConfig) -> None:
    """The store has one run with everything in it, each thing once; nothing waits any more."""
    (run,) = logged(config)
    manifest = load_manifest(TokensManifest, config.out)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "tokenize artifact"
    assert run.data.tags["scone.fingerprint"] == manifest.fingerprint
    assert run.data.tags["scone.stage"] == "tokenize"
    assert run.data.params["engine"] == "rust"
    client = mlflow.MlflowClient(config.tracking.uri)
    points = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in points] == list(LOSSES)
    assert [point.value for point in points] == pytest.approx(list(LOSSES.values()), nan_ok=True)
    assert len(client.get_metric_history(run.info.run_id, "perplexity/a_ b.txt")) == len(LOSSES)
    files = {entry.path for entry in client.list_artifacts(run.info.run_id)}
    assert files == {"manifest.json", "plot.png", "tables"}
    assert mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/manifest.json") == (
        manifest.model_dump(mode="json")
    )
    (version,) = client.search_model_versions(f"run_id = '{run.info.run_id}'")
    assert version.name == "scone-artifact"
    assert version.tags["scone.out"] == config.out
    assert {path.name for path in Path(config.out).iterdir()} == {MANIFEST}


def test_a_stage_is_built_once_and_its_run_is_complete(config: JobConfig) -> None:
    manifest = run(config)
    assert run(config, refuse_to_build) == manifest
    require_all(config)


def test_the_record_is_durable_before_the_artifact_is_published(config: JobConfig) -> None:
    """A folder stands where the manifest should go, so the publication fails."""
    config = unreachable(config)

    def block_the_manifest(shared: SharedFields, log: RunLog) -> TokensManifest:
        (Path(config.out) / MANIFEST / "folder").mkdir(parents=True)
        return build(shared, log)

    with pytest.raises(OSError, match=MANIFEST):
        run(config, block_the_manifest)
    spool = Spool(config.out)
    contents = [spool.read(name).content for name in spool.names]
    names = [content.name for content in contents if isinstance(content, File)]
    assert names == ["tables/figures.txt", "plot.png", "manifest.json"]


def test_a_store_that_is_down_gets_the_whole_record_at_the_next_start(
    config: JobConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = run(unreachable(config))
    lines = capsys.readouterr().out.splitlines()
    (warning,) = [line for line in lines if "warning" in line]
    assert "http://127.0.0.1:" in warning
    assert f"{config.out}/{TRACKING}" in warning
    assert load_manifest(TokensManifest, config.out) == manifest
    assert logged(config) == []
    for _ in range(2):
        assert run(config, refuse_to_build) == manifest
        require_all(config)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_store_that_fails_in_the_middle_gets_the_rest_at_the_next_start(
    config: JobConfig, tmp_path: Path, after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk of the store gives other bytes after some of the metrics were logged."""
    store, saved = tmp_path / "mlflow.db", tmp_path / "saved.db"

    def damage_the_store(shared: SharedFields, log: RunLog) -> TokensManifest:
        for step, loss in list(LOSSES.items())[:after]:
            log.log_metrics({"loss": loss, "perplexity/a, b.txt": 2.0}, step=step)
        with sqlite3.connect(store) as source, sqlite3.connect(saved) as target:
            source.backup(target)
        store.write_bytes(b"damaged" * 4096)
        return build(shared, log)

    manifest = run(config, damage_the_store)
    assert load_manifest(TokensManifest, config.out) == manifest
    assert "took no record (" in capsys.readouterr().out
    shutil.copy(saved, store)
    assert run(config, refuse_to_build) == manifest
    require_all(config)


def test_an_attempt_that_failed_is_continued_in_its_run(config: JobConfig) -> None:
    def fail(shared: SharedFields, log: RunLog) -> TokensManifest:
        log_everything(log)
        raise ZeroDivisionError("the user's own error")

    with pytest.raises(ZeroDivisionError, match="the user's own error"):
        run(config, fail)
    assert [found.info.status for found in logged(config)] == ["FAILED"]
    run(config)
    require_all(config)


def test_a_record_that_the_store_refuses_holds_no_other_back(
    config: JobConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    def log_too_long_a_name(shared: SharedFields, log: RunLog) -> TokensManifest:
        log.log_metrics({"x" * 300: 1.0})
        return build(shared, log)

    run(config, log_too_long_a_name)
    assert capsys.readouterr().out.count("warning") == 1
    assert len(Spool(config.out).names) == 1
    (found,) = logged(config)
    assert found.info.status == "FINISHED"


def test_a_stage_of_another_configuration_is_refused_and_nothing_is_logged(
    config: JobConfig,
) -> None:
    run(config)
    with pytest.raises(ArtifactError, match="text: 'abc' there, 'xyz' here"):
        run_stage(TokensManifest, config, {"text": "xyz"}, build, stage="tokenize")
    require_all(config)
