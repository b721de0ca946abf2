"""Reports of rank 0 -> a queue, from Ray Train's controller.

A module of its own, because the controller imports it: with its neighbours' imports (MLflow,
transformers) every training would begin 12 s later.
"""

from typing import Any

from ray.train import UserCallback
from ray.util.queue import Queue


class SendReports(UserCallback):
    """Passes the reports of rank 0 on."""

    def __init__(self, reports: Queue) -> None:
        self._reports = reports

    def after_report(
        self, run_context: Any, metrics: list[dict[str, float]], checkpoint: Any
    ) -> None:
        self._reports.put(metrics[0])
