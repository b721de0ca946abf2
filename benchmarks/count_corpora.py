"""The corpora of bench_count: real text, the same grown to 200 M tokens, one with a hot bigram."""

from pathlib import Path

import numba as nb
import numpy as np
import pyarrow as pa

from ray_jobs.runtime.config import Cluster
from ray_jobs.tokenize.config import TokenizeConfig
from ray_jobs.tokenize.tokenize_corpus import run
from scone_core.artifacts import storage
from scone_core.artifacts.folders import publish
from scone_core.artifacts.manifests import TokensManifest, load_manifest
from scone_core.artifacts.shards import write_shard
from scone_core.corpus.token_shards import map_documents
from scone_core.counting.one_scan import Piece

SHARED = Path(__file__).parents[2] / "shared" / "corpus"
MILLION = 1_000_000
SEGMENT = 7
"""Mean length of the pieces of real text of which generated text consists: every joint gives new
n-grams, so their number keeps growing with the corpus, as in a real one."""
DOCUMENT = 700
"""Tokens of a generated document."""


def prepare(folder: Path) -> dict[str, str]:
    """Folders of the tokens/v1 artifacts by name; those that are there already are kept."""
    real = str(folder / "real")
    config = TokenizeConfig(
        inputs=(str(SHARED / "text"),),
        tokenizer=str(SHARED / "tokenizers" / "gpt2.json"),
        out=real,
        cluster=Cluster(num_cpus=2),
    )
    manifest = run(config)
    tokens_L, offsets_D1 = join(real, manifest)
    made = {"real": real}
    for name, num_tokens in (("50m", 50 * MILLION), ("200m", 200 * MILLION)):
        made[name] = str(folder / name)
        if not storage.exists(f"{made[name]}/manifest.json"):
            grown = _grow(tokens_L, num_tokens)
            _write(made[name], manifest, *_with_documents(grown, offsets_D1, len(tokens_L)))
    made["hot"] = str(folder / "hot")
    if not storage.exists(f"{made['hot']}/manifest.json"):
        hot = _insert_bigram(tokens_L, 50 * MILLION, np.random.default_rng(2))
        _write(made["hot"], manifest, *_with_documents(hot, np.zeros(1, np.int64), 0))
    return made


def join(folder: str, manifest: TokensManifest) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of an artifact and the boundaries of its documents."""
    shards = [map_documents(folder, shard) for shard in manifest.shards]
    lengths = np.concatenate([np.diff(offsets) for _, offsets in shards])
    return np.concatenate([tokens for tokens, _ in shards]), np.cumsum([0, *lengths])


def load_piece(folder: str, num_tokens: int) -> Piece:
    """The first tokens of an artifact."""
    tokens_L, offsets_D1 = join(folder, load_manifest(TokensManifest, folder))
    return Piece(tokens_L, offsets_D1, 0, min(num_tokens, len(tokens_L)))


def _with_documents(
    tokens_L: np.ndarray, offsets_D1: np.ndarray, num_real: int
) -> tuple[np.ndarray, np.ndarray]:
    num = len(tokens_L)
    inside = offsets_D1[offsets_D1 < num]
    made = np.arange(num_real + DOCUMENT, num, DOCUMENT)
    return tokens_L, np.unique(np.concatenate([inside, made, [0, num]])).astype(np.int64)


def _write(folder: str, real: TokensManifest, tokens_L: np.ndarray, offsets_D1: np.ndarray) -> None:
    num_shards = max(1, len(tokens_L) // (25 * MILLION))
    cuts = np.linspace(0, len(offsets_D1) - 1, num_shards + 1).astype(int)
    shards = []
    for i, (first, last) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        offsets = offsets_D1[first : last + 1]
        values = pa.array(tokens_L[offsets[0] : offsets[-1]])
        lists = pa.LargeListArray.from_arrays(offsets - offsets[0], values)
        doc_ids = pa.array(range(first, last), pa.uint64())
        batch = pa.record_batch({"doc_id": doc_ids, "tokens": lists})
        shards.append(write_shard(folder, f"shard-{i:05d}.arrow", batch))
    changes = {
        "fingerprint": Path(folder).name,
        "shards": tuple(shards),
        "num_documents": len(offsets_D1) - 1,
        "num_tokens": len(tokens_L),
    }
    publish(folder, real.model_copy(update=changes))


def _grow(tokens_L: np.ndarray, num_tokens: int) -> np.ndarray:
    out_L = np.empty(num_tokens, tokens_L.dtype)
    real = min(len(tokens_L), num_tokens)
    out_L[:real] = tokens_L[:real]
    _stitch(tokens_L, out_L[real:], np.random.default_rng(1))
    return out_L


@nb.njit
def _stitch(source_L: np.ndarray, out_L: np.ndarray, rng: np.random.Generator) -> None:
    """Fill `out_L` with random pieces of `source_L`."""
    place = 0
    while place < len(out_L):
        length = min(1 + int(rng.standard_exponential() * SEGMENT), len(out_L) - place)
        start = rng.integers(0, len(source_L) - length)
        out_L[place : place + length] = source_L[start : start + length]
        place += length


@nb.njit
def _insert_bigram(source_L: np.ndarray, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Natural text with the bigram (11, 12) put in so often that it begins at 40 % of positions."""
    out_L = np.empty(num_tokens, source_L.dtype)
    place = i = 0
    while place < num_tokens:
        if rng.random() < 2 / 3 and place + 2 <= num_tokens:
            out_L[place], out_L[place + 1] = 11, 12
            place += 2
        else:
            out_L[place] = source_L[i]
            i += 1
            place += 1
    return out_L
