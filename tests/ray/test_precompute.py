"""Laws of the precompute stage: the table is the f-gram model's output, however it is computed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_jobs.count import fgram_grow
from ray_jobs.count.fgram_grow import GrowConfig
from ray_jobs.precompute.config import PrecomputeConfig
from ray_jobs.precompute.precompute import run
from ray_jobs.runtime.config import Cluster
from scone_core.artifacts.manifests import (
    ArtifactError,
    EmbeddingsManifest,
    FGramsManifest,
    load_manifest,
)
from scone_core.evaluation.embed import embed_from_table, embed_on_the_fly
from scone_core.fgrams.fgram_shards import depth_first_order, read_fgrams
from scone_core.fgrams.index import FGramIndex
from scone_core.model.decoders import DecoderConfig
from scone_core.model.forest import build_forest
from scone_core.model.scone_lm import SconeLM
from scone_core.table.check import check_table
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.tiers import Tiers
from tests import ROOT
from tests.builders.served_models import (
    VOCAB,
    publish_checkpoint,
    publish_fgrams,
    random_fgrams,
    trained_model,
)
from tests.oracles import plain_precompute
from tests.programs.stages import kill_at_random_points, kill_when, snapshot

LONG_DOT_PRODUCTS = DecoderConfig(
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8192,
)
"""MKL splits a product of this length by the number of threads, unless told otherwise."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and its f-grams."""
    folder = tmp_path_factory.mktemp("inputs")
    fgrams = publish_fgrams(str(folder / "fgrams"), random_fgrams(per_length=500))
    publish_checkpoint(str(folder / "checkpoint"), trained_model(main=LONG_DOT_PRODUCTS), fgrams)
    return folder


def config_for(inputs: Path, out: Path, **changes: object) -> PrecomputeConfig:
    config = PrecomputeConfig(
        checkpoint=str(inputs / "checkpoint"),
        fgrams=str(inputs / "fgrams"),
        out=str(out),
        row_format="fp32",
        fgrams_per_block=400,
        fgrams_per_forest=300,
        rows_per_shard=600,
        num_actors=1,
    )
    return config.replace(**changes)


def arguments(config: PrecomputeConfig) -> list[str]:
    names = ("checkpoint", "fgrams", "out", "row_format")
    names += ("rows_per_shard", "fgrams_per_block", "fgrams_per_forest")
    return [
        word
        for name in names
        for word in (f"--{name.replace('_', '-')}", str(getattr(config, name)))
    ]


