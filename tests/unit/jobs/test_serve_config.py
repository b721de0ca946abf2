"""What the application refuses before any engine starts."""

import json
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from ray_jobs.serve.serve_scone import ServeConfig, engine_config
from scone_core.artifacts.manifests import ArtifactError
from scone_core.table.tiers import Tiers
from tests.builders.served_models import publish_served, write_served_folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_served_folder(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"modle": "x"}, "modle"),
        ({"placement": "somewhere"}, "placement"),
        ({"num_replicas": "0"}, "num_replicas"),
    ],
)
def test_a_bad_argument_names_itself(arguments: dict[str, str], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ServeConfig.model_validate({"model": "/data/served", **arguments})


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"config.json: missing.*pipelines/export.py"):
        engine_config(ServeConfig(model=str(tmp_path)))


@pytest.mark.parametrize("field", ["fgrams_fingerprint", "table_fingerprint", "max_n"])
def test_other_artifacts_than_the_exported_ones_are_refused(
    base: Path, tmp_path: Path, field: str
) -> None:
    folder = shutil.copytree(base / "served", tmp_path / "served")
    config = json.loads((folder / "config.json").read_text())
    config["scone"][field] = 4 if field == "max_n" else "another"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=field.split("_")[-1]):
        engine_config(ServeConfig(model=str(folder)))


def test_model_folders_with_and_without_f_grams_are_accepted(base: Path, tmp_path: Path) -> None:
    for folder in (base / "served", publish_served(tmp_path / "plain", None)):
        config = engine_config(ServeConfig(model=str(folder), placement="actor"))
        assert config["model_loading_config"]["model_source"] == str(folder)
        assert config["engine_kwargs"]["additional_config"] == {"placement": "actor"}


def test_engines_are_told_where_rows_live(base: Path) -> None:
    config = ServeConfig.model_validate(
        {"model": str(base / "served"), "tiers": {"hot_rows": 10, "io": "mmap"}}
    )
    options = engine_config(config)["engine_kwargs"]["additional_config"]
    assert Tiers.model_validate(options["tiers"]) == Tiers(hot_rows=10, io="mmap")
