"""Laws of embeddings/v1: what was written is what is read, and nothing else is accepted."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from scone_core.artifacts import storage
from scone_core.artifacts.folders import publish
from scone_core.artifacts.manifests import (
    ArtifactError,
    EmbeddingsManifest,
    RowFormat,
    load_manifest,
)
from scone_core.artifacts.shards import PAGE_BYTES, map_shard, verify_shards, write_shard
from scone_core.machine.intrinsics import CACHE_LINE
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.row_formats import STORAGE, as_array, embedding_batch
from scone_core.table.row_kernels import STREAMED_BYTES
from tests.builders.tables import publish_rows, publish_vectors, random_vectors

ALL_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
"""Every bit pattern: NaNs with payloads, infinities, -0 and denormals among them."""


def publish_all(folder: Path, *, rows_per_shard: int = 100) -> str:
    return publish_rows(folder, ALL_BFLOAT16, row_format="bf16", rows_per_shard=rows_per_shard)


def test_every_bfloat16_bit_pattern_survives_the_disk(tmp_path: Path) -> None:
    ids_M = np.random.default_rng(0).permutation(256)
    rows_MD = EmbeddingTable.open(publish_all(tmp_path)).vectors(ids_M)
    assert rows_MD.dtype == torch.bfloat16
    assert np.array_equal(rows_MD.view(torch.uint16).numpy(), ALL_BFLOAT16[ids_M])


@pytest.mark.parametrize("rows_per_shard", [1, 3, 256])
def test_the_cut_into_shards_is_invisible_to_readers(tmp_path: Path, rows_per_shard: int) -> None:
    table = EmbeddingTable.open(publish_all(tmp_path, rows_per_shard=rows_per_shard))
    ids_M = np.random.default_rng(0).integers(0, 256, 1000)
    out_MD = table.empty(1000)
    assert out_MD.ctypes.data % 64 == 0
    table.gather(ids_M, out_MD)
    assert np.array_equal(out_MD, ALL_BFLOAT16[ids_M])
    assert np.array_equal(table.stored(ids_M), ALL_BFLOAT16[ids_M])


@pytest.mark.parametrize("offset", [0, 8])
def test_large_results_are_whole_wherever_they_begin(tmp_path: Path, offset: int) -> None:
    """Results of this size are written past the caches where they are aligned."""
    table = EmbeddingTable.open(publish_all(tmp_path))
    ids_M = np.random.default_rng(0).integers(0, 256, STREAMED_BYTES // 512 + 3)
    room = table.empty(len(ids_M) + 1).reshape(-1)
    out_MD = room[offset : offset + len(ids_M) * 256].reshape(-1, 256)
    assert (out_MD.ctypes.data % CACHE_LINE == 0) == (offset == 0)
    table.gather(ids_M, out_MD)
    assert np.array_equal(out_MD, ALL_BFLOAT16[ids_M])


def test_shards_may_have_any_sizes(tmp_path: Path) -> None:
    """An id's shard is found by division where all have one size, else by search."""
    cuts, shards = [0, 5, 6, 100, 101, 250, 256], []
    publish_all(tmp_path)
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        batch = embedding_batch(ALL_BFLOAT16[first:last], "bf16")
        shard = write_shard(str(tmp_path), f"odd-{first}.arrow", batch, first_id=first)
        shards.append(shard)
    manifest = load_manifest(EmbeddingsManifest, str(tmp_path))
    publish(str(tmp_path), manifest.model_copy(update={"shards": tuple(shards)}))
    table = EmbeddingTable.open(str(tmp_path))
    assert np.array_equal(table.stored(np.arange(256)), ALL_BFLOAT16)


@pytest.mark.parametrize("row_format", STORAGE)
def test_rows_can_be_gathered_into_a_callers_tensor_of_any_dtype(
    tmp_path: Path, row_format: RowFormat
) -> None:
    vectors_SD = random_vectors(50, 33)
    table = EmbeddingTable.open(publish_vectors(tmp_path, vectors_SD, row_format=row_format))
    ids_M = np.random.default_rng(0).integers(0, 50, 200)
    native_MD = table.vectors(ids_M)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out_MD = torch.empty(200, 33, dtype=dtype)
        table.gather(ids_M, as_array(out_MD))
        torch.testing.assert_close(out_MD, native_MD.to(dtype), rtol=2**-8, atol=0)


@pytest.mark.parametrize("row_format", STORAGE)
def test_rows_start_on_a_page(tmp_path: Path, row_format: RowFormat) -> None:
    """The first of a shard always, every one when its size is a multiple of the page."""
    folder = publish_vectors(
        tmp_path, torch.zeros(3, 2048), row_format=row_format, rows_per_shard=2
    )
    for shard in load_manifest(EmbeddingsManifest, folder).shards:
        column = map_shard(folder, shard).column("embedding")
        values = getattr(column, "values", column)
        assert values.buffers()[1].address % PAGE_BYTES == 0


@pytest.mark.parametrize("bad_id", [-1, 256, 1 << 40])
def test_an_id_without_a_row_is_refused_and_nothing_is_written(tmp_path: Path, bad_id: int) -> None:
    table = EmbeddingTable.open(publish_all(tmp_path, rows_per_shard=9))
    out_MD = table.empty(2)
    out_MD[:] = 7
    with pytest.raises(ValueError, match=f"f-gram id {bad_id} has no row.*0..255"):
        table.gather(np.array([3, bad_id]), out_MD)
    assert (out_MD == 7).all()


