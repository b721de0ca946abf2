"""What rank 0 reports -> a progress line and MLflow, both from the driver.

Ray Train hands reports to its controller, a process of its own; a queue brings them to the driver.
A kill may lose the last ones on their way, so a resume state holds the reports before it, too.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from threading import Thread

from ray.util.queue import Queue

from ray_jobs.runtime.progress import Progress
from ray_jobs.runtime.tracking import RunLog
from ray_jobs.train.send_reports import SendReports
from ray_jobs.train.tally import Report


class TrainingLog:
    """The progress line and the run of a training."""

    def __init__(self, run: RunLog, *, steps: int, steps_before: int) -> None:
        """`steps_before`: done by an earlier attempt."""
        self._run, self._done = run, steps_before
        self._logged: set[int] = set()
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
        """Log reports; the run has each step once, however often it is taken."""
        by_step = {int(report["step"]): report for report in reports}
        new = {step: by_step[step] for step in by_step.keys() - self._logged}
        if new:
            self._run.log_history({step: _metrics(new[step]) for step in sorted(new)})
            self._logged |= new.keys()


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


def _metrics(report: Report) -> dict[str, float]:
    return {name: value for name, value in report.items() if name != "step"}
