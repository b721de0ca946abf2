"""tokens/v1 -> arrays: the documents of a shard, mapped, and the check of all invariants.

Shapes: A documents of a shard, L its tokens.
"""

import numpy as np

from scone_core.artifacts.manifests import (
    MANIFEST,
    ArtifactError,
    Shard,
    TokensManifest,
    load_manifest,
)
from scone_core.artifacts.shards import map_shard, verify_shards


def map_documents(folder: str, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """The flat tokens of a tokens/v1 shard and its document boundaries, both mapped.

    Returns:
        tokens_L: uint16 or uint32, the documents of the shard one after another.
        offsets_A1: int64 [A + 1]; document i is `tokens_L[offsets[i]:offsets[i + 1]]`.
    """
    documents = map_shard(folder, shard).column("tokens")
    assert documents.offset == 0, "a mapped shard starts at its first document"
    return documents.values.to_numpy(), documents.offsets.to_numpy()


def map_targets(folder: str, shard: Shard) -> np.ndarray | None:
    """uint8 [L]: 1 for every token of a shard that is a target, mapped; None where all are."""
    batch = map_shard(folder, shard)
    if "is_target" not in batch.schema.names:
        return None
    return batch.column("is_target").values.to_numpy()


def validate_tokens(folder: str) -> TokensManifest:
    """Check every invariant of tokens/v1 by reading all of it.

    Raises:
        ArtifactError: names the shard and the invariant that does not hold.
    """
    manifest = load_manifest(TokensManifest, folder)
    verify_shards(folder, manifest.shards)
    num_documents = num_tokens = 0
    for shard in manifest.shards:
        tokens_L, offsets_A1 = map_documents(folder, shard)
        if len(tokens_L) and int(tokens_L.max()) >= manifest.vocab_size:
            raise ArtifactError(
                f"{folder}/{shard.name}: token id {tokens_L.max()} >= {manifest.vocab_size=}"
            )
        if (tokens_L == manifest.separator_id).any():
            raise ArtifactError(
                f"{folder}/{shard.name}: separator id {manifest.separator_id} inside a document"
            )
        num_documents += len(offsets_A1) - 1
        num_tokens += len(tokens_L)
    if (num_documents, num_tokens) != (manifest.num_documents, manifest.num_tokens):
        raise ArtifactError(
            f"{folder}: {num_documents} documents and {num_tokens} tokens on disk, "
            f"{manifest.num_documents} and {manifest.num_tokens} in {MANIFEST}"
        )
    return manifest
