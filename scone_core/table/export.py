"""embeddings/v1 -> other stores: LMDB (the paper's), safetensors, .npy files.

Shapes: S rows of the table, N rows of one shard, M rows of one block, K max_n, D width.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import (
    ArtifactError,
    FGramsManifest,
    load_manifest,
    require_equal,
)
from scone_core.fgrams.fgram_shards import depth_first_order, read_fgrams
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.row_formats import STORAGE, as_tensor, split_records

ROWS_PER_TRANSACTION = 1 << 14


def export_safetensors(table: EmbeddingTable, out: str) -> list[str]:
    """One file per shard, of the same name: the tensor `embedding`, or `values` and `scale` of a
    quantised table; `first_id` and `row_format` in its metadata. Returns the files' names.
    """
    names = []
    for number, shard in enumerate(table.manifest.shards):
        rows_NC = table.stored_shard(number)
        if STORAGE[table.row_format].quantised is None:
            tensors = {"embedding": as_tensor(rows_NC.copy())}  # torch wants writable memory
        else:
            values_ND, scale_N = split_records(rows_NC, table.row_format)
            tensors = {"values": values_ND, "scale": scale_N}
        metadata = {"first_id": str(shard.first_id), "row_format": table.row_format}
        names.append(f"{Path(shard.name).stem}.safetensors")

        def write(file: Path, tensors: Any = tensors, metadata: Any = metadata) -> None:
            save_file(tensors, file, metadata)

        storage.write_unhashed(storage.join(out, names[-1]), write)
    return names


def export_npy(table: EmbeddingTable, out: str) -> list[str]:
    """`embedding.npy` [S, D] for `np.load(..., mmap_mode="r")`, uint16 bits where rows are bf16;
    of a quantised table `values.npy` (int8, or the bits of e4m3 as uint8) and `scale.npy` [S].
    Returns the files' names.
    """
    shape, quantised = (table.num_rows, table.width), STORAGE[table.row_format].quantised
    if quantised is None:
        storage.write_unhashed(
            storage.join(out, "embedding.npy"),
            lambda file: _fill(file, table, shape, STORAGE[table.row_format].stored, slice(None)),
        )
        return ["embedding.npy"]
    values = np.dtype(np.int8 if table.row_format == "int8" else np.uint8)
    storage.write_unhashed(
        storage.join(out, "values.npy"),
        lambda file: _fill(file, table, shape, values, slice(4, None)),
    )
    storage.write_unhashed(
        storage.join(out, "scale.npy"),
        lambda file: _fill(file, table, shape[:1], np.dtype(np.float32), slice(4)),
    )
    return ["values.npy", "scale.npy"]


def _fill(
    file: Path, table: EmbeddingTable, shape: tuple[int, ...], dtype: np.dtype, columns: slice
) -> None:
    """Write some columns of all stored rows as one .npy file."""
    with open(file, "wb") as target:
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(target, header)
        for number in range(len(table.manifest.shards)):
            for block in _blocks(table.stored_shard(number)):
                np.ascontiguousarray(block[:, columns]).view(dtype).tofile(target)


def _blocks(rows_NC: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(rows_NC), ROWS_PER_TRANSACTION):
        yield rows_NC[first : first + ROWS_PER_TRANSACTION]


def export_lmdb(table: EmbeddingTable, fgrams: str, out: str) -> list[str]:
    """An LMDB environment in the folder `out`: `ngram_keys` -> stored row. Returns its file names.

    Keys are added in their order, which leaves no page half empty.

    Raises:
        ArtifactError: `fgrams` are not the table's, or `out` is not local.
        ValueError: the package `lmdb` is not installed.
    """
    manifest = load_manifest(FGramsManifest, fgrams)
    remedy = "give the f-grams that the table was precomputed for"
    found, expected = manifest.fingerprint, table.manifest.fgrams_fingerprint
    require_equal(f"fgrams={fgrams!r}: fingerprint", found, expected, remedy)
    if not storage.is_local(out):
        raise ArtifactError(f"out={out!r}: LMDB needs a local folder")
    tokens_SK, n_S, _ = read_fgrams(fgrams)
    return fill_lmdb(table, tokens_SK, n_S, out, vocab_size=manifest.vocab_size)


def fill_lmdb(
    table: EmbeddingTable, tokens_SK: np.ndarray, n_S: np.ndarray, out: str, *, vocab_size: int
) -> list[str]:
    """`export_lmdb` for f-grams with the ids 0 to S - 1.

    Raises:
        ValueError: the package `lmdb` is not installed.
    """
    lmdb, order_S = _lmdb(), depth_first_order(tokens_SK, n_S)
    room = 4 * (len(n_S) * table.manifest.bytes_per_row + (1 << 28))  # takes no disk until used
    Path(out).mkdir(parents=True, exist_ok=True)
    with lmdb.open(out, map_size=room, sync=False, metasync=False) as store:
        for first in range(0, len(order_S), ROWS_PER_TRANSACTION):
            ids_M = order_S[first : first + ROWS_PER_TRANSACTION]
            keys = ngram_keys(tokens_SK[ids_M], n_S[ids_M], vocab_size)
            with store.begin(write=True) as transaction:
                for key, row_C in zip(keys, table.stored(ids_M), strict=True):
                    transaction.put(key, row_C.tobytes(), append=True)
        store.sync(True)
    return ["data.mdb", "lock.mdb"]


def ngram_keys(tokens_MK: np.ndarray, n_M: np.ndarray, vocab_size: int) -> list[bytes]:
    """The tokens of each n-gram as big-endian uint16 (vocabularies up to 65,536 ids) or uint32."""
    dtype = np.dtype(">u2" if vocab_size <= 1 << 16 else ">u4")
    rows = np.ascontiguousarray(tokens_MK.astype(dtype)).view(np.uint8)
    sizes = (n_M.astype(np.int64) * dtype.itemsize).tolist()
    return [row.tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]


def _lmdb() -> Any:
    return import_extra("lmdb", needed_for="to='lmdb'", remedy="install scone[lmdb]")


def import_extra(package: str, *, needed_for: str, remedy: str) -> Any:
    """The module `package`.

    Raises:
        ValueError: it is not installed; names what needs it and the remedy.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{needed_for} needs the package {package} ({error}); {remedy}") from error
