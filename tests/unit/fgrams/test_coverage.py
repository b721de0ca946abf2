"""Laws of the coverage curve: at every size it is what matching with that many f-grams gives."""

from pathlib import Path

import numpy as np
import pytest

from scone_core.counting.one_scan import count_ngrams
from scone_core.counting.ranking import class_sizes, rank_range, rank_runs
from scone_core.counting.records import Layout
from scone_core.fgrams.coverage import count_hits, coverage_curve, curve_sizes, sample_documents
from scone_core.fgrams.index import FGramIndex
from scone_core.fgrams.ngrams import NGrams
from tests.builders.corpora import whole, write_tokens, zipf_documents

VOCAB_SIZE = 40
COUNTED, HELD_OUT = (
    zipf_documents(num_documents=12, mean_length=150, vocab_size=VOCAB_SIZE, seed=seed)
    for seed in (1, 2)
)


@pytest.fixture(scope="module")
def ranked() -> NGrams:
    found = count_ngrams([whole(COUNTED)], Layout(5, VOCAB_SIZE), min_count=2)
    return rank_range(found)


def as_row(documents: list[list[int]]) -> np.ndarray:
    return np.array([[token for document in documents for token in (-1, *document)]])


def matched(ranked: NGrams, size: int, documents: list[list[int]]) -> tuple[float, float]:
    """Hit rate and mean match length with an index of the first `size` f-grams alone."""
    index = FGramIndex.from_fgrams(
        ranked.tokens_MK[:size], ranked.n_M[:size], vocab_size=VOCAB_SIZE
    )
    tokens_1L = as_row(documents)
    lengths = index.match(tokens_1L).match_len_BT[tokens_1L >= 0]
    return float((lengths > 1).mean()), float(lengths.mean())


def test_the_curve_of_a_sample_is_matching_at_every_size(ranked: NGrams) -> None:
    index = FGramIndex.from_fgrams(ranked.tokens_MK, ranked.n_M, vocab_size=VOCAB_SIZE)
    sizes = [1, 2, 3, *range(5, len(ranked.n_M), 37), len(ranked.n_M)]
    hits = count_hits(index, as_row(HELD_OUT))
    curve = coverage_curve(hits, num_tokens=sum(map(len, HELD_OUT)), sizes=sizes)
    for size, hit_rate, mean_match_length in curve.iter_rows():
        assert (hit_rate, mean_match_length) == pytest.approx(matched(ranked, size, HELD_OUT))


def test_the_curve_of_the_counted_corpus_follows_from_its_counts(ranked: NGrams) -> None:
    runs = rank_runs([class_sizes(ranked)], num_fgrams=len(ranked.n_M))
    sizes = curve_sizes(len(ranked.n_M), num=9)
    curve = coverage_curve(runs, num_tokens=sum(map(len, COUNTED)), sizes=sizes)
    for size, hit_rate, mean_match_length in curve.iter_rows():
        assert (hit_rate, mean_match_length) == pytest.approx(matched(ranked, size, COUNTED))


def test_curve_sizes_ascend_from_one_to_all() -> None:
    for num_fgrams in (1, 2, 7, 10**6):
        sizes = curve_sizes(num_fgrams)
        assert sizes == sorted(set(sizes))
        assert (sizes[0], sizes[-1]) == (1, num_fgrams)


@pytest.mark.parametrize("num_shards", [1, 5])
def test_a_sample_is_the_first_tokens_with_marked_boundaries(
    tmp_path: Path, num_shards: int
) -> None:
    folder = str(tmp_path / "tokens")
    documents = [[], *HELD_OUT]
    manifest = write_tokens(folder, documents, vocab_size=VOCAB_SIZE, num_shards=num_shards)
    everything = sample_documents(folder, manifest, num_tokens=10**9)
    np.testing.assert_array_equal(everything, as_row(documents))
    sample_1L = sample_documents(folder, manifest, num_tokens=200)
    assert (sample_1L >= 0).sum() == 200
    np.testing.assert_array_equal(sample_1L, everything[:, : sample_1L.shape[1]])
