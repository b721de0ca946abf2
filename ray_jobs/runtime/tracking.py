"""What a run logs -> MLflow: one run per artifact, found by its fingerprint; nothing of it is lost.

A record is written to the artifact's folder first (`records.Spool`) and sent from there. When the
tracking store does not answer, records wait in the folder, and the next start of the stage sends
them.
"""

import io
import json
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from matplotlib.figure import Figure
from mlflow.exceptions import MlflowException
from mlflow.tracking.context.registry import resolve_tags

from ray_jobs.runtime.config import JobConfig
from ray_jobs.runtime.mlflow_store import FINGERPRINT_TAG, MlflowStore
from ray_jobs.runtime.records import (
    Begin,
    Content,
    End,
    File,
    Metrics,
    Model,
    Params,
    Record,
    Spool,
)
from scone_core.artifacts import storage

RETRY_SECONDS = 120
"""Pause after a failure: a failed attempt costs up to 15 s, which reports of a training wait."""


class RunLog:
    """The record of one run of a stage, for its driver; workers never write to the store.

    Every `log_...` makes its record durable, then tries to send it. A store that does not answer
    costs one warning line and at most 15 s every two minutes.
    """

    def __init__(self, config: JobConfig, *, stage: str) -> None:
        """Nothing is sent yet.

        Raises:
            ValueError: `tracking.uri` names no store that MLflow has.
        """
        self._config, self._stage = config, stage
        self._fingerprint = ""
        self._spool = Spool(config.out)
        self._store = MlflowStore(tracking_uri(config), config.tracking.experiment)
        self._refused: set[str] = set()
        self._retry_at = 0.0

    @contextmanager
    def run(self, fingerprint: str) -> Generator[None]:
        """Begin the run of the artifact `fingerprint`, or continue the one that an interrupted
        attempt began; end it with the context.
        """
        self._fingerprint = fingerprint
        out = self._config.out
        tags = {FINGERPRINT_TAG: fingerprint, "scone.stage": self._stage, "scone.out": out}
        self._log(Begin(name=f"{self._stage} {_last_name(out)}", tags=resolve_tags(tags)))
        self.log_params(self._config.semantic_fields())
        try:
            yield
        except BaseException:
            with suppress(OSError):  # e.g. a full disk, of which the build's own error tells
                self._log(End(status="FAILED"))
            raise
        self._log(End(status="FINISHED"))

    def log_params(self, values: Mapping[str, object]) -> None:
        """Log options and choices; values are cut after 500 characters."""
        self._log(Params(values={name: str(value)[:500] for name, value in values.items()}))

    def log_metrics(self, values: Mapping[str, float], *, step: int = 0) -> None:
        """Log figures. A figure that the run has for this step already is not logged again."""
        self.log_history({step: values})

    def log_history(self, values: Mapping[int, Mapping[str, float]]) -> None:
        """Log the figures of many steps, by step, as `log_metrics` does."""
        self._log(Metrics(values={step: dict(figures) for step, figures in values.items()}))

    def log_text(self, text: str, name: str) -> None:
        """Log a text as the file `name`."""
        self._log(File.of(name, text.encode()))

    def log_dict(self, content: Mapping[str, Any], name: str) -> None:
        """Log `content` as the JSON file `name`."""
        self._log(File.of(name, json.dumps(content, indent=2).encode()))

    def log_figure(self, figure: Figure, name: str) -> None:
        """Log a plot as the image `name`, whose suffix is its format."""
        image = io.BytesIO()
        figure.savefig(image, format=os.path.splitext(name)[1].removeprefix("."))
        self._log(File.of(name, image.getvalue()))

    def register_model(self) -> None:
        """Put the model at `out` into the store's registry, once. The weights stay where they are;
        the registered version names their place and fingerprint.
        """
        name = f"{self._config.tracking.experiment}-{_last_name(self._config.out)}"
        tags = {FINGERPRINT_TAG: self._fingerprint, "scone.out": self._config.out}
        self._log(Model(name=name, tags=tags))

    def send(self) -> None:
        """Send all records that wait, those of earlier runs included; the store may not answer."""
        if time.monotonic() < self._retry_at:
            return
        for name in self._spool.names:
            if name in self._refused:
                continue
            try:
                self._store.send(self._spool.read(name))
            except Exception as error:  # what databases, HTTP and object stores raise is endless
                self._warn(error)
                if not _is_refusal(error):
                    self._retry_at = time.monotonic() + RETRY_SECONDS
                    return
                self._refused.add(name)
            else:
                self._spool.remove(name)

    def _log(self, content: Content) -> None:
        time_ms = time.time_ns() // 1_000_000
        self._spool.append(Record(fingerprint=self._fingerprint, time_ms=time_ms, content=content))
        self.send()

    def _warn(self, error: Exception) -> None:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        print(
            f"{self._stage}: warning: MLflow at {self._store.uri} took no record ({reason}); they "
            f"wait in {self._spool.folder} and are sent when the stage is started again",
            flush=True,
        )


def tracking_uri(config: JobConfig) -> str:
    """The address of the tracking store of a run.

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


def _last_name(out: str) -> str:
    return os.path.basename(out.rstrip("/"))


def _is_refusal(error: Exception) -> bool:
    """Whether the store answered that it will never take this record, and would take others."""
    return isinstance(error, MlflowException) and error.get_http_status_code() == 400
