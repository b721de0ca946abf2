"""Laws of checking and exporting: a foreign row is found, and every store holds the same rows."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from ray_jobs.precompute import export_table, verify_table
from ray_jobs.precompute.config import ExportConfig, VerifyConfig
from scone_core.artifacts.folders import publish
from scone_core.artifacts.manifests import (
    ArtifactError,
    EmbeddingsManifest,
    RowFormat,
    load_manifest,
)
from scone_core.fgrams.fgram_shards import read_fgrams
from scone_core.model.scone_lm import SconeLM
from scone_core.table.check import compute_rows
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.export import ngram_keys
from scone_core.table.row_formats import STORAGE, convert_rows, from_storage
from tests.builders.served_models import (
    VOCAB,
    publish_checkpoint,
    publish_fgrams,
    publish_table,
    random_fgrams,
    trained_model,
)
from tests.builders.tables import publish_rows

GRAMS = random_fgrams(per_length=100)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fgrams, checkpoint, and a table in each row format, named after it."""
    folder = tmp_path_factory.mktemp("tables")
    fgrams = publish_fgrams(str(folder / "fgrams"), GRAMS)
    checkpoint = publish_checkpoint(str(folder / "checkpoint"), trained_model(), fgrams)
    model = SconeLM.load(str(folder / "checkpoint")).eval()
    vectors_SD = compute_rows(model, str(folder / "fgrams"), np.arange(len(GRAMS)))
    for row_format in STORAGE:
        publish_table(
            str(folder / row_format),
            vectors_SD,
            fgrams,
            checkpoint=checkpoint.fingerprint,
            row_format=row_format,
        )
    return folder


def verify_config(base: Path, table: Path) -> VerifyConfig:
    return VerifyConfig(
        table=str(table), checkpoint=str(base / "checkpoint"), fgrams=str(base / "fgrams")
    )


@pytest.mark.parametrize("row_format", STORAGE)
def test_rows_computed_again_are_the_rows_of_the_table(base: Path, row_format: RowFormat) -> None:
    config = verify_config(base, base / row_format)
    check = verify_table.run(config.replace(num_rows=100, seed=3))
    assert check.num_rows == 100
    assert check.largest_error <= 1
    assert verify_table.run(config).num_rows == len(GRAMS)


def republish(base: Path, folder: Path, *, source: RowFormat, **changes: object) -> EmbeddingTable:
    """A copy of the table in the format `source`, with other rows or manifest fields."""
    table = EmbeddingTable.open(str(base / source))
    rows_SC = changes.pop("rows_SC", table.stored(np.arange(table.num_rows)))
    row_format = changes.get("row_format", source)
    publish_rows(folder, rows_SC, row_format=row_format, rows_per_shard=97)  # pyrefly: ignore
    copied = load_manifest(EmbeddingsManifest, str(folder))
    kept = {"fgrams_fingerprint", "checkpoint_fingerprint", "tokenizer_sha256"}
    fields = table.manifest.model_dump(include=kept) | changes
    publish(str(folder), EmbeddingsManifest.model_validate(copied.model_dump() | fields))
    return EmbeddingTable.open(str(folder))


@pytest.mark.parametrize("row_format", STORAGE)
def test_one_row_of_another_f_gram_is_found_and_named(
    base: Path, tmp_path: Path, row_format: RowFormat
) -> None:
    rows_SC = EmbeddingTable.open(str(base / row_format)).stored(np.arange(len(GRAMS)))
    rows_SC[[41, 42]] = rows_SC[[42, 41]]
    republish(base, tmp_path / "table", source=row_format, rows_SC=rows_SC)
    with pytest.raises(ArtifactError, match="row of f-gram 4[12] is not the model's"):
        verify_table.run(verify_config(base, tmp_path / "table"))


def test_a_converted_table_is_checked_against_both_roundings(base: Path, tmp_path: Path) -> None:
    stored_SC = EmbeddingTable.open(str(base / "bf16")).stored(np.arange(len(GRAMS)))
    rows_SC = convert_rows(stored_SC, "bf16", "int8")
    republish(
        base,
        tmp_path / "table",
        source="bf16",
        rows_SC=rows_SC,
        row_format="int8",
        converted_from=("bf16",),
    )
    assert verify_table.run(verify_config(base, tmp_path / "table")).largest_error <= 1


