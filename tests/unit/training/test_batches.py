"""The laws of the batches: what a step holds never depends on who computes it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scone_core.artifacts.manifests import ArtifactError
from scone_core.corpus.token_stream import TokenStream
from scone_core.training.batches import TrainingBatches, shuffle, split_step
from tests.builders.corpora import write_tokens

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [10, 11]]
STREAM = [0, 1, 2, 3, 0, 0, 4, 0, 5, 6, 7, 8, 9, 0, 10, 11, 0]


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_every_part_of_the_stream_is_documents_between_separators(num_shards, tmp_path):
    write_tokens(str(tmp_path), DOCUMENTS, num_shards=num_shards)
    stream = TokenStream.open(str(tmp_path))
    assert stream.length == len(STREAM)
    padded = [*STREAM, 0, 0, 0]
    for start in range(len(STREAM)):
        for end in range(start, len(padded) + 1):
            assert stream.read(start, end - start).tolist() == padded[start:end]


def test_windows_overlap_by_one_token(tmp_path):
    write_tokens(str(tmp_path), DOCUMENTS)
    windows_BT1 = TokenStream.open(str(tmp_path)).windows(np.array([0, 2]), 4)
    assert windows_BT1.tolist() == [STREAM[0:5], STREAM[8:13]]


@given(st.integers(1, 200), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_every_epoch_visits_every_window_once(num_windows, seed, epoch):
    samples_B = epoch * num_windows + np.arange(num_windows)
    windows_B = shuffle(samples_B, num_windows=num_windows, seed=seed)
    assert sorted(windows_B) == list(range(num_windows))


def test_epochs_and_seeds_have_their_own_order():
    orders = {
        tuple(shuffle(epoch * 100 + np.arange(100), num_windows=100, seed=seed))
        for epoch in range(3)
        for seed in range(3)
    }
    assert len(orders) == 9


@given(st.integers(0, 1000), st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 4]))
def test_a_step_holds_the_same_samples_for_any_number_of_ranks(step, num_ranks, micro_batch):
    parts = [split_step(step, 24, micro_batch, rank, num_ranks) for rank in range(num_ranks)]
    together = np.stack(parts, axis=1).reshape(-1)
    assert together.tolist() == list(range(step * 24, step * 24 + 24))


def test_micro_batches_of_all_ranks_are_the_batch_of_one_rank(tmp_path):
    rng = np.random.default_rng(0)
    write_tokens(str(tmp_path), [rng.integers(1, 99, 50).tolist() for _ in range(9)], num_shards=3)
    batches = TrainingBatches(
        TokenStream.open(str(tmp_path)), None, sequence_length=7, global_batch=8, seed=1
    )
    (alone,) = batches.micro_batches(3, micro_batch=8, rank=0, num_ranks=1)
    parts = [
        list(batches.micro_batches(3, micro_batch=2, rank=rank, num_ranks=2)) for rank in range(2)
    ]
    tokens = np.concatenate(
        [batch.tokens_BT for pair in zip(*parts, strict=True) for batch in pair]
    )
    np.testing.assert_array_equal(tokens, alone.tokens_BT)
    np.testing.assert_array_equal(alone.targets_BT[:, :-1], alone.tokens_BT[:, 1:])


def test_a_global_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"global_batch=6 .* micro_batch \* num_workers = 2 \* 2"):
        split_step(0, 6, 2, 0, 2)


def test_a_corpus_shorter_than_a_sequence_is_refused(tmp_path):
    write_tokens(str(tmp_path), DOCUMENTS)
    stream = TokenStream.open(str(tmp_path))
    with pytest.raises(ArtifactError, match="sequence_length=100: the corpus has only 17 tokens"):
        TrainingBatches(stream, None, sequence_length=100, global_batch=8, seed=1)
