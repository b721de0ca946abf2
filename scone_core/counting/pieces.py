"""token shards -> the pieces of a chunk: which part of every shard one unit of mapping reads."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import ArtifactError, Shard
from scone_core.artifacts.shards import verify_shards
from scone_core.corpus.token_shards import map_documents
from scone_core.counting.one_scan import Piece
from scone_core.counting.plan import CountPlan


def chunk_pieces(plan: CountPlan, chunk_index: int) -> Iterator[Piece]:
    """The chunk's part of every shard. The chunk that holds the begin of a shard verifies it.

    Raises:
        ArtifactError: a shard is missing or damaged.
    """
    for shard, low, high in _parts(plan, chunk_index):
        yield _piece(plan, shard, low, high)


@contextmanager
def damage_named(plan: CountPlan, chunk_index: int) -> Generator[None]:
    """If reading fails, check the chunk's shards first: damage is the better explanation than the
    error it caused. Another chunk may be the one that verifies a shard, and run later.
    """
    try:
        yield
    except ValueError:
        verify_shards(plan.tokens, [shard for shard, _, _ in _parts(plan, chunk_index)])
        raise


def _parts(plan: CountPlan, chunk_index: int) -> Iterator[tuple[Shard, int, int]]:
    """The chunk's shards, and which of their bytes. Chunks cut the bytes of all shards evenly, so
    no shard has to be opened to plan.
    """
    total = sum(shard.num_bytes for shard in plan.manifest.shards)
    begin, end = (total * i // plan.num_chunks for i in (chunk_index, chunk_index + 1))
    start = 0
    for shard in plan.manifest.shards:
        low, high = max(begin - start, 0), min(end - start, shard.num_bytes)
        if low < high:
            yield shard, low, high
        start += shard.num_bytes


def _piece(plan: CountPlan, shard: Shard, low: int, high: int) -> Piece:
    """The tokens between two bytes of a shard; bytes stand for positions in proportion."""
    if low == 0:
        verify_shards(plan.tokens, [shard])
    tokens_L, offsets_D1 = map_documents(plan.tokens, shard)
    inside = offsets_D1[0] == 0 and offsets_D1[-1] == len(tokens_L)
    if not inside or (offsets_D1[1:] < offsets_D1[:-1]).any():
        path = storage.join(plan.tokens, shard.name)
        raise ArtifactError(f"{path}: damaged document boundaries; restore it or tokenize again")
    first, last = (len(tokens_L) * byte // shard.num_bytes for byte in (low, high))
    return Piece(tokens_L, offsets_D1, first, last)