def test_the_table_of_another_checkpoint_or_f_gram_set_is_refused(tmp_path: Path) -> None:
    folder = publish_all(tmp_path)
    EmbeddingTable.open(folder, expected={"max_n": 5, "checkpoint_fingerprint": "this checkpoint"})
    for field in ("checkpoint_fingerprint", "fgrams_fingerprint", "tokenizer_sha256", "max_n"):
        with pytest.raises(ArtifactError, match=field):
            EmbeddingTable.open(folder, expected={field: "another"})


def test_a_missing_or_truncated_shard_is_refused(tmp_path: Path) -> None:
    folder = publish_all(tmp_path)
    shard = tmp_path / "rows-00100.arrow"
    content = shard.read_bytes()
    for part in (content[:-1], content[:5000], b""):
        shard.write_bytes(part)
        with pytest.raises(ArtifactError, match="rows-00100.arrow: .* bytes"):
            EmbeddingTable.open(folder)
    shard.unlink()
    with pytest.raises(ArtifactError, match="rows-00100.arrow.*missing"):
        EmbeddingTable.open(folder)


@pytest.mark.parametrize("row_format", ["bf16", "int8"])
def test_any_damaged_byte_around_the_rows_is_refused_or_harmless(
    tmp_path: Path, row_format: RowFormat
) -> None:
    """Sizes are checked at opening and sha256 is not, so Arrow's own description of the rows may
    arrive damaged: the rows must then be the right ones, or there must be an ArtifactError.
    """
    vectors_SD = random_vectors(20, 8)
    folder = publish_vectors(tmp_path, vectors_SD, row_format=row_format)
    rows_SC = EmbeddingTable.open(folder).stored(np.arange(20))
    path = tmp_path / "rows-00000.arrow"
    content = path.read_bytes()
    body = content.index(rows_SC.tobytes())
    around = [*range(body), *range(body + rows_SC.nbytes, len(content))]
    num_refused = 0
    for place in around[:400] + around[-600:]:
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        try:
            table = EmbeddingTable.open(folder)
        except ArtifactError:
            num_refused += 1
        else:
            assert np.array_equal(table.stored(np.arange(20)), rows_SC), place
    assert num_refused > 50


def test_a_shard_of_other_rows_than_the_manifest_says_is_refused(tmp_path: Path) -> None:
    folder = publish_all(tmp_path)
    manifest = load_manifest(EmbeddingsManifest, folder)
    for change in ({"row_format": "fp16"}, {"row_format": "int8"}, {"width": 255}):
        changed = EmbeddingsManifest.model_validate(manifest.model_dump() | change)
        publish(folder, changed)
        with pytest.raises(ArtifactError, match="rows-00000.arrow: 100 rows of"):
            EmbeddingTable.open(folder)


def test_verification_finds_one_flipped_bit(tmp_path: Path) -> None:
    folder = publish_all(tmp_path)
    shards = load_manifest(EmbeddingsManifest, folder).shards
    verify_shards(folder, shards)
    content = bytearray((tmp_path / shards[1].name).read_bytes())
    content[5000] ^= 1
    (tmp_path / shards[1].name).write_bytes(bytes(content))
    with pytest.raises(ArtifactError, match=shards[1].name):
        verify_shards(folder, shards)


def test_the_copy_of_a_remote_shard_is_checked_before_anyone_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec's in-memory files stand for a remote store."""
    monkeypatch.setenv("SCONE_CACHE", str(tmp_path / "cache"))
    publish_all(tmp_path / "table")
    for file in (tmp_path / "table").iterdir():
        storage.write_bytes(f"memory://remote/{file.name}", file.read_bytes())
    good = storage.read_bytes("memory://remote/rows-00100.arrow")
    storage.write_bytes("memory://remote/rows-00100.arrow", good[:6000] + b"!" + good[6001:])
    with pytest.raises(ArtifactError, match="rows-00100.arrow: sha256 .* arrived"):
        EmbeddingTable.open("memory://remote")
    storage.write_bytes("memory://remote/rows-00100.arrow", good)
    table = EmbeddingTable.open("memory://remote")
    assert np.array_equal(table.stored(np.arange(256)), ALL_BFLOAT16)


def test_a_table_whose_shards_do_not_cover_all_ids_is_refused(tmp_path: Path) -> None:
    folder = publish_all(tmp_path)
    manifest = load_manifest(EmbeddingsManifest, folder)
    for shards in (manifest.shards[1:], manifest.shards[:-1], manifest.shards[::-1]):
        changed = {**manifest.model_dump(), "shards": shards}
        publish(folder, EmbeddingsManifest.model_validate(changed))
        with pytest.raises(ArtifactError, match="first_id|rows in shards"):
            EmbeddingTable.open(folder)


def test_a_compressed_shard_is_refused(tmp_path: Path) -> None:
    folder = publish_all(tmp_path, rows_per_shard=256)
    manifest = load_manifest(EmbeddingsManifest, folder)
    path = tmp_path / manifest.shards[0].name
    batch = embedding_batch(ALL_BFLOAT16, "bf16")
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(str(path), batch.schema, options=options) as writer:
        writer.write_batch(batch)
    shard = manifest.shards[0].model_dump() | {"num_bytes": path.stat().st_size}
    changed = manifest.model_dump() | {"shards": (shard,)}
    publish(folder, EmbeddingsManifest.model_validate(changed))
    with pytest.raises(ArtifactError, match="compressed"):
        EmbeddingTable.open(folder)


def test_an_empty_lookup_is_empty(tmp_path: Path) -> None:
    rows_MD = EmbeddingTable.open(publish_all(tmp_path)).vectors(np.empty(0, np.int64))
    assert rows_MD.shape == (0, 256)
