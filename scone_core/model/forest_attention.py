"""query, key, value of forest nodes -> every node attends to its path, in Hugging Face decoders.

On CPUs a fused kernel reads a node's ancestors in place (depth-first order keeps them in cache); on
other devices the ancestors are gathered. Each is bit-equal at any thread count: one thread sums a
row, in one order.

Legend: N forest nodes, K max_n; H key heads, G query heads per key head, W head width.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from scone_core.model.forest import Forest

ATTENTION = "forest"
"""Name of this attention in `config._attn_implementation`."""


def register_forest_attention() -> None:
    """Make `ATTENTION` known to transformers."""
    AttentionInterface.register(ATTENTION, forest_attention)


def forest_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: Forest,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of every node over its path, by the calling convention of transformers.

    Args:
        query: [1, H * G, N, W]; key and value: [1, H, N, W].
        forest: reaches this function through the keyword arguments of the model's forward.

    Returns:
        [1, N, H * G, W], and None for the attention weights.
    """
    attend = fused_attention if query.device.type == "cpu" else gathered_attention
    query_NHW, key_NHW, value_NHW = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(query_NHW, key_NHW, value_NHW, forest, scaling)[None], None


def fused_attention(
    query_NHW: Tensor, key_NHW: Tensor, value_NHW: Tensor, forest: Forest, scaling: float
) -> Tensor:
    """The attention in compiled loops over nodes, on CPUs; query has H * G heads."""
    return _FusedAttention.apply(query_NHW, key_NHW, value_NHW, forest, scaling)


def gathered_attention(
    query_NHW: Tensor, key_NHW: Tensor, value_NHW: Tensor, forest: Forest, scaling: float
) -> Tensor:
    """The attention in PyTorch operations, for any device; query has H * G heads."""
    num_nodes, num_heads, width = key_NHW.shape
    pairs_N2HW = torch.stack([key_NHW, value_NHW], 1).reshape(num_nodes, -1)
    paths_NK2HW = forest.ancestors(pairs_N2HW).view(num_nodes, -1, 2, num_heads, width)
    key_NKHW, value_NKHW = paths_NK2HW.unbind(2)
    query_NHGW = query_NHW.reshape(num_nodes, num_heads, -1, width)
    scores_NHGK = torch.einsum("nhgw,nkhw->nhgk", query_NHGW, key_NKHW) * scaling
    scores_NHGK = scores_NHGK.masked_fill(~forest.ancestor_mask_NK[:, None, None], -torch.inf)
    output_NHGW = torch.einsum("nhgk,nkhw->nhgw", scores_NHGK.softmax(-1), value_NKHW)
    return output_NHGW.reshape(query_NHW.shape)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, forest: Forest, scaling: float
    ) -> Tensor:
        arrays = [_to_numpy(x) for x in (query, key, value)]
        output = np.empty_like(arrays[0])
        weights_NHK = np.empty((*output.shape[:2], forest.ancestor_mask_NK.shape[1]), output.dtype)
        paths = forest.ancestors.index_M.numpy(), forest.depth_N.numpy()
        _in_threads(_attend, len(output), *arrays, *paths, scaling, weights_NHK, output)
        ctx.save_for_backward(query, key, value)
        ctx.weights_NHK, ctx.forest, ctx.scaling = weights_NHK, forest, scaling
        return torch.from_numpy(output).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forest, weights_NHK = ctx.forest, ctx.weights_NHK
        query, key, value = (_to_numpy(x) for x in ctx.saved_tensors)
        grad = _to_numpy(grads[0])
        grad_query, grad_key, grad_value = map(np.empty_like, (query, key, value))
        grad_scores_NHK = np.empty_like(weights_NHK)
        paths = forest.ancestors.index_M.numpy(), forest.depth_N.numpy()
        readers = forest.ancestors.readers_M.numpy(), forest.ancestors.offsets_R1.numpy()
        scores = grad_scores_NHK, weights_NHK
        _in_threads(
            _grad_query, len(grad), key, value, grad, *paths, ctx.scaling, *scores, grad_query
        )
        _in_threads(_grad_pair, len(grad), query, grad, *readers, *scores, grad_key, grad_value)
        results = (torch.from_numpy(x) for x in (grad_query, grad_key, grad_value))
        return *(x.to(grads[0].dtype) for x in results), None, None


