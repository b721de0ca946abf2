"""Laws of converting: the same table in fewer bytes, done once."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ray_jobs.precompute.config import ConvertConfig
from ray_jobs.precompute.convert_table import run
from scone_core.artifacts.manifests import ArtifactError
from scone_core.artifacts.shards import verify_shards
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.row_formats import convert_rows
from tests.builders.served_models import publish_fgrams, publish_table, random_fgrams
from tests.programs.stages import snapshot


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    grams = random_fgrams(per_length=300)
    fgrams = publish_fgrams(str(folder / "fgrams"), grams)
    publish_table(str(folder / "table"), torch.randn(len(grams), 64), fgrams)
    return folder / "table"


def test_a_converted_table_holds_the_rounded_rows_and_keeps_its_origin(
    source: Path, tmp_path: Path
) -> None:
    config = ConvertConfig(table=str(source), row_format="int8", out=str(tmp_path / "int8"))
    manifest = run(config)
    original, converted = EmbeddingTable.open(str(source)), EmbeddingTable.open(config.out)
    ids_M = np.arange(original.num_rows)
    expected_MC = convert_rows(original.stored(ids_M), "bf16", "int8")
    assert np.array_equal(converted.stored(ids_M), expected_MC)
    assert manifest.converted_from == ("bf16",)
    assert manifest.bytes_per_row == 64 + 4
    for field in ("fgrams_fingerprint", "checkpoint_fingerprint", "tokenizer_sha256", "num_rows"):
        assert getattr(manifest, field) == getattr(original.manifest, field)
    verify_shards(config.out, manifest.shards)
    before = snapshot(tmp_path / "int8")
    assert run(config) == manifest
    assert snapshot(tmp_path / "int8") == before


def test_the_folder_of_another_conversion_is_refused(source: Path, tmp_path: Path) -> None:
    config = ConvertConfig(table=str(source), row_format="fp8", out=str(tmp_path / "fp8"))
    run(config)
    with pytest.raises(ArtifactError, match="row_format: 'fp8' there, 'fp32' here"):
        run(config.replace(row_format="fp32"))
