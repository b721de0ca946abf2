"""Unit tests may not start Ray."""

import pytest
import ray


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a unit test started Ray; move it to tests/ray")

    monkeypatch.setattr(ray, "init", refuse)
