"""Laws of the count stage: equal bytes however it runs, and bad input changes nothing."""

import re
import shutil
from collections import Counter
from pathlib import Path

import mlflow
import numpy as np
import pytest

from ray_jobs.count.config import CountConfig
from ray_jobs.count.fgram_count import run
from scone_core.artifacts import storage
from scone_core.artifacts.folders import RECEIPTS, publish
from scone_core.artifacts.manifests import (
    MANIFEST,
    ArtifactError,
    FGramsManifest,
    TokensManifest,
    load_manifest,
)
from scone_core.fgrams.fgram_shards import read_fgrams
from scone_core.fgrams.index import FGramIndex
from scone_core.fgrams.validation import validate_fgrams
from tests.builders.corpora import brute_force, rank, write_tokens, zipf_documents
from tests.oracles import plain_count
from tests.programs.stages import kill_at_random_points, kill_when, run_script, snapshot

DOCUMENTS = zipf_documents(num_documents=60, mean_length=300, vocab_size=200, seed=3)


def config_for(folder: Path) -> CountConfig:
    """Counts DOCUMENTS, of whose n-grams at `min_count` the last third is cut off."""
    write_tokens(str(folder / "tokens"), DOCUMENTS, num_shards=3)
    return CountConfig(
        tokens=str(folder / "tokens"),
        out=str(folder / "fgrams"),
        num_fgrams=1500,
        min_count=3,
        rows_per_shard=400,
    )


@pytest.fixture
def config(tmp_path: Path) -> CountConfig:
    return config_for(tmp_path)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the configuration above gives, once for all tests that only read it."""
    config = config_for(tmp_path_factory.mktemp("counted"))
    run(config)
    return Path(config.out)


@pytest.fixture
def finished(counted: Path, config: CountConfig) -> CountConfig:
    """A configuration whose output is there, for tests that change it or run again."""
    shutil.copytree(counted, config.out)
    return config


def test_the_stage_writes_the_most_frequent_n_grams(config: CountConfig) -> None:
    manifest = run(config)
    assert validate_fgrams(config.out) == manifest
    counts = brute_force(DOCUMENTS, max_n=5, min_count=3)
    expected = rank(counts)[:1500]
    found = read_fgrams(config.out)
    assert found.tuples() == expected
    assert found.counts_M.tolist() == [counts[fgram] for fgram in expected]
    assert FGramIndex.open(config.out).match(np.array([expected[-1]])).fgram_ids_BT[0, -1] == 1499


def test_the_artifact_is_self_contained_and_scratch_is_gone(counted: Path) -> None:
    names = set(snapshot(counted))
    shards = {f"fgrams-{number:05d}.parquet" for number in range(4)}
    assert names == {MANIFEST, "tokenizer.json", "index/trie.npy", *shards}
    assert not any(path.name.startswith("_") for path in counted.iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_chunks": 1, "num_ranges": 1},
        {"num_chunks": 2, "num_ranges": 9, "scratch_form": "compressed"},
        {"num_chunks": 8, "num_ranges": 40, "memory_mb": 500},
        {"scratch": "elsewhere"},
    ],
    ids=str,
)
def test_bytes_do_not_depend_on_chunks_ranges_and_scratch(
    counted: Path, config: CountConfig, changes: dict[str, object], tmp_path: Path
) -> None:
    if "scratch" in changes:
        changes = {"scratch": str(tmp_path / "elsewhere")}
    run(config.replace(**changes))
    assert snapshot(tmp_path / "fgrams") == snapshot(counted)
    assert not list((tmp_path / "elsewhere").glob("*"))


def test_rows_and_index_do_not_depend_on_shards_and_the_order_of_documents(
    counted: Path, config: CountConfig, tmp_path: Path
) -> None:
    write_tokens(str(tmp_path / "reversed"), DOCUMENTS[::-1], num_shards=7)
    run(config.replace(tokens=str(tmp_path / "reversed")))
    whole, other = snapshot(counted), snapshot(Path(config.out))
    assert whole.pop(MANIFEST) != other.pop(MANIFEST)
    assert whole == other


def test_the_plan_is_printed_and_says_what_is_a_guess(
    config: CountConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Silent estimates end in workers killed for memory (ray-project/ray#61049)."""
    run(config)
    output = capsys.readouterr().out
    num_tokens = sum(map(len, DOCUMENTS))
    assert f"count: {num_tokens:,} tokens in 3 shards" in output
    assert re.search(r"a guess from a sample\): [\d,]+ distinct n-grams, [\d,]+ frequent", output)
    assert re.search(r"1 rounds of 8 chunks, about 4 ranges, at most [\d,]+ MiB per task", output)
    assert re.search(r"MiB of scratch in .*_scratch.* \([\d,]+ MiB free\)", output)
    assert "map chunks: 8/8 units" in output


