"""Laws of the one-scan engine: its counts are Python's counts, however the corpus is cut."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scone_core.artifacts import ArtifactError
from scone_core.ngrams import (
    MAX_VOCAB,
    NGrams,
    Piece,
    count_groups,
    count_ngrams,
    gather_groups,
    group_records,
    plan_ranges,
    read_starts,
    write_chunk,
)
from tests.corpora import Documents, brute_force, whole

VOCABULARIES = [2, 255, 256, 257, 65_534, 65_535]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[int, Documents]:
    """A vocabulary size and documents over few of its ids, the smallest and largest among them."""
    vocab_size = draw(st.sampled_from(VOCABULARIES))
    ids = st.sampled_from(sorted({0, 1, vocab_size // 2, vocab_size - 1}))
    return vocab_size, draw(st.lists(st.lists(ids, max_size=12), max_size=8))


def to_counts(ngrams: NGrams) -> dict[tuple[int, ...], int]:
    """Also checks that no n-gram appears twice and that rows are zero behind the n-th token."""
    rows = zip(*(column.tolist() for column in ngrams), strict=True)
    counts = {}
    for tokens, n, count in rows:
        assert not any(tokens[n:])
        assert tuple(tokens[:n]) not in counts
        counts[tuple(tokens[:n])] = count
    return counts


@given(corpus=corpora(), max_n=st.integers(2, 5), min_count=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_counts_equal_brute_force(
    corpus: tuple[int, Documents], max_n: int, min_count: int
) -> None:
    vocab_size, documents = corpus
    found = count_ngrams(
        [whole(documents)], max_n=max_n, vocab_size=vocab_size, min_count=min_count
    )
    assert to_counts(found) == brute_force(documents, max_n=max_n, min_count=min_count)


@given(
    corpus=corpora(),
    max_n=st.integers(2, 5),
    min_count=st.integers(1, 3),
    num_ranges=st.integers(1, 6),
    cuts=st.lists(st.integers(0, 96), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_counts_do_not_depend_on_chunks_and_ranges(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: tuple[int, Documents],
    max_n: int,
    min_count: int,
    num_ranges: int,
    cuts: list[int],
) -> None:
    vocab_size, documents = corpus
    tokens_L, offsets_D1, _, num_tokens = whole(documents)
    edges = [0, *sorted(min(cut, num_tokens) for cut in cuts), num_tokens]
    folder = tmp_path_factory.mktemp("chunks")
    paths, sizes_G = [], np.zeros(vocab_size, np.int64)
    for i, (first, last) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        piece = Piece(tokens_L, offsets_D1, first, last)
        paths.append(str(folder / f"{i}.records"))
        write_chunk(paths[-1], group_records([piece], max_n=max_n, vocab_size=vocab_size))
        sizes_G += np.diff(read_starts(paths[-1], 0, vocab_size))
    range_cuts = plan_ranges(sizes_G, num_ranges)
    counts = {}
    for first, last in zip(range_cuts[:-1], range_cuts[1:], strict=True):
        groups = gather_groups(paths, first, last, num_groups=vocab_size)
        found = count_groups(groups, first_token=first, max_n=max_n, min_count=min_count)
        assert all(first <= ngram[0] < last for ngram in to_counts(found))
        counts |= to_counts(found)
    assert counts == brute_force(documents, max_n=max_n, min_count=min_count)


@given(corpus=corpora(), max_n=st.integers(2, 5))
@settings(max_examples=50, deadline=None)
def test_counts_of_each_order_sum_to_its_windows(corpus: tuple[int, Documents], max_n: int) -> None:
    vocab_size, documents = corpus
    found = count_ngrams([whole(documents)], max_n=max_n, vocab_size=vocab_size, min_count=1)
    for n in range(2, max_n + 1):
        windows = sum(max(0, len(document) - n + 1) for document in documents)
        assert found.counts_M[found.n_M == n].sum() == windows


@given(corpus=corpora(), max_n=st.integers(3, 5), min_count=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_prefixes_and_suffixes_count_at_least_as_much(
    corpus: tuple[int, Documents], max_n: int, min_count: int
) -> None:
    vocab_size, documents = corpus
    counts = to_counts(
        count_ngrams([whole(documents)], max_n=max_n, vocab_size=vocab_size, min_count=min_count)
    )
    for ngram, count in counts.items():
        if len(ngram) > 2:
            assert counts[ngram[:-1]] >= count
            assert counts[ngram[1:]] >= count


def test_counts_have_64_bits() -> None:
    piece = whole([[7, 7]])
    counts_M = count_ngrams([piece], max_n=2, vocab_size=8, min_count=1).counts_M
    assert counts_M.dtype == np.uint64


def test_a_vocabulary_beyond_the_record_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size=65536.*smaller vocabulary"):
        count_ngrams([whole([[1, 2]])], max_n=5, vocab_size=MAX_VOCAB + 1, min_count=1)
    with pytest.raises(ValueError, match=r"max_n=6: expected 2 to 5"):
        count_ngrams([whole([[1, 2]])], max_n=6, vocab_size=8, min_count=1)


@pytest.mark.parametrize("token", [8, 65_535, 70_000])
def test_a_token_outside_the_vocabulary_is_refused_and_not_lost(token: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token} >= vocab_size=8"):
        count_ngrams([whole([[1, token, 2]])], max_n=5, vocab_size=8, min_count=1)


def test_a_truncated_or_missing_chunk_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "0.records"
    groups = group_records([whole([[1, 2, 1, 2]])], max_n=5, vocab_size=4)
    num_bytes = write_chunk(str(path), groups)
    path.write_bytes(path.read_bytes()[: num_bytes - 8])
    with pytest.raises(ArtifactError, match="truncated"):
        gather_groups([str(path)], 0, 4, num_groups=4)
    with pytest.raises(ArtifactError, match="is gone"):
        gather_groups([str(tmp_path / "1.records")], 0, 4, num_groups=4)
