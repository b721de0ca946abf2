"""Laws of show_fgrams: its tables say what the artifact holds."""

import json
from pathlib import Path

import pytest

from ray_jobs.count import fgram_grow
from ray_jobs.count.fgram_grow import GrowConfig
from scone_core.artifacts.manifests import ArtifactError
from scone_core.fgrams.inspection import Compare, Coverage, Lookup, Top, render
from tests.builders.corpora import (
    brute_force,
    rank,
    text_of,
    write_fgrams,
    write_tokens,
    zipf_documents,
)

DOCUMENTS = zipf_documents(num_documents=30, mean_length=300, vocab_size=60, seed=5)
COUNTS = brute_force(DOCUMENTS, max_n=5, min_count=2)
RANKED = rank(COUNTS)[:900]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    folder = str(tmp_path / "fgrams")
    write_fgrams(folder, DOCUMENTS, num_fgrams=900)
    return folder


def test_top_lists_the_most_frequent_of_each_length(folder: str) -> None:
    tables = Top(fgrams=folder, num=3).tables()
    for n in range(2, 6):
        expected = [
            {"rank": number, "count": COUNTS[fgram], "text": text_of(fgram)}
            for number, fgram in enumerate(RANKED)
            if len(fgram) == n
        ]
        assert tables[f"n = {n}"].to_dicts() == expected[:3]


def test_lookup_lists_every_f_gram_of_a_text_and_marks_the_longest(folder: str) -> None:
    document = DOCUMENTS[3][:40]
    expected = []
    for end in range(1, len(document) + 1):
        endings = [tuple(document[end - n : end]) for n in range(2, min(5, end) + 1)]
        found = [ending for ending in endings if ending in RANKED]
        expected += [
            (end - 1, RANKED.index(fgram), COUNTS[fgram], text_of(fgram), fgram == found[-1])
            for fgram in found
        ]
    (table,) = Lookup(fgrams=folder, text=text_of(document)).tables().values()
    assert table.select("position", "rank", "count", "text", "used").rows() == expected


def test_ranks_of_a_set_that_grew_are_those_of_the_newer_count(folder: str, tmp_path: Path) -> None:
    few, grown = str(tmp_path / "few"), str(tmp_path / "grown")
    write_fgrams(few, DOCUMENTS[:6], num_fgrams=100)
    fgram_grow.run(GrowConfig(fgrams=few, counted=folder, out=grown))
    expected, found = (Top(fgrams=each, num=30).tables() for each in (folder, grown))
    for title, table in expected.items():
        assert found[title].select("rank", "text").equals(table.select("rank", "text"))
    text = text_of(DOCUMENTS[3][:40])
    (expected_table,), (found_table,) = (
        Lookup(fgrams=each, text=text).tables().values() for each in (folder, grown)
    )
    of_both = found_table.join(expected_table, on=["position", "n"], suffix="_expected")
    assert len(of_both) == len(expected_table) > 40
    assert of_both["rank"].equals(of_both["rank_expected"])


def test_lookup_of_a_text_without_f_grams_is_empty(folder: str) -> None:
    for text in ("", "t59 t58 t57"):
        (table,) = Lookup(fgrams=folder, text=text).tables().values()
        assert table.is_empty()


def test_comparison_covers_a_sample_with_both_sets(folder: str, tmp_path: Path) -> None:
    few, tokens = str(tmp_path / "few"), str(tmp_path / "tokens")
    write_fgrams(few, DOCUMENTS, num_fgrams=100)
    write_tokens(tokens, DOCUMENTS)
    tables = Compare(first=folder, second=few, tokens=tokens).tables()
    many_row, few_row = tables["coverage of the sample"].to_dicts()
    bigrams = sum(COUNTS[fgram] for fgram in RANKED[:100] if len(fgram) == 2)
    assert few_row["hit_rate"] == pytest.approx(bigrams / sum(map(len, DOCUMENTS)))
    assert many_row["mean_match_length"] > few_row["mean_match_length"] > 1


def test_coverage_sets_hit_rate_against_bytes(folder: str, tmp_path: Path) -> None:
    held_out = zipf_documents(num_documents=5, mean_length=300, vocab_size=60, seed=6)
    write_tokens(str(tmp_path / "held_out"), held_out)
    options = {"fgrams": folder, "tokens": str(tmp_path / "held_out"), "bytes_per_row": 10**6}
    rows = Coverage(**options).tables()["coverage"].to_dicts()
    assert [row["table_mb"] for row in rows] == [row["num_fgrams"] for row in rows]
    assert rows[-1]["num_fgrams"] == 900
    rates = [row["hit_rate"] for row in rows]
    assert rates == sorted(rates)
    assert 0 <= rates[0] < rates[-1] < 1


def test_a_sample_of_another_tokenizer_is_refused(folder: str, tmp_path: Path) -> None:
    tokens = str(tmp_path / "tokens")
    write_tokens(tokens, DOCUMENTS, vocab_size=99)
    with pytest.raises(ArtifactError, match="tokenizer of"):
        Compare(first=folder, second=folder, tokens=tokens).tables()


def test_json_holds_the_same_rows_as_the_tables(folder: str) -> None:
    tables = Top(fgrams=folder, num=3).tables()
    rows = {title: table.to_dicts() for title, table in tables.items()}
    assert json.loads(render(tables, "json")) == rows
    assert f'"{text_of(RANKED[0])}"' in render(tables, "table")
