"""Lists of token ids -> tokens/v1, fgrams/v1: what tests of the later stages start from."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, models, pre_tokenizers

from scone_core.artifacts import storage
from scone_core.artifacts.config import fingerprint
from scone_core.artifacts.folders import publish
from scone_core.artifacts.manifests import FGramsManifest, TokensManifest
from scone_core.artifacts.shards import write_shard
from scone_core.corpus.token_files import documents_to_batch
from scone_core.counting.one_scan import Piece, count_ngrams
from scone_core.counting.ranking import rank_range
from scone_core.counting.records import Layout
from scone_core.fgrams import fgram_shards

Documents = Sequence[Sequence[int]]


def write_tokens(
    folder: str,
    documents: Documents,
    *,
    vocab_size: int = 256,
    separator_id: int = 0,
    num_shards: int = 1,
    targets: Documents | None = None,
    files: Sequence[str] = ("documents",),
) -> TokensManifest:
    """A finished tokens/v1 artifact of `documents`, spread over `num_shards` in their order, as if
    `files` (in the order of their names) had held about as many of them each.

    Its `tokenizer.json` knows the words t0, t1, ... (id i is "t{i}"), separated by spaces.
    """
    tokenizer = word_tokenizer(vocab_size)
    storage.write_bytes(storage.join(folder, "tokenizer.json"), tokenizer)
    cuts = np.linspace(0, len(documents), num_shards + 1).astype(int)
    shards = [
        write_shard(
            folder, f"tokens-{i:05d}.arrow", _batch(documents, lo, hi, vocab_size, files, targets)
        )
        for i, (lo, hi) in enumerate(zip(cuts[:-1], cuts[1:], strict=True))
    ]
    fields = {"vocab_size": vocab_size, "separator_id": separator_id, "num_shards": num_shards}
    content = hashlib.sha256(repr(documents).encode()).hexdigest()
    inputs = {"tokenizer": hashlib.sha256(tokenizer).hexdigest(), **dict.fromkeys(files, content)}
    manifest = TokensManifest(
        fingerprint=fingerprint(TokensManifest.CONTRACT, fields, inputs),
        config=fields,
        inputs=inputs,
        shards=tuple(shards),
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
        vocab_size=vocab_size,
        separator_id=separator_id,
        num_documents=len(documents),
        num_tokens=sum(map(len, documents)),
        num_bytes_text=sum(len(text_of(document)) for document in documents),
        num_targets=None if targets is None else sum(map(sum, targets)),
        num_skipped_records={},
    )
    return publish(folder, manifest)


def write_fgrams(
    folder: str,
    documents: Documents,
    *,
    num_fgrams: int,
    max_n: int = 5,
    min_count: int = 2,
    vocab_size: int = 256,
    separator_id: int = 0,
    rows_per_shard: int = 1000,
) -> FGramsManifest:
    """A finished fgrams/v1 artifact of `documents`, counted in memory."""
    tokenizer = word_tokenizer(vocab_size)
    storage.write_bytes(storage.join(folder, "tokenizer.json"), tokenizer)
    found = count_ngrams([whole(documents)], Layout(max_n, vocab_size), min_count=min_count)
    top = rank_range(found).part(0, num_fgrams)
    shards = [
        fgram_shards.write_fgrams(
            folder,
            f"fgrams-{first // rows_per_shard:05d}.parquet",
            top.part(first, first + rows_per_shard),
            first_id=first,
        )
        for first in range(0, top.num, rows_per_shard)
    ]
    index = fgram_shards.build_index(folder, shards, out=folder, vocab_size=vocab_size)
    fields = {"num_fgrams": num_fgrams, "max_n": max_n, "min_count": min_count}
    inputs = {"documents": hashlib.sha256(repr(documents).encode()).hexdigest()}
    manifest = FGramsManifest(
        fingerprint=fingerprint(FGramsManifest.CONTRACT, fields, inputs),
        config=fields,
        inputs=inputs,
        shards=tuple(shards),
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
        vocab_size=vocab_size,
        separator_id=separator_id,
        max_n=max_n,
        min_count=min_count,
        num_fgrams=top.num,
        num_fgrams_per_n={n: int((top.n_M == n).sum()) for n in range(2, max_n + 1)},
        num_tokens=sum(map(len, documents)),
        index=index,
    )
    return publish(folder, manifest)


def whole(documents: Documents) -> Piece:
    """All positions of `documents` as one piece."""
    tokens_L = np.array([token for document in documents for token in document], np.uint32)
    offsets_D1 = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return Piece(tokens_L, offsets_D1, 0, len(tokens_L))


def brute_force(
    documents: Documents, *, max_n: int, min_count: int = 1
) -> Counter[tuple[int, ...]]:
    """Counts of all n-grams, n = 2 .. max_n, at `min_count` or above, as Python counts them."""
    counts = Counter(
        tuple(document[i : i + n])
        for document in documents
        for n in range(2, max_n + 1)
        for i in range(len(document) - n + 1)
    )
    return Counter({ngram: count for ngram, count in counts.items() if count >= min_count})


def rank(counts: Counter[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """n-grams in rank order: count descending, n ascending, tokens ascending."""
    return sorted(counts, key=lambda ngram: (-counts[ngram], len(ngram), ngram))


def zipf_documents(
    *, num_documents: int, mean_length: int, vocab_size: int, seed: int
) -> list[list[int]]:
    """Documents with a natural mix of frequent and rare n-grams; no document holds id 0."""
    rng = np.random.default_rng(seed)
    phrases = [_zipf(rng, rng.integers(2, 7), vocab_size) for _ in range(vocab_size)]
    documents = []
    for length in rng.poisson(mean_length, num_documents):
        chosen = _zipf(rng, length // 4 + 1, len(phrases))
        documents.append([token for i in chosen for token in phrases[i]][:length])
    return documents


def text_of(document: Sequence[int]) -> str:
    """The text that `word_tokenizer` turns into the ids of `document`."""
    return " ".join(f"t{token}" for token in document)


@cache
def word_tokenizer(vocab_size: int) -> bytes:
    """The tokenizer.json with the words t0 .. t{vocab_size - 1}."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, "t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer.to_str().encode()


def file_of(document: int, *, num_documents: int, num_files: int) -> int:
    """The index of the file that `write_tokens` says a document came from."""
    return document * num_files // num_documents


def _batch(
    documents: Documents,
    first: int,
    last: int,
    vocab_size: int,
    files: Sequence[str],
    targets: Documents | None,
) -> pa.RecordBatch:
    chosen = [np.array(document, np.int64) for document in documents[first:last]]
    marks = None if targets is None else [np.array(mark, np.uint8) for mark in targets[first:last]]
    file_of_document = partial(file_of, num_documents=len(documents), num_files=len(files))
    doc_ids = [file_of_document(i) << 40 | i for i in range(first, last)]
    return documents_to_batch(doc_ids, chosen, vocab_size, marks)


def _zipf(rng: np.random.Generator, num: int, below: int) -> list[int]:
    """`num` ids from 1 to `below` - 1; the frequency of the id i is about proportional to 1 / i."""
    return (below ** rng.random(num)).astype(int).clip(1, below - 1).tolist()
