"""chunk files <-> chunks/v1: records that stay for later counts of a grown corpus."""

from collections.abc import Iterable

from scone_core.artifacts import storage
from scone_core.artifacts.config import StageConfig
from scone_core.artifacts.folders import claim, publish, shared_fields
from scone_core.artifacts.manifests import (
    ChunksManifest,
    TokensManifest,
    load_manifest,
    require_equal,
)
from scone_core.artifacts.units import read_receipts
from scone_core.counting.plan import CountPlan, KeptChunk
from scone_core.counting.receipts import ChunkReceipt


class ChunksConfig(StageConfig):
    """What decides the content of a chunks/v1 artifact."""

    max_n: int


def load_chunks(
    folders: Iterable[str], tokens: TokensManifest, *, max_n: int
) -> tuple[KeptChunk, ...]:
    """The chunk files of the chunks/v1 artifacts in `folders`.

    Raises:
        ArtifactError: they are of another tokenizer or another `max_n`, or a file is not whole.
    """
    found = []
    for folder in folders:
        manifest = load_manifest(ChunksManifest, folder)
        for name in ("tokenizer_sha256", "vocab_size", "separator_id"):
            expected = getattr(tokens, name)
            remedy = "count it together with tokens of the same tokenizer"
            require_equal(f"{name} of {folder}", getattr(manifest, name), expected, remedy)
        require_equal(f"max_n of {folder}", manifest.max_n, max_n, "use the same max_n")
        for shard in manifest.shards:
            path = storage.join(folder, shard.name)
            size = storage.file_size(path)
            require_equal(f"bytes of {path}", size, shard.num_bytes, "restore it")
            found.append(KeptChunk(path=path, num_tokens=shard.num_rows))
    return tuple(found)


def claim_chunks(plan: CountPlan) -> CountPlan:
    """Claim the plan's chunk folder for the chunks of its tokens.

    Returns:
        The plan; where the folder holds these chunks already, the plan that reads them.

    Raises:
        ArtifactError: the folder holds something else.
    """
    config, inputs = _identity(plan)
    if claim(ChunksManifest, plan.chunk_folder, config, inputs) is None:
        return plan
    return plan.with_mapped(load_chunks([plan.chunk_folder], plan.manifest, max_n=config.max_n))


def publish_chunks(plan: CountPlan) -> ChunksManifest:
    """Publish the chunk files of a plan with one round, all of them mapped."""
    config, inputs = _identity(plan)
    receipts = read_receipts(
        "count: keep chunks", plan.chunk_names(0), kind=ChunkReceipt, folder=plan.chunk_folder
    )
    manifest = ChunksManifest(
        **shared_fields(ChunksManifest, config, inputs),
        shards=tuple(receipt.shard for receipt in receipts),
        tokenizer_sha256=plan.manifest.tokenizer_sha256,
        vocab_size=plan.manifest.vocab_size,
        separator_id=plan.manifest.separator_id,
        max_n=config.max_n,
    )
    return publish(plan.chunk_folder, manifest)


def _identity(plan: CountPlan) -> tuple[ChunksConfig, dict[str, str]]:
    """The configuration and the inputs of the chunks that a plan makes."""
    return ChunksConfig(max_n=plan.options.max_n), {"tokens": plan.manifest.fingerprint}
