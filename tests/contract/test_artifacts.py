"""Laws of the contracts on disk: nothing half-written is ever read, nothing foreign is ever
touched.
"""

import multiprocessing
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer
from pydantic import ValidationError

from scone_core.artifacts import storage
from scone_core.artifacts.config import InputPath, OutputPath, Resource, StageConfig, fingerprint
from scone_core.artifacts.folders import (
    claim,
    publish,
    shared_fields,
)
from scone_core.artifacts.manifests import (
    MANIFEST,
    PLAN,
    ArtifactError,
    FGramsManifest,
    Manifest,
    Shard,
    TokensManifest,
    load_manifest,
)
from scone_core.artifacts.shards import PAGE_BYTES, map_shard, verify_shards, write_shard
from scone_core.artifacts.units import read_receipt, write_receipt


class ExampleConfig(StageConfig):
    tokens: InputPath = "somewhere"
    out: OutputPath = "elsewhere"
    num_cpus: Resource[int] = 1
    max_n: int = 5
    name: str = "a"


INPUTS = {"tokens": "abc"}
RECEIPT = Shard(name="tokens-00000.arrow", num_rows=3, num_bytes=4096, sha256="def")


def finished(folder: str, config: ExampleConfig) -> TokensManifest:
    manifest = TokensManifest(
        **shared_fields(TokensManifest, config, INPUTS),
        shards=(),
        tokenizer_sha256="",
        vocab_size=4,
        separator_id=0,
        num_documents=0,
        num_tokens=0,
        num_bytes_text=0,
        num_skipped_records={},
    )
    return publish(folder, manifest)


def tokens_batch() -> pa.RecordBatch:
    tokens = pa.LargeListArray.from_arrays(np.array([0, 2, 5]), np.arange(1, 6, dtype=np.uint16))
    return pa.record_batch({"doc_id": pa.array([7, 8], pa.uint64()), "tokens": tokens})


