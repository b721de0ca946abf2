"""The table, the index and the text of bench_lookup, made once and kept.

F-grams are the 2^20 most frequent n-grams of the bundled corpus (n = 2..5); rows are random bits
that begin with their id. The index also holds synthetic keys that no text can reach, up to 50 M, so
that a probe meets the memory of a large one.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import process_time

import numba as nb
import numpy as np

from scone_core.artifacts.folders import publish
from scone_core.artifacts.manifests import EmbeddingsManifest, Shard
from scone_core.artifacts.shards import write_shard
from scone_core.corpus.documents import DocumentFormat, read_packs
from scone_core.corpus.input_files import find_files
from scone_core.corpus.tokenizer import FastBpe
from scone_core.counting.one_scan import Piece, count_ngrams
from scone_core.counting.ranking import rank_range
from scone_core.counting.records import Layout
from scone_core.fgrams import trie
from scone_core.fgrams.index import FGramIndex, write_index
from scone_core.machine.mapped_memory import expect_hits
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.export import fill_lmdb
from scone_core.table.row_formats import embedding_batch

BUNDLED = Path(__file__).parents[1] / "pipelines" / "corpus"
VOCAB_SIZE, MAX_N = 8192, 5
NUM_ROWS, WIDTH, ROWS_PER_SHARD = 1 << 20, 2048, 1 << 18
NUM_KEYS = 50_000_000


@dataclass(frozen=True)
class Data:
    """Folders and arrays of the benchmark."""

    table: str
    lmdb: str
    index: FGramIndex
    tokens_SK: np.ndarray
    """F-grams by id, zero padded."""
    n_S: np.ndarray
    text_L: np.ndarray
    """Held-out tokens, uint16."""


def prepare(folder: Path) -> Data:
    """Make what is not in `folder` yet: 4.3 GB of rows, 8.6 GB of LMDB, 0.9 GB of index."""
    folder.mkdir(parents=True, exist_ok=True)
    fgrams = folder / "fgrams.npz"
    if not fgrams.exists():
        _write_fgrams(fgrams)
    with np.load(fgrams) as arrays:
        tokens_SK, n_S, text_L = (arrays[name] for name in ("tokens", "n", "text"))
    index = folder / "trie.npy"
    if not index.exists():
        _write_padded_index(index, tokens_SK, n_S)
    table, lmdb = str(folder / "table"), str(folder / "lmdb")
    if not (folder / "table" / "manifest.json").exists():
        _write_table(table)
    if not (folder / "lmdb.json").exists():
        fill_lmdb(EmbeddingTable.open(table), tokens_SK, n_S, lmdb, vocab_size=VOCAB_SIZE)
        (folder / "lmdb.json").write_text(json.dumps({"rows": NUM_ROWS}))
    for path in (index, *Path(table).iterdir(), *Path(lmdb).iterdir()):
        read_anew(path)
    buckets_N8 = np.load(index, mmap_mode="r").view(np.ndarray)
    expect_hits(buckets_N8)
    return Data(table, lmdb, FGramIndex(buckets_N8, MAX_N, NUM_KEYS), tokens_SK, n_S, text_L)


def read_anew(path: Path) -> None:
    """Have a file in memory as servers have it that read it; pages that a writer left behind lie
    one by one, and no reader finds them fast.
    """
    drop_from_cache(path)
    with open(path, "rb", buffering=0) as file:
        while file.read(8 << 20):
            pass


def drop_from_cache(path: Path) -> None:
    """The pages that no process has mapped; what is not on disk yet is written first."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _write_fgrams(path: Path) -> None:
    """The most frequent n-grams of the training split in rank order, and the held-out text."""
    documents = [_encode(text) for text in _texts("train")]
    offsets_D1 = np.cumsum([0, *map(len, documents)])
    tokens_L = np.concatenate(documents)
    piece = Piece(tokens_L, offsets_D1, 0, len(tokens_L))
    ranked = rank_range(count_ngrams([piece], Layout(MAX_N, VOCAB_SIZE), min_count=1))
    text_L = np.concatenate([_encode(text) for text in _texts("validation")])
    np.savez(path, tokens=ranked.tokens_MK[:NUM_ROWS], n=ranked.n_M[:NUM_ROWS], text=text_L)


