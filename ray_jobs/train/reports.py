"""What rank 0 reports -> a progress line and MLflow, both from the driver.

Ray Train hands reports to its controller, a process of its own; a queue brings them to the driver.
A kill may lose the last ones on their way, so a resume state holds the reports before it, too.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from threading import Thread

import mlflow
from ray.util.queue import Queue

from ray_jobs.runtime.progress import Progress
from ray_jobs.runtime.tracking import metric_name
from ray_jobs.train.send_reports import SendReports
from ray_jobs.train.tally import Report


class TrainingLog:
    """The active MLflow run of a training; each step is logged once, however often it is taken."""

    def __init__(self, *, steps: int, steps_before: int) -> None:
        """`steps_before`: done by an earlier attempt."""
        run = mlflow.active_run()
        assert run is not None, "training is tracked"
        self._run_id = run.info.run_id
        history = mlflow.MlflowClient().get_metric_history(self._run_id, "loss")
        self._logged = {point.step for point in history}
        self._done = steps_before
        self._progress = Progress("train", unit="steps", total=steps, done=steps_before)

    def show(self, report: Report) -> None:
        """Move the progress line to the step of `report`."""
        note = f"loss {report['loss']:.3f}"
        if "validation_perplexity" in report:
            note += f", held-out perplexity {report['validation_perplexity']:.2f}"
        step = int(report["step"])
        self._progress.advance(max(0, step - self._done), note)
        self._done = max(self._done, step)

    def log(self, reports: Iterable[Report]) -> None:
        """Log the reports whose steps are not logged yet."""
        for report in reports:
            step = int(report["step"])
            if step not in self._logged:
                metrics = {metric_name(name): report[name] for name in report if name != "step"}
                mlflow.log_metrics(metrics, step=step, run_id=self._run_id)
                self._logged.add(step)


@contextmanager
def follow_reports(log: TrainingLog) -> Generator[SendReports]:
    """A callback whose reports are shown and logged as long as the context lasts."""
    reports = Queue(actor_options={"num_cpus": 0})
    follower = Thread(target=_follow, args=(reports, log))
    follower.start()
    try:
        yield SendReports(reports)
    finally:
        reports.put(None)
        follower.join()
        reports.shutdown()


def _follow(reports: Queue, log: TrainingLog) -> None:
    while (report := reports.get()) is not None:
        log.show(report)
        log.log([report])
