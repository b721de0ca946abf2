"""Laws of embeddings/v1: what was written is what is read, and nothing else is accepted."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from scone_core import artifacts
from scone_core.artifacts import ArtifactError, EmbeddingsManifest, Shard
from scone_core.table import STORAGE, EmbeddingTable, embedding_batch, from_storage, to_storage

ALL_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
"""Every bit pattern: NaNs with payloads, infinities, -0 and denormals among them."""


def publish(folder: Path, rows_SD: np.ndarray, *, dtype: str, rows_per_shard: int) -> str:
    shards: list[Shard] = []
    for first in range(0, len(rows_SD), rows_per_shard):
        batch = embedding_batch(rows_SD[first : first + rows_per_shard], dtype)
        name = f"rows-{first:05d}.arrow"
        shards.append(artifacts.write_shard(str(folder), name, batch, first_id=first))
    manifest = EmbeddingsManifest(
        fingerprint="table",
        config={},
        inputs={},
        shards=tuple(shards),
        fgrams_fingerprint="these f-grams",
        checkpoint_fingerprint="this checkpoint",
        tokenizer_sha256="this tokenizer",
        max_n=5,
        num_rows=len(rows_SD),
        width=rows_SD.shape[1],
        dtype=dtype,  # pyrefly: ignore[bad-argument-type]
        bytes_per_row=rows_SD.shape[1] * rows_SD.itemsize,
    )
    artifacts.publish(str(folder), manifest)
    return str(folder)


def test_every_bfloat16_bit_pattern_survives_the_disk(tmp_path: Path) -> None:
    folder = publish(tmp_path, ALL_BFLOAT16, dtype="bfloat16", rows_per_shard=100)
    ids_M = np.random.default_rng(0).permutation(256)
    rows_MD = EmbeddingTable.open(folder).vectors(ids_M)
    assert rows_MD.dtype == torch.bfloat16
    assert np.array_equal(rows_MD.view(torch.uint16).numpy(), ALL_BFLOAT16[ids_M])


@pytest.mark.parametrize("dtype", STORAGE)
def test_a_vector_is_rounded_once_to_the_stored_dtype(tmp_path: Path, dtype: str) -> None:
    vectors_SD = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    vectors_SD[0, :3] = torch.tensor([float("inf"), -0.0, float("nan")])
    folder = publish(tmp_path, to_storage(vectors_SD, dtype), dtype=dtype, rows_per_shard=3)
    rows_SD = EmbeddingTable.open(folder).vectors(np.arange(7))
    torch.testing.assert_close(
        rows_SD, vectors_SD.to(STORAGE[dtype][0]), rtol=0, atol=0, equal_nan=True
    )
    assert torch.signbit(rows_SD[0, 1])


@pytest.mark.parametrize("rows_per_shard", [1, 3, 256])
def test_the_cut_into_shards_is_invisible_to_readers(tmp_path: Path, rows_per_shard: int) -> None:
    folder = publish(tmp_path, ALL_BFLOAT16, dtype="bfloat16", rows_per_shard=rows_per_shard)
    table = EmbeddingTable.open(folder)
    ids_M = np.random.default_rng(0).integers(0, 256, 1000)
    out_MD = table.empty(1000)
    assert out_MD.ctypes.data % 64 == 0
    table.gather(ids_M, out_MD)
    assert np.array_equal(out_MD, ALL_BFLOAT16[ids_M])


def test_rows_start_on_a_page_when_their_size_allows(tmp_path: Path) -> None:
    rows_SD = np.zeros((3, 2048), np.uint16)
    folder = publish(tmp_path, rows_SD, dtype="bfloat16", rows_per_shard=2)
    for shard in artifacts.load_manifest(EmbeddingsManifest, folder).shards:
        rows = artifacts.map_shard(folder, shard).column("embedding").values
        assert rows.buffers()[1].address % artifacts.PAGE_BYTES == 0


@pytest.mark.parametrize("bad_id", [-1, 256, 1 << 40])
def test_an_id_without_a_row_is_refused_and_nothing_is_written(tmp_path: Path, bad_id: int) -> None:
    table = EmbeddingTable.open(publish(tmp_path, ALL_BFLOAT16, dtype="bfloat16", rows_per_shard=9))
    out_MD = table.empty(2)
    out_MD[:] = 7
    with pytest.raises(ValueError, match=f"f-gram id {bad_id} has no row.*0..255"):
        table.gather(np.array([3, bad_id]), out_MD)
    assert (out_MD == 7).all()


def test_the_table_of_another_checkpoint_or_f_gram_set_is_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path, ALL_BFLOAT16, dtype="bfloat16", rows_per_shard=100)
    EmbeddingTable.open(folder, expected={"max_n": 5, "checkpoint_fingerprint": "this checkpoint"})
    for field in ("checkpoint_fingerprint", "fgrams_fingerprint", "tokenizer_sha256", "max_n"):
        with pytest.raises(ArtifactError, match=field):
            EmbeddingTable.open(folder, expected={field: "another"})


def test_a_missing_or_truncated_shard_is_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path, ALL_BFLOAT16, dtype="bfloat16", rows_per_shard=100)
    shard = tmp_path / "rows-00100.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match="rows-00100.arrow: .* bytes"):
        EmbeddingTable.open(folder)
    shard.unlink()
    with pytest.raises(ArtifactError, match="rows-00100.arrow.*missing"):
        EmbeddingTable.open(folder)


def test_verification_finds_one_flipped_bit(tmp_path: Path) -> None:
    folder = publish(tmp_path, ALL_BFLOAT16, dtype="bfloat16", rows_per_shard=100)
    shards = artifacts.load_manifest(EmbeddingsManifest, folder).shards
    artifacts.verify_shards(folder, shards)
    content = bytearray((tmp_path / shards[1].name).read_bytes())
    content[5000] ^= 1
    (tmp_path / shards[1].name).write_bytes(bytes(content))
    with pytest.raises(ArtifactError, match=shards[1].name):
        artifacts.verify_shards(folder, shards)


def test_a_table_whose_shards_do_not_cover_all_ids_is_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path, ALL_BFLOAT16, dtype="bfloat16", rows_per_shard=100)
    manifest = artifacts.load_manifest(EmbeddingsManifest, folder)
    for shards in (manifest.shards[1:], manifest.shards[:-1], manifest.shards[::-1]):
        changed = {**manifest.model_dump(), "shards": shards}
        artifacts.publish(folder, EmbeddingsManifest.model_validate(changed))
        with pytest.raises(ArtifactError, match="first_id|rows in shards"):
            EmbeddingTable.open(folder)


def test_a_compressed_shard_is_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path, ALL_BFLOAT16, dtype="bfloat16", rows_per_shard=256)
    manifest = artifacts.load_manifest(EmbeddingsManifest, folder)
    path = tmp_path / manifest.shards[0].name
    batch = embedding_batch(ALL_BFLOAT16, "bfloat16")
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(str(path), batch.schema, options=options) as writer:
        writer.write_batch(batch)
    shard = manifest.shards[0].model_dump() | {"num_bytes": path.stat().st_size}
    changed = manifest.model_dump() | {"shards": (shard,)}
    artifacts.publish(folder, EmbeddingsManifest.model_validate(changed))
    with pytest.raises(ArtifactError, match="compressed"):
        EmbeddingTable.open(folder)


def test_stored_rows_share_memory_with_their_torch_view() -> None:
    rows_MD = np.zeros((2, 4), np.uint16)
    from_storage(rows_MD, "bfloat16")[1, 2] = 1.0
    assert rows_MD[1, 2] == 0x3F80
