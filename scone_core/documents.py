"""documents (JSONL, Parquet, text) -> packs of texts: read, check, split, never lose a record
silently.
"""

import gzip
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import zstandard

from scone_core import storage
from scone_core.config import Frozen

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
COMPRESSIONS = ("", ".gz", ".zst")
_RECORD_BITS, _PIECE_BITS = 28, 12


class DocumentFormat(Frozen):
    """How records are read from files and cut into documents."""

    text_field: str = "text"
    """Column or JSON key that holds the text."""
    id_field: str = "id"
    """Column or JSON key that names a record; where absent the name is `<file>:<record number>`."""
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


@dataclass(frozen=True)
class SourceFile:
    """One input file: its number in name order, where it is, and its name relative to the input."""

    number: int
    path: str
    name: str


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


def find_files(inputs: tuple[str, ...]) -> list[SourceFile]:
    """The input files, in the order of their names: each input is a file or a folder (searched
    through).

    Raises:
        ValueError: an input does not exist or holds no file of a known kind, or two files share a
        name.
    """
    found: dict[str, str] = {}
    for path in inputs:
        for name, location in _files_of(path):
            if found.setdefault(name, location) != location:
                raise ValueError(f"inputs: {location} and {found[name]} share the name {name!r}")
    return [SourceFile(number, found[name], name) for number, name in enumerate(sorted(found))]


def group_files(files: list[SourceFile], group_bytes: int) -> list[list[SourceFile]]:
    """Neighbours in name order, at most `group_bytes` on disk; a larger file stands alone."""
    groups: list[list[SourceFile]] = []
    room = 0
    for file in files:
        size = storage.file_size(file.path) or 0
        if not groups or size > room:
            groups.append([])
            room = group_bytes
        groups[-1].append(file)
        room -= size
    return groups


def fingerprint_files(files: list[SourceFile]) -> dict[str, str]:
    """Relative name -> size and content hash of every raw input file."""
    return {
        file.name: f"{storage.file_size(file.path)}:{storage.sha256_of(file.path)}"
        for file in files
    }


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
    for number, read_record in enumerate(_records(source, form)):
        try:
            record_id, text = read_record()
        except BadRecord as error:
            if form.bad_records == "fail":
                remedy = "mend it, or leave such records out with --form.bad-records skip"
                message = f"{source.path}, record {number}: {error}; {remedy}"
                raise BadRecord(error.reason, message) from error
            yield error
            continue
        for piece, document in split_document(record_id or f"{source.name}:{number}", text, form):
            yield Document(_document_id(source.number, number, piece), document)


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


def _document_id(file: int, record: int, piece: int) -> int:
    """File, record and block number in one uint64, so that every document can be traced to its
    source.
    """
    if record >> _RECORD_BITS or piece >> _PIECE_BITS:
        raise ValueError(
            f"file {file}: record {record}, block {piece}: too many for one file; split the file"
        )
    return (file << _RECORD_BITS | record) << _PIECE_BITS | piece


def _files_of(path: str) -> Iterator[tuple[str, str]]:
    filesystem, inner = storage.resolve(path)
    info = filesystem.get_file_info(inner)
    if info.type == pafs.FileType.File:
        yield inner.rsplit("/", 1)[-1], path
        return
    if info.type == pafs.FileType.NotFound:
        raise ValueError(f"inputs: {path!r} does not exist")
    names = [
        entry.path.removeprefix(inner.rstrip("/") + "/")
        for entry in filesystem.get_file_info(pafs.FileSelector(inner, recursive=True))
        if entry.type == pafs.FileType.File and _kind_of(entry.path) is not None
    ]
    if not names:
        raise ValueError(f"inputs: no {', '.join(SUFFIXES)} file (also .gz, .zst) in {path!r}")
    yield from ((name, storage.join(path, name)) for name in names)


def _kind_of(name: str) -> tuple[str, str] | None:
    """(suffix, compression) of a file name; None when it is of no known kind."""
    for suffix in SUFFIXES:
        for compression in COMPRESSIONS:
            if name.endswith(suffix + compression):
                return suffix, compression
    return None


Record = Callable[[], tuple[str | None, str]]
"""Gives a record's (name, text) or raises BadRecord, so that the caller decides what a bad one
means.
"""


def _records(source: SourceFile, form: DocumentFormat) -> Iterator[Record]:
    kind = _kind_of(source.name)
    if kind is None:
        raise ValueError(
            f"{source.path}: unknown kind of file; one of {', '.join(SUFFIXES)} (.gz, .zst)"
        )
    suffix, compression = kind
    if suffix == ".parquet":
        yield from _parquet_records(source, form)
        return
    with storage.open_input(source.path) as raw:
        stream = _decompress(raw, compression)
        try:
            if suffix == ".txt":
                content = stream.read((form.max_record_mb << 20) + 1)
                yield lambda: (None, _decode(content, form))
            else:
                yield from _json_records(stream, form)
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


def _json_records(stream: io.BufferedReader, form: DocumentFormat) -> Iterator[Record]:
    limit = form.max_record_mb << 20
    while line := stream.readline(limit + 1):
        if len(line) > limit:
            while not line.endswith(b"\n") and (rest := stream.readline(limit)):
                line = line[: limit + 1] if not rest.endswith(b"\n") else line[:limit] + b" \n"
        if line.strip():
            yield lambda line=line: _parse_json(line, form)


def _parse_json(line: bytes, form: DocumentFormat) -> tuple[str | None, str]:
    text = _decode(line, form)
    try:
        record = json.loads(text)
    except ValueError as error:
        raise BadRecord("invalid_json", f"not JSON ({error})") from error
    if not isinstance(record, dict) or not isinstance(record.get(form.text_field), str):
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise BadRecord("no_text", f"no string under text_field={form.text_field!r} (found {keys})")
    return _name_of(record.get(form.id_field)), record[form.text_field]


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
        file = pq.ParquetFile(inner, filesystem=filesystem)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{source.path}: damaged Parquet file: {error}") from error
    names = file.schema_arrow.names
    if form.text_field not in names:
        raise BadRecord(
            "no_text", f"{source.path}: no column text_field={form.text_field!r} (found {names})"
        )
    columns = [name for name in (form.id_field, form.text_field) if name in names]
    for batch in file.iter_batches(batch_size=256, columns=columns):
        binary = batch.column(form.text_field).cast(pa.large_binary())
        ids = batch.column(form.id_field) if form.id_field in columns else [None] * batch.num_rows
        for record_id, content in zip(ids, binary, strict=True):
            yield lambda i=record_id, c=content: _parquet_record(i, c, form)


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
