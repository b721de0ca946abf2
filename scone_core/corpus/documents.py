"""documents (JSONL, Parquet, text) -> packs of texts: read, check and split, and count every record
that is left out.
"""

import gzip
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.corpus.input_files import TEXT_SUFFIXES, SourceFile, kind_of

_PLACE_BITS, _PIECE_BITS = 40, 12


class DocumentFormat(Frozen):
    """How records are read from files and cut into documents."""

    text_field: str = "text"
    """Column or JSON key that holds the text; for chat the list of messages, each with role and
    content."""
    id_field: str = "id"
    """Column or JSON key that names a record; where absent the name is `<file>:<place>`: the byte
    at which its line begins, or its row of a Parquet file."""
    split: Literal["all", "train", "validation"] = "all"
    """Every document is cut at line ends into blocks of at least `block_chars`; one block in
    `validation_one_in`, chosen by a hash of record and block number, is validation. Runs of blocks
    of the same kind stay one document."""
    block_chars: int = 8000
    validation_one_in: int = 50
    max_record_mb: int = 16
    """A longer record is a bad record: it is nearly always a broken line ending."""
    bad_records: Literal["fail", "skip"] = "fail"
    """Invalid JSON, no text, invalid UTF-8, too long: stop, or leave out, count and report."""


class BadRecord(ValueError):
    """A record that cannot become a document; `reason` is its class in the report."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason, self.message = reason, message

    def __str__(self) -> str:
        return self.message


class Document(NamedTuple):
    doc_id: int
    text: str


@dataclass
class Pack:
    """Consecutive documents that become one shard."""

    number: int = 0
    doc_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_bytes: int = 0
    """UTF-8 bytes of the texts."""
    num_skipped: dict[str, int] = field(default_factory=dict)
    """Bad records left out, by reason."""

    def add(self, item: Document | BadRecord) -> None:
        if isinstance(item, BadRecord):
            self.num_skipped[item.reason] = self.num_skipped.get(item.reason, 0) + 1
            return
        self.doc_ids.append(item.doc_id)
        self.texts.append(item.text)
        self.num_bytes += len(item.text.encode())


def read_packs(
    sources: Iterable[SourceFile], form: DocumentFormat, pack_bytes: int
) -> Iterator[Pack]:
    """Stream files as packs of about `pack_bytes` of text; memory holds one pack and one record.

    Raises:
        BadRecord: names the file, the record and the remedy, when `form.bad_records` is "fail".
    """
    pack = Pack()
    for source in sources:
        for item in read_documents(source, form):
            pack.add(item)
            if pack.num_bytes >= pack_bytes:
                yield pack
                pack = Pack(pack.number + 1)
    if pack.texts or pack.num_skipped:
        yield pack


def read_documents(source: SourceFile, form: DocumentFormat) -> Iterator[Document | BadRecord]:
    """The documents of one file in order; a bad record is yielded or raised as `form.bad_records`
    says.
    """
    for record in _records(source, form):
        try:
            record_id, text = record.read()
        except BadRecord as error:
            if form.bad_records == "fail":
                remedy = "mend it, or leave such records out with --form.bad-records skip"
                message = f"{source.path}, {record.unit} {record.place}: {error}; {remedy}"
                raise BadRecord(error.reason, message) from error
            yield error
            continue
        name = record_id or f"{source.name}:{record.place}"
        for piece, document in split_document(name, text, form):
            yield Document(document_id(source, record.number + piece), document)


def split_document(record_id: str, text: str, form: DocumentFormat) -> Iterator[tuple[int, str]]:
    """The documents that a record gives for `form.split`, with the number of its first block."""
    if form.split == "all":
        yield 0, text
        return
    run: list[str] = []
    start = 0
    for number, block in enumerate(_blocks(text, form.block_chars)):
        digest = hashlib.sha256(f"{record_id}:{number}".encode()).hexdigest()
        is_validation = int(digest, 16) % form.validation_one_in == 0
        if is_validation == (form.split == "validation"):
            start = start if run else number
            run.append(block)
        elif run:
            yield start, "".join(run)
            run = []
    if run:
        yield start, "".join(run)


def _blocks(text: str, block_chars: int) -> Iterator[str]:
    block: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        block.append(line)
        size += len(line)
        if size >= block_chars:
            yield "".join(block)
            block, size = [], 0
    if block:
        yield "".join(block)


def document_id(source: SourceFile, number: int) -> int:
    """File number and place in the file in one uint64, so that every document can be traced to its
    source.
    """
    if number >> _PLACE_BITS:
        raise ValueError(f"{source.path}: too large for document ids; split the file")
    return source.number << _PLACE_BITS | number


def file_number(doc_ids: np.ndarray) -> np.ndarray:
    """The numbers, in name order, of the files that documents with these ids come from."""
    return doc_ids >> np.uint64(_PLACE_BITS)


class Record(NamedTuple):
    """A record that is yet to be checked, so that the caller decides what a bad one means."""

    unit: Literal["byte", "row"]
    place: int
    """Where it is in its file, in `unit`s."""
    number: int
    """Id of its first block within the file; the next ones follow."""
    read: Callable[[], tuple[str | None, str]]
    """Gives (name, text) or raises BadRecord."""


def _records(source: SourceFile, form: DocumentFormat) -> Iterator[Record]:
    kind = kind_of(source.name)
    if kind is None:
        raise ValueError(
            f"{source.path}: unknown kind of file; one of {', '.join(TEXT_SUFFIXES)} (.gz, .zst)"
        )
    suffix, compression = kind
    if suffix == ".parquet":
        yield from _parquet_records(source, form)
        return
    with storage.open_input(source.path, offset=max(source.begin - 1, 0)) as raw:
        stream = _decompress(raw, compression)
        try:
            if suffix == ".txt":
                content = stream.read((form.max_record_mb << 20) + 1)
                yield Record("byte", 0, 0, lambda: (None, _decode(content, form)))
            else:
                yield from _json_records(stream, source, form)
        except (OSError, EOFError, zstandard.ZstdError) as error:
            raise ValueError(f"{source.path}: damaged {compression} file: {error}") from error


def _decompress(raw: pa.NativeFile, compression: str) -> io.BufferedReader:
    if compression == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)
    if compression == ".zst":
        return io.BufferedReader(
            zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True), 1 << 20
        )
    return io.BufferedReader(raw, 1 << 20)


def _json_records(
    stream: io.BufferedReader, source: SourceFile, form: DocumentFormat
) -> Iterator[Record]:
    """The lines that begin in the source's part of its file; the stream begins one byte before."""
    limit = form.max_record_mb << 20
    place = max(source.begin - 1, 0)
    if source.begin:  # the end of the line that is there belongs to the part before
        place += _skip_line(stream)
    while source.end is None or place < source.end:
        line = stream.readline(limit + 1)
        if not line:
            return
        size = len(line)
        if len(line) > limit and not line.endswith(b"\n"):
            size += _skip_line(stream)
        if line.strip():
            yield Record("byte", place, place, lambda line=line: _parse_json(line, form))
        place += size


