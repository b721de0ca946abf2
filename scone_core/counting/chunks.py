"""grouped records <-> chunk files: a reader takes some groups of all chunks, one slice of each.

A chunk file is little-endian. It has six int64 (first token, groups, records, `sorted_from`, bytes
of a record's high part, block size or 0), the starts of its groups, the column of low words and the
column of high parts. A column is raw, or it consists of blocks of `block` records: first the ends
of the blocks in bytes, then each block as zstd over the differences of its records (4 bytes per
record of sorted English, instead of 8). Groups of at least `sorted_from` records are sorted, so a
reader can take a part of one.

Shapes: G groups, R records.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import ArtifactError
from scone_core.counting.one_scan import Groups
from scone_core.counting.records import Records

HEADER_WORDS = 6
BLOCK = 1 << 16
"""Records of a compressed block."""
_CODEC = pa.Codec("zstd", compression_level=1)


def write_chunk(path: str, groups: Groups, *, sorted_from: int, block: int = 0) -> int:
    """Publish groups as a chunk file, its columns raw or in compressed blocks of `block` records.

    Returns:
        Size in bytes.
    """
    low_R, high_R = groups.records
    high_bytes = 0 if high_R is None else high_R.itemsize
    num_groups = len(groups.starts_G1) - 1
    header = [groups.first_token, num_groups, len(low_R), sorted_from, high_bytes, block]

    def write(file: Path) -> None:
        with open(file, "wb") as sink:
            np.array(header, np.int64).tofile(sink)
            groups.starts_G1.tofile(sink)
            for column_R in groups.records.columns:
                _write_column(sink, column_R, block)

    return storage.write_unhashed(path, write)


def _write_column(sink: BinaryIO, column_R: np.ndarray, block: int) -> None:
    if not block:
        column_R.tofile(sink)
        return
    blocks = [_compress(column_R[i : i + block]) for i in range(0, len(column_R), block)]
    np.cumsum([0, *map(len, blocks)], dtype=np.int64).tofile(sink)
    for data in blocks:
        sink.write(data)


def _compress(column_R: np.ndarray) -> pa.Buffer:
    steps_R = np.diff(column_R, prepend=column_R.dtype.type(0))
    planes = steps_R.view(np.uint8).reshape(len(steps_R), -1).T
    return _CODEC.compress(np.ascontiguousarray(planes))


def _decompress(data: pa.Buffer, num: int, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(_CODEC.decompress(data, num * dtype.itemsize), np.uint8)
    steps_R = np.ascontiguousarray(planes.reshape(dtype.itemsize, num).T).view(dtype)[:, 0]
    return np.cumsum(steps_R, dtype=dtype)


@dataclass(frozen=True)
class Chunk:
    """A chunk file. Each call reads only the part of the file that it returns."""

    path: str

    @cached_property
    def _file(self) -> pa.NativeFile:
        filesystem, inner = storage.resolve(self.path)
        try:
            return filesystem.open_input_file(inner)
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{self.path}: scratch file is gone; start the count stage again"
            ) from error

    @cached_property
    def _header(self) -> list[int]:
        return self._read(0, HEADER_WORDS, np.dtype(np.int64)).tolist()

    @property
    def num_records(self) -> int:
        return self._header[2]

    @property
    def sorted_from(self) -> int:
        """Groups of at least this many records are sorted."""
        return self._header[3]

    def starts(self, first_token: int, last_token: int) -> np.ndarray:
        """Where the groups of the tokens `first_token` to `last_token - 1` start, and where the
        last of them ends: int64 [last_token - first_token + 1].
        """
        offset = (HEADER_WORDS + first_token - self._header[0]) * 8
        return self._read(offset, last_token - first_token + 1, np.dtype(np.int64))

    def records(self, first: int, last: int) -> Records:
        """The records `first` to `last - 1`.

        Raises:
            ArtifactError: the file is missing or truncated.
        """
        _, num_groups, num_records, _, high_bytes, block = self._header
        place = (HEADER_WORDS + num_groups + 1) * 8
        read = self._read_blocks if block else self._read_raw
        low_R = read(place, first, last, np.dtype(np.uint64))
        if not high_bytes:
            return Records(low_R)
        place = self._column_end(place) if block else place + num_records * 8
        return Records(low_R, read(place, first, last, np.dtype(f"u{high_bytes}")))

    def find(self, first: int, last: int, value: int) -> int:
        """Where `value` is, or would be, among the sorted records `first` to `last - 1`."""
        return bisect_left(range(first, last), value, key=self.value) + first

    def value(self, i: int) -> int:
        return self.records(i, i + 1).value(0)

    def _read_raw(self, place: int, first: int, last: int, dtype: np.dtype) -> np.ndarray:
        return self._read(place + first * dtype.itemsize, last - first, dtype)

    def _read_blocks(self, place: int, first: int, last: int, dtype: np.dtype) -> np.ndarray:
        _, _, num_records, _, _, block = self._header
        if first == last:
            return np.empty(0, dtype)
        begin, end = first // block, -(-last // block)
        bounds = self._read(place + begin * 8, end - begin + 1, np.dtype(np.int64))
        content = place + (self._num_blocks + 1) * 8
        parts = []
        for block_index, (low, high) in enumerate(zip(bounds[:-1], bounds[1:], strict=True), begin):
            data = self._file.read_at(int(high - low), content + int(low))
            num = min(block, num_records - block_index * block)
            parts.append(_decompress(data, num, dtype))
        return np.concatenate(parts)[first - begin * block : last - begin * block]

    @property
    def _num_blocks(self) -> int:
        return -(-self._header[2] // self._header[5])

    def _column_end(self, place: int) -> int:
        content = place + (self._num_blocks + 1) * 8
        return content + int(self._read(content - 8, 1, np.dtype(np.int64))[0])

    def _read(self, offset: int, num: int, dtype: np.dtype) -> np.ndarray:
        data = self._file.read_at(num * dtype.itemsize, offset)
        if len(data) != num * dtype.itemsize:
            raise ArtifactError(f"{self.path}: truncated scratch file; delete it and start again")
        return np.frombuffer(data, dtype)
