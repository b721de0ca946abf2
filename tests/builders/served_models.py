"""Random Llama models with f-grams, small enough to serve on a CPU: what tests of serving need."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ray_jobs.serve.export import PLAIN_CHAT
from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.folders import publish
from scone_core.artifacts.manifests import (
    CheckpointManifest,
    EmbeddingsManifest,
    FGramsManifest,
    RowFormat,
    Shard,
)
from scone_core.artifacts.shards import write_shard
from scone_core.fgrams.fgram_shards import write_fgrams
from scone_core.fgrams.index import INDEX, write_index
from scone_core.fgrams.ngrams import NGrams
from scone_core.model.decoders import DecoderConfig, build_causal_lm, hugging_face_config
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.model.scone_lm import SconeLM
from scone_core.serving.served_folder import SconeSection, ServedManifest, served_config
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.row_formats import STORAGE, embedding_batch, to_storage
from tests.builders.corpora import word_tokenizer

VOCAB = 96
SEPARATOR = 0
WIDTH = 64
MAX_LENGTH = 512
TIE = 1e-4
"""Difference of two logits below which either choice is right."""
Grams = list[tuple[int, ...]]


def random_fgrams(*, max_n: int = 5, per_length: int = 20_000, seed: int = 0) -> Grams:
    """A prefix- and suffix-closed set in rank order, dense enough to match often; never the
    separator.
    """
    rng = np.random.default_rng(seed)
    tokens = range(1, VOCAB)
    level: Grams = [(a, b) for a in tokens for b in tokens if rng.random() < 0.6][:per_length]
    grams = list(level)
    for _ in range(3, max_n + 1):
        known, by_prefix = set(level), {}
        for gram in level:
            by_prefix.setdefault(gram[:-1], []).append(gram)
        longer = [gram + (end[-1],) for gram in known for end in by_prefix.get(gram[1:], [])]
        rng.shuffle(longer := sorted(longer))
        level = [tuple(map(int, gram)) for gram in longer[:per_length]]
        grams += level
    return grams


def publish_fgrams(folder: str, grams: Grams, *, max_n: int = 5) -> FGramsManifest:
    """A fgrams/v1 artifact."""
    n_S = np.array([len(gram) for gram in grams], np.uint8)
    tokens_SK = np.zeros((len(grams), max_n), np.uint32)
    for row, gram in zip(tokens_SK, grams, strict=True):
        row[: len(gram)] = gram
    rows = NGrams(tokens_SK, n_S, np.ones(len(grams), np.uint64))
    num_bytes, sha256 = write_index(
        storage.join(folder, INDEX), [(tokens_SK, n_S)], num_fgrams=len(grams), vocab_size=VOCAB
    )
    index = Shard(name=INDEX, num_rows=len(grams), num_bytes=num_bytes, sha256=sha256)
    storage.write_bytes(storage.join(folder, "tokenizer.json"), word_tokenizer(VOCAB))
    manifest = FGramsManifest(
        fingerprint=sha256,
        config={},
        inputs={},
        shards=(write_fgrams(folder, "fgrams-00000.parquet", rows, first_id=0),),
        tokenizer_sha256=hashlib.sha256(word_tokenizer(VOCAB)).hexdigest(),
        vocab_size=VOCAB,
        separator_id=SEPARATOR,
        max_n=max_n,
        min_count=1,
        num_fgrams=len(grams),
        num_fgrams_per_n={n: int((n_S == n).sum()) for n in range(2, max_n + 1)},
        num_tokens=0,
        index=index,
    )
    return publish(folder, manifest)


def trained_model(
    fgram: FGramModelConfig | None = None, *, main: DecoderConfig | None = None
) -> SconeLM:
    """A model with f-grams none of whose parts is at its special starting point."""
    torch.manual_seed(0)
    main = main or DecoderConfig(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2)
    config = hugging_face_config(main, vocab_size=VOCAB, separator_id=SEPARATOR)
    model = SconeLM.start(
        build_causal_lm(config), fgram or FGramModelConfig(num_layers=2), separator_id=SEPARATOR
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape)
    return model.eval()


def publish_checkpoint(
    folder: str, model: SconeLM, fgrams: FGramsManifest | None
) -> CheckpointManifest:
    """A checkpoint/v1 artifact of `model`."""
    model.save(Path(folder), fgrams=fgrams)
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    shards = tuple(
        Shard(
            name=str(path.relative_to(folder)),
            num_rows=0,
            num_bytes=path.stat().st_size,
            sha256=storage.sha256_of(str(path)),
        )
        for path in paths
    )
    manifest = CheckpointManifest(
        fingerprint=hashlib.sha256(repr(shards).encode()).hexdigest(),
        config={},
        inputs={},
        shards=shards,
        step=1,
        tokens_seen=1,
        tokenizer_sha256=hashlib.sha256(word_tokenizer(VOCAB)).hexdigest(),
        method="scone" if fgrams else "plain",
        fgrams_fingerprint=fgrams.fingerprint if fgrams else None,
        max_n=fgrams.max_n if fgrams else None,
        fgram_output="residual" if fgrams else None,
    )
    return publish(folder, manifest)


def publish_table(
    folder: str,
    vectors_SD: torch.Tensor,
    fgrams: FGramsManifest,
    *,
    checkpoint: str = "random",
    row_format: RowFormat = "bf16",
) -> EmbeddingsManifest:
    """An embeddings/v1 artifact of two shards."""
    cut = len(vectors_SD) // 3
    shards = tuple(
        write_shard(
            folder,
            f"embeddings-{number}.arrow",
            embedding_batch(to_storage(rows_ND, row_format), row_format),
            first_id=first,
        )
        for number, first, rows_ND in ((0, 0, vectors_SD[:cut]), (1, cut, vectors_SD[cut:]))
    )
    manifest = EmbeddingsManifest(
        fingerprint=hashlib.sha256(shards[0].sha256.encode()).hexdigest(),
        config={},
        inputs={},
        shards=shards,
        fgrams_fingerprint=fgrams.fingerprint,
        checkpoint_fingerprint=checkpoint,
        tokenizer_sha256=fgrams.tokenizer_sha256,
        max_n=fgrams.max_n,
        num_rows=len(vectors_SD),
        width=vectors_SD.shape[1],
        row_format=row_format,
        bytes_per_row=STORAGE[row_format].num_bytes(vectors_SD.shape[1]),
    )
    return publish(folder, manifest)


def random_llama(*, seed: int = 0) -> LlamaForCausalLM:
    """A model whose choices depend on its inputs: weights far larger than at a usual start."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=SEPARATOR,
        dtype=torch.float32,
    )
    return LlamaForCausalLM(config).eval()


