"""Lists of token ids -> tokens/v1: the artifacts that tests of the later stages start from."""

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, models, pre_tokenizers

from scone_core import storage
from scone_core.artifacts import TokensManifest, publish, write_shard
from scone_core.config import fingerprint

Documents = Sequence[Sequence[int]]


def write_tokens(
    folder: str,
    documents: Documents,
    *,
    vocab_size: int = 256,
    separator_id: int = 0,
    num_shards: int = 1,
) -> TokensManifest:
    """A finished tokens/v1 artifact of `documents`, spread over `num_shards` in their order.

    Its `tokenizer.json` knows the words t0, t1, ... (id i is "t{i}"), separated by spaces.
    """
    tokenizer = word_tokenizer(vocab_size)
    storage.write_bytes(storage.join(folder, "tokenizer.json"), tokenizer)
    cuts = np.linspace(0, len(documents), num_shards + 1).astype(int)
    shards = [
        write_shard(folder, f"tokens-{i:05d}.arrow", _batch(documents, lo, hi, vocab_size))
        for i, (lo, hi) in enumerate(zip(cuts[:-1], cuts[1:], strict=True))
    ]
    fields = {"vocab_size": vocab_size, "separator_id": separator_id, "num_shards": num_shards}
    inputs = {"documents": hashlib.sha256(repr(documents).encode()).hexdigest()}
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
        num_skipped_records={},
    )
    return publish(folder, manifest)


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


def _batch(documents: Documents, first: int, last: int, vocab_size: int) -> pa.RecordBatch:
    chosen = documents[first:last]
    offsets = np.cumsum([0, *map(len, chosen)], dtype=np.int64)
    dtype = np.uint16 if vocab_size <= 65_535 else np.uint32
    values = np.fromiter((token for document in chosen for token in document), dtype)
    tokens = pa.LargeListArray.from_arrays(offsets, values)
    doc_ids = pa.array(range(first, last), pa.uint64())
    return pa.RecordBatch.from_arrays([doc_ids, tokens], ["doc_id", "tokens"])


def _zipf(rng: np.random.Generator, num: int, below: int) -> list[int]:
    """`num` ids in 1 .. below - 1, the id i about proportional to 1 / i."""
    return (below ** rng.random(num)).astype(int).clip(1, below - 1).tolist()
