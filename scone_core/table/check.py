"""embeddings/v1 against the model it came from: rows are computed again and compared.

Shapes: M rows, K max_n, D width.
"""

import numpy as np
import torch

from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import (
    ArtifactError,
    CheckpointManifest,
    FGramsManifest,
    load_manifest,
)
from scone_core.artifacts.shards import verify_shards
from scone_core.fgrams.fgram_shards import take_fgrams
from scone_core.model.forest import build_forest
from scone_core.model.scone_lm import SconeLM
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.row_formats import rounding_error

NOISE = 1e-4
"""Of a row's RMS: what sums in another order, on another machine, may differ by."""
FGRAMS_PER_FOREST = 1 << 12


class RowCheck(Frozen):
    """What computing rows again has shown."""

    num_rows: int
    largest_error: float
    """Of all values, where 1 is what rounding to the row format allows."""
    mean_cosine_error: float
    """1 - cosine of a stored row and its vector."""
    max_cosine_error: float


def check_table(
    folder: str, *, checkpoint: str, fgrams: str, num_rows: int, seed: int = 0
) -> RowCheck:
    """Compare every shard with its sha256 and `num_rows` random rows with the f-gram model.

    Args:
        folder, checkpoint, fgrams: folders or URIs of the three manifests.

    Raises:
        ArtifactError: a damaged file, a row that is not the model's, or artifacts that do not
            belong together.
    """
    model_manifest = load_manifest(CheckpointManifest, checkpoint)
    expected = {
        "checkpoint_fingerprint": model_manifest.fingerprint,
        "fgrams_fingerprint": load_manifest(FGramsManifest, fgrams).fingerprint,
    }
    table = EmbeddingTable.open(folder, expected=expected)
    files = [*table.manifest.shards, *filter(None, [table.manifest.ranks])]
    verify_shards(folder, files)
    rng = np.random.default_rng(seed)
    ids_M = np.sort(rng.choice(table.num_rows, min(num_rows, table.num_rows), replace=False))
    computed_MD = compute_rows(SconeLM.load(checkpoint).eval(), fgrams, ids_M)
    return compare_rows(table, ids_M, computed_MD, where=folder)


@torch.inference_mode()
def compute_rows(model: SconeLM, fgrams: str, ids_M: np.ndarray) -> torch.Tensor:
    """The f-gram model's vectors of the f-grams `ids_M`, float32 [M, D]."""
    tokens_MK, n_M, _ = take_fgrams(fgrams, ids_M)
    parts = []
    for first in range(0, len(ids_M), FGRAMS_PER_FOREST):
        part = slice(first, first + FGRAMS_PER_FOREST)
        forest = build_forest(tokens_MK[part], n_M[part])
        parts.append(model.fgram_vectors(forest)[forest.node_of_S].float())
    return torch.cat(parts)


def compare_rows(
    table: EmbeddingTable, ids_M: np.ndarray, computed_MD: torch.Tensor, *, where: str
) -> RowCheck:
    """How well the table's rows `ids_M` agree with `computed_MD`.

    Raises:
        ArtifactError: a value is further away than its row format can explain; `where` is named.
    """
    out_MD = np.empty(computed_MD.shape, np.float32)
    table.gather(ids_M, out_MD)
    stored_MD = torch.from_numpy(out_MD)
    allowed_MD = NOISE * computed_MD.square().mean(1, keepdim=True).sqrt()
    for row_format in (*table.manifest.converted_from, table.row_format):
        allowed_MD = allowed_MD + rounding_error(computed_MD, row_format)
    error_M = ((stored_MD - computed_MD).abs() / allowed_MD).nan_to_num(torch.inf).amax(1)
    if not (error_M <= 1).all():
        worst = int(error_M.argmax())
        raise ArtifactError(
            f"{where}: the row of f-gram {ids_M[worst]} is not the model's: {error_M[worst]:.3g} "
            f"times as far from it as {table.row_format} can be; run the precompute stage again"
        )
    cosine_error_M = 1 - torch.cosine_similarity(stored_MD.double(), computed_MD.double())
    return RowCheck(
        num_rows=len(ids_M),
        largest_error=float(error_M.max()),
        mean_cosine_error=float(cosine_error_M.mean()),
        max_cosine_error=float(cosine_error_M.max()),
    )