def write_served_folder(base: Path) -> Path:
    """`base/served` with f-grams, and its f-grams and table beside it."""
    grams = random_fgrams()
    fgrams = publish_fgrams(str(base / "fgrams"), grams)
    vectors_SD = torch.randn(len(grams), WIDTH, generator=torch.Generator().manual_seed(1)) * 0.2
    publish_table(str(base / "table"), vectors_SD, fgrams)
    section = SconeSection.of(
        str(base / "fgrams"), str(base / "table"), checkpoint_fingerprint="random"
    )
    return publish_served(base / "served", section)


def publish_served(folder: Path, section: SconeSection | None) -> Path:
    """A served/v1 artifact of `random_llama`."""
    random_llama().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "split_special_tokens": True,
        "chat_template": PLAIN_CHAT,
    }
    (folder / "config.json").write_text(json.dumps(served_config(config, section)))
    (folder / "tokenizer.json").write_bytes(word_tokenizer(VOCAB))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    manifest = ServedManifest(
        fingerprint="served",
        config={},
        inputs={},
        shards=tuple(
            Shard(name=path.name, num_rows=0, num_bytes=path.stat().st_size, sha256="")
            for path in sorted(folder.iterdir())
        ),
        checkpoint_fingerprint="random",
        table_fingerprint=section.table_fingerprint if section else None,
    )
    publish(str(folder), manifest)
    return folder


class Reference:
    """The served model by brute force: dictionary of f-grams, no cache, one sequence at a time."""

    def __init__(self, base: Path) -> None:
        grams = random_fgrams()
        self.model = random_llama()
        self.id_of = {gram: number for number, gram in enumerate(grams)}
        rows_SD = EmbeddingTable.open(str(base / "table")).vectors(np.arange(len(grams)))
        self.rows_SD = rows_SD.float()

    def fgram_ids(self, tokens: list[int]) -> list[int]:
        """The longest f-gram that ends at each token, -1 for none."""
        found = []
        for end in range(1, len(tokens) + 1):
            windows = [tuple(tokens[max(end - n, 0) : end]) for n in range(5, 1, -1)]
            found.append(next((self.id_of[w] for w in windows if w in self.id_of), -1))
        return found

    @torch.inference_mode()
    def logits(self, tokens: list[int], fgram_ids: list[int]) -> torch.Tensor:
        """[T, V] of a whole sequence."""
        embedding = self.model.get_input_embeddings().weight
        inputs = [
            embedding[token] if fgram_id < 0 else self.rows_SD[fgram_id]
            for token, fgram_id in zip(tokens, fgram_ids, strict=True)
        ]
        return self.model(inputs_embeds=torch.stack(inputs)[None], use_cache=False).logits[0]

    def check(self, prompt: list[int], answer: list[int]) -> "Agreement":
        """Compare a greedy answer with what the model would choose after each of its tokens."""
        tokens = prompt + answer
        fgram_ids = self.fgram_ids(tokens)
        logits_TV = self.logits(tokens, fgram_ids)[len(prompt) - 1 : -1]
        best = logits_TV.topk(2).values
        is_tie = (best[:, 0] - best[:, 1] < TIE).tolist()
        is_equal = [
            token == choice
            for token, choice in zip(answer, logits_TV.argmax(-1).tolist(), strict=True)
        ]
        return Agreement(
            num_tokens=len(answer),
            num_ties=sum(tie and not equal for tie, equal in zip(is_tie, is_equal, strict=True)),
            num_wrong=sum(
                not tie and not equal for tie, equal in zip(is_tie, is_equal, strict=True)
            ),
            num_hits=sum(fgram_id >= 0 for fgram_id in fgram_ids[len(prompt) :]),
        )


class Agreement(Frozen):
    """Counts over the tokens of answers."""

    num_tokens: int = 0
    num_ties: int = 0
    """Another choice where the two best logits differ by less than `TIE`."""
    num_wrong: int = 0
    num_hits: int = 0

    def __add__(self, other: "Agreement") -> "Agreement":
        mine, theirs = self.model_dump(), other.model_dump()
        return Agreement(**{name: mine[name] + theirs[name] for name in mine})