def _to_numpy(x: Tensor) -> np.ndarray:
    """Contiguous float32 (or float64) view or copy; NumPy has no bfloat16."""
    x = x.detach().contiguous()
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy()


def _in_threads(kernel: Callable[..., None], num_nodes: int, *args: object) -> None:
    """Run `kernel(first, last, *args)` over ranges of nodes, on as many threads as PyTorch uses."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return kernel(0, num_nodes, *args)
    bounds = np.linspace(0, num_nodes, num_threads + 1).astype(int).tolist()
    with ThreadPoolExecutor(num_threads) as pool:
        for done in [
            pool.submit(kernel, *span, *args) for span in zip(bounds, bounds[1:], strict=False)
        ]:
            done.result()


@numba.njit(cache=True, nogil=True, fastmath=True)
def _attend(first, last, query, key, value, index_M, depth_N, scaling, weights_NHK, output) -> None:
    groups = query.shape[1] // key.shape[1]
    max_n = weights_NHK.shape[2]
    for i in range(first, last):
        path = index_M[i * max_n : i * max_n + depth_N[i] + 1]
        for h in range(query.shape[1]):
            weights = weights_NHK[i, h]
            highest = -np.inf
            for k, a in enumerate(path):
                weights[k] = scaling * _dot(query[i, h], key[a, h // groups])
                highest = max(highest, weights[k])
            total = 0.0
            for k in range(len(path)):
                weights[k] = np.exp(weights[k] - highest)
                total += weights[k]
            output[i, h] = 0
            for k, a in enumerate(path):
                weights[k] /= total
                _add(output[i, h], weights[k], value[a, h // groups])


@numba.njit(cache=True, nogil=True, fastmath=True)
def _grad_query(
    first, last, key, value, grad, index_M, depth_N, scaling, grad_scores_NHK, weights_NHK, out
) -> None:
    groups = grad.shape[1] // key.shape[1]
    max_n = weights_NHK.shape[2]
    for i in range(first, last):
        path = index_M[i * max_n : i * max_n + depth_N[i] + 1]
        for h in range(grad.shape[1]):
            weights, grad_scores = weights_NHK[i, h], grad_scores_NHK[i, h]
            mean = 0.0
            for k, a in enumerate(path):
                grad_scores[k] = _dot(grad[i, h], value[a, h // groups])
                mean += weights[k] * grad_scores[k]
            out[i, h] = 0
            for k, a in enumerate(path):
                grad_scores[k] = weights[k] * (grad_scores[k] - mean) * scaling
                _add(out[i, h], grad_scores[k], key[a, h // groups])


@numba.njit(cache=True, nogil=True, fastmath=True)
def _grad_pair(
    first,
    last,
    query,
    grad,
    readers_M,
    offsets_R1,
    grad_scores_NHK,
    weights_NHK,
    out_key,
    out_value,
) -> None:
    groups = query.shape[1] // out_key.shape[1]
    max_n = weights_NHK.shape[2]
    for a in range(first, last):
        out_key[a] = 0
        out_value[a] = 0
        for reader in readers_M[offsets_R1[a] : offsets_R1[a + 1]]:
            i, k = reader // max_n, reader % max_n
            for h in range(query.shape[1]):
                _add(out_key[a, h // groups], grad_scores_NHK[i, h, k], query[i, h])
                _add(out_value[a, h // groups], weights_NHK[i, h, k], grad[i, h])


@numba.njit(cache=True, nogil=True, fastmath=True, inline="always")
def _dot(x_W, y_W) -> float:
    total = x_W.dtype.type(0)
    for w in range(len(x_W)):
        total += x_W[w] * y_W[w]
    return total


@numba.njit(cache=True, nogil=True, fastmath=True, inline="always")
def _add(out_W, factor, x_W) -> None:
    for w in range(len(out_W)):
        out_W[w] += factor * x_W[w]
