"""Laws of tokenized inputs: all formats give the same documents, and nothing is lost silently."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scone_core.corpus import token_files
from scone_core.corpus.input_files import TOKEN_SUFFIXES, find_files
from scone_core.corpus.token_files import TokenFormat, TokenPack, read_token_packs

SEPARATOR = 0
VOCAB_SIZE = 1000
DOCUMENTS = [[5, 6, 7], [999], [3] * 50, [1, 2]]

Documents = list[list[int]]


def flat(documents: Documents) -> np.ndarray:
    return np.array([t for document in documents for t in (*document, SEPARATOR)], np.uint16)


def write_parquet(folder: Path, documents: Documents) -> None:
    pq.write_table(pa.table({"input_ids": documents}), folder / "a.parquet", row_group_size=2)


def write_packed_parquet(folder: Path, documents: Documents) -> None:
    """Rows of a language model's data set: several documents in one, separators between."""
    pq.write_table(pa.table({"input_ids": [flat(documents)]}), folder / "a.parquet")


def write_arrow(folder: Path, documents: Documents) -> None:
    table = pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32()))})
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as sink:
        sink.write_table(table, max_chunksize=3)


def write_npy(folder: Path, documents: Documents) -> None:
    np.save(folder / "a.npy", flat(documents))


def write_raw_npy(folder: Path, documents: Documents) -> None:
    """Dolma names a flat array .npy and writes no header."""
    flat(documents).tofile(folder / "a.npy")


def write_nanogpt(folder: Path, documents: Documents) -> None:
    flat(documents).tofile(folder / "a.bin")


def write_megatron(folder: Path, documents: Documents) -> None:
    """Each document is two sequences, its tokens and its separator: bounds count sequences."""
    flat(documents).tofile(folder / "a.bin")
    lengths = np.array([n for document in documents for n in (len(document), 1)], np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) * 2
    bounds = np.arange(0, len(lengths) + 1, 2, dtype=np.int64)
    head = token_files.MEGATRON_MAGIC + np.array([1], np.int64).tobytes() + bytes([8])
    counts = np.array([len(lengths), len(bounds)], np.int64)
    parts = [counts, lengths, starts, bounds]
    (folder / "a.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))


WRITERS = [
    write_parquet,
    write_packed_parquet,
    write_arrow,
    write_npy,
    write_raw_npy,
    write_nanogpt,
    write_megatron,
]


def read(
    folder: Path, *, pack_bytes: int = 1 << 20, vocab_size: int = VOCAB_SIZE
) -> list[TokenPack]:
    return list(
        read_token_packs(
            find_files((str(folder),), TOKEN_SUFFIXES),
            TokenFormat(),
            pack_bytes,
            separator_id=SEPARATOR,
            bytes_V=np.full(vocab_size, 2),
        )
    )


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_every_format_gives_the_same_documents(
    tmp_path: Path, write: Callable[[Path, Documents], None]
) -> None:
    write(tmp_path, DOCUMENTS)
    packs = read(tmp_path, pack_bytes=10)
    assert [len(pack.documents) for pack in packs] == [3, 1]
    assert [d.tolist() for pack in packs for d in pack.documents] == DOCUMENTS
    assert [doc_id for pack in packs for doc_id in pack.doc_ids] == [0, 1, 2, 3]
    assert sum(pack.num_bytes for pack in packs) == 2 * sum(map(len, DOCUMENTS))


@given(
    stream=st.lists(st.integers(0, 3), max_size=40),
    block=st.integers(1, 7),
)
def test_documents_end_at_separators_wherever_blocks_end(stream: list[int], block: int) -> None:
    blocks = [np.array(stream[i : i + block]) for i in range(0, len(stream), block)]
    rows = [token_files.Row(tokens, begins=i == 0) for i, tokens in enumerate(blocks)]
    found = [document.tolist() for document in token_files.split_rows(rows, SEPARATOR)]
    text = "".join(map(str, stream)).split("0")
    assert found == [[int(token) for token in part] for part in text if part]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_ids_of_another_vocabulary_are_refused(
    tmp_path: Path, write: Callable[[Path, Documents], None]
) -> None:
    write(tmp_path, DOCUMENTS)
    with pytest.raises(ValueError, match=r"document 1: token id 999, .* ids below 999; give"):
        read(tmp_path, vocab_size=999)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parquet", b"junk", "damaged"),
        ("a.arrow", b"junk", "damaged"),
        ("a.bin", b"abc", "3 bytes are no flat array of uint16"),
        ("a.npy", b"abc", "3 bytes are no flat array of uint16"),
    ],
)
def test_a_damaged_file_names_itself(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: .*{words}"):
        read(tmp_path)


def test_tokens_that_are_no_ids_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([0.5]))
    with pytest.raises(ValueError, match=r"a\.npy: tokens of type float64"):
        read(tmp_path)
    np.save(tmp_path / "a.npy", np.array([3, -1]))
    with pytest.raises(ValueError, match=r"a\.npy: token id -1 < 0"):
        read(tmp_path)


def test_a_file_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [[1]]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"no column='input_ids' \(found \['ids'\]\)"):
        read(tmp_path)
