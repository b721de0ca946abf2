"""The laws of the forest: its order, its exactness, its determinism."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaModel

from scone_core.model.decoders import build_fgram_body
from scone_core.model.forest import RowGather, build_batch_forest, build_forest
from scone_core.model.forest_attention import fused_attention, gathered_attention

fgram_lists = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), min_size=1, max_size=40
)


def to_rows(fgrams: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    rows_SK = np.zeros((len(fgrams), 5), np.uint32)
    for row_K, fgram in zip(rows_SK, fgrams, strict=True):
        row_K[: len(fgram)] = fgram
    return rows_SK, np.array([len(fgram) for fgram in fgrams], np.uint8)


@given(fgram_lists)
def test_nodes_are_the_distinct_prefixes_in_lexicographic_order(fgrams):
    forest = build_forest(*to_rows(fgrams))
    path_NK = forest.tokens_N[forest.ancestors.index_M.view(forest.num_nodes, -1)]
    paths = [
        tuple(path_K[is_real_K].tolist())
        for path_K, is_real_K in zip(path_NK, forest.ancestor_mask_NK, strict=True)
    ]
    assert paths == sorted({fgram[:n] for fgram in fgrams for n in range(1, len(fgram) + 1)})
    assert [len(path) - 1 for path in paths] == forest.depth_N.tolist()
    assert [paths[node] for node in forest.node_of_S] == fgrams


@given(fgram_lists)
def test_every_subtree_is_a_contiguous_range(fgrams):
    forest = build_forest(*to_rows(fgrams))
    ancestors_NK = forest.ancestors.index_M.view(forest.num_nodes, -1)
    for node in range(forest.num_nodes):
        (subtree,) = torch.where((ancestors_NK == node).any(1))
        assert subtree.tolist() == list(range(node, node + len(subtree)))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.float32, torch.float64]))
def test_gather_backward_equals_plain_indexing(seed, dtype):
    rng = np.random.default_rng(seed)
    index_M = rng.integers(0, 20, 50)
    x_RD = torch.tensor(rng.standard_normal((20, 3)), dtype=dtype, requires_grad=True)
    weight_MD = torch.tensor(rng.standard_normal((50, 3)), dtype=dtype)
    gathered_MD = RowGather.of(index_M, num_rows=20)(x_RD)
    assert torch.equal(gathered_MD, x_RD[index_M])
    (grad_RD,) = torch.autograd.grad((gathered_MD * weight_MD).sum(), x_RD)
    (expected_RD,) = torch.autograd.grad((x_RD[index_M] * weight_MD).sum(), x_RD)
    torch.testing.assert_close(grad_RD, expected_RD)


def at_each_thread_count(compute: Callable[[], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3, 1, 2):
            torch.set_num_threads(num_threads)
            results.append(compute())
        return results
    finally:
        torch.set_num_threads(before)


def test_gather_backward_is_bit_equal_at_any_thread_count():
    generator = torch.Generator().manual_seed(0)
    index_M = (torch.rand(50_000, generator=generator) ** 4 * 3_000).long()
    x_RD = torch.randn(3_000, 64, generator=generator, requires_grad=True)
    weight_MD = torch.randn(len(index_M), 64, generator=generator)
    gather = RowGather.of(index_M.numpy(), num_rows=len(x_RD))

    def gradient() -> list[torch.Tensor]:
        return list(torch.autograd.grad((gather(x_RD) * weight_MD).sum(), x_RD))

    first, *others = at_each_thread_count(gradient)
    assert all(torch.equal(first[0], other[0]) for other in others)


@pytest.mark.parametrize("attend", [fused_attention, gathered_attention])
def test_attention_is_bit_equal_at_any_thread_count(attend):
    tokens_BT, match_len_BT = random_batch(np.random.default_rng(1), shape=(4, 512), vocab_size=9)
    forest = build_batch_forest(tokens_BT, match_len_BT).forest
    inputs = random_attention_inputs(forest.num_nodes)

    def gradients() -> list[torch.Tensor]:
        output = attend(*inputs, forest, 0.3)
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    first, *others = at_each_thread_count(gradients)
    assert all(map(torch.equal, first * len(others), [x for other in others for x in other]))


def test_fused_attention_equals_gathered_attention():
    tokens_BT, match_len_BT = random_batch(np.random.default_rng(2), shape=(3, 64), vocab_size=4)
    forest = build_batch_forest(tokens_BT, match_len_BT).forest
    inputs = random_attention_inputs(forest.num_nodes)
    outputs = [attend(*inputs, forest, 0.3) for attend in (fused_attention, gathered_attention)]
    torch.testing.assert_close(*outputs)
    fused, gathered = (torch.autograd.grad(x.square().sum(), inputs) for x in outputs)
    torch.testing.assert_close(fused, gathered)


def random_attention_inputs(num_nodes: int) -> list[torch.Tensor]:
    """query with 4 heads, key and value with 2."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(num_nodes, heads, 8, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    ]


