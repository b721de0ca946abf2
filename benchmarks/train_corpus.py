"""The data of bench_train: the training split in GPT-2 tokens, and its most frequent f-grams."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.count_corpora import SHARED, load_piece
from ray_jobs.count.config import CountConfig
from ray_jobs.tokenize.config import TokenizeConfig
from scone_core.artifacts import storage
from scone_core.artifacts.folders import claim, publish, shared_fields
from scone_core.artifacts.manifests import FGramsManifest, TokensManifest
from scone_core.artifacts.shards import write_shard
from scone_core.corpus.documents import DocumentFormat, read_packs
from scone_core.corpus.input_files import find_files, fingerprint_files
from scone_core.corpus.token_files import documents_to_batch
from scone_core.corpus.tokenizer import Tokenizer
from scone_core.counting.one_scan import count_ngrams
from scone_core.counting.ranking import rank_range
from scone_core.counting.records import Layout
from scone_core.fgrams.fgram_shards import build_index, write_fgrams

NUM_FGRAMS = 512 << 10
PACK_BYTES = 64 << 20


class TrainingData(NamedTuple):
    """Folders of the manifests."""

    tokens: str
    fgrams: str


def prepare(folder: Path) -> TrainingData:
    """tokens/v1 and fgrams/v1 in `folder`, made by the stages' own functions in this process; what
    is there already is kept.
    """
    data = TrainingData(str(folder / "tokens"), str(folder / "fgrams"))
    _count(_tokenize(data.tokens), data)
    return data


def _tokenize(out: str) -> TokensManifest:
    config = TokenizeConfig(
        inputs=(str(SHARED / "text"),),
        tokenizer=str(SHARED / "tokenizers" / "gpt2.json"),
        out=out,
        form=DocumentFormat(split="train"),
    )
    files = find_files(config.inputs)
    inputs = {"tokenizer": storage.sha256_of(config.tokenizer), **fingerprint_files(files)}
    if done := claim(TokensManifest, out, config, inputs):
        return done
    tokenizer = Tokenizer(config.tokenizer, engine="tiktoken")
    shards, num_bytes_text, num_tokens = [], 0, 0
    for pack in read_packs(files, config.form, PACK_BYTES):
        documents = [tokenizer.encode(text) for text in pack.texts]
        batch = documents_to_batch(pack.doc_ids, documents, tokenizer.vocab_size)
        shards.append(write_shard(out, f"shard-{pack.number:05d}.arrow", batch))
        num_bytes_text += pack.num_bytes
        num_tokens += sum(map(len, documents))
    storage.write_bytes(f"{out}/tokenizer.json", storage.read_bytes(config.tokenizer))
    manifest = TokensManifest(
        **shared_fields(TokensManifest, config, inputs),
        shards=tuple(shards),
        tokenizer_sha256=inputs["tokenizer"],
        vocab_size=tokenizer.vocab_size,
        separator_id=tokenizer.separator_id(config.separator),
        num_documents=sum(shard.num_rows for shard in shards),
        num_tokens=num_tokens,
        num_bytes_text=num_bytes_text,
        num_skipped_records={},
    )
    return publish(out, manifest)


def _count(tokens: TokensManifest, data: TrainingData) -> FGramsManifest:
    config = CountConfig(tokens=data.tokens, out=data.fgrams, num_fgrams=NUM_FGRAMS)
    inputs = config.input_fingerprints(tokens)
    if done := claim(FGramsManifest, data.fgrams, config, inputs):
        return done
    layout = Layout(config.max_n, tokens.vocab_size)
    piece = load_piece(data.tokens, tokens.num_tokens)
    ranked = rank_range(count_ngrams([piece], layout, min_count=config.min_count))
    top = ranked.part(0, NUM_FGRAMS)
    shard = write_fgrams(data.fgrams, "fgrams-00000.parquet", top, first_id=0)
    index = build_index(data.fgrams, [shard], out=data.fgrams, vocab_size=tokens.vocab_size)
    tokenizer = storage.read_bytes(f"{data.tokens}/tokenizer.json")
    storage.write_bytes(f"{data.fgrams}/tokenizer.json", tokenizer)
    per_n = np.bincount(top.n_M, minlength=config.max_n + 1)
    manifest = FGramsManifest(
        **shared_fields(FGramsManifest, config, inputs),
        shards=(shard,),
        index=index,
        tokenizer_sha256=tokens.tokenizer_sha256,
        vocab_size=tokens.vocab_size,
        separator_id=tokens.separator_id,
        max_n=config.max_n,
        min_count=config.min_count,
        num_fgrams=top.num,
        num_fgrams_per_n={n: int(per_n[n]) for n in range(2, config.max_n + 1)},
        num_tokens=tokens.num_tokens,
    )
    return publish(data.fgrams, manifest)
