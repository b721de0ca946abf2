"""fgrams/v1 + a newer count -> its next generation: old ids stay, new f-grams follow.

A grown corpus ranks its f-grams anew, but the rows of a table are found by id. So an f-gram keeps
the id it first got, those that are new follow in their own rank order, and `ranks.npy` says where
every id stands in the newer count. Both sets are closed under prefixes and suffixes, which rank
before what holds them, so the union is closed and every id is behind those inside it.

Shapes: M n-grams of a block, U new ones of it, C f-grams of the newer count, S f-grams of the
union.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import (
    ArtifactError,
    FGramsManifest,
    Shard,
    load_manifest,
    require_equal,
)
from scone_core.fgrams.fgram_shards import build_index, iter_rows, read_fgrams, write_fgrams
from scone_core.fgrams.index import FGramIndex
from scone_core.fgrams.ngrams import NGrams
from scone_core.fgrams.ranks import write_ranks
from scone_core.fgrams.trie import MAX_FGRAMS, find_rows

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class GrowthSources:
    """The f-gram set that grows, and the newer count."""

    folder: str
    counted_folder: str
    base: FGramsManifest
    counted: FGramsManifest

    @classmethod
    def open(cls, folder: str, counted: str) -> Self:
        """
        Raises:
            ArtifactError: one is missing or unfinished, or they do not go together.
        """
        sources = cls(
            folder,
            counted,
            load_manifest(FGramsManifest, folder),
            load_manifest(FGramsManifest, counted),
        )
        for field in ("tokenizer_sha256", "vocab_size", "separator_id", "max_n"):
            require_equal(
                f"counted={counted!r}: {field}",
                getattr(sources.counted, field),
                getattr(sources.base, field),
                f"count the grown corpus with the tokenizer and max_n of {folder}",
            )
        if sources.counted.earlier:
            raise ArtifactError(
                f"counted={counted!r}: it grew itself; give the f-grams of one count"
            )
        return sources


@dataclass
class Union:
    """The f-grams of both sets, as far as the newer count has been read."""

    shards: list[Shard]
    num_fgrams: int
    per_n_K1: np.ndarray
    """int64, f-grams by their length."""
    num_included: int = 0
    """Of the new ones."""


def grow(
    sources: GrowthSources, out: str, *, num_new: int | None, rows_per_shard: int
) -> dict[str, object]:
    """Publish the files of the next generation in `out`: the shards of the set that grows as they
    are, shards of the new f-grams, the index, the ranks and the tokenizer.

    Args:
        num_new: f-grams to add, the most frequent ones that are new; None: all of them, or as many
            as there are ids of 32 bits.

    Returns:
        The fields of the FGramsManifest that say so.

    Raises:
        ValueError: nothing is new.
    """
    base, counted = sources.base, sources.counted
    lengths = [base.num_fgrams_per_n.get(n, 0) for n in range(base.max_n + 1)]
    union = Union(list(base.shards), base.num_fgrams, np.array(lengths, np.int64))
    ids_C = np.concatenate(list(_number(sources, union, out, num_new, rows_per_shard)))
    for name in [*(shard.name for shard in base.shards), TOKENIZER]:
        storage.copy_file(storage.join(sources.folder, name), storage.join(out, name))
    num_rows = union.num_fgrams
    return {
        "shards": tuple(union.shards),
        "index": build_index(out, union.shards, out=out, vocab_size=base.vocab_size),
        "ranks": write_ranks(out, ids_C, num_rows),
        "tokenizer_sha256": base.tokenizer_sha256,
        "vocab_size": base.vocab_size,
        "separator_id": base.separator_id,
        "max_n": base.max_n,
        "min_count": min(base.min_count, counted.min_count),
        "num_fgrams": num_rows,
        "num_fgrams_per_n": {n: int(union.per_n_K1[n]) for n in range(2, base.max_n + 1)},
        "num_included": union.num_included,
        "num_tokens": counted.num_tokens,
        "earlier": base.generations,
    }


def _number(
    sources: GrowthSources, union: Union, out: str, num_new: int | None, rows_per_shard: int
) -> Iterator[np.ndarray]:
    """The ids (uint32) of the newer count's f-grams in rank order, those left out not among them;
    writes the shards of new ones.
    """
    base, counted = sources.base, sources.counted
    limit = MAX_FGRAMS if num_new is None else min(MAX_FGRAMS, base.num_fgrams + num_new)
    first_included, row = counted.num_fgrams - counted.num_included, 0
    index = FGramIndex.map(sources.folder, base)
    waiting = [read_fgrams(sources.folder, num=0)]
    for ngrams in map(NGrams.from_batch, iter_rows(sources.counted_folder, counted.shards)):
        ids_M = find_rows(index.buckets_N8, ngrams.tokens_MK, ngrams.n_M)
        new_U = np.flatnonzero(ids_M < 0)
        new_U = new_U[: limit - union.num_fgrams]
        ids_M[new_U] = union.num_fgrams + np.arange(len(new_U))
        union.num_fgrams += len(new_U)
        union.num_included += int((row + new_U >= first_included).sum())
        union.per_n_K1 += np.bincount(ngrams.n_M[new_U], minlength=len(union.per_n_K1))
        row += len(ids_M)
        waiting.append(ngrams.take(new_U))
        waiting = _write_shards(union, out, waiting, rows_per_shard, least=rows_per_shard)
        yield ids_M[ids_M >= 0].astype(np.uint32)
    if union.num_fgrams == base.num_fgrams:
        raise ValueError(
            f"counted={sources.counted_folder!r}: no f-gram that {sources.folder!r} does not have; "
            "there is nothing to grow by"
        )
    _write_shards(union, out, waiting, rows_per_shard, least=1)


def _write_shards(
    union: Union, out: str, waiting: list[NGrams], rows_per_shard: int, *, least: int
) -> list[NGrams]:
    """Write shards of at most `rows_per_shard` rows while at least `least` rows wait.

    Returns:
        The rows that still wait.
    """
    if sum(ngrams.num for ngrams in waiting) < least:
        return waiting
    fgrams = NGrams.concat(waiting)
    while fgrams.num >= least:
        first_id = union.shards[-1].first_id + union.shards[-1].num_rows
        name = f"fgrams-{len(union.shards):05d}.parquet"
        shard = write_fgrams(out, name, fgrams.part(0, rows_per_shard), first_id=first_id)
        union.shards.append(shard)
        fgrams = fgrams.part(rows_per_shard, fgrams.num)
    return [fgrams]