def random_batch(
    rng: np.random.Generator, *, shape: tuple[int, int], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """tokens_BT and a match_len_BT in 1..5 that stays inside each row."""
    tokens_BT = rng.integers(0, vocab_size, shape)
    match_len_BT = rng.integers(1, 6, shape).clip(max=np.arange(1, shape[1] + 1))
    return tokens_BT, match_len_BT


def test_forest_equals_padded_evaluation_in_values_and_gradients():
    """Values to 2e-6, gradients to 1e-6 (float32), with grouped queries."""
    torch.manual_seed(0)
    body = build_fgram_body(small_llama())
    padded = LlamaModel(small_llama())
    padded.load_state_dict(body.state_dict(), strict=False)
    tokens_BT, match_len_BT = random_batch(np.random.default_rng(0), shape=(2, 24), vocab_size=5)
    embedding_VD = torch.randn(5, 32, requires_grad=True)
    weight_SD = torch.randn((match_len_BT > 1).sum(), 32)

    forest = build_batch_forest(tokens_BT, match_len_BT).forest
    hidden_ND = body(
        inputs_embeds=embedding_VD[forest.tokens_N][None],
        position_ids=forest.depth_N[None],
        use_cache=False,
        forest=forest,
    ).last_hidden_state[0]
    by_forest_SD = hidden_ND[forest.node_of_S]
    by_padding_SD = evaluate_padded(padded, embedding_VD, tokens_BT, match_len_BT)

    torch.testing.assert_close(by_forest_SD, by_padding_SD, atol=2e-6, rtol=0)
    found, expected = (
        torch.autograd.grad(
            (vector_SD * weight_SD).mean(), [embedding_VD, *model.layers.parameters()]
        )
        for vector_SD, model in ((by_forest_SD, body), (by_padding_SD, padded))
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def small_llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def evaluate_padded(
    model: LlamaModel, embedding_VD: torch.Tensor, tokens_BT: np.ndarray, match_len_BT: np.ndarray
) -> torch.Tensor:
    """The paper's way: every hit's f-gram as its own padded sequence; the output at its end."""
    fgrams = [
        tuple(tokens_BT[b, t - match_len_BT[b, t] + 1 : t + 1])
        for b, t in zip(*np.nonzero(match_len_BT > 1), strict=True)
    ]
    rows_SK, n_S = map(lambda x: torch.from_numpy(x.astype(np.int64)), to_rows(fgrams))
    hidden_SKD = model(
        inputs_embeds=embedding_VD[rows_SK],
        attention_mask=(torch.arange(5) < n_S[:, None]).long(),
        use_cache=False,
    ).last_hidden_state
    return hidden_SKD[torch.arange(len(n_S)), n_S - 1]


def test_a_batch_without_hits_has_one_node_that_no_position_reads():
    batch = build_batch_forest(np.arange(6).reshape(2, 3), np.ones((2, 3), np.uint8))
    assert batch.forest.num_nodes == 1
    assert not batch.is_hit_P.any()
    assert batch.inputs.index_M.tolist() == list(range(6))