def test_a_damaged_shard_is_found(base: Path, tmp_path: Path) -> None:
    republish(base, tmp_path / "table", source="bf16")
    path = tmp_path / "table" / "rows-00097.arrow"
    content = bytearray(path.read_bytes())
    content[4096] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="rows-00097.arrow: sha256 differs"):
        verify_table.run(verify_config(base, tmp_path / "table"))


def test_the_table_of_another_model_is_not_even_computed(base: Path, tmp_path: Path) -> None:
    republish(base, tmp_path / "table", source="bf16", checkpoint_fingerprint="another")
    with pytest.raises(ArtifactError, match="checkpoint_fingerprint: found 'another'"):
        verify_table.run(verify_config(base, tmp_path / "table"))


def export_to(base: Path, out: Path, row_format: RowFormat, to: str) -> Path:
    fields = {"table": base / row_format, "to": to, "out": out, "fgrams": base / "fgrams"}
    names = export_table.run(
        ExportConfig.model_validate({name: str(value) for name, value in fields.items()})
    )
    about = json.loads((out / "export.json").read_text())
    assert about["files"] == names
    assert (about["row_format"], about["num_rows"]) == (row_format, len(GRAMS))
    return out


@pytest.mark.parametrize("row_format", STORAGE)
def test_safetensors_hold_the_stored_rows(
    base: Path, tmp_path: Path, row_format: RowFormat
) -> None:
    out = export_to(base, tmp_path / "out", row_format, "safetensors")
    parts = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            parts[int(file.metadata()["first_id"])] = tensors
    ordered = [parts[first_id] for first_id in sorted(parts)]
    if "scale" in ordered[0]:
        found = torch.cat([part["values"].float() * part["scale"][:, None] for part in ordered])
    else:
        found = torch.cat([part["embedding"] for part in ordered])
    stored = EmbeddingTable.open(str(base / row_format)).stored(np.arange(len(GRAMS)))
    assert torch.equal(found, from_storage(stored, row_format))


@pytest.mark.parametrize("row_format", STORAGE)
def test_npy_files_hold_the_stored_rows(base: Path, tmp_path: Path, row_format: RowFormat) -> None:
    out = export_to(base, tmp_path / "out", row_format, "npy")
    stored = EmbeddingTable.open(str(base / row_format)).stored(np.arange(len(GRAMS)))
    if STORAGE[row_format].quantised is None:
        assert np.array_equal(np.load(out / "embedding.npy", mmap_mode="r"), stored)
        return
    values, scale = np.load(out / "values.npy"), np.load(out / "scale.npy")
    assert values.dtype == (np.int8 if row_format == "int8" else np.uint8)
    assert np.array_equal(values.view(np.uint8), stored[:, 4:])
    assert np.array_equal(scale, stored[:, :4].copy().view(np.float32)[:, 0])


@pytest.mark.parametrize("row_format", ["bf16", "int8"])
def test_lmdb_gives_the_row_of_every_n_gram(
    base: Path, tmp_path: Path, row_format: RowFormat
) -> None:
    lmdb = pytest.importorskip("lmdb")
    out = export_to(base, tmp_path / "out", row_format, "lmdb")
    tokens_SK, n_S, _ = read_fgrams(str(base / "fgrams"))
    stored = EmbeddingTable.open(str(base / row_format)).stored(np.arange(len(GRAMS)))
    with lmdb.open(str(out), readonly=True, lock=False) as store, store.begin() as transaction:
        assert store.stat()["entries"] == len(GRAMS)
        for key, row_C in zip(ngram_keys(tokens_SK, n_S, VOCAB), stored, strict=True):
            assert transaction.get(key) == row_C.tobytes()


def test_keys_are_the_big_endian_tokens() -> None:
    tokens_MK, n_M = np.array([[1, 2, 0], [65535, 3, 258]]), np.array([2, 3])
    assert ngram_keys(tokens_MK, n_M, 1 << 16) == [b"\0\1\0\2", b"\xff\xff\0\3\1\2"]
    assert ngram_keys(tokens_MK, n_M, 1 << 17)[0] == b"\0\0\0\1\0\0\0\2"


def test_an_export_touches_no_folder_that_holds_something(base: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ArtifactError, match="not empty"):
        export_table.run(ExportConfig(table=str(base / "bf16"), to="npy", out=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_lmdb_without_f_grams_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fgrams: the keys of lmdb"):
        export_table.run(
            ExportConfig(table=str(base / "bf16"), to="lmdb", out=str(tmp_path / "out"))
        )
