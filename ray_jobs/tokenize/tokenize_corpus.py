"""documents, as text or tokenized already -> tokens/v1: shards streamed through Ray Data."""

from functools import partial

import ray

from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.progress import Progress
from ray_jobs.runtime.stage import run_stage
from ray_jobs.runtime.tracking import RunLog
from ray_jobs.runtime.units import units_dataset
from ray_jobs.tokenize.config import TokenizeConfig
from ray_jobs.tokenize.worker import (
    GroupReceipt,
    PackReceipt,
    ShardWriter,
    convert_group,
    group_name,
    pack_name,
    read_group,
)
from scone_core.artifacts import storage
from scone_core.artifacts.folders import SharedFields
from scone_core.artifacts.manifests import ArtifactError, TokensManifest
from scone_core.artifacts.units import read_receipt
from scone_core.corpus.documents import DocumentFormat, Pack, read_packs
from scone_core.corpus.input_files import (
    TEXT_SUFFIXES,
    TOKEN_SUFFIXES,
    SourceFile,
    find_files,
    fingerprint_files,
    group_files,
    split_files,
)
from scone_core.corpus.tokenizer import Engine, Tokenizer

PART_SHARDS = 4
"""Shards' worth of text of a large file that one worker reads."""
SAMPLE_BYTES = 1 << 20
"""Text of the corpus on which the fast tokenizer must agree with the reference."""


def run(config: TokenizeConfig) -> TokensManifest:
    """Tokenize a corpus: every record becomes tokens, a counted skip, or an error."""
    _refuse_options(config)
    suffixes = TOKEN_SUFFIXES if config.content == "tokens" else TEXT_SUFFIXES
    files = find_files(config.inputs, suffixes)
    tokenizer = Tokenizer(storage.local_copy(config.tokenizer))
    tokenizer.separator_id(config.separator)
    inputs = {"tokenizer": storage.sha256_of(config.tokenizer), **fingerprint_files(files)}
    if config.chat_template:
        inputs["chat_template"] = storage.sha256_of(config.chat_template)
    build = partial(_tokenize, config, files, tokenizer)
    return run_stage(TokensManifest, config, inputs, build, stage="tokenize")


def _refuse_options(config: TokenizeConfig) -> None:
    if config.content != "text" and config.form.split != "all":
        raise ValueError(
            f"form.split={config.form.split!r}: {config.content} is not cut at line ends"
        )
    if (config.content == "chat") != (config.chat_template is not None):
        raise ValueError(
            f"chat_template={config.chat_template!r}: needed for content 'chat', and for no other"
        )


def _tokenize(
    config: TokenizeConfig,
    files: list[SourceFile],
    tokenizer: Tokenizer,
    shared: SharedFields,
    log: RunLog,
) -> TokensManifest:
    parts = split_files(files, PART_SHARDS * config.shard_mb << 20)
    groups = group_files(files if config.content == "tokens" else parts, config.shard_mb << 20)
    connect(config.cluster)
    print(f"tokenize: {len(files)} files in {len(groups)} groups")
    if config.content != "tokens":
        engine = tokenizer.select_engine(_sample(groups[0], config.form))
        print(f"tokenize: encoded by {engine}")
        log.log_params({"engine": engine})
        _write_shards(config, groups, engine)
    else:
        _convert_shards(config, groups)
    manifest = _manifest(config, groups, tokenizer, shared)
    print(f"tokenize: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens")
    log.log_metrics({"documents": manifest.num_documents, "tokens": manifest.num_tokens})
    return manifest


def _sample(sources: list[SourceFile], form: DocumentFormat) -> list[str]:
    pack = next(read_packs(sources, form, SAMPLE_BYTES), Pack())
    return pack.texts


def _write_shards(config: TokenizeConfig, groups: list[list[SourceFile]], engine: Engine) -> None:
    """groups of files -> packs of text -> shards: texts flow through Ray's object store, one pack a
    row; a group whose receipt and shards exist is not opened again.
    """
    todo = [number for number in range(len(groups)) if _shards_of(config.out, number) is None]
    if not todo:
        return
    workers = config.num_tokenizers or max(1, int(ray.cluster_resources().get("CPU", 1)))
    packs = ray.data.from_items([{"group": n} for n in todo], override_num_blocks=len(todo))
    receipts = packs.map_batches(
        partial(read_group, groups=groups, config=config),
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=0.25,
    ).map_batches(
        ShardWriter,
        fn_constructor_args=(config, engine),
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=0.75,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers),
    )
    progress = Progress("tokenize", unit="tokens")
    for receipt in receipts.iter_rows():
        progress.advance(receipt["num_tokens"])


def _convert_shards(config: TokenizeConfig, groups: list[list[SourceFile]]) -> None:
    """groups of tokenized files -> shards, one task per group."""
    todo = [number for number in range(len(groups)) if _shards_of(config.out, number) is None]
    if not todo:
        return
    converted = units_dataset(todo).map(
        partial(convert_group, groups=groups, config=config), num_cpus=1
    )
    progress = Progress("tokenize", unit="tokens")
    for row in converted.iter_rows():
        progress.advance(row["num_tokens"])


def _manifest(
    config: TokenizeConfig,
    groups: list[list[SourceFile]],
    tokenizer: Tokenizer,
    shared: SharedFields,
) -> TokensManifest:
    receipts = [r for number in range(len(groups)) for r in _shards_of(config.out, number) or ()]
    num_skipped: dict[str, int] = {}
    for receipt in receipts:
        for reason, count in receipt.num_skipped.items():
            num_skipped[reason] = num_skipped.get(reason, 0) + count
    if num_skipped:
        print(f"tokenize: left out bad records: {num_skipped}")
    num_tokens = sum(receipt.num_tokens for receipt in receipts)
    if num_tokens == 0:
        raise ArtifactError(
            f"inputs={config.inputs}: no text in them ({num_skipped=}); nothing written"
        )
    storage.write_bytes(
        storage.join(config.out, "tokenizer.json"), storage.read_bytes(config.tokenizer)
    )
    return TokensManifest(
        **shared,
        shards=tuple(receipt.shard for receipt in receipts),
        tokenizer_sha256=shared["inputs"]["tokenizer"],
        vocab_size=tokenizer.vocab_size,
        separator_id=tokenizer.separator_id(config.separator),
        num_documents=sum(receipt.shard.num_rows for receipt in receipts),
        num_tokens=num_tokens,
        num_bytes_text=sum(receipt.num_bytes_text for receipt in receipts),
        num_targets=sum(receipt.num_targets or 0 for receipt in receipts)
        if config.content == "chat"
        else None,
        num_skipped_records=num_skipped,
    )


def _shards_of(out: str, group: int) -> list[PackReceipt] | None:
    """The receipts of a group's shards in order; None while the group is unfinished."""
    finished = read_receipt(out, group_name(group), GroupReceipt)
    if finished is None:
        return None
    names = [pack_name(group, number) for number in range(finished.num_packs)]
    receipts = [read_receipt(out, name, PackReceipt) for name in names]
    found = [receipt for receipt in receipts if receipt is not None]
    return found if len(found) == len(receipts) else None
