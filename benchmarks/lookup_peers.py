"""What else finds rows: a Python dictionary, LMDB (the paper's store), page faults, fio.

Shapes: B positions of a text, D width.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from benchmarks.lookup_data import MAX_N, NUM_ROWS, Data
from scone_core.table.export import ngram_keys

TOKEN_BYTES = 2


def python_dict(data: Data) -> dict[bytes, int]:
    """n-gram -> id, all f-grams."""
    keys = ngram_keys(data.tokens_SK, data.n_S, 1 << 16)
    return dict(zip(keys, range(len(keys)), strict=True))


def match_in_dict(ids: dict[bytes, int], text: bytes, ends_B: list[int]) -> list[int]:
    """The longest f-gram that ends at each byte position of a big-endian text."""
    found = []
    for end in ends_B:
        for n in range(MAX_N, 1, -1):
            fgram_id = ids.get(text[end - n * TOKEN_BYTES : end])
            if fgram_id is not None:
                found.append(fgram_id)
                break
        else:
            found.append(-1)
    return found


class Lmdb:
    """The store of the paper, read as its documentation advises: one transaction, no copies."""

    def __init__(self, folder: str) -> None:
        self._store = lmdb.open(folder, readonly=True, lock=False, readahead=False)
        self._transaction = self._store.begin(buffers=True)

    def match_rows(self, text: bytes, ends_B: list[int], out_BD: np.ndarray) -> list[bool]:
        """Copy the row of the longest f-gram that ends at each position, if there is one."""
        get, found = self._transaction.get, []
        for b, end in enumerate(ends_B):
            row = None
            for n in range(MAX_N, 1, -1):
                row = get(text[end - n * TOKEN_BYTES : end])
                if row is not None:
                    out_BD[b] = np.frombuffer(row, np.uint16)
                    break
            found.append(row is not None)
        return found

    def rows(self, keys_M: list[bytes], out_MD: np.ndarray) -> None:
        for m, key in enumerate(keys_M):
            out_MD[m] = np.frombuffer(self._transaction.get(key), np.uint16)

    def close(self) -> None:
        self._transaction.abort()
        self._store.close()


def lmdb_bytes_per_row(folder: str) -> float:
    return Path(folder, "data.mdb").stat().st_blocks * 512 / NUM_ROWS


def fio_rows_per_s(files: list[str], *, queue_depth: int, seconds: int = 2) -> float | None:
    """Random 4 KiB direct reads per second of these files; None without fio."""
    if shutil.which("fio") is None:
        print("fio: skipped (Debian's package fio)")
        return None
    options = {
        "name": "rows",
        "filename": ":".join(files),
        "rw": "randread",
        "bs": "4k",
        "direct": "1",
        "ioengine": "io_uring",
        "iodepth": str(queue_depth),
        "runtime": str(seconds),
        "time_based": "1",
        "output-format": "json",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    result = subprocess.run(
        ["fio", "--readonly", *words], capture_output=True, text=True, check=True
    )
    report: dict[str, Any] = json.loads(result.stdout)
    return float(report["jobs"][0]["read"]["iops"])
