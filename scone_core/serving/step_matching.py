"""vLLM's token table -> the f-gram that ends at each token of an engine step.

History is the scheduler's own table: it holds prompt and generated tokens of each request, whatever
chunked prefill, prefix caching or preemption did to the KV cache.

Shapes: R requests, T tokens of one engine step, L positions, K max_n.
"""

import numba as nb
import numpy as np

from scone_core.fgrams.index import FGramIndex


def match_step(
    index: FGramIndex, tokens_RL: np.ndarray, num_computed_R: np.ndarray, starts_R1: np.ndarray
) -> np.ndarray:
    """The f-gram that ends at each token of an engine step.

    Args:
        index: the f-gram set.
        tokens_RL: int32, all tokens of each request so far.
        num_computed_R: tokens of each request that earlier steps have computed.
        starts_R1: request r contributes tokens starts[r]..starts[r + 1] - 1 of the step.

    Returns:
        int64 [T], -1 for a miss.
    """
    flat_L, steps_T = _with_context(tokens_RL, num_computed_R, starts_R1, index.max_n)
    return index.match(flat_L[None]).fgram_ids_BT[0][steps_T]


@nb.njit(nogil=True, cache=True)
def _with_context(
    tokens_RL: np.ndarray, num_computed_R: np.ndarray, starts_R1: np.ndarray, max_n: int
) -> tuple[np.ndarray, np.ndarray]:
    """The step's tokens, each request's behind up to K - 1 tokens of its history and a -1 that no
    f-gram contains; and where in that the step's own tokens are.
    """
    num_requests, num_tokens = len(starts_R1) - 1, starts_R1[-1]
    flat_L = np.empty(num_tokens + num_requests * max_n, np.int64)
    steps_T = np.empty(num_tokens, np.int64)
    end = 0
    for r in range(num_requests):
        flat_L[end] = -1
        end += 1
        first = num_computed_R[r]
        for position in range(max(first - max_n + 1, 0), first):
            flat_L[end] = tokens_RL[r, position]
            end += 1
        for t in range(starts_R1[r], starts_R1[r + 1]):
            flat_L[end] = tokens_RL[r, first + t - starts_R1[r]]
            steps_T[t] = end
            end += 1
    return flat_L[:end], steps_T