@pytest.fixture(scope="module")
def table(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("table") / "table"
    run(config_for(inputs, out, num_actors=1, cpus_per_actor=1))
    return out


def alone(model: SconeLM, fgram_K: np.ndarray) -> torch.Tensor:
    """The vector of one f-gram, computed without any other."""
    forest = build_forest(fgram_K[None], np.array([len(fgram_K)]))
    return model.fgram_vectors(forest)[forest.node_of_S[0]]


@torch.no_grad()
def test_a_table_row_is_the_output_of_the_f_gram_model(inputs: Path, table: Path) -> None:
    rows = EmbeddingTable.open(str(table))
    model = SconeLM.load(str(inputs / "checkpoint"))
    fgrams = read_fgrams(str(inputs / "fgrams"))
    assert rows.num_rows == len(fgrams.n_M)
    for row in range(0, rows.num_rows, 7):
        expected_D = alone(model, fgrams.tokens_MK[row, : fgrams.n_M[row]])
        found_D = rows.vectors(np.array([row]))[0]
        torch.testing.assert_close(found_D, expected_D, rtol=2e-5, atol=2e-5)


def test_quantised_rows_are_off_by_their_rounding_alone(inputs: Path, tmp_path: Path) -> None:
    manifest = run(config_for(inputs, tmp_path / "table", row_format="int8"))
    assert (manifest.row_format, manifest.bytes_per_row) == ("int8", manifest.width + 4)
    check = check_table(
        str(tmp_path / "table"),
        checkpoint=str(inputs / "checkpoint"),
        fgrams=str(inputs / "fgrams"),
        num_rows=500,
    )
    assert check.largest_error <= 1


def test_bytes_do_not_depend_on_the_number_of_actors_and_threads(
    inputs: Path, table: Path, tmp_path: Path
) -> None:
    run(config_for(inputs, tmp_path / "table", num_actors=2, cpus_per_actor=2))
    assert snapshot(tmp_path / "table") == snapshot(table)


def test_a_killed_run_goes_on_and_ends_with_equal_bytes(
    inputs: Path, table: Path, tmp_path: Path
) -> None:
    config = config_for(inputs, tmp_path / "table")
    first_block = tmp_path / "table/_receipts/block-000000.json"
    kill_when(first_block.exists, "precompute.py", *arguments(config))
    run(config)
    assert snapshot(tmp_path / "table") == snapshot(table)


def test_killed_at_ten_random_points_equals_uninterrupted(inputs: Path, tmp_path: Path) -> None:
    plain_precompute.precompute(str(inputs), str(tmp_path / "whole"))
    whole = snapshot(tmp_path / "whole")
    out = tmp_path / "killed"
    killed = kill_at_random_points(
        plain_precompute.precompute, str(inputs), str(out), out=out, num_files=len(whole)
    )
    assert killed == whole


def test_a_full_disk_ends_the_run_and_is_gone_on_from(inputs: Path, tmp_path: Path) -> None:
    """No file may have more than 100,000 bytes at first: the sorted f-grams fit, blocks do not."""
    out = tmp_path / "out"
    program = [sys.executable, "-m", "tests.oracles.plain_precompute"]
    command = [*program, str(inputs), str(out), "100000"]
    full = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert full.returncode == 1
    assert "File too large" in full.stderr.splitlines()[-1]
    before = snapshot(out)
    assert "_blocks/sorted.arrow" in before
    assert not [name for name in before if "embeddings" in name or name.endswith(".tmp")]
    for folder in (out, tmp_path / "whole"):
        plain_precompute.precompute(str(inputs), str(folder))
    assert snapshot(out) == snapshot(tmp_path / "whole")


def test_a_finished_table_is_not_computed_again(
    inputs: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = run(config_for(inputs, table, num_actors=2))
    assert manifest == load_manifest(EmbeddingsManifest, str(table))
    assert "up to date" in capsys.readouterr().out


@torch.no_grad()
def test_logits_from_the_table_are_logits_on_the_fly(inputs: Path, table: Path) -> None:
    model = SconeLM.load(str(inputs / "checkpoint"))
    index = FGramIndex.open(str(inputs / "fgrams"))
    rows = EmbeddingTable.open(str(table))
    tokens_BT = np.random.default_rng(0).integers(0, VOCAB, (4, 64))
    fly = embed_on_the_fly(tokens_BT, model=model, matcher=index)
    looked_up = embed_from_table(tokens_BT, model=model, index=index, table=rows)
    assert (fly.match_len_BT > 1).mean() > 0.05
    logits = [
        model.main_model(inputs_embeds=inputs.embeddings_BTD).logits for inputs in (fly, looked_up)
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_grown_table_keeps_its_shards_and_adds_the_rows_of_new_f_grams(
    inputs: Path, table: Path, tmp_path: Path
) -> None:
    grown = grow(inputs, tmp_path)
    config = config_for(inputs, tmp_path / "table", fgrams=str(grown))
    manifest = run(config.replace(grow=str(table)))
    before, after = snapshot(table), snapshot(tmp_path / "table")
    shards = [name for name in before if name.endswith(".arrow")]
    assert {name: after[name] for name in shards} == {name: before[name] for name in shards}
    assert manifest.num_rows == load_manifest(FGramsManifest, str(grown)).num_fgrams
    model, rows = SconeLM.load(config.checkpoint), EmbeddingTable.open(config.out)
    fgrams = read_fgrams(str(grown))
    for row in range(0, rows.num_rows, 97):
        expected_D = alone(model, fgrams.tokens_MK[row, : fgrams.n_M[row]])
        torch.testing.assert_close(
            rows.vectors(np.array([row]))[0], expected_D, rtol=2e-5, atol=2e-5
        )
    check = check_table(config.out, checkpoint=config.checkpoint, fgrams=str(grown), num_rows=300)
    assert check.num_rows == 300
    readers = EmbeddingTable.open(config.out, tiers=Tiers(hot_rows=50, cold_from=900, io="mmap"))
    ids_M = np.arange(rows.num_rows)
    assert readers.vectors(ids_M).equal(rows.vectors(ids_M))


def test_only_a_table_of_an_earlier_generation_grows(
    inputs: Path, table: Path, tmp_path: Path
) -> None:
    grown = grow(inputs, tmp_path)
    config = config_for(inputs, tmp_path / "table", fgrams=str(grown), grow=str(table))
    with pytest.raises(ArtifactError, match="row_format: found 'fp32', expected 'int8'"):
        run(config.replace(row_format="int8"))
    with pytest.raises(ArtifactError, match="no earlier generation"):
        run(config.replace(fgrams=str(inputs / "fgrams")))
    assert not (tmp_path / "table").exists()


def grow(inputs: Path, folder: Path) -> Path:
    """The f-grams of `inputs` with those of another count behind them."""
    publish_fgrams(str(folder / "counted"), random_fgrams(per_length=150, seed=9))
    grown = folder / "grown"
    fgram_grow.run(
        GrowConfig(fgrams=str(inputs / "fgrams"), counted=str(folder / "counted"), out=str(grown))
    )
    return grown


def test_other_f_grams_than_those_of_the_training_are_refused(inputs: Path, tmp_path: Path) -> None:
    publish_fgrams(str(tmp_path / "fgrams"), random_fgrams(per_length=10, seed=1))
    with pytest.raises(ArtifactError, match="fgrams=.*trained with"):
        run(config_for(inputs, tmp_path / "out", fgrams=str(tmp_path / "fgrams")))
    assert not (tmp_path / "out").exists()


def test_a_plain_baseline_is_refused(inputs: Path, tmp_path: Path) -> None:
    model = SconeLM(trained_model().main_model)
    publish_checkpoint(str(tmp_path / "plain"), model, None)
    with pytest.raises(ArtifactError, match="plain baseline"):
        run(config_for(inputs, tmp_path / "out", checkpoint=str(tmp_path / "plain")))
    assert not (tmp_path / "out").exists()


def test_the_output_of_another_configuration_is_refused_by_field(inputs: Path, table: Path) -> None:
    before = snapshot(table)
    with pytest.raises(ArtifactError, match="row_format: 'fp32' there, 'fp16' here"):
        run(config_for(inputs, table, row_format="fp16"))
    assert snapshot(table) == before


def test_an_actor_that_cannot_be_scheduled_is_refused(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cpus_per_actor=64.*the cluster has"):
        run(config_for(inputs, tmp_path / "out", cpus_per_actor=64, cluster=Cluster(num_cpus=2)))


def test_every_prefix_stands_before_what_it_begins() -> None:
    grams = random_fgrams(per_length=300)
    tokens_SK = np.zeros((len(grams), 5), np.uint32)
    for row, gram in zip(tokens_SK, grams, strict=True):
        row[: len(gram)] = gram
    order = depth_first_order(tokens_SK, np.array([len(gram) for gram in grams]))
    assert [grams[i] for i in order] == sorted(grams)
