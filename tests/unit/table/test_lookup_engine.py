"""Laws of the lookup: token by token or all at once, the rows are those of the longest f-grams."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scone_core.artifacts.manifests import ArtifactError
from scone_core.fgrams import trie
from scone_core.fgrams.index import FGramIndex
from scone_core.table.lookup_engine import LookupEngine
from tests.builders.served_models import VOCAB, publish_fgrams, publish_table, random_fgrams

WIDTH = 16
GRAMS = random_fgrams(per_length=800)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("lookup")
    fgrams = publish_fgrams(str(base / "fgrams"), GRAMS)
    vectors_SD = torch.randn(len(GRAMS), WIDTH, generator=torch.Generator().manual_seed(0))
    publish_table(str(base / "table"), vectors_SD, fgrams)
    return base


@pytest.fixture(scope="module")
def engine(folder: Path) -> LookupEngine:
    return LookupEngine.open(str(folder / "fgrams"), str(folder / "table"))


@pytest.fixture(scope="module")
def index(engine: LookupEngine) -> FGramIndex:
    return engine.index


def text(num_sequences: int, length: int, seed: int) -> np.ndarray:
    """Tokens that match often, with separators, unknown ids and negative ones among them."""
    rng = np.random.default_rng(seed)
    tokens_BT = rng.integers(1, VOCAB, (num_sequences, length))
    strange = rng.choice([0, -1, VOCAB + 5, trie.MAX_VOCAB, 1 << 40], tokens_BT.shape)
    return np.where(rng.random(tokens_BT.shape) < 0.05, strange, tokens_BT)


@given(st.integers(1, 3 * trie.STREAMS_AHEAD), st.integers(1, 30), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_a_stream_finds_what_a_batch_finds(num_sequences: int, length: int, seed: int) -> None:
    tokens_SK = np.zeros((len(GRAMS), 5), np.uint32)
    for row, gram in zip(tokens_SK, GRAMS, strict=True):
        row[: len(gram)] = gram
    lengths = np.array([len(gram) for gram in GRAMS], np.uint8)
    index = FGramIndex.from_fgrams(tokens_SK, lengths, vocab_size=VOCAB)
    tokens_BT = text(num_sequences, length, seed)
    expected, stream = index.match(tokens_BT), index.stream(num_sequences)
    for t in range(length):
        assert np.array_equal(stream.advance(tokens_BT[:, t]), expected.fgram_ids_BT[:, t])
        assert np.array_equal(stream.match_len_B, expected.match_len_BT[:, t])


@pytest.mark.parametrize("length", [0, 1, 3, 40])
def test_a_sequence_may_start_anew_with_a_prompt_beside_others(
    index: FGramIndex, length: int
) -> None:
    tokens_BT, prompt_T = text(3, 20, seed=1), text(1, length, seed=2)[0]
    stream = index.stream(3)
    for t in range(10):
        stream.advance(tokens_BT[:, t])
    stream.restart(1, prompt_T)
    whole_T = np.concatenate([prompt_T, tokens_BT[1, 10:]])
    expected_T = index.match(whole_T[None]).fgram_ids_BT[0, length:]
    others_BT = index.match(tokens_BT).fgram_ids_BT[:, 10:]
    for t in range(10):
        found_B = stream.advance(tokens_BT[:, 10 + t])
        assert found_B.tolist() == [others_BT[0, t], expected_T[t], others_BT[2, t]]


def test_rows_of_a_step_are_the_rows_of_its_hits(engine: LookupEngine) -> None:
    tokens_BT, stream = text(40, 12, seed=3), engine.stream(40)
    matches = engine.match(tokens_BT)
    out_BD = engine.table.empty(40)
    for t in range(12):
        sequences_M = engine.step(stream, tokens_BT[:, t], out_BD)
        ids_B = matches.fgram_ids_BT[:, t]
        assert np.array_equal(sequences_M, np.flatnonzero(ids_B >= 0))
        expected_MD = engine.table.stored(ids_B[sequences_M])
        assert np.array_equal(out_BD[: len(sequences_M)], expected_MD)


def test_statistics_count_tokens_hits_rows_and_bytes(folder: Path) -> None:
    engine = LookupEngine.open(str(folder / "fgrams"), str(folder / "table"))
    tokens_BT, stream = text(8, 50, seed=4), engine.stream(8)
    hits = int((engine.match(tokens_BT).fgram_ids_BT >= 0).sum())
    out_BD = engine.table.empty(8)
    for t in range(50):
        engine.step(stream, tokens_BT[:, t], out_BD)
    report = engine.report()
    assert (report.num_tokens, report.num_hits, report.num_rows) == (400, hits, hits)
    assert report.num_bytes == hits * WIDTH * 2
    assert 0 < report.latency_us(0.5) <= report.latency_us(0.99)


def test_a_table_of_other_f_grams_is_refused(folder: Path, tmp_path: Path) -> None:
    publish_fgrams(str(tmp_path / "fgrams"), random_fgrams(per_length=10, seed=1))
    with pytest.raises(ArtifactError, match="fgrams_fingerprint"):
        LookupEngine.open(str(tmp_path / "fgrams"), str(folder / "table"))
