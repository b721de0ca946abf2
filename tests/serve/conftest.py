"""One served model for all tests of this folder."""

from pathlib import Path

import pytest

from tests.builders.served_models import Reference, write_served_folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a served model in `served`, its f-grams in `fgrams`, its table in `table`."""
    folder = tmp_path_factory.mktemp("model")
    write_served_folder(folder)
    return folder


@pytest.fixture(scope="session")
def reference(base: Path) -> Reference:
    return Reference(base)
