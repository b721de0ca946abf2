"""f-grams and tokens -> hit rate and mean match length for every number of f-grams.

The suffix of an f-gram ranks before it, so with the first S f-grams alone the match at a position
is as long as the longest of the n-grams ending there that have an id below S: each hit of an
n-gram adds one token to the match of its position, and each hit of a bigram adds one position to
the hits. Hits below S, summed, are therefore exact for every S at once.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from scone_core.artifacts.manifests import TokensManifest, load_manifest, require_equal
from scone_core.corpus.token_shards import map_documents
from scone_core.fgrams.index import FGramIndex

HELD_OUT_TOKENS = 4_000_000
"""Enough for three digits of the hit rate."""
HIT_SCHEMA = {"first_id": pl.UInt64, "num": pl.UInt64, "n": pl.UInt8, "count": pl.UInt64}


def count_hits(index: FGramIndex, tokens_BT: np.ndarray) -> pl.DataFrame:
    """How often each f-gram ends at a position of `tokens_BT`, shorter than the match or not.

    Returns:
        first_id (the f-gram), num (always 1), n, count: the form that `coverage_curve` takes.
    """
    hits = []
    for n in range(2, index.max_n + 1):
        matches = index.match(tokens_BT, max_n=n)
        ids, counts = np.unique(matches.fgram_ids_BT[matches.match_len_BT == n], return_counts=True)
        columns = {
            "first_id": ids,
            "num": np.ones_like(ids),
            "n": np.full_like(ids, n),
            "count": counts,
        }
        hits.append(pl.DataFrame(columns, schema=HIT_SCHEMA))
    return pl.concat(hits)


def coverage_curve(hits: pl.DataFrame, *, num_tokens: int, sizes: Sequence[int]) -> pl.DataFrame:
    """Hit rate and mean match length with the first S f-grams, for every S in `sizes`.

    Args:
        hits: runs of f-grams, ids first_id to first_id + num, that have the same n and were hit
            `count` times each: `count_hits` on a sample or, for the counted corpus itself,
            `ranking.rank_runs`, where each f-gram is hit as often as it was counted.
        num_tokens: positions of the corpus or sample.

    Returns:
        num_fgrams, hit_rate (share of positions with a match), mean_match_length (a miss is 1).
    """
    rows = []
    hits = hits.select("n", pl.col("first_id", "num", "count").cast(pl.Int64))
    for size in sizes:
        below = (size - pl.col("first_id")).clip(0, pl.col("num"))
        num_hits = hits.select("n", hits=pl.col("count") * below)
        bigrams = num_hits.filter(pl.col("n") == 2)["hits"].sum()
        rows.append((size, bigrams / num_tokens, 1 + num_hits["hits"].sum() / num_tokens))
    return pl.DataFrame(rows, ["num_fgrams", "hit_rate", "mean_match_length"], orient="row")


def held_out_curve(
    index: FGramIndex, tokens: str, *, tokenizer_sha256: str, num_tokens: int = HELD_OUT_TOKENS
) -> pl.DataFrame:
    """`coverage_curve` on the first `num_tokens` tokens of a tokens/v1 artifact.

    Raises:
        ArtifactError: the artifact is of another tokenizer, or damaged.
    """
    manifest = load_manifest(TokensManifest, tokens)
    require_equal(
        f"tokenizer of {tokens}",
        manifest.tokenizer_sha256,
        tokenizer_sha256,
        "use the same tokenizer",
    )
    sample_1L = sample_documents(tokens, manifest, num_tokens=num_tokens)
    return coverage_curve(
        count_hits(index, sample_1L),
        num_tokens=int((sample_1L >= 0).sum()),
        sizes=curve_sizes(index.num_fgrams),
    )


def sample_documents(folder: str, manifest: TokensManifest, *, num_tokens: int) -> np.ndarray:
    """The first `num_tokens` tokens of a tokens/v1 artifact as one row, int64 [1, L]: -1 stands
    before each document, so that no match crosses into it.
    """
    parts = [np.empty(0, np.int64)]
    for shard in manifest.shards:
        tokens_L, offsets_D1 = map_documents(folder, shard)
        tokens_L = tokens_L[:num_tokens].astype(np.int64)
        parts.append(np.insert(tokens_L, offsets_D1[offsets_D1 < len(tokens_L)], -1))
        num_tokens -= len(tokens_L)
        if num_tokens == 0:
            break
    return np.concatenate(parts)[None]


def curve_sizes(num_fgrams: int, *, num: int = 49) -> list[int]:
    """Sizes from 1 to `num_fgrams`, about evenly spread on a logarithmic axis."""
    return sorted({round(size) for size in np.geomspace(1, num_fgrams, num)})
