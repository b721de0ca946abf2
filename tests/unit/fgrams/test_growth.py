"""Laws of growing: ids and shards stay, the union is closed, ranks are those of the newer count."""

from pathlib import Path

import numpy as np
import pytest

from ray_jobs.count import fgram_grow
from ray_jobs.count.fgram_grow import GrowConfig
from scone_core.artifacts.manifests import ArtifactError, FGramsManifest
from scone_core.fgrams.fgram_shards import read_fgrams
from scone_core.fgrams.index import FGramIndex
from scone_core.fgrams.ranks import map_ranks
from scone_core.fgrams.validation import validate_fgrams
from tests.builders.corpora import write_fgrams, zipf_documents
from tests.programs.stages import snapshot

FIRST, SECOND, THIRD = (
    zipf_documents(num_documents=20, mean_length=60, vocab_size=64, seed=seed) for seed in (1, 2, 3)
)


def ngrams(folder: Path) -> list[tuple[int, ...]]:
    """All f-grams by id."""
    tokens_SK, n_S, _ = read_fgrams(str(folder))
    return [tuple(row[:n].tolist()) for row, n in zip(tokens_SK, n_S, strict=True)]


def count(folder: Path, documents: list[list[int]], **options: int) -> Path:
    write_fgrams(str(folder), documents, **{"num_fgrams": 150, "rows_per_shard": 64} | options)
    return folder


def grow(out: Path, fgrams: Path, counted: Path, **options: int) -> FGramsManifest:
    config = GrowConfig(fgrams=str(fgrams), counted=str(counted), out=str(out))
    return fgram_grow.run(config.replace(**{"rows_per_shard": 50} | options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three counts of a corpus that grows, and the set of the first grown twice."""
    folder = tmp_path_factory.mktemp("generations")
    count(folder / "count-1", FIRST)
    count(folder / "count-2", FIRST + SECOND, num_fgrams=300)
    count(folder / "count-3", FIRST + SECOND + THIRD, num_fgrams=200, min_count=4)
    grow(folder / "second", folder / "count-1", folder / "count-2")
    grow(folder / "third", folder / "second", folder / "count-3")
    return folder


def test_old_f_grams_keep_ids_and_shards_and_new_ones_follow_in_rank_order(folder: Path) -> None:
    before, counted, after = (ngrams(folder / name) for name in ("count-1", "count-2", "second"))
    assert after[: len(before)] == before
    assert after[len(before) :] == [ngram for ngram in counted if ngram not in set(before)]
    assert len(after) > len(before) + 64  # several shards
    files, copies = snapshot(folder / "count-1"), snapshot(folder / "second")
    shards = [name for name in files if name.endswith(".parquet")]
    assert len(shards) == 3
    assert all(copies[name] == files[name] for name in shards)


@pytest.mark.parametrize("name", ["second", "third"])
def test_a_grown_set_holds_every_invariant_and_finds_every_f_gram(folder: Path, name: str) -> None:
    manifest = validate_fgrams(str(folder / name))
    assert sum(manifest.num_fgrams_per_n.values()) == manifest.num_fgrams
    index = FGramIndex.open(str(folder / name))
    for number, ngram in enumerate(ngrams(folder / name)):
        ids_BT, match_len_BT = index.match(np.array([ngram]))
        assert (ids_BT[0, -1], match_len_BT[0, -1]) == (number, len(ngram))


def test_ranks_are_those_of_the_newer_count_then_the_old_order(folder: Path) -> None:
    for name, counted in (("second", "count-2"), ("third", "count-3")):
        manifest = validate_fgrams(str(folder / name))
        assert manifest.ranks is not None
        by_id = ngrams(folder / name)
        order = np.argsort(map_ranks(str(folder / name), manifest.ranks))
        newest = ngrams(folder / counted)
        left = [ngram for ngram in by_id if ngram not in set(newest)]
        assert left
        assert [by_id[i] for i in order] == newest + left


def test_fingerprints_chain_from_generation_to_generation(folder: Path) -> None:
    first, second, third = (
        validate_fgrams(str(folder / name)) for name in ("count-1", "second", "third")
    )
    assert second.inputs["fgrams"] == first.fingerprint
    assert third.inputs["fgrams"] == second.fingerprint
    assert [g.fingerprint for g in third.generations] == [
        manifest.fingerprint for manifest in (first, second, third)
    ]
    assert [g.num_fgrams for g in third.generations] == [
        manifest.num_fgrams for manifest in (first, second, third)
    ]


@pytest.mark.parametrize("num_new", [1, 40, 51])
def test_the_most_frequent_new_f_grams_come_first(
    folder: Path, tmp_path: Path, num_new: int
) -> None:
    grow(tmp_path / "out", folder / "count-1", folder / "count-2", num_new=num_new)
    num_before = len(ngrams(folder / "count-1"))
    validate_fgrams(str(tmp_path / "out"))
    assert ngrams(tmp_path / "out") == ngrams(folder / "second")[: num_before + num_new]


def test_a_finished_generation_is_not_made_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(folder / "second")
    grow(folder / "second", folder / "count-1", folder / "count-2")
    assert "up to date" in capsys.readouterr().out
    assert snapshot(folder / "second") == before


def test_what_does_not_go_together_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to grow by"):
        grow(tmp_path / "a", folder / "count-1", folder / "count-1")
    with pytest.raises(ArtifactError, match="it grew itself"):
        grow(tmp_path / "b", folder / "count-1", folder / "second")
    count(tmp_path / "other", FIRST, max_n=3)
    with pytest.raises(ArtifactError, match="max_n: found 3, expected 5"):
        grow(tmp_path / "c", folder / "count-1", tmp_path / "other")
    assert not (tmp_path / "b").exists()