def _texts(split: str) -> Iterator[str]:
    files = find_files((str(BUNDLED / "austen.jsonl.gz"), str(BUNDLED / "sotu.jsonl.gz")))
    form = DocumentFormat.model_validate({"split": split})
    for pack in read_packs(files, form, 4 << 20):
        yield from pack.texts


def _encode(text: str) -> np.ndarray:
    return _bpe().encode(text).astype(np.uint16)


@cache
def _bpe() -> FastBpe:
    bpe = FastBpe.from_json(json.loads((BUNDLED / "tokenizer.json").read_text()))
    assert bpe is not None, "the bundled tokenizer is byte-level BPE"
    return bpe


def _write_padded_index(path: Path, tokens_SK: np.ndarray, n_S: np.ndarray) -> None:
    shape = (trie.num_buckets(NUM_KEYS), 8)
    temporary = path.with_suffix(".tmp")
    buckets_N8 = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint64, shape=shape)
    trie.clear(buckets_N8)
    assert trie.insert_rows(buckets_N8, tokens_SK, n_S, 0, VOCAB_SIZE) == len(n_S)
    _insert_padding(buckets_N8, len(n_S), NUM_KEYS, np.random.default_rng(0))
    buckets_N8.flush()
    temporary.rename(path)


@nb.njit
def _insert_padding(
    buckets_N8: np.ndarray, first_id: int, last_id: int, rng: np.random.Generator
) -> None:
    """Random keys whose prefix is a padding f-gram, so that no walk from a token reaches them."""
    for fgram_id in range(first_id, last_id):
        prefix = trie.FGRAM_BASE + rng.integers(first_id, last_id)
        token = rng.integers(0, trie.MAX_VOCAB)
        key = (np.uint64(prefix) << np.uint64(trie.TOKEN_BITS)) | np.uint64(token)
        trie.insert_key(buckets_N8, key, fgram_id)


def _write_table(folder: str) -> None:
    rng, shards = np.random.default_rng(0), list[Shard]()
    noise_ND = rng.integers(0, 1 << 16, (ROWS_PER_SHARD, WIDTH), np.uint16)
    for first in range(0, NUM_ROWS, ROWS_PER_SHARD):
        noise_ND.view(np.int64)[:, 0] = np.arange(first, first + ROWS_PER_SHARD)
        batch = embedding_batch(noise_ND, "bf16")
        name = f"embeddings-{len(shards):06d}.arrow"
        shards.append(write_shard(folder, name, batch, first_id=first))
    manifest = EmbeddingsManifest(
        fingerprint="synthetic",
        config={},
        inputs={},
        shards=tuple(shards),
        fgrams_fingerprint="synthetic",
        checkpoint_fingerprint="synthetic",
        tokenizer_sha256="",
        max_n=MAX_N,
        num_rows=NUM_ROWS,
        width=WIDTH,
        row_format="bf16",
        bytes_per_row=2 * WIDTH,
    )
    publish(folder, manifest)


def index_build_ns(data: Data, folder: Path) -> float:
    """Nanoseconds per f-gram of building the index of the real f-grams, published and hashed."""
    started = process_time()
    blocks = [(data.tokens_SK, data.n_S)]
    path = str(folder / "built.npy")
    write_index(path, blocks, num_fgrams=len(data.n_S), vocab_size=VOCAB_SIZE)
    seconds = process_time() - started
    Path(path).unlink()
    return seconds / len(data.n_S) * 1e9


def bench_folder() -> Path:
    return Path(os.environ.get("BENCH_FOLDER", f"{tempfile.gettempdir()}/scone-bench-lookup"))


if __name__ == "__main__":
    prepare(bench_folder())
