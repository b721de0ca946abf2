"""The law of the engine's history: an engine step sees the f-grams of the whole sequences."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scone_core.fgrams.index import FGramIndex
from scone_core.serving.step_matching import match_step
from tests.builders.served_models import VOCAB, random_fgrams


def small_index() -> FGramIndex:
    grams = random_fgrams(per_length=3000)
    tokens_SK = np.zeros((len(grams), 5), np.int64)
    for row, gram in zip(tokens_SK, grams, strict=True):
        row[: len(gram)] = gram
    return FGramIndex.from_fgrams(tokens_SK, np.array([len(g) for g in grams]), vocab_size=VOCAB)


INDEX = small_index()


@given(st.data())
def test_any_cut_of_requests_into_steps_sees_the_same_f_grams(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    computed = [data.draw(st.integers(0, length - 1)) for length in lengths]
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    tokens_RL = rng.integers(0, VOCAB, (len(lengths) + 1, 40), dtype=np.int32)
    chunks = [length - first for length, first in zip(lengths, computed, strict=True)]
    starts_R1 = np.cumsum([0, *chunks], dtype=np.int32)
    found_T = match_step(INDEX, tokens_RL, np.array([*computed, 7], np.int32), starts_R1)
    expected = [
        INDEX.match(tokens_RL[r : r + 1, :length]).fgram_ids_BT[0, first:]
        for r, (length, first) in enumerate(zip(lengths, computed, strict=True))
    ]
    assert np.array_equal(found_T, np.concatenate(expected))
