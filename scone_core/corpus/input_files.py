"""paths of files and folders -> parts of input files: the units in which documents are read.

A large file is cut into parts that several workers read: JSONL at bytes (a line belongs to the part
in which it begins), Parquet at row groups. Compressed files, which can only be read from their
beginning, stay whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from scone_core.artifacts import storage

TEXT_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
TOKEN_SUFFIXES = (".parquet", ".arrow", ".npy", ".bin")
COMPRESSIONS = ("", ".gz", ".zst")


@dataclass(frozen=True)
class SourceFile:
    """An input file or a part of one: the file's number in name order, where it is, and its name
    relative to the input.
    """

    number: int
    path: str
    name: str
    begin: int = 0
    """First byte of the part, or first row group of a Parquet file."""
    end: int | None = None
    """Where the next part begins; None at the end of the file."""
    num_bytes: int = 0
    """Size of the part on disk; of a part of a Parquet file, an estimate."""


def find_files(
    inputs: tuple[str, ...], suffixes: tuple[str, ...] = TEXT_SUFFIXES
) -> list[SourceFile]:
    """The input files, in the order of their names: each input is a file or a folder (searched
    through).

    Raises:
        ValueError: an input does not exist or holds no file of a known kind, or two files share a
        name.
    """
    found: dict[str, str] = {}
    for path in inputs:
        for name, location in _files_of(path, suffixes):
            if found.setdefault(name, location) != location:
                raise ValueError(f"inputs: {location} and {found[name]} share the name {name!r}")
    return [
        SourceFile(number, found[name], name, num_bytes=storage.file_size(found[name]) or 0)
        for number, name in enumerate(sorted(found))
    ]


def split_files(files: list[SourceFile], part_bytes: int) -> list[SourceFile]:
    """The same files, those that can be cut in parts of about `part_bytes`."""
    return [part for file in files for part in _split(file, part_bytes)]


def group_files(files: list[SourceFile], group_bytes: int) -> list[list[SourceFile]]:
    """Neighbours in name order, at most `group_bytes` on disk; a larger one stands alone."""
    groups: list[list[SourceFile]] = []
    room = 0
    for file in files:
        if not groups or file.num_bytes > room:
            groups.append([])
            room = group_bytes
        groups[-1].append(file)
        room -= file.num_bytes
    return groups


def fingerprint_files(files: list[SourceFile]) -> dict[str, str]:
    """Relative name -> size and content hash of every raw input file."""
    return {file.name: f"{file.num_bytes}:{storage.sha256_of(file.path)}" for file in files}


def kind_of(name: str, suffixes: tuple[str, ...] = TEXT_SUFFIXES) -> tuple[str, str] | None:
    """(suffix, compression) of a file name; None when it is of no known kind."""
    for suffix in suffixes:
        for compression in COMPRESSIONS:
            if name.endswith(suffix + compression):
                return suffix, compression
    return None


def _split(file: SourceFile, part_bytes: int) -> Iterator[SourceFile]:
    if file.num_bytes <= part_bytes:
        yield file
    elif file.name.endswith((".jsonl", ".json")):
        for begin in range(0, file.num_bytes, part_bytes):
            end = begin + part_bytes if begin + part_bytes < file.num_bytes else None
            size = min(part_bytes, file.num_bytes - begin)
            yield replace(file, begin=begin, end=end, num_bytes=size)
    elif file.name.endswith(".parquet"):
        yield from _split_parquet(file, part_bytes)
    else:
        yield file


def _split_parquet(file: SourceFile, part_bytes: int) -> Iterator[SourceFile]:
    filesystem, inner = storage.resolve(file.path)
    try:
        metadata = pq.read_metadata(inner, filesystem=filesystem)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file.path}: damaged Parquet file: {error}") from error
    begin = size = 0
    share = file.num_bytes / max(metadata.num_rows, 1)
    for number in range(metadata.num_row_groups):
        size += round(metadata.row_group(number).num_rows * share)
        last = number + 1 == metadata.num_row_groups
        if size >= part_bytes or last:
            yield replace(file, begin=begin, end=None if last else number + 1, num_bytes=size)
            begin, size = number + 1, 0


def _files_of(path: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
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
        if entry.type == pafs.FileType.File and kind_of(entry.path, suffixes) is not None
    ]
    if not names:
        raise ValueError(f"inputs: no {', '.join(suffixes)} file (also .gz, .zst) in {path!r}")
    yield from ((name, storage.join(path, name)) for name in names)
