"""Laws of reading: nothing is lost silently, the split is a partition, formats agree."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from scone_core.corpus.documents import BadRecord, DocumentFormat, Pack, read_packs, split_document
from scone_core.corpus.input_files import SourceFile, find_files, group_files, split_files

TEXTS = ["first\ndocument", "", "zwei — 🙂", "a" * 5000]


def read_all(
    folder: Path, form: DocumentFormat | None = None, pack_bytes: int = 1 << 20
) -> list[Pack]:
    return list(read_packs(find_files((str(folder),)), form or DocumentFormat(), pack_bytes))


def texts_of(packs: list[Pack]) -> list[str]:
    return [text for pack in packs for text in pack.texts]


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_every_format_gives_the_same_documents(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"corpus{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=2)
    else:
        compress = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
        path.write_bytes(compress.get(path.suffix, bytes)(jsonl(TEXTS)))
    assert texts_of(read_all(tmp_path)) == TEXTS


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"drei"))
    assert texts_of(read_all(tmp_path)) == ["one\ntwo\n", "drei"]


def test_packs_hold_every_document_once_and_ids_are_unique(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    (tmp_path / "b.jsonl").write_bytes(jsonl(TEXTS))
    packs = read_all(tmp_path, pack_bytes=10)
    assert texts_of(packs) == TEXTS + TEXTS
    assert [pack.number for pack in packs] == list(range(len(packs)))
    ids = [doc_id for pack in packs for doc_id in pack.doc_ids]
    assert sorted(set(ids)) == ids
    assert sum(pack.num_bytes for pack in packs) == sum(len(t.encode()) for t in TEXTS + TEXTS)


def test_groups_partition_the_files_in_order(tmp_path: Path) -> None:
    for number, size in enumerate([10, 10, 50, 10, 10, 10]):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
    files = find_files((str(tmp_path),))
    groups = group_files(files, 25)
    assert [file for group in groups for file in group] == files
    assert [len(group) for group in groups] == [2, 1, 2, 1]


@pytest.mark.parametrize("part_bytes", [1, 7, 19, 64, 1 << 20])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_parts_of_a_file_hold_its_documents_once_with_the_same_ids(
    tmp_path: Path, suffix: str, part_bytes: int
) -> None:
    """Whatever the byte at which a file is cut (ray-project/ray#48236)."""
    texts = [*TEXTS, "last"] * 3
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=2)
    else:
        (tmp_path / "a.jsonl").write_bytes(b"\n" + jsonl(texts).rstrip(b"\n"))
    files = find_files((str(tmp_path),))
    parts = split_files(files, part_bytes)
    whole, cut = (list(read_packs(found, DocumentFormat(), 1 << 20)) for found in (files, parts))
    assert texts_of(cut) == texts_of(whole) == texts
    assert cut[0].doc_ids == whole[0].doc_ids
    assert len(parts) > 1 or part_bytes == 1 << 20


@given(st.lists(st.text(alphabet="ab \n", max_size=60), max_size=8), st.integers(2, 4))
def test_train_and_validation_partition_every_document(parts: list[str], one_in: int) -> None:
    text = "\n".join(parts)
    pieces = {}
    for split in ("train", "validation"):
        form = DocumentFormat(split=split, block_chars=20, validation_one_in=one_in)
        for start, document in split_document("id", text, form):
            pieces[start] = document
    assert "".join(pieces[start] for start in sorted(pieces)) == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{not json}\n", "invalid_json"),
        (b'{"body": "x"}\n', "no_text"),
        (b'{"text": 7}\n', "no_text"),
        (b'["text"]\n', "no_text"),
        (b'{"text": "\xff"}\n', "invalid_utf8"),
        (b'{"text": "' + b"x" * (20 << 20) + b'"}\n', "too_long"),
    ],
)
def test_a_bad_record_stops_or_is_counted_and_never_lost(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["before"]) + content + jsonl(["after"]))
    with pytest.raises(BadRecord, match=r"a\.jsonl, byte 19: .*bad-records skip"):
        read_all(tmp_path)
    packs = read_all(tmp_path, DocumentFormat(bad_records="skip"))
    assert texts_of(packs) == ["before", "after"]
    assert packs[-1].num_skipped == {reason: 1}


def test_parquet_without_the_text_column_names_the_columns_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(BadRecord, match=r"text_field='text' \(found \['content'\]\)"):
        read_all(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_damaged_file_names_itself(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not what the name says")
    with pytest.raises(ValueError, match=f"{name}: damaged"):
        read_all(tmp_path)


def test_a_truncated_gzip_file_is_an_error_and_not_a_shorter_corpus(tmp_path: Path) -> None:
    whole = gzip.compress(jsonl([str(number) for number in range(10_000)]))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        read_all(tmp_path)


def test_missing_and_empty_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        find_files((str(tmp_path / "nowhere"),))
    with pytest.raises(ValueError, match=r"no \.jsonl"):
        find_files((str(tmp_path),))


def test_files_of_the_same_name_are_refused(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="share the name"):
        find_files((str(tmp_path / "x"), str(tmp_path / "y")))


def test_an_unknown_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x")
    with pytest.raises(ValueError, match="unknown kind"):
        list(read_packs([SourceFile(0, str(path), "a.csv")], DocumentFormat(), 1))


PEAK_OF_READING = """
import sys
from scone_core.corpus.documents import DocumentFormat, read_packs
from scone_core.corpus.input_files import find_files
for pack in read_packs(find_files((sys.argv[1],)), DocumentFormat(), 4 << 20):
    pass
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["VmHWM"].split()[0])
"""


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_memory_does_not_grow_with_the_size_of_a_file(tmp_path: Path, suffix: str) -> None:
    """A reader that loads the file whole fails by its size (ray-project/ray#46485): 24, 96 MB."""
    peaks = []
    for num_texts in (3000, 12_000):
        path = tmp_path / f"{num_texts}{suffix}"
        texts = [f"{number} " + "word " * 1600 for number in range(num_texts)]
        if suffix == ".jsonl":
            path.write_bytes(jsonl(texts))
        else:
            pq.write_table(pa.table({"text": texts}), path, compression="none")
        command = [sys.executable, "-c", PEAK_OF_READING, str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(result.stdout))
    assert peaks[1] < 1.2 * peaks[0]
