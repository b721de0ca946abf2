"""ranks.npy: where each f-gram stands in the last count, once ids no longer say so.

Shapes: S f-grams, C f-grams of the last count.
"""

from pathlib import Path

import numpy as np

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import ArtifactError, Shard
from scone_core.artifacts.shards import local_shard

RANKS = "ranks.npy"


def write_ranks(out: str, ids_C: np.ndarray, num_fgrams: int) -> Shard:
    """Publish the ranks of the ids 0 to S - 1.

    Args:
        ids_C: integers, the ids of the last count's f-grams in rank order; those that it lacks come
            behind them, by their ids.
    """
    ranks_S = np.zeros(num_fgrams, np.uint32)
    is_left_S = np.ones(num_fgrams, np.bool_)
    ranks_S[ids_C] = np.arange(len(ids_C), dtype=np.uint32)
    is_left_S[ids_C] = False
    ranks_S[is_left_S] = np.arange(len(ids_C), num_fgrams, dtype=np.uint32)
    num_bytes, sha256 = storage.write_atomic(
        storage.join(out, RANKS), lambda file: _save(file, ranks_S)
    )
    return Shard(name=RANKS, num_rows=num_fgrams, num_bytes=num_bytes, sha256=sha256)


def map_ranks(folder: str, ranks: Shard) -> np.ndarray:
    """The mapped ranks, uint32 [S].

    Raises:
        ArtifactError: missing, truncated or not an array of ranks.
    """
    path = local_shard(folder, ranks)
    try:
        ranks_S = np.load(path, mmap_mode="r")
    except ValueError as error:
        raise ArtifactError(f"{path}: not an array of ranks ({error}); rebuild {folder}") from error
    if ranks_S.dtype != np.uint32 or ranks_S.shape != (ranks.num_rows,):
        raise ArtifactError(f"{path}: {ranks_S.dtype} {ranks_S.shape}; rebuild {folder}")
    return ranks_S.view(np.ndarray)


def _save(file: Path, ranks_S: np.ndarray) -> None:
    with open(file, "wb") as sink:
        np.save(sink, ranks_S)
