"""a script's options -> a stage's run, and one line for whatever fails."""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from ray.exceptions import RayError, UserCodeException
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
from ray.train.v2.api.exceptions import RayTrainError, WorkerGroupError

from ray_jobs.runtime.config import Config
from ray_jobs.runtime.options import read_options
from scone_core.artifacts.config import Role, StageConfig
from scone_core.artifacts.manifests import Manifest

RETRY_NOTE = "\nFailed to apply UDF transform"
"""Ray Data adds advice on retries to every message of a task; the advice begins here."""


def main(kind: type[Config], run: Callable[[Config], Manifest]) -> None:
    """Run a stage from the command line: bad input ends in one `error:` line and exit code 1."""
    with one_line_errors():
        config = read_options(kind, description=run.__doc__)
        refuse_relative_paths(config)
        manifest = run(config)
        print(f"{manifest.contract} at {config.out} (fingerprint {manifest.fingerprint[:12]})")


@contextmanager
def one_line_errors() -> Generator[None]:
    """End the process with one `error:` line when input, files or the cluster are at fault."""
    try:
        yield
    except (ValueError, OSError, RayError, RayTrainError) as error:
        reason, _, _ = str(root_cause(error)).partition(RETRY_NOTE)
        sys.exit(f"error: {reason}")


def root_cause(error: BaseException) -> BaseException:
    """The exception that a task or a train loop raised, without the wrappers that Ray puts around
    it.
    """
    while isinstance(error, RayError | RayTrainError | UserCodeException):
        cause = getattr(error, "cause", None) or error.__cause__
        if isinstance(error, WorkerGroupError):
            cause = next(iter(error.worker_failures.values()))
        elif isinstance(error, UserExceptionWithTraceback):
            cause = error._base_exc
        if not isinstance(cause, BaseException):
            break
        error = cause
    return error


def refuse_relative_paths(config: StageConfig) -> None:
    """Refuse relative paths in a submitted job: it runs in a temporary copy of its working folder,
    and what it writes there vanishes with the copy.

    Raises:
        ValueError: names the option and its value.
    """
    if "working_dir_files" not in os.getcwd():
        return
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        is_path = any(mark in field.metadata for mark in (Role("input"), Role("output")))
        if is_path and isinstance(value, str) and "://" not in value and not os.path.isabs(value):
            raise ValueError(
                f"{name}={value!r}: a submitted job needs an absolute path or a URI here"
            )