def test_readers_ignore_files_that_the_manifest_does_not_list(finished: CountConfig) -> None:
    """A crashed writer leaves such files behind (Eventual-Inc/Daft#3576)."""
    manifest = load_manifest(FGramsManifest, finished.out)
    (Path(finished.out) / "fgrams-00099.parquet").write_bytes(b"PAR1 half a file")
    assert validate_fgrams(finished.out) == manifest
    assert read_fgrams(finished.out).num == manifest.num_fgrams


def test_a_second_run_returns_at_once_and_opens_nothing(finished: CountConfig) -> None:
    first = load_manifest(FGramsManifest, finished.out)
    before = {path: path.stat().st_mtime_ns for path in Path(finished.out).rglob("*")}
    assert run(finished.replace(num_chunks=2, memory_mb=2000)) == first
    assert {path: path.stat().st_mtime_ns for path in Path(finished.out).rglob("*")} == before


def kill_count(config: CountConfig, unit: str) -> None:
    """Run the stage as a process and kill it once a unit of work like `unit` is finished."""
    command = [
        f"--{name}={getattr(config, name.replace('-', '_'))}"
        for name in ("tokens", "out", "num-fgrams", "min-count", "rows-per-shard")
    ]
    command += ["--num-chunks=16", "--num-ranges=16"]
    out = Path(config.out)
    kill_when(lambda: any(out.rglob(f"{RECEIPTS}/{unit}")), "fgram_count.py", *command)
    assert not (out / MANIFEST).exists()


def test_killed_and_run_again_equals_uninterrupted(counted: Path, config: CountConfig) -> None:
    killed = config.replace(num_chunks=16, num_ranges=16)
    kill_count(killed, "range-*")
    run(killed)
    assert snapshot(Path(killed.out)) == snapshot(counted)


def test_killed_at_ten_random_points_equals_uninterrupted(
    config: CountConfig, tmp_path: Path
) -> None:
    """Each attempt is killed once it has written a random number of files more, temporary ones and
    half written ones included; then one goes through.
    """
    plain_count.count(config.tokens, str(tmp_path / "whole"))
    whole = snapshot(tmp_path / "whole")
    out = tmp_path / "killed"
    killed = kill_at_random_points(
        plain_count.count, config.tokens, str(out), out=out, num_files=len(whole)
    )
    assert killed == whole


def test_a_resumed_count_opens_no_input_of_finished_units(
    counted: Path, config: CountConfig, tmp_path: Path
) -> None:
    """Once all ranges are done, chunks and token shards may as well be gone."""
    killed = config.replace(num_chunks=16, num_ranges=16)
    kill_count(killed, "shard-*")
    opened_by_finished = [
        *Path(killed.out).glob("_scratch/*/*.records"),
        *(tmp_path / "tokens").glob("*.arrow"),
    ]
    assert len(opened_by_finished) == 16 + 3, opened_by_finished
    for path in opened_by_finished:
        path.unlink()
    run(killed)
    assert snapshot(Path(killed.out)) == snapshot(counted)


def test_an_output_of_another_configuration_is_refused_and_untouched(
    finished: CountConfig,
) -> None:
    config = finished
    before = snapshot(Path(config.out))
    with pytest.raises(ArtifactError, match="min_count: 3 there, 4 here"):
        run(config.replace(min_count=4))
    storage.remove_folder(config.tokens)
    write_tokens(config.tokens, DOCUMENTS[1:])
    with pytest.raises(ArtifactError, match="tokens: .* there, .* here"):
        run(config)
    assert snapshot(Path(config.out)) == before


def test_a_folder_that_no_stage_wrote_is_refused_and_untouched(
    config: CountConfig, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ArtifactError, match="not empty"):
        run(config.replace(out=str(tmp_path / "home")))
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


def test_an_output_that_cannot_be_written_names_itself(config: CountConfig, tmp_path: Path) -> None:
    """A file stands where the folder should be: that stops root as well."""
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(OSError, match="occupied"):
        run(config.replace(out=str(tmp_path / "occupied" / "fgrams")))
    assert (tmp_path / "occupied").read_text() == "a file"


def test_a_corrupted_token_shard_is_named_and_nothing_is_published(config: CountConfig) -> None:
    shard = Path(config.tokens) / "tokens-00001.arrow"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    before = snapshot(Path(config.tokens))
    with pytest.raises(ArtifactError, match=r"tokens-00001\.arrow: sha256 differs"):
        run(config)
    shard.write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match=r"tokens-00001\.arrow: \d+ bytes"):
        run(config)
    shard.write_bytes(content)
    assert snapshot(Path(config.tokens)) == before
    assert not (Path(config.out) / MANIFEST).exists()


