"""fgrams/v1 -> tables for people: the most frequent f-grams, those in a text, two sets compared."""

import json
from typing import Literal

import numpy as np
import polars as pl

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import (
    FGramsManifest,
    load_manifest,
    require_equal,
)
from scone_core.corpus.tokenizer import Tokenizer
from scone_core.fgrams.coverage import held_out_curve
from scone_core.fgrams.fgram_shards import iter_rows, take_fgrams
from scone_core.fgrams.index import FGramIndex
from scone_core.fgrams.ngrams import NGrams
from scone_core.fgrams.ranks import map_ranks
from scone_core.fgrams.trie import find_rows

Tables = dict[str, pl.DataFrame]


class Top(Frozen):
    """The most frequent f-grams of each length."""

    fgrams: str
    """Folder or URI of a fgrams/v1 artifact."""
    num: int = 10
    """F-grams per length."""
    form: Literal["table", "json"] = "table"

    def tables(self) -> Tables:
        manifest = load_manifest(FGramsManifest, self.fgrams)
        tokenizer = _tokenizer(self.fgrams)
        wanted = {n: min(self.num, num) for n, num in manifest.num_fgrams_per_n.items()}
        found: dict[int, pl.DataFrame] = {}
        for rows in iter_rows(self.fgrams, manifest.shards):
            ranks_S = _ranks(self.fgrams, manifest, rows.column("fgram_id").to_numpy())
            fgrams = NGrams.from_batch(rows)
            for n, num in wanted.items():
                of_n = np.flatnonzero(fgrams.n_M == n)
                chosen = of_n[np.argsort(ranks_S[of_n])[:num]]
                parts = [found[n]] if n in found else []
                parts.append(_table(tokenizer, ranks_S[chosen], fgrams.take(chosen)))
                found[n] = pl.concat(parts).sort("rank").head(num)
            is_in_rank_order = manifest.ranks is None
            if is_in_rank_order and all(len(found[n]) == num for n, num in wanted.items()):
                break
        return {f"n = {n}": table.drop("n") for n, table in found.items()}


class Lookup(Frozen):
    """The f-grams of a text, by the position at which they end. A model uses the longest."""

    fgrams: str
    """Folder or URI of a fgrams/v1 artifact."""
    text: str
    form: Literal["table", "json"] = "table"

    def tables(self) -> Tables:
        manifest = load_manifest(FGramsManifest, self.fgrams)
        index, tokenizer = FGramIndex.map(self.fgrams, manifest), _tokenizer(self.fgrams)
        tokens_1T = tokenizer.encode(self.text).astype(np.int64)[None]
        used_T = index.match(tokens_1T).match_len_BT[0]
        parts = []
        for n in range(2, index.max_n + 1):
            matches = index.match(tokens_1T, max_n=n)
            positions = np.flatnonzero(matches.match_len_BT[0] == n)
            ids = matches.fgram_ids_BT[0, positions]
            fgrams = take_fgrams(self.fgrams, ids)
            rows = _table(tokenizer, _ranks(self.fgrams, manifest, ids), fgrams)
            used = pl.Series("used", used_T[positions] == n)
            parts.append(rows.select(pl.Series("position", positions), "*", used))
        return {"f-grams": pl.concat(parts).sort("position", "n")}


class Compare(Frozen):
    """How many f-grams two sets have in common and, given tokens, the hit rate of each."""

    first: str
    """Folder or URI of a fgrams/v1 artifact."""
    second: str
    """Folder or URI of another fgrams/v1 artifact of the same tokenizer."""
    tokens: str | None = None
    """Folder or URI of a tokens/v1 artifact whose first tokens are the sample."""
    num_tokens: int = 1_000_000
    """Size of the sample, at most."""
    form: Literal["table", "json"] = "table"

    def tables(self) -> Tables:
        tables = {"overlap": compare_fgrams(self.first, self.second)}
        if self.tokens is not None:
            curves = [
                _coverage(folder, self.tokens, self.num_tokens)
                for folder in (self.first, self.second)
            ]
            tables["coverage of the sample"] = pl.concat(curves)
        return tables


