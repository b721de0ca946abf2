"""fgrams/v1 -> the first law that it breaks."""

import tempfile

import numpy as np

from scone_core.artifacts.manifests import (
    ArtifactError,
    FGramsManifest,
    Generation,
    load_manifest,
    require_equal,
)
from scone_core.artifacts.shards import verify_shards
from scone_core.fgrams.fgram_shards import build_index, iter_rows
from scone_core.fgrams.ngrams import NGrams
from scone_core.fgrams.ranks import map_ranks


def validate_fgrams(folder: str) -> FGramsManifest:
    """Check every invariant of fgrams/v1 by reading all of it.

    Raises:
        ArtifactError: names the file and the invariant that does not hold.
    """
    manifest = load_manifest(FGramsManifest, folder)
    verify_shards(folder, [*manifest.shards, manifest.index, *filter(None, [manifest.ranks])])
    num_per_n = np.zeros(manifest.max_n + 1, np.int64)
    for generation in manifest.generations:
        num_per_n += _check_generation(folder, manifest, generation, int(num_per_n.sum()))
    found = {n: int(num_per_n[n]) for n in range(2, manifest.max_n + 1)}
    require_equal(f"{folder}: f-grams per n", found, manifest.num_fgrams_per_n, "rebuild it")
    _check_index(folder, manifest)
    if manifest.ranks is not None:
        ranks_S = np.sort(map_ranks(folder, manifest.ranks))
        if not np.array_equal(ranks_S, np.arange(manifest.num_fgrams)):
            raise ArtifactError(f"{folder}/{manifest.ranks.name}: not one rank per f-gram")
    return manifest


def _check_generation(
    folder: str, manifest: FGramsManifest, generation: Generation, first_id: int
) -> np.ndarray:
    """Check the rows from `first_id` on; how many f-grams of each length they are."""
    num_per_n = np.zeros(manifest.max_n + 1, np.int64)
    last_ranked = generation.num_fgrams - generation.num_included
    last_row: NGrams | None = None
    last_id = generation.num_fgrams
    for rows in iter_rows(folder, manifest.shards, first_id=first_id, last_id=last_id):
        fgrams, where = NGrams.from_batch(rows), f"{folder}: f-grams from {first_id} on"
        if not np.array_equal(rows.column("fgram_id"), first_id + np.arange(rows.num_rows)):
            raise ArtifactError(f"{folder}: fgram_id is not the row number behind row {first_id}")
        _check_rows(fgrams, manifest, max(last_ranked - first_id, 0), where)
        _check_order(fgrams, last_row, where)
        num_per_n += np.bincount(fgrams.n_M, minlength=manifest.max_n + 1)
        last_row = fgrams.part(fgrams.num - 1, fgrams.num)
        first_id += rows.num_rows
    return num_per_n


def _check_rows(fgrams: NGrams, manifest: FGramsManifest, num_ranked: int, where: str) -> None:
    """`num_ranked`: of the rows, the first ones, that are not there on request alone."""
    tokens_MK, n_M, counts_M = fgrams
    counts_M = counts_M[:num_ranked]
    if tokens_MK.shape[1] != manifest.max_n or n_M.min() < 2 or n_M.max() > manifest.max_n:
        raise ArtifactError(f"{where}: n outside 2 to max_n={manifest.max_n}")
    if counts_M.size and counts_M.min() < manifest.min_count:
        raise ArtifactError(f"{where}: count {counts_M.min()} < min_count={manifest.min_count}")
    inside_MK = fgrams.is_token_MK
    if tokens_MK[~inside_MK].any():
        raise ArtifactError(f"{where}: not zero behind the n-th token")
    tokens = tokens_MK[inside_MK]
    if tokens.max() >= manifest.vocab_size or (tokens == manifest.separator_id).any():
        raise ArtifactError(
            f"{where}: a token outside vocab_size={manifest.vocab_size}, or the separator"
        )


def _check_order(fgrams: NGrams, last_row: NGrams | None, where: str) -> None:
    """Each row must come after the one before it: count descending, n, then tokens ascending."""
    tokens_MK, n_M, counts_M = map(
        np.concatenate, zip(*filter(None, [last_row, fgrams]), strict=True)
    )
    keys_MX = np.column_stack([np.invert(counts_M), n_M, tokens_MK])
    deciding = (keys_MX[1:] != keys_MX[:-1]).argmax(axis=1)
    rows = np.arange(len(deciding))
    if not (keys_MX[1:][rows, deciding] > keys_MX[:-1][rows, deciding]).all():
        raise ArtifactError(f"{where}: not in rank order")


def _check_index(folder: str, manifest: FGramsManifest) -> None:
    """The index is a function of the rows: building it again must give the same bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            built = build_index(
                folder, manifest.shards, out=scratch, vocab_size=manifest.vocab_size
            )
        except ValueError as error:
            raise ArtifactError(f"{folder}: {error}") from error
    if built.sha256 != manifest.index.sha256:
        raise ArtifactError(f"{folder}/{manifest.index.name}: not the index of its f-grams")
