"""Laws of the tokenize stage: equal bytes however it runs, and bad input changes nothing."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_jobs.runtime.command_line import main
from ray_jobs.tokenize.config import TokenizeConfig
from ray_jobs.tokenize.tokenize_corpus import run
from scone_core.artifacts.folders import RECEIPTS
from scone_core.artifacts.manifests import MANIFEST, ArtifactError, TokensManifest, load_manifest
from scone_core.artifacts.shards import map_shard
from scone_core.corpus.token_shards import map_documents, validate_tokens
from scone_core.corpus.tokenizer import Tokenizer
from tests import BUNDLED
from tests.programs.stages import kill_when, run_script, snapshot

TOKENIZER = BUNDLED / "tokenizer.json"


def write_corpus(folder: Path, *, num_files: int = 4, num_records: int = 400) -> None:
    folder.mkdir()
    for file in range(num_files):
        lines = [
            json.dumps({"id": f"{file}-{i}", "text": f"Record {i} of {file}.\n" * (i % 100 + 200)})
            for i in range(num_records)
        ]
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")


def config_for(folder: Path, out: str, **changes: object) -> TokenizeConfig:
    config = TokenizeConfig(
        inputs=(str(folder / "corpus"),),
        tokenizer=str(TOKENIZER),
        out=str(folder / out),
        shard_mb=1,
    )
    return config.replace(**changes)


def arguments(config: TokenizeConfig) -> list[str]:
    return ["--inputs", *config.inputs, "--tokenizer", config.tokenizer, "--out", config.out]


def test_the_stage_writes_every_document_in_order(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    config = config_for(tmp_path, "tokens")
    manifest = run(config)
    assert validate_tokens(config.out) == manifest
    tokenizer = Tokenizer(TOKENIZER)
    texts = []
    for shard in manifest.shards:
        tokens_L, offsets_A1 = map_documents(config.out, shard)
        texts += [
            tokenizer.decode(tokens_L[a:b].tolist())
            for a, b in zip(offsets_A1[:-1], offsets_A1[1:], strict=True)
        ]
    files = sorted((tmp_path / "corpus").iterdir())
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert texts == [json.loads(line)["text"] for line in lines]


def test_bytes_do_not_depend_on_workers_or_the_order_of_inputs(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", num_records=20)
    files = [str(path) for path in sorted((tmp_path / "corpus").iterdir())]
    run(config_for(tmp_path, "one", num_tokenizers=1, inputs=files))
    run(config_for(tmp_path, "two", num_tokenizers=2, inputs=files[::-1]))
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


def documents_of(folder: str) -> list[list[int]]:
    manifest = load_manifest(TokensManifest, folder)
    documents = []
    for shard in manifest.shards:
        tokens_L, offsets_A1 = map_documents(folder, shard)
        documents += [part.tolist() for part in np.split(tokens_L, offsets_A1[1:-1])]
    return documents


def test_tokens_of_any_format_become_the_shards_of_their_text(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", num_files=1, num_records=150)
    text = run(config_for(tmp_path, "text"))
    documents = documents_of(str(tmp_path / "text"))
    (tmp_path / "bin").mkdir()
    stream = [token for document in documents for token in (*document, text.separator_id)]
    np.array(stream, np.uint16).tofile(tmp_path / "bin" / "a.bin")
    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.table({"input_ids": documents}), tmp_path / "parquet" / "a.parquet")
    for form in ("bin", "parquet"):
        config = config_for(
            tmp_path, f"from-{form}", inputs=[str(tmp_path / form)], content="tokens"
        )
        manifest = run(config)
        assert validate_tokens(config.out) == manifest
        assert documents_of(config.out) == documents
        assert manifest.num_bytes_text == text.num_bytes_text
    shards = [
        {
            name: digest
            for name, digest in snapshot(tmp_path / f"from-{form}").items()
            if "shard" in name
        }
        for form in ("bin", "parquet")
    ]
    assert shards[0] == shards[1] != {}


def test_one_large_file_and_thousands_of_tiny_ones_give_the_same_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"Line {i}.\n" * 150}) for i in range(3000)]
    for folder in ("large", "tiny"):
        (tmp_path / folder).mkdir()
    (tmp_path / "large" / "a.jsonl").write_text("\n".join(lines))
    for number, line in enumerate(lines):
        (tmp_path / "tiny" / f"{number:05d}.jsonl").write_text(line)
    for folder in ("large", "tiny"):
        run(config_for(tmp_path, f"out-{folder}", inputs=[str(tmp_path / folder)]))
    large, tiny = (documents_of(str(tmp_path / f"out-{folder}")) for folder in ("large", "tiny"))
    assert large == tiny
    assert len(list((tmp_path / "out-large").glob("shard-00001-*"))) > 0, "read in one part"


def test_a_second_run_returns_at_once_and_opens_nothing(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", num_files=1, num_records=5)
    config = config_for(tmp_path, "tokens")
    first = run(config)
    before = {path: path.stat().st_mtime_ns for path in Path(config.out).rglob("*")}
    assert run(config) == first
    assert {path: path.stat().st_mtime_ns for path in Path(config.out).rglob("*")} == before


def test_killed_and_run_again_equals_uninterrupted(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    expected = config_for(tmp_path, "whole")
    run(expected)
    out = tmp_path / "killed"
    config = config_for(tmp_path, "killed")
    receipts = out / RECEIPTS
    command = [*arguments(config), "--shard-mb", "1"]
    kill_when(lambda: any(receipts.glob("shard-*")), "tokenize_corpus.py", *command)
    assert not (out / MANIFEST).exists()
    run(config)
    assert snapshot(out) == snapshot(tmp_path / "whole")


def test_an_output_of_another_configuration_is_refused_and_untouched(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", num_files=1, num_records=5)
    config = config_for(tmp_path, "tokens")
    run(config)
    before = snapshot(Path(config.out))
    with pytest.raises(ArtifactError, match="shard_mb: 1 there, 2 here"):
        run(config.replace(shard_mb=2))
    (tmp_path / "corpus" / "0.jsonl").write_text('{"text": "another corpus"}\n')
    with pytest.raises(ArtifactError, match=r"0\.jsonl: .* there, .* here"):
        run(config)
    assert snapshot(Path(config.out)) == before


def test_a_folder_that_no_stage_wrote_is_refused_and_untouched(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", num_files=1, num_records=5)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ArtifactError, match="not empty"):
        run(config_for(tmp_path, "home"))
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


def corrupt_inputs(folder: Path) -> dict[str, str]:
    """Bad inputs by name, with the words that their error must hold."""
    (folder / "no_column").mkdir()
    pq.write_table(pa.table({"content": ["x"]}), folder / "no_column" / "a.parquet")
    contents = {
        "empty": (b"", "no text in them"),
        "invalid_utf8": (b'{"text": "ab\xff"}\n', "invalid UTF-8 at byte 12"),
        "long_line": (b'{"text": "' + b"x" * (20 << 20) + b'"}\n', "max_record_mb=16"),
    }
    for name, (content, _) in contents.items():
        (folder / name).mkdir()
        (folder / name / "a.jsonl").write_bytes(content)
    return {"no_column": "text_field='text'"} | {n: words for n, (_, words) in contents.items()}


def test_bad_input_ends_in_one_clear_line_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, words in corrupt_inputs(tmp_path).items():
        before = snapshot(tmp_path / name)
        config = config_for(tmp_path, f"tokens-{name}", inputs=(str(tmp_path / name),))
        monkeypatch.setattr("sys.argv", ["tokenize_corpus.py", *arguments(config)])
        with pytest.raises(SystemExit) as stopped:
            main(TokenizeConfig, run)
        message = str(stopped.value)
        assert message.startswith("error: ")
        assert words in message
        assert "\n" not in message
        assert snapshot(tmp_path / name) == before
        assert not (Path(config.out) / MANIFEST).exists()


def test_bad_input_ends_the_process_with_its_reason_as_the_last_line(tmp_path: Path) -> None:
    corrupt_inputs(tmp_path)
    config = config_for(tmp_path, "tokens", inputs=(str(tmp_path / "invalid_utf8"),))
    code, output = run_script("tokenize_corpus.py", *arguments(config))
    assert code == 1
    assert re.match(r"error: .*a\.jsonl, byte 0: invalid UTF-8", output.splitlines()[-1])


def test_bad_records_can_be_skipped_and_are_reported(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_bytes(b'{"text": "good"}\nbad\n{"text": 1}\n')
    config = config_for(tmp_path, "tokens", form={"bad_records": "skip"})
    manifest = run(config)
    assert manifest.num_skipped_records == {"invalid_json": 1, "no_text": 1}
    assert manifest.num_documents == 1


def test_an_output_that_cannot_be_written_names_itself(tmp_path: Path) -> None:
    """A file stands where the folder should be: that stops root as well."""
    write_corpus(tmp_path / "corpus", num_files=1, num_records=5)
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(OSError, match="occupied"):
        run(config_for(tmp_path, "occupied/tokens"))
    assert (tmp_path / "occupied").read_text() == "a file"


def test_a_corrupted_shard_is_found_by_its_reader(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", num_files=1, num_records=5)
    config = config_for(tmp_path, "tokens")
    shard = Path(config.out) / run(config).shards[0].name
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ArtifactError, match="sha256"):
        validate_tokens(config.out)
    shard.write_bytes(content[:-10])
    with pytest.raises(ArtifactError, match="bytes"):
        map_shard(config.out, load_manifest(TokensManifest, config.out).shards[0])
    os.remove(shard)
    with pytest.raises(ArtifactError, match="missing"):
        validate_tokens(config.out)