@pytest.fixture(params=["local", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place for artifacts: a local folder, and a bucket behind real HTTP."""
    if request.param == "local":
        yield str(tmp_path)
        return
    caplog = request.getfixturevalue("caplog")
    caplog.set_level("WARNING", logger="werkzeug")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_EC2_METADATA_DISABLED": "true",
        "SCONE_CACHE": str(tmp_path / "cache"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        bucket = f"test-{uuid.uuid4()}"
        boto3.client("s3").create_bucket(Bucket=bucket)
        yield f"s3://{bucket}/run"
    server.stop()


def test_a_fingerprint_covers_what_and_never_how() -> None:
    config = ExampleConfig()
    same = config.replace(tokens="moved", out="moved", num_cpus=64)
    other = config.replace(max_n=4)
    prints = [fingerprint("c/v1", c.semantic_fields(), INPUTS) for c in (config, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert fingerprint("c/v2", config.semantic_fields(), INPUTS) != prints[0]
    assert fingerprint("c/v1", config.semantic_fields(), {"tokens": "def"}) != prints[0]


def test_a_fingerprint_refuses_values_without_a_stable_form() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        fingerprint("c/v1", {"lr": float("nan")}, {})


def test_configs_are_frozen_and_replace_validates() -> None:
    config = ExampleConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.max_n = 3  # pyrefly: ignore
    with pytest.raises(ValidationError, match="max_n"):
        config.replace(max_n="many")
    with pytest.raises(ValidationError, match="max_m"):
        ExampleConfig(max_m=3)  # pyrefly: ignore


def test_a_finished_folder_is_returned_and_another_configuration_is_refused(base: str) -> None:
    config = ExampleConfig()
    folder = storage.join(base, "tokens")
    assert claim(TokensManifest, folder, config, INPUTS) is None
    manifest = finished(folder, config)
    assert claim(TokensManifest, folder, config, INPUTS) == manifest
    with pytest.raises(ArtifactError, match="max_n: 5 there, 4 here"):
        claim(TokensManifest, folder, config.replace(max_n=4), INPUTS)
    with pytest.raises(ArtifactError, match="tokens: 'abc' there, 'xyz' here"):
        claim(TokensManifest, folder, config, {"tokens": "xyz"})


def test_an_unfinished_folder_is_resumed_by_its_own_configuration_only(base: str) -> None:
    config = ExampleConfig()
    folder = storage.join(base, "tokens")
    claim(TokensManifest, folder, config, INPUTS)
    write_receipt(folder, "unit-0", RECEIPT)
    assert claim(TokensManifest, folder, config, INPUTS) is None
    assert read_receipt(folder, "unit-0", Shard) == RECEIPT
    assert read_receipt(folder, "unit-1", Shard) is None
    with pytest.raises(ArtifactError, match="name: 'a' there, 'b' here"):
        claim(TokensManifest, folder, config.replace(name="b"), INPUTS)
    finished(folder, config)
    assert read_receipt(folder, "unit-0", Shard) is None


def test_a_claim_without_any_work_done_can_change_its_mind(base: str) -> None:
    folder = storage.join(base, "tokens")
    claim(TokensManifest, folder, ExampleConfig(), INPUTS)
    other = ExampleConfig(max_n=4)
    assert claim(TokensManifest, folder, other, INPUTS) is None
    assert claim(TokensManifest, folder, other, INPUTS) is None


def test_a_foreign_folder_is_refused(base: str) -> None:
    storage.write_bytes(storage.join(base, "home", "notes.txt"), b"mine")
    with pytest.raises(ArtifactError, match="not empty"):
        claim(TokensManifest, storage.join(base, "home"), ExampleConfig(), INPUTS)
    assert storage.read_bytes(storage.join(base, "home", "notes.txt")) == b"mine"


def test_readers_name_what_is_missing(base: str) -> None:
    folder = storage.join(base, "tokens")
    with pytest.raises(ArtifactError, match="no artifact"):
        load_manifest(TokensManifest, folder)
    claim(TokensManifest, folder, ExampleConfig(), INPUTS)
    with pytest.raises(ArtifactError, match="unfinished artifact"):
        load_manifest(TokensManifest, folder)
    finished(folder, ExampleConfig())
    with pytest.raises(ArtifactError, match="'tokens/v1', but 'fgrams/v1' is needed"):
        load_manifest(FGramsManifest, folder)


def test_a_shard_maps_to_what_was_written_on_a_page_boundary(base: str) -> None:
    batch = tokens_batch()
    shard = write_shard(base, "tokens-00000.arrow", batch)
    mapped = map_shard(base, shard)
    assert mapped.equals(batch)
    assert mapped.column(0).buffers()[1].address % PAGE_BYTES == 0
    verify_shards(base, [shard])


def test_mapping_allocates_nothing(tmp_path: Path) -> None:
    values = pa.array(np.arange(1 << 20, dtype=np.uint16))
    rows = pa.record_batch({"embedding": pa.FixedSizeListArray.from_arrays(values, 64)})
    shard = write_shard(str(tmp_path), "rows.arrow", rows)
    before = pa.total_allocated_bytes()
    mapped = map_shard(str(tmp_path), shard)
    assert mapped.num_rows == 1 << 14
    assert pa.total_allocated_bytes() == before


def write_ipc(path: Path, batches: list[pa.RecordBatch], compression: str | None) -> Shard:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return Shard(
        name=path.name,
        num_rows=sum(batch.num_rows for batch in batches),
        num_bytes=path.stat().st_size,
        sha256=storage.sha256_of(str(path)),
    )


def test_shards_that_cannot_be_mapped_are_refused(tmp_path: Path) -> None:
    values = pa.record_batch({"x": np.zeros(100_000, np.int64)})
    compressed = write_ipc(tmp_path / "a.arrow", [values], "zstd")
    with pytest.raises(ArtifactError, match="compressed"):
        map_shard(str(tmp_path), compressed)
    several = write_ipc(tmp_path / "b.arrow", [values, values], None)
    with pytest.raises(ArtifactError, match="2 record batches"):
        map_shard(str(tmp_path), several)
    (tmp_path / "c.arrow").write_bytes(b"x" * several.num_bytes)
    with pytest.raises(ArtifactError, match="damaged"):
        map_shard(str(tmp_path), several.model_copy(update={"name": "c.arrow"}))


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    storage.write_bytes(str(target), b"old")

    def fail(file: Path) -> None:
        file.write_bytes(b"half of the ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        storage.write_atomic(str(target), fail)
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.json"]


def write_half(path: str) -> None:
    def write(file: Path) -> None:
        file.write_bytes(b"half a sh")
        os.kill(os.getpid(), signal.SIGKILL)

    storage.write_atomic(path, write)


def kill_a_writer(path: Path) -> None:
    """Leaves what a process leaves that is killed while it writes `path`."""
    writer = multiprocessing.get_context("fork").Process(target=write_half, args=(str(path),))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert len(os.listdir(path.parent)) == 1


def test_what_killed_writers_leave_is_no_work_and_gone_in_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    kill_a_writer(folder / PLAN)
    assert claim(TokensManifest, str(folder), ExampleConfig(), INPUTS) is None
    kill_a_writer(folder / "index/trie.npy")
    finished(str(folder), ExampleConfig())
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [MANIFEST]


def test_a_cached_download_follows_the_content(tmp_path: Path) -> None:
    """fsspec's in-memory files stand for a store whose object is replaced by one of equal size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCONE_CACHE", str(tmp_path))
        for content in (b"one", b"two"):
            storage.write_bytes("memory://bucket/x", content)
            digest = storage.sha256_of("memory://bucket/x")
            assert storage.local_copy("memory://bucket/x", sha256=digest).read_bytes() == content


def test_manifests_have_no_field_that_differs_between_equal_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        claim(TokensManifest, str(tmp_path / name), ExampleConfig(), INPUTS)
        finished(str(tmp_path / name), ExampleConfig())
    first, second = ((tmp_path / n / MANIFEST).read_bytes() for n in ("a", "b"))
    assert first == second
    assert issubclass(TokensManifest, Manifest)
