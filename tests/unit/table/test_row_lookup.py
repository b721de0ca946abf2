"""Laws of the lookup: the last K tokens decide, however a text was cut into steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scone_core.artifacts.manifests import RowFormat
from scone_core.fgrams import trie
from scone_core.fgrams.index import FGramIndex
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.row_formats import as_tensor
from scone_core.table.row_lookup import RowLookup
from tests.builders.served_models import VOCAB, random_fgrams
from tests.builders.tables import publish_vectors, random_vectors

WIDTH, MAX_N = 16, 5
GRAMS = random_fgrams(per_length=5000)
ID_OF = {gram: number for number, gram in enumerate(GRAMS)}


def make_index() -> FGramIndex:
    tokens_SK = np.zeros((len(GRAMS), MAX_N), np.uint32)
    for row, gram in zip(tokens_SK, GRAMS, strict=True):
        row[: len(gram)] = gram
    lengths = np.array([len(gram) for gram in GRAMS], np.uint8)
    return FGramIndex.from_fgrams(tokens_SK, lengths, vocab_size=VOCAB)


INDEX = make_index()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingTable:
    return open_table(tmp_path_factory.mktemp("table"), "bf16")


def open_table(folder: Path, row_format: RowFormat) -> EmbeddingTable:
    vectors_SD = random_vectors(len(GRAMS), WIDTH)
    return EmbeddingTable.open(publish_vectors(folder, vectors_SD, row_format=row_format))


def random_tokens(num_rows: int, length: int, seed: int) -> np.ndarray:
    """Tokens that match often, with separators, unknown ids and negative ones among them."""
    rng = np.random.default_rng(seed)
    tokens_RL = rng.integers(1, VOCAB, (num_rows, length))
    strange = rng.choice([0, -1, VOCAB + 5, trie.MAX_VOCAB, 1 << 40], tokens_RL.shape)
    return np.where(rng.random(tokens_RL.shape) < 0.05, strange, tokens_RL)


def longest_fgram(tokens: list[int]) -> int:
    """The id of the longest f-gram that ends `tokens`, by trying all; -1 for a miss."""
    endings = [tuple(tokens[-n:]) for n in range(min(MAX_N, len(tokens)), 1, -1)]
    return next((ID_OF[ending] for ending in endings if ending in ID_OF), -1)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_cut_of_requests_into_steps_hits_what_brute_force_finds(data: st.DataObject) -> None:
    """Prefill, chunks of it and decoding in one step; the table has rows that no request uses."""
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    computed = [data.draw(st.integers(0, length - 1)) for length in lengths]
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    tokens_RL = random_tokens(len(lengths) + 1, 40, data.draw(st.integers(0, 1 << 32)))
    tokens_RL[tokens_RL == 1 << 40] = -7  # not an int32
    starts_R1 = np.cumsum([0, *np.subtract(lengths, computed)], dtype=np.int32)
    hits = RowLookup(INDEX, NoRows()).match(
        tokens_RL.astype(dtype), np.array([*computed, 7], np.int32), starts_R1
    )
    expected = [
        longest_fgram(tokens_RL[r, :end].tolist())
        for r, (length, first) in enumerate(zip(lengths, computed, strict=True))
        for end in range(first + 1, length + 1)
    ]
    assert hits.places_M.tolist() == [t for t, found in enumerate(expected) if found >= 0]
    assert hits.fgram_ids_M.tolist() == [found for found in expected if found >= 0]
    assert hits.match_len_M.tolist() == [len(GRAMS[found]) for found in expected if found >= 0]


class NoRows:
    """For laws of matching alone."""

    def put_rows(self, ids_M: np.ndarray, places_M: np.ndarray, inputs_TD: torch.Tensor) -> None:
        raise AssertionError("only matched")


@pytest.mark.parametrize("num_requests", [1, 40, 3 * trie.BLOCK // MAX_N])
def test_token_by_token_is_the_whole_text(table: EmbeddingTable, num_requests: int) -> None:
    """Whatever other requests are beside it, and over borders of the blocks that match together."""
    tokens_BT = random_tokens(num_requests, 12, seed=num_requests)
    expected, lookup = INDEX.match(tokens_BT), RowLookup(INDEX, table)
    starts_B1 = np.arange(num_requests + 1, dtype=np.int32)
    inputs_BD = torch.zeros(num_requests, WIDTH, dtype=torch.bfloat16)
    for t in range(12):
        num_computed_B = np.full(num_requests, t, np.int32)
        hits = lookup.put_rows(tokens_BT, num_computed_B, starts_B1, inputs_BD)
        ids_B = expected.fgram_ids_BT[:, t]
        assert np.array_equal(hits.places_M, np.flatnonzero(ids_B >= 0))
        assert np.array_equal(hits.fgram_ids_M, ids_B[hits.places_M])
        assert np.array_equal(hits.match_len_M, expected.match_len_BT[hits.places_M, t])
        assert torch.equal(inputs_BD[hits.places_M], table.vectors(hits.fgram_ids_M))


def test_a_request_may_take_the_place_of_another(table: EmbeddingTable) -> None:
    """As after a preemption: a lookup remembers no tokens of the step before."""
    tokens_RL, lookup = random_tokens(2, 20, seed=1), RowLookup(INDEX, table)
    computed_R, starts_R1 = np.array([9, 9]), np.arange(3)
    lookup.match(tokens_RL, computed_R, starts_R1)
    swapped = lookup.match(tokens_RL[::-1].copy(), computed_R + 1, starts_R1)
    expected_R = INDEX.match(tokens_RL[::-1]).fgram_ids_BT[:, 10]
    assert swapped.fgram_ids_M.tolist() == expected_R[expected_R >= 0].tolist()


@pytest.mark.parametrize("row_format", ["bf16", "fp16", "fp32", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hits_get_their_rows_and_misses_keep_their_embeddings(
    tmp_path: Path, row_format: RowFormat, dtype: torch.dtype
) -> None:
    table, tokens_BT = open_table(tmp_path, row_format), random_tokens(5, 33, seed=2)
    inputs_BTD = torch.full((5, 33, WIDTH), 3.0, dtype=dtype)
    match_len_BT = RowLookup(INDEX, table).put_rows_of_sequences(tokens_BT, inputs_BTD)
    expected = INDEX.match(tokens_BT)
    assert np.array_equal(match_len_BT, expected.match_len_BT)
    is_hit_BT = expected.fgram_ids_BT >= 0
    rows_MD = table.empty(is_hit_BT.sum()) if dtype != torch.float32 else None
    out_MD = np.empty((is_hit_BT.sum(), WIDTH), np.float32) if rows_MD is None else rows_MD
    table.gather(expected.fgram_ids_BT[is_hit_BT], out_MD)
    expected_BTD = torch.full((5, 33, WIDTH), 3.0, dtype=dtype)
    expected_BTD[torch.from_numpy(is_hit_BT)] = as_tensor(out_MD).to(dtype)
    assert 0.3 < is_hit_BT.mean() < 0.95, "the case is neither empty nor full"
    assert torch.equal(inputs_BTD, expected_BTD)


def test_gradients_flow_to_the_embeddings_of_misses_alone(table: EmbeddingTable) -> None:
    weight_VD = torch.zeros(VOCAB, WIDTH, requires_grad=True)
    tokens_BT = np.random.default_rng(3).integers(1, VOCAB, (1, 30))
    inputs_BTD = torch.nn.functional.embedding(torch.from_numpy(tokens_BT), weight_VD)
    match_len_BT = RowLookup(INDEX, table).put_rows_of_sequences(tokens_BT, inputs_BTD)
    inputs_BTD.sum().backward()
    expected_V = np.bincount(tokens_BT[match_len_BT == 1], minlength=VOCAB)
    assert weight_VD.grad is not None
    assert weight_VD.grad[:, 0].tolist() == expected_V.tolist()


def test_statistics_count_rows_and_bytes(tmp_path: Path) -> None:
    table, tokens_BT = open_table(tmp_path, "bf16"), random_tokens(8, 50, seed=4)
    hits = int((INDEX.match(tokens_BT).fgram_ids_BT >= 0).sum())
    RowLookup(INDEX, table).put_rows_of_sequences(
        tokens_BT, torch.zeros(8, 50, WIDTH, dtype=torch.bfloat16)
    )
    report = table.statistics.report()
    assert (report.num_rows, report.num_lookups) == (hits, 1)
    assert report.num_bytes == hits * WIDTH * 2