def test_an_interrupted_count_goes_on_once_its_input_is_restored(config: CountConfig) -> None:
    shard = Path(config.tokens) / "tokens-00002.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(ArtifactError):
        run(config)
    with pytest.raises(ArtifactError, match="min_count: 3 there, 4 here"):
        run(config.replace(min_count=4))
    shard.write_bytes(content)
    assert run(config) == validate_fgrams(config.out)


def test_a_corpus_without_frequent_n_grams_says_so(config: CountConfig) -> None:
    with pytest.raises(ValueError, match="min_count=100000: no n-gram occurs that often"):
        run(config.replace(min_count=100_000))
    assert not (Path(config.out) / MANIFEST).exists()
    assert run(config) == validate_fgrams(config.out)


def test_memory_that_holds_no_task_is_refused(config: CountConfig) -> None:
    with pytest.raises(ValueError, match="memory_mb=100: at least"):
        run(config.replace(memory_mb=100))
    assert not Path(config.out).exists()


def test_a_count_that_the_disk_cannot_hold_is_refused_before_it_starts(config: CountConfig) -> None:
    manifest = load_manifest(TokensManifest, config.tokens)
    publish(config.tokens, manifest.model_copy(update={"num_tokens": 10**14}))
    with pytest.raises(ValueError, match=r"MiB available, about [\d,]+ MiB needed; name a larger"):
        run(config.replace(num_chunks=8, num_ranges=4))
    assert not list(Path(config.out).rglob("*.records"))