def _skip_line(stream: io.BufferedReader) -> int:
    """Read past the next line end; the number of bytes that were read."""
    size = 0
    while part := stream.readline(1 << 20):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _parse_json(line: bytes, form: DocumentFormat) -> tuple[str | None, str]:
    text = _decode(line, form)
    try:
        record = json.loads(text)
    except ValueError as error:
        raise BadRecord("invalid_json", f"not JSON ({error})") from error
    value = record.get(form.text_field) if isinstance(record, dict) else None
    if isinstance(value, list):  # chat messages travel as JSON
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise BadRecord("no_text", f"no string under text_field={form.text_field!r} (found {keys})")
    return _name_of(record.get(form.id_field)), value


def _decode(content: bytes, form: DocumentFormat) -> str:
    if len(content) > form.max_record_mb << 20:
        raise BadRecord("too_long", f"longer than max_record_mb={form.max_record_mb}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord("invalid_utf8", f"invalid UTF-8 at byte {error.start}") from error


def _parquet_records(source: SourceFile, form: DocumentFormat) -> Iterator[Record]:
    filesystem, inner = storage.resolve(source.path)
    try:
        file = pq.ParquetFile(inner, filesystem=filesystem, buffer_size=1 << 20, pre_buffer=False)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{source.path}: damaged Parquet file: {error}") from error
    names = file.schema_arrow.names
    if form.text_field not in names:
        raise BadRecord(
            "no_text", f"{source.path}: no column text_field={form.text_field!r} (found {names})"
        )
    columns = [name for name in (form.id_field, form.text_field) if name in names]
    groups = range(source.begin, source.end or file.num_row_groups)
    row = sum(file.metadata.row_group(number).num_rows for number in range(source.begin))
    for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=columns):
        binary = batch.column(form.text_field).cast(pa.large_binary())
        ids = batch.column(form.id_field) if form.id_field in columns else [None] * batch.num_rows
        for record_id, content in zip(ids, binary, strict=True):
            read = partial(_parquet_record, record_id, content, form)
            yield Record("row", row, row << _PIECE_BITS, read)
            row += 1


def _parquet_record(
    record_id: Any, content: pa.Scalar, form: DocumentFormat
) -> tuple[str | None, str]:
    if not content.is_valid:
        raise BadRecord("no_text", f"null in text_field={form.text_field!r}")
    return _name_of(record_id.as_py() if record_id is not None else None), _decode(
        content.as_py(), form
    )


def _name_of(value: object) -> str | None:
    return None if value is None else str(value)