class Coverage(Frozen):
    """Hit rate and table size for numbers of f-grams, on documents that were not counted."""

    fgrams: str
    """Folder or URI of a fgrams/v1 artifact."""
    tokens: str
    """Folder or URI of a tokens/v1 artifact whose first tokens are the sample."""
    num_tokens: int = 1_000_000
    """Size of the sample, at most."""
    bytes_per_row: int = 4096
    """Bytes of a row of the embedding table: its width times the bytes of a value."""
    form: Literal["table", "json"] = "table"

    def tables(self) -> Tables:
        manifest = load_manifest(FGramsManifest, self.fgrams)
        curve = held_out_curve(
            FGramIndex.map(self.fgrams, manifest),
            self.tokens,
            tokenizer_sha256=manifest.tokenizer_sha256,
            num_tokens=self.num_tokens,
        )
        table_mb = (pl.col("num_fgrams") * self.bytes_per_row / 1e6).alias("table_mb")
        return {
            "coverage": curve[-1::-4][::-1].select("num_fgrams", table_mb, pl.exclude("num_fgrams"))
        }


def render(tables: Tables, form: Literal["table", "json"]) -> str:
    """Tables as text, or as one JSON object that maps titles to rows."""
    if form == "json":
        rows = {title: table.to_dicts() for title, table in tables.items()}
        return json.dumps(rows, ensure_ascii=False, indent=1)
    with pl.Config(
        tbl_rows=-1,
        tbl_cols=-1,
        fmt_str_lengths=100,
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
        tbl_formatting="UTF8_BORDERS_ONLY",
        thousands_separator=",",
    ):
        return "\n".join(f"{title}\n{_quote(table)}" for title, table in tables.items())


def _quote(table: pl.DataFrame) -> pl.DataFrame:
    """The table with its texts in JSON's quotes, which show spaces and line ends."""
    if "text" not in table.columns:
        return table
    quoted = [json.dumps(text, ensure_ascii=False) for text in table["text"]]
    return table.with_columns(text=pl.Series(quoted, dtype=pl.String))


def _tokenizer(folder: str) -> Tokenizer:
    return Tokenizer(storage.local_copy(storage.join(folder, "tokenizer.json")))


def _ranks(folder: str, manifest: FGramsManifest, ids_S: np.ndarray) -> np.ndarray:
    """The ranks of f-grams; an id is a rank until the set grows."""
    return ids_S if manifest.ranks is None else map_ranks(folder, manifest.ranks)[ids_S]


def _table(tokenizer: Tokenizer, ranks_S: np.ndarray, fgrams: NGrams) -> pl.DataFrame:
    texts = [tokenizer.decode(ngram) for ngram in fgrams.tuples()]
    columns = {"rank": ranks_S, "count": fgrams.counts_M, "n": fgrams.n_M, "text": texts}
    return pl.DataFrame(
        columns, {"rank": pl.Int64, "count": pl.Int64, "n": pl.UInt8, "text": pl.String}
    )


def _coverage(folder: str, tokens: str, num_tokens: int) -> pl.DataFrame:
    """Hit rate and mean match length on the first tokens of a corpus."""
    manifest = load_manifest(FGramsManifest, folder)
    curve = held_out_curve(
        FGramIndex.map(folder, manifest),
        tokens,
        tokenizer_sha256=manifest.tokenizer_sha256,
        num_tokens=num_tokens,
    )
    return curve[-1:].select(pl.lit(folder).alias("fgrams"), "*")


def compare_fgrams(first: str, second: str) -> pl.DataFrame:
    """How many f-grams of each length two artifacts have, and have in common.

    Returns:
        n, first, second, common (numbers of f-grams), overlap (common / all of both).

    Raises:
        ArtifactError: their tokenizers differ.
    """
    kept, other = (load_manifest(FGramsManifest, folder) for folder in (first, second))
    require_equal(
        f"tokenizer of {second}",
        other.tokenizer_sha256,
        kept.tokenizer_sha256,
        f"only f-grams of the tokenizer of {first} can be compared with it",
    )
    index = FGramIndex.map(second, other)
    common_K1 = np.zeros(kept.max_n + 1, np.int64)
    for rows in iter_rows(first, kept.shards):
        tokens_SK, n_S, _ = NGrams.from_batch(rows)
        is_common_S = find_rows(index.buckets_N8, tokens_SK, n_S) >= 0
        common_K1 += np.bincount(n_S[is_common_S], minlength=kept.max_n + 1)
    numbers = [
        (
            n,
            kept.num_fgrams_per_n.get(n, 0),
            other.num_fgrams_per_n.get(n, 0),
            int(common_K1[n]) if n <= kept.max_n else 0,
        )
        for n in range(2, max(kept.max_n, other.max_n) + 1)
    ]
    table = pl.DataFrame(numbers, ["n", "first", "second", "common"], orient="row")
    union = pl.col("first") + pl.col("second") - pl.col("common")
    return table.with_columns(overlap=pl.col("common") / union)
