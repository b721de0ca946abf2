"""Laws of fgrams/v1: what is written is read, and every broken invariant is found."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from scone_core.artifacts import storage
from scone_core.artifacts.folders import publish
from scone_core.artifacts.manifests import ArtifactError, FGramsManifest, load_manifest
from scone_core.fgrams import fgram_shards
from scone_core.fgrams.fgram_shards import read_fgrams, take_fgrams
from scone_core.fgrams.index import INDEX
from scone_core.fgrams.inspection import compare_fgrams
from scone_core.fgrams.ngrams import NGrams
from scone_core.fgrams.validation import validate_fgrams
from tests.builders.corpora import brute_force, rank, write_fgrams, zipf_documents

DOCUMENTS = zipf_documents(num_documents=30, mean_length=300, vocab_size=60, seed=5)
NUM_FGRAMS, ROWS_PER_SHARD = 900, 250


@pytest.fixture
def folder(tmp_path: Path) -> str:
    folder = str(tmp_path / "fgrams")
    write_fgrams(folder, DOCUMENTS, num_fgrams=NUM_FGRAMS, rows_per_shard=ROWS_PER_SHARD)
    return folder


def test_rows_are_the_most_frequent_n_grams_in_rank_order(folder: str) -> None:
    counts = brute_force(DOCUMENTS, max_n=5, min_count=2)
    expected = rank(counts)[:NUM_FGRAMS]
    found = read_fgrams(folder)
    assert found.tuples() == expected
    assert found.counts_M.tolist() == [counts[fgram] for fgram in expected]
    assert [column.dtype for column in found] == [np.uint32, np.uint8, np.uint64]


@pytest.mark.parametrize(("first_id", "num"), [(0, 0), (0, 900), (249, 2), (250, 250), (899, 1)])
def test_any_part_can_be_read(folder: str, first_id: int, num: int) -> None:
    whole = read_fgrams(folder)
    for part, column in zip(read_fgrams(folder, first_id=first_id, num=num), whole, strict=True):
        np.testing.assert_array_equal(part, column[first_id : first_id + num])


def test_reading_beyond_the_artifact_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="ids below 900"):
        read_fgrams(folder, first_id=899, num=2)


def test_taking_ids_gives_their_rows_in_the_order_asked(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fgram_shards, "ROW_GROUP", 100)
    ids_S = np.array([899, 0, 251, 0, 249])
    for part, column in zip(take_fgrams(folder, ids_S), read_fgrams(folder), strict=True):
        np.testing.assert_array_equal(part, column[ids_S])


def test_a_written_artifact_is_valid(folder: str) -> None:
    assert validate_fgrams(folder) == load_manifest(FGramsManifest, folder)


def test_the_parquet_columns_are_those_of_the_contract(folder: str) -> None:
    schema = pq.read_schema(f"{folder}/fgrams-00000.parquet")
    assert schema.remove_metadata().equals(fgram_shards.fgram_schema(5))


def swap_rows(rows: NGrams) -> None:
    for column in rows:
        column[[0, 1]] = column[[1, 0]]


def lower_count(rows: NGrams) -> None:
    rows.counts_M[-1] = 1


def fill_padding(rows: NGrams) -> None:
    rows.tokens_MK[np.argmin(rows.n_M), -1] = 9


def leave_vocabulary(rows: NGrams) -> None:
    rows.tokens_MK[0, 0] = 256


def use_separator(rows: NGrams) -> None:
    rows.tokens_MK[0, 0] = 0


def change_token(rows: NGrams) -> None:
    """Breaks closure: the n-grams that held the old bigram lose their part."""
    rows.tokens_MK[0, 0] = 59


def rewrite(folder: str, change: Callable[[NGrams], None]) -> None:
    """Publish the first shard with `change`, and a manifest that agrees with it."""
    manifest = load_manifest(FGramsManifest, folder)
    rows = read_fgrams(folder, num=ROWS_PER_SHARD)
    change(rows)
    shard = fgram_shards.write_fgrams(folder, manifest.shards[0].name, rows, first_id=0)
    publish(folder, manifest.model_copy(update={"shards": (shard, *manifest.shards[1:])}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap_rows, "not in rank order"),
        (lower_count, "count 1 < min_count=2"),
        (fill_padding, "not zero behind the n-th token"),
        (leave_vocabulary, "outside vocab_size=256"),
        (use_separator, "or the separator"),
        (change_token, "not ranked before it"),
    ],
)
def test_validation_finds_each_broken_invariant(
    folder: str, change: Callable[[NGrams], None], words: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(ArtifactError, match=words):
        validate_fgrams(folder)


def test_validation_finds_ids_that_are_not_row_numbers(folder: str) -> None:
    manifest = load_manifest(FGramsManifest, folder)
    rows = read_fgrams(folder, num=ROWS_PER_SHARD)
    shard = fgram_shards.write_fgrams(folder, manifest.shards[0].name, rows, first_id=1)
    publish(folder, manifest.model_copy(update={"shards": (shard, *manifest.shards[1:])}))
    with pytest.raises(ArtifactError, match="fgram_id is not the row number"):
        validate_fgrams(folder)


def test_validation_finds_an_index_of_other_f_grams(folder: str, tmp_path: Path) -> None:
    manifest = load_manifest(FGramsManifest, folder)
    other = zipf_documents(num_documents=30, mean_length=300, vocab_size=60, seed=6)
    foreign = write_fgrams(str(tmp_path / "other"), other, num_fgrams=NUM_FGRAMS)
    assert foreign.num_fgrams == NUM_FGRAMS
    storage.write_bytes(f"{folder}/{INDEX}", (tmp_path / "other" / INDEX).read_bytes())
    publish(folder, manifest.model_copy(update={"index": foreign.index}))
    with pytest.raises(ArtifactError, match="not the index of its f-grams"):
        validate_fgrams(folder)


@pytest.mark.parametrize("name", ["fgrams-00001.parquet", INDEX])
def test_validation_finds_a_flipped_bit(folder: str, name: str) -> None:
    path = Path(folder) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="sha256 differs"):
        validate_fgrams(folder)


def test_reading_names_a_damaged_or_truncated_shard(folder: str) -> None:
    path = Path(folder) / "fgrams-00001.parquet"
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    with pytest.raises(ArtifactError, match=r"fgrams-00001\.parquet: damaged Parquet"):
        read_fgrams(folder)
    path.write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match=r"fgrams-00001\.parquet: missing or truncated"):
        read_fgrams(folder)


def test_comparison_counts_what_both_sets_hold(folder: str, tmp_path: Path) -> None:
    other_documents = DOCUMENTS[:20]
    write_fgrams(str(tmp_path / "other"), other_documents, num_fgrams=500, max_n=4)
    first = set(rank(brute_force(DOCUMENTS, max_n=5, min_count=2))[:NUM_FGRAMS])
    second = set(rank(brute_force(other_documents, max_n=4, min_count=2))[:500])
    table = compare_fgrams(folder, str(tmp_path / "other"))
    for n, *numbers, overlap in table.iter_rows():
        parts = [{fgram for fgram in side if len(fgram) == n} for side in (first, second)]
        common = parts[0] & parts[1]
        assert numbers == [len(parts[0]), len(parts[1]), len(common)]
        assert overlap == pytest.approx(len(common) / len(parts[0] | parts[1]))


def test_sets_of_different_tokenizers_are_not_compared(folder: str, tmp_path: Path) -> None:
    write_fgrams(str(tmp_path / "other"), DOCUMENTS, num_fgrams=50, vocab_size=99)
    with pytest.raises(ArtifactError, match="tokenizer of"):
        compare_fgrams(folder, str(tmp_path / "other"))