def test_a_short_disk_is_met_with_rounds_and_the_same_bytes(
    config: CountConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 MB of records in scratch space for one."""
    documents = zipf_documents(num_documents=100, mean_length=2500, vocab_size=200, seed=4)
    write_tokens(str(tmp_path / "long"), documents, num_shards=2)
    config = config.replace(tokens=str(tmp_path / "long"), min_count=50)
    run(config)
    run(config.replace(out=str(tmp_path / "short"), scratch_mb=1))
    assert re.search(r"plan: [2-9] rounds of 8 chunks", capsys.readouterr().out)
    assert snapshot(tmp_path / "short") == snapshot(tmp_path / "fgrams")


def test_a_grown_corpus_counts_its_new_documents_alone(
    counted: Path, config: CountConfig, tmp_path: Path
) -> None:
    """Kept chunks and new tokens give the bytes of the joint count, and old tokens are not read."""
    for part, documents in (("old", DOCUMENTS[:40]), ("new", DOCUMENTS[40:])):
        write_tokens(str(tmp_path / part), documents)
    old = config.replace(tokens=str(tmp_path / "old"), out=str(tmp_path / "of-old"))
    run(old.replace(keep_chunks=str(tmp_path / "kept"), num_chunks=3))
    storage.remove_folder(str(tmp_path / "old"))
    manifest = run(
        config.replace(
            tokens=str(tmp_path / "new"), chunks=[str(tmp_path / "kept")], out=str(tmp_path / "sum")
        )
    )
    joint, updated = snapshot(counted), snapshot(tmp_path / "sum")
    assert joint.pop(MANIFEST) != updated.pop(MANIFEST)
    assert joint == updated
    assert manifest.num_tokens == sum(map(len, DOCUMENTS))


def test_kept_chunks_are_mapped_once_for_many_counts(config: CountConfig, tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    run(config.replace(keep_chunks=kept))
    before = snapshot(tmp_path / "kept")
    for shard in (tmp_path / "tokens").glob("*.arrow"):
        content = bytearray(shard.read_bytes())
        content[len(content) // 4 * 2] ^= 1  # a low byte; to map it again would find this
        shard.write_bytes(content)
    other = run(config.replace(keep_chunks=kept, out=str(tmp_path / "other"), min_count=4))
    assert other == validate_fgrams(str(tmp_path / "other"))
    assert snapshot(tmp_path / "kept") == before


def test_chunks_of_another_tokenizer_or_length_are_refused(
    config: CountConfig, tmp_path: Path
) -> None:
    run(config.replace(keep_chunks=str(tmp_path / "kept")))
    write_tokens(str(tmp_path / "wide"), DOCUMENTS, vocab_size=300)
    changed = config.replace(chunks=[str(tmp_path / "kept")], out=str(tmp_path / "other"))
    with pytest.raises(ArtifactError, match="tokenizer_sha256 of .*kept"):
        run(changed.replace(tokens=str(tmp_path / "wide")))
    with pytest.raises(ArtifactError, match="max_n of .*kept: found 5, expected 4"):
        run(changed.replace(max_n=4))


def test_included_n_grams_and_all_inside_them_come_on_top(
    config: CountConfig, tmp_path: Path
) -> None:
    counts = brute_force(DOCUMENTS, max_n=5)
    present = next(g for g in rank(counts)[::-1] if len(g) == 5)
    absent = (199, 198, 199)
    lines = [" ".join(map(str, ngram)) for ngram in (present, absent)]
    (tmp_path / "include.txt").write_text("\n".join(lines))
    manifest = run(config.replace(include=str(tmp_path / "include.txt")))
    assert validate_fgrams(config.out) == manifest
    wanted = {g[a:b] for g in (present, absent) for a in range(4) for b in range(a + 2, len(g) + 1)}
    top = rank(Counter({g: count for g, count in counts.items() if count >= 3}))[:1500]
    extra = sorted(wanted - {*top}, key=lambda g: (-counts[g], len(g), g))
    found = read_fgrams(config.out)
    assert found.tuples() == top + extra
    assert found.counts_M.tolist() == [counts[ngram] for ngram in found.tuples()]
    assert manifest.num_included == len(extra) > 0


def test_no_f_gram_holds_an_excluded_token(config: CountConfig) -> None:
    run(config.replace(exclude_tokens=[2, 5], num_fgrams=500))
    validate_fgrams(config.out)
    counts = brute_force(DOCUMENTS, max_n=5, min_count=3)
    allowed = [ngram for ngram in rank(counts) if not {2, 5} & {*ngram}]
    assert read_fgrams(config.out).tuples() == allowed[:500]


@pytest.mark.parametrize("line", ["7", "1 2 3 4 5 6", "1 x", "1 256", "1 0 2", "1 9"])
def test_a_line_that_cannot_be_included_is_named(
    config: CountConfig, tmp_path: Path, line: str
) -> None:
    """One token, six, no number, outside the vocabulary, the separator, an excluded token."""
    (tmp_path / "include.txt").write_text(f"1 2\n{line}\n")
    with pytest.raises(ValueError, match=f"include.txt, line 2: .*{line}"):
        run(config.replace(include=str(tmp_path / "include.txt"), exclude_tokens=[9]))


def test_more_f_grams_than_32_bits_number_are_refused(config: CountConfig) -> None:
    with pytest.raises(ValueError, match="f-gram ids have 32 bits, so 4294967296 at most"):
        config.replace(num_fgrams=(1 << 32) + 1)


def test_the_coverage_of_held_out_documents_is_recorded(
    config: CountConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(str(tmp_path / "held_out"), DOCUMENTS[::7])
    run(config.replace(held_out=str(tmp_path / "held_out")))
    assert re.search(r"held out: hit rate 0\.[1-9]\d+, mean", capsys.readouterr().out)


def test_a_vocabulary_beyond_the_index_is_refused_before_anything_is_written(
    config: CountConfig,
) -> None:
    manifest = load_manifest(TokensManifest, config.tokens)
    publish(config.tokens, manifest.model_copy(update={"vocab_size": (1 << 20) + 1}))
    with pytest.raises(ValueError, match="vocab_size=1048577 of .*: the index holds 1048576 ids"):
        run(config)
    assert not Path(config.out).exists()


def test_a_separator_inside_a_document_is_refused(config: CountConfig, tmp_path: Path) -> None:
    write_tokens(str(tmp_path / "joined"), [*DOCUMENTS, [1, 0, 2]])
    with pytest.raises(ArtifactError, match="separator=0 inside a document"):
        run(config.replace(tokens=str(tmp_path / "joined")))


def test_bad_input_ends_the_process_with_its_reason_as_the_last_line(
    config: CountConfig, tmp_path: Path
) -> None:
    command = [f"--tokens={config.tokens}", f"--out={tmp_path / 'none'}"]
    shard = Path(config.tokens) / "tokens-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, output = run_script("fgram_count.py", *command, "--num-fgrams=10")
    assert code == 1
    assert output.splitlines()[-1].startswith(f"error: {shard}:")


def test_the_run_is_in_mlflow_with_its_plots(counted: Path) -> None:
    manifest = load_manifest(FGramsManifest, str(counted))
    (found,) = mlflow.search_runs(
        experiment_names=["scone"],
        filter_string=f"tags.`scone.fingerprint` = '{manifest.fingerprint}'",
        max_results=1,
        output_format="list",
    )
    assert found.data.metrics["num_fgrams"] == 1500
    assert found.data.metrics["mean_match_length"] > 1 + found.data.metrics["hit_rate"] > 1
    client = mlflow.MlflowClient()
    names = {artifact.path for artifact in client.list_artifacts(found.info.run_id)}
    assert names >= {"rank_frequency.png", "coverage.png", "fgrams_per_n.png", "coverage.csv"}
