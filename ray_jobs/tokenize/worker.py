"""What tasks and actors of the tokenize stage do: groups of files -> packs -> shards with receipts.

Workers import this module and no other of the stage: MLflow alone would take them seconds.
"""

import json
from collections.abc import Iterator

import pyarrow as pa

from ray_jobs.tokenize.config import TokenizeConfig
from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import Shard
from scone_core.artifacts.shards import write_shard
from scone_core.artifacts.units import read_receipt, write_receipt
from scone_core.corpus.chat import ChatTokenizer, read_template
from scone_core.corpus.documents import Pack, read_packs
from scone_core.corpus.input_files import SourceFile
from scone_core.corpus.token_files import documents_to_batch, read_token_packs
from scone_core.corpus.tokenizer import Engine, Tokenizer


class GroupReceipt(Frozen):
    """All packs of a group of files are read."""

    num_packs: int


class PackReceipt(Frozen):
    """A pack is a shard."""

    shard: Shard
    num_tokens: int
    num_bytes_text: int
    """UTF-8 bytes of the text behind the tokens; of chat, those that models learn."""
    num_skipped: dict[str, int] = {}
    """Records left out, by reason."""
    num_targets: int | None = None
    """Tokens that models learn to write, of chat only."""


def read_group(
    batch: pa.Table, *, groups: list[list[SourceFile]], config: TokenizeConfig
) -> Iterator[pa.Table]:
    """The packs of a group that are no shards yet, one row each."""
    group = batch["group"][0].as_py()
    num_packs = 0
    for pack in read_packs(groups[group], config.form, config.shard_mb << 20):
        num_packs += 1
        if read_receipt(config.out, pack_name(group, pack.number), PackReceipt) is None:
            yield to_table(group, pack)
    write_receipt(config.out, group_name(group), GroupReceipt(num_packs=num_packs))


def to_table(group: int, pack: Pack) -> pa.Table:
    return pa.table(
        {
            "group": [group],
            "pack": [pack.number],
            "doc_ids": pa.array([pack.doc_ids], pa.large_list(pa.uint64())),
            "texts": pa.array([pack.texts], pa.large_list(pa.large_string())),
            "num_bytes": [pack.num_bytes],
            "num_skipped": [json.dumps(pack.num_skipped)],
        }
    )


class ShardWriter:
    """Encodes packs and publishes each as a shard with its receipt; one per worker."""

    def __init__(self, config: TokenizeConfig, engine: Engine) -> None:
        self._out = config.out
        self._tokenizer = Tokenizer(storage.local_copy(config.tokenizer), engine=engine)
        self._chat = _chat_tokenizer(config, self._tokenizer)

    def __call__(self, batch: pa.Table) -> pa.Table:
        row = batch.drop_columns("texts").to_pylist()[0]
        texts = (text.as_py() for text in batch["texts"][0].values)  # each fresh in the cache
        num_bytes, targets = row["num_bytes"], None
        if self._chat is None:
            documents = [self._tokenizer.encode(text) for text in texts]
        else:
            chats = [self._chat.encode(json.loads(text)) for text in texts]
            documents = [chat.tokens_L for chat in chats]
            targets = [chat.is_target_L for chat in chats]
            num_bytes = sum(chat.num_target_bytes for chat in chats)
        tokens = documents_to_batch(row["doc_ids"], documents, self._tokenizer.vocab_size, targets)
        receipt = _publish_shard(
            self._out,
            pack_name(row["group"], row["pack"]),
            tokens,
            num_bytes_text=num_bytes,
            num_skipped=json.loads(row["num_skipped"]),
            num_targets=None if targets is None else sum(int(part.sum()) for part in targets),
        )
        return pa.table({"num_tokens": [receipt.num_tokens]})


def _chat_tokenizer(config: TokenizeConfig, tokenizer: Tokenizer) -> ChatTokenizer | None:
    if config.chat_template is None:
        return None
    path = storage.local_copy(config.tokenizer)
    return ChatTokenizer(tokenizer, path, read_template(config.chat_template))


def convert_group(
    row: dict[str, int], *, groups: list[list[SourceFile]], config: TokenizeConfig
) -> dict[str, int]:
    """A group of tokenized files as shards."""
    group = row["number"]
    tokenizer = Tokenizer(storage.local_copy(config.tokenizer))
    packs = read_token_packs(
        groups[group],
        config.token_form,
        config.shard_mb << 20,
        separator_id=tokenizer.separator_id(config.separator),
        bytes_V=tokenizer.bytes_of_tokens(),
    )
    num_packs = num_tokens = 0
    for pack in packs:
        tokens = documents_to_batch(pack.doc_ids, pack.documents, tokenizer.vocab_size)
        name = pack_name(group, pack.number)
        receipt = _publish_shard(config.out, name, tokens, num_bytes_text=pack.num_bytes)
        num_tokens += receipt.num_tokens
        num_packs += 1
    write_receipt(config.out, group_name(group), GroupReceipt(num_packs=num_packs))
    return {"num_tokens": num_tokens}


def _publish_shard(
    out: str,
    name: str,
    tokens: pa.RecordBatch,
    *,
    num_bytes_text: int,
    num_skipped: dict[str, int] | None = None,
    num_targets: int | None = None,
) -> PackReceipt:
    """Write a shard, then its receipt."""
    receipt = PackReceipt(
        shard=write_shard(out, f"{name}.arrow", tokens),
        num_tokens=len(tokens.column("tokens").values),
        num_bytes_text=num_bytes_text,
        num_skipped=num_skipped or {},
        num_targets=num_targets,
    )
    write_receipt(out, name, receipt)
    return receipt


def group_name(group: int) -> str:
    return f"group-{group:05d}"


def pack_name(group: int, pack: int) -> str:
    return f"shard-{group:05d}-{pack:05d}"
