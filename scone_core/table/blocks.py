"""Sorted f-grams -> rows of the table, block by block: one token of forward per f-gram.

Shapes: S f-grams of one block, K max_n, D width.
"""

import numpy as np
import pyarrow as pa
import torch

from scone_core.artifacts.manifests import Shard
from scone_core.artifacts.shards import map_shard, write_shard
from scone_core.model.forest import build_forest
from scone_core.model.scone_lm import SconeLM
from scone_core.table.build import BuildPlan
from scone_core.table.row_formats import embedding_batch, to_storage


class BlockWriter:
    """Holds the model; computes blocks and spills each, its rows sorted by f-gram id."""

    def __init__(self, plan: BuildPlan, sorted_fgrams: Shard, device: str = "cpu") -> None:
        self._plan = plan
        self._fgrams = map_shard(plan.block_folder, sorted_fgrams)
        self._model = SconeLM.load(plan.checkpoint).to(device)

    def write(self, number: int) -> Shard:
        """Compute and spill block `number`."""
        plan = self._plan
        part = self._fgrams.slice(number * plan.fgrams_per_block, plan.fgrams_per_block)
        ids_S, tokens = part["fgram_id"].to_numpy(), part["tokens"]
        tokens_SK = tokens.flatten().to_numpy().reshape(len(tokens), -1)
        vectors_SD = embed_fgrams(
            self._model, tokens_SK, part["n"].to_numpy(), plan.fgrams_per_forest
        )
        by_id_S = np.argsort(ids_S)
        batch = embedding_batch(to_storage(vectors_SD[by_id_S], plan.row_format), plan.row_format)
        batch = batch.append_column("fgram_id", pa.array(ids_S[by_id_S]))
        return write_shard(plan.block_folder, f"{plan.block_names[number]}.arrow", batch)


def embed_fgrams(
    model: SconeLM, tokens_SK: np.ndarray, n_S: np.ndarray, fgrams_per_forest: int
) -> torch.Tensor:
    """The vectors of f-grams in depth-first order, float32 [S, D] on the CPU."""
    device = next(model.parameters()).device
    parts = []
    with torch.inference_mode():
        for first in range(0, len(n_S), fgrams_per_forest):
            part = slice(first, first + fgrams_per_forest)
            forest = build_forest(tokens_SK[part], n_S[part]).to(device)
            parts.append(model.fgram_vectors(forest)[forest.node_of_S].cpu())
    return torch.cat(parts)
