"""One local Ray and one MLflow store for all tests of this folder."""

from collections.abc import Iterator
from multiprocessing.forkserver import ensure_running

import pytest
import ray

from tests.programs.processes import FORKS


@pytest.fixture(scope="session", autouse=True)
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The store of every run that names no other, scripts' runs included: to make one takes
    seconds.
    """
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        yield uri


@pytest.fixture(scope="session", autouse=True)
def local_ray() -> Iterator[None]:
    assert FORKS.get_start_method() == "forkserver"
    ensure_running()  # it imports while Ray starts
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=512 << 20,
        include_dashboard=False,
        logging_level="WARNING",
    )
    yield
    ray.shutdown()
