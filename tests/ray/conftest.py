"""One local Ray for all tests of this folder."""

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session", autouse=True)
def local_ray() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=512 << 20,
        include_dashboard=False,
        logging_level="WARNING",
    )
    yield
    ray.shutdown()
