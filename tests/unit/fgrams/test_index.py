"""Laws of matching: the longest f-gram that ends at a position, exactly, from the past alone."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scone_core.artifacts.manifests import ArtifactError
from scone_core.fgrams import trie
from scone_core.fgrams.index import FGramIndex
from tests.builders.corpora import brute_force, rank, write_fgrams, zipf_documents

VOCAB_SIZE = 40
DOCUMENTS = zipf_documents(num_documents=30, mean_length=300, vocab_size=VOCAB_SIZE, seed=5)


def to_rows(fgrams: list[tuple[int, ...]], max_n: int) -> tuple[np.ndarray, np.ndarray]:
    tokens_SK = np.zeros((len(fgrams), max_n), np.uint32)
    for row, fgram in enumerate(fgrams):
        tokens_SK[row, : len(fgram)] = fgram
    return tokens_SK, np.array([len(fgram) for fgram in fgrams], np.uint8)


def make(max_n: int, num_fgrams: int) -> tuple[FGramIndex, dict[tuple[int, ...], int]]:
    """The index of the most frequent n-grams of DOCUMENTS, and its content as Python has it."""
    fgrams = rank(brute_force(DOCUMENTS, max_n=max_n, min_count=2))[:num_fgrams]
    index = FGramIndex.from_fgrams(*to_rows(fgrams, max_n), vocab_size=VOCAB_SIZE)
    return index, {fgram: fgram_id for fgram_id, fgram in enumerate(fgrams)}


def longest(ids: dict[tuple[int, ...], int], row: list[int], max_n: int) -> list[tuple[int, int]]:
    """(id, length) of the longest f-gram that ends at each position of `row`, by trying all."""
    matches = []
    for end in range(1, len(row) + 1):
        endings = [tuple(row[end - n : end]) for n in range(min(max_n, end), 1, -1)]
        found = next((ending for ending in endings if ending in ids), None)
        matches.append((ids[found], len(found)) if found else (-1, 1))
    return matches


def matches_of(index: FGramIndex, tokens_BT: np.ndarray) -> list[list[tuple[int, int]]]:
    matches = index.match(tokens_BT)
    return [
        list(zip(ids, lengths, strict=True))
        for ids, lengths in zip(
            matches.fgram_ids_BT.tolist(), matches.match_len_BT.tolist(), strict=True
        )
    ]


INDEXES = [make(max_n, num_fgrams) for max_n, num_fgrams in [(2, 50), (3, 300), (5, 2000)]]
tokens = st.integers(1, 12) | st.integers(-1, VOCAB_SIZE + 2) | st.just(trie.MAX_VOCAB + 3)


@given(
    index=st.sampled_from(INDEXES),
    dtype=st.sampled_from([np.int64, np.int32]),
    tokens_BT=hnp.arrays(
        np.int64, st.tuples(st.integers(0, 5), st.integers(1, 9)), elements=tokens
    ),
)
@settings(max_examples=150, deadline=None)
def test_match_is_the_longest_by_brute_force_and_resets_at_row_starts(
    index: tuple[FGramIndex, dict[tuple[int, ...], int]], dtype: type, tokens_BT: np.ndarray
) -> None:
    mapped, ids = index
    expected = [longest(ids, row, mapped.max_n) for row in tokens_BT.tolist()]
    assert matches_of(mapped, tokens_BT.astype(dtype)) == expected


@pytest.mark.parametrize(("mapped", "ids"), INDEXES)
@pytest.mark.parametrize("shape", [(1, 2 * trie.BLOCK + 77), (7, 5000), (9000, 4)])
def test_match_does_not_depend_on_blocks(
    mapped: FGramIndex, ids: dict[tuple[int, ...], int], shape: tuple[int, int]
) -> None:
    stream = np.array([token for document in DOCUMENTS for token in document], np.uint16)
    tokens_BT = np.resize(stream, shape)
    expected = [longest(ids, row, mapped.max_n) for row in tokens_BT.tolist()]
    assert matches_of(mapped, tokens_BT) == expected


@given(row=st.lists(st.integers(1, 12), min_size=2, max_size=30), data=st.data())
@settings(max_examples=50, deadline=None)
def test_match_ignores_the_future(row: list[int], data: st.DataObject) -> None:
    mapped, _ = INDEXES[-1]
    end = data.draw(st.integers(1, len(row) - 1))
    (complete,) = matches_of(mapped, np.array([row]))
    (past,) = matches_of(mapped, np.array([row[:end]]))
    assert complete[:end] == past


def test_a_smaller_max_n_matches_as_if_longer_f_grams_were_not_there() -> None:
    mapped, ids = INDEXES[-1]
    row = DOCUMENTS[0]
    matches = mapped.match(np.array([row]), max_n=3)
    expected = longest({f: i for f, i in ids.items() if len(f) <= 3}, row, 3)
    assert matches.fgram_ids_BT[0].tolist() == [fgram_id for fgram_id, _ in expected]


def test_every_f_gram_finds_its_own_id_and_nothing_else_is_found() -> None:
    mapped, ids = INDEXES[-1]
    others = [fgram for fgram in brute_force(DOCUMENTS, max_n=5) if fgram not in ids]
    found = trie.find_rows(mapped.buckets_N8, *to_rows([*ids, *others], 5))
    assert found.tolist() == [*ids.values(), *[-1] * len(others)]


def test_the_index_takes_at_most_20_bytes_per_f_gram() -> None:
    for num_fgrams in (1000, 10**6, 2**32):
        assert trie.num_buckets(num_fgrams) * 64 <= 20 * num_fgrams


def test_full_buckets_overflow_into_the_next_and_wrap_around() -> None:
    """20 bigrams in 4 buckets of 5: every bucket is full, so nearly every chain wraps."""
    buckets_N8 = trie.clear(np.empty((4, 8), np.uint64))
    bigrams = [(a, b) for a in range(5) for b in range(4)]
    tokens_SK, n_S = to_rows(bigrams, 2)
    assert trie.insert_rows(buckets_N8, tokens_SK, n_S, 0, 10) == 20
    assert trie.find_rows(buckets_N8, tokens_SK, n_S).tolist() == list(range(20))
    mapped = FGramIndex(buckets_N8, 2, 20)
    assert mapped.match(np.array([[0, 1]])).fgram_ids_BT.tolist() == [[-1, 1]]


@pytest.mark.parametrize(
    "fgrams",
    [
        [(1, 2), (1, 2)],
        [(1, 2), (1, 2, 3)],
        [(2, 3), (1, 2, 3)],
        [(1, 2, 3), (1, 2), (2, 3)],
        [(1, VOCAB_SIZE)],
    ],
    ids=["twice", "no suffix", "no prefix", "ranked before its parts", "outside the vocabulary"],
)
def test_an_index_refuses_what_is_not_closed(fgrams: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"f-gram \d+ \[.*\]: listed twice"):
        FGramIndex.from_fgrams(*to_rows(fgrams, 3), vocab_size=VOCAB_SIZE)


def test_an_opened_index_is_the_built_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "fgrams")
    manifest = write_fgrams(folder, DOCUMENTS, num_fgrams=2000, vocab_size=VOCAB_SIZE)
    opened, (built, _) = FGramIndex.open(folder), INDEXES[-1]
    assert (opened.max_n, opened.num_fgrams, opened.manifest) == (5, 2000, manifest)
    np.testing.assert_array_equal(opened.buckets_N8, built.buckets_N8)
    assert not opened.buckets_N8.flags.writeable


def test_opening_refuses_an_index_that_is_not_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "fgrams"
    write_fgrams(str(folder), DOCUMENTS, num_fgrams=100, vocab_size=VOCAB_SIZE)
    path = folder / "index" / "trie.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match="missing or truncated"):
        FGramIndex.open(str(folder))
    path.write_bytes(b"x" * len(content))
    with pytest.raises(ArtifactError, match="not a trie index"):
        FGramIndex.open(str(folder))
    path.unlink()
    with pytest.raises(ArtifactError, match="missing or truncated"):
        FGramIndex.open(str(folder))
