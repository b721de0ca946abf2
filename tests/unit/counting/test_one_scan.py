"""Laws of counting in memory, and of its oracle: counts are Python's, whatever the vocabulary."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers import apriori
from scone_core.counting import one_scan
from scone_core.counting.records import Layout, Records, find_value, sort_records
from scone_core.fgrams.ngrams import NGrams
from tests.builders.corpora import Documents, brute_force, whole

VOCABULARIES = [2, 255, 256, 257, 65_535, 65_536, 65_537, 131_071, 131_072, 131_073, 1 << 18]
Engine = Callable[..., NGrams]
engines = pytest.mark.parametrize(
    "engine", [one_scan.count_ngrams, apriori.count_ngrams], ids=["one_scan", "a_priori"]
)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[Layout, Documents]:
    """A layout and documents over few ids, the smallest and largest of the vocabulary among them.

    In a vocabulary of 65,536 the largest is 65,535, which ends a document in records of 16 bits.
    """
    vocab_size = draw(st.sampled_from(VOCABULARIES))
    max_n = draw(st.integers(2, 8 if vocab_size < 1 << 18 else 7))
    ids = st.sampled_from(sorted({0, 1, vocab_size // 2, vocab_size - 1}))
    return Layout(max_n, vocab_size), draw(st.lists(st.lists(ids, max_size=12), max_size=8))


def to_counts(found: NGrams) -> dict[tuple[int, ...], int]:
    """Also checks that no n-gram appears twice and that rows are zero behind the n-th token."""
    rows = zip(*(column.tolist() for column in found), strict=True)
    counts = {}
    for tokens, n, count in rows:
        assert not any(tokens[n:])
        assert tuple(tokens[:n]) not in counts
        counts[tuple(tokens[:n])] = count
    return counts


@engines
@given(corpus=corpora(), min_count=st.integers(1, 4))
@settings(max_examples=150)
def test_counts_equal_brute_force(
    engine: Engine, corpus: tuple[Layout, Documents], min_count: int
) -> None:
    layout, documents = corpus
    found = engine([whole(documents)], layout, min_count=min_count)
    assert to_counts(found) == brute_force(documents, max_n=layout.max_n, min_count=min_count)


@engines
@given(corpus=corpora())
@settings(max_examples=40)
def test_counts_of_each_order_sum_to_its_windows(
    engine: Engine, corpus: tuple[Layout, Documents]
) -> None:
    layout, documents = corpus
    found = engine([whole(documents)], layout, min_count=1)
    for n in range(2, layout.max_n + 1):
        windows = sum(max(0, len(document) - n + 1) for document in documents)
        assert found.counts_M[found.n_M == n].sum() == windows


@given(corpus=corpora(), min_count=st.integers(1, 4))
@settings(max_examples=40)
def test_prefixes_and_suffixes_count_at_least_as_much(
    corpus: tuple[Layout, Documents], min_count: int
) -> None:
    layout, documents = corpus
    counts = to_counts(one_scan.count_ngrams([whole(documents)], layout, min_count=min_count))
    for ngram, count in counts.items():
        if len(ngram) > 2:
            assert counts[ngram[:-1]] >= count
            assert counts[ngram[1:]] >= count


@engines
def test_token_65535_is_not_lost(engine: Engine) -> None:
    found = engine([whole([[65_535, 65_535, 7, 65_535]])], Layout(5, 65_536), min_count=1)
    assert to_counts(found) == brute_force([[65_535, 65_535, 7, 65_535]], max_n=5)


@engines
def test_no_n_gram_crosses_a_document_boundary(engine: Engine) -> None:
    """Packed documents must not see each other (huggingface/trl#784)."""
    found = engine([whole([[1, 2, 3], [], [4], [5, 6]])], Layout(5, 8), min_count=1)
    assert to_counts(found) == {(1, 2): 1, (2, 3): 1, (1, 2, 3): 1, (5, 6): 1}


@engines
@pytest.mark.parametrize("token", [8, 65_535, 70_000])
def test_a_token_outside_the_vocabulary_is_refused_and_not_lost(engine: Engine, token: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token} >= vocab_size=8"):
        engine([whole([[1, token, 2]])], Layout(5, 8), min_count=1)


def test_counts_have_64_bits() -> None:
    counts_M = one_scan.count_ngrams([whole([[7, 7]])], Layout(2, 8), min_count=1).counts_M
    assert counts_M.dtype == np.uint64


def test_n_grams_that_no_record_holds_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"max_n=9: expected 2 to 8"):
        Layout(9, 8)
    with pytest.raises(ValueError, match=r"133 bits per record, 128 .* lower max_n to 7"):
        Layout(8, 1 << 18)


@pytest.mark.parametrize(
    ("max_n", "vocab_size", "record_bytes"),
    [(5, 65_535, 8), (5, 65_536, 10), (5, 128_256, 10), (5, 1 << 18, 10), (8, 131_073, 16)],
)
def test_records_take_as_few_bytes_as_the_vocabulary_allows(
    max_n: int, vocab_size: int, record_bytes: int
) -> None:
    assert Layout(max_n, vocab_size).record_bytes == record_bytes


@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=300),
    high=st.sampled_from([np.uint16, np.uint64]),
)
@settings(max_examples=60)
def test_two_part_records_sort_like_numbers(pairs: list[tuple[int, int]], high: type) -> None:
    lows, highs = np.array(pairs, np.uint64).reshape(-1, 2).T
    records = Records(lows.copy(), highs.astype(high))
    sort_records(records)
    values = [records.value(i) for i in range(len(pairs))]
    assert values == sorted(low | high << 64 for low, high in pairs)
    for value in (0, 5, 3 << 64, (3 << 64) + 5, 1 << 70):
        assert find_value(records, value) == sum(found < value for found in values)
