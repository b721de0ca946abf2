"""The laws of resuming, on ranks without Ray: every ZeRO stage goes on as if nothing had happened,
on as many ranks or on another number of them.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from ray_jobs.train.config import TrainConfig
from ray_jobs.train.resume import ResumePoint, complete_points, drop_states, find_resume_point
from scone_core.artifacts.manifests import ArtifactError
from scone_core.model.decoders import DecoderConfig
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.training.optimizer import OptimizerConfig
from tests.builders.corpora import write_fgrams, write_tokens, zipf_documents
from tests.programs.train_ranks import load, run_ranks

VOCAB_SIZE = 96
STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
every_stage = pytest.mark.parametrize("name", STAGES)
every_job = pytest.mark.parametrize("name", [*STAGES, "dropout"])


def config_of(inputs: Path, out: Path, name: str, *, num_ranks: int) -> TrainConfig:
    """Eight steps with a state after every second one, 2 threads a rank."""
    return TrainConfig(
        out=str(out / name),
        train_tokens=str(inputs / "tokens"),
        validation_tokens=str(inputs / "tokens"),
        fgrams=str(inputs / "fgrams"),
        model=DecoderConfig(
            model_type="gpt2" if name == "dropout" else "llama",  # GPT-2 has dropout by default
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
        ),
        fgram_model=FGramModelConfig(num_layers=1),
        sequence_length=16,
        global_batch=8,
        micro_batch=2,
        steps=8,
        optimizer=OptimizerConfig(warmup_steps=2),
        num_workers=num_ranks,
        cpus_per_worker=2,
        zero_stage=STAGES.get(name, 1),
        eval_every=3,
        report_every=1,
        checkpoint_every=2,
        keep_last=2,
    )


def train(
    inputs: Path,
    out: Path,
    *,
    num_ranks: int,
    names: Iterable[str] = (*STAGES, "dropout"),
    stop: int = 8,
) -> Path:
    """One training for every job; it goes on from what lies in `out`."""
    configs = {name: config_of(inputs, out, name, num_ranks=num_ranks) for name in names}
    run_ranks(out, configs, num_ranks=num_ranks, stop=stop)
    return out


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    documents = zipf_documents(num_documents=30, mean_length=60, vocab_size=VOCAB_SIZE, seed=1)
    write_tokens(str(folder / "tokens"), documents, vocab_size=VOCAB_SIZE)
    write_fgrams(str(folder / "fgrams"), documents, num_fgrams=300, vocab_size=VOCAB_SIZE)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(inputs, tmp_path_factory.mktemp("uninterrupted"), num_ranks=2)


@pytest.fixture(scope="module")
def interrupted(uninterrupted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The states that were there after step 5; the last one is that of step 4."""
    folder = copy_of(uninterrupted, tmp_path_factory)
    for state in folder.glob("*/resume/step-00000006"):
        shutil.rmtree(state)
    for result in [*folder.glob("*.pt"), *folder.glob("*.json")]:
        result.unlink()
    return folder


@pytest.fixture(scope="module")
def resumed(inputs: Path, interrupted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On two ranks again."""
    return train(inputs, copy_of(interrupted, tmp_path_factory), num_ranks=2)


@pytest.fixture(scope="module")
def resumed_alone(
    inputs: Path, interrupted: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """From two ranks to one, up to step 7, with a state of step 6."""
    return train(inputs, copy_of(interrupted, tmp_path_factory), num_ranks=1, names=STAGES, stop=7)


@pytest.fixture(scope="module")
def resumed_twice(
    inputs: Path, resumed_alone: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """And from one rank to two."""
    return train(inputs, copy_of(resumed_alone, tmp_path_factory), num_ranks=2, names=STAGES)


def copy_of(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("copy")
    shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


def losses(folder: Path, name: str) -> dict[float, float]:
    return {report["step"]: report["loss"] for report in load(folder, name)["reports"]}


@every_job
def test_resumed_training_is_bit_equal_to_the_uninterrupted_one(
    uninterrupted: Path, resumed: Path, name: str
) -> None:
    """Weights, losses and held-out perplexities, at 2 threads; states are saved in the middle of
    an epoch (allenai/allennlp#4693) and loaded by the pinned torch (deepspeedai/DeepSpeed#8500).
    """
    assert load(resumed, name)["first_step"] == 4
    assert losses(resumed, name) == losses(uninterrupted, name)
    before, after = (torch.load(run / f"{name}.pt") for run in (uninterrupted, resumed))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@every_job
def test_learning_rate_and_data_go_on_where_they_were(
    uninterrupted: Path, resumed: Path, name: str
) -> None:
    """ray-project/ray#46814: the log said restored, and training began at epoch 1."""
    whole, parts = (load(run, name)["reports"] for run in (uninterrupted, resumed))
    for metric in ("step", "learning_rate", "hit_rate", "validation_perplexity"):
        assert [report.get(metric) for report in whole] == [r.get(metric) for r in parts]
    (point, *_) = complete_points(str(resumed / name / "resume"))
    assert point.samples_seen == point.step * 8


@every_stage
def test_training_goes_on_on_another_number_of_ranks(
    uninterrupted: Path, resumed_alone: Path, resumed_twice: Path, name: str
) -> None:
    """deepspeedai/DeepSpeed#2898, #3810: 2 to 1, then 1 to 2."""
    expected = losses(uninterrupted, name)
    assert load(resumed_alone, name)["first_step"] == 4
    assert load(resumed_twice, name)["first_step"] == 6
    for run in (resumed_alone, resumed_twice):
        assert not list((run / name / "resume").glob("universal-*"))
        assert losses(run, name) == pytest.approx(
            {step: expected[step] for step in losses(run, name)}, rel=1e-4
        )


@every_stage
def test_an_output_keeps_as_many_states_as_asked(resumed: Path, name: str) -> None:
    points = complete_points(str(resumed / name / "resume"))
    assert [point.step for point in points] == [4, 6]


def test_the_newest_complete_state_counts_whatever_lies_beside_it(
    inputs: Path, interrupted: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A kill during a save leaves a folder without COMPLETE."""
    resume = copy_of(interrupted, tmp_path_factory) / "zero1" / "resume"
    (resume / "step-00000006").mkdir()
    (resume / "step-00000006" / "mp_rank_00_model_states.pt").write_bytes(b"half")
    point = find_resume_point(str(resume), fingerprint="one training", zero_stage=1)
    assert point is not None
    assert point.step == 4


def test_the_state_of_another_training_or_stage_is_refused(interrupted: Path) -> None:
    resume = str(interrupted / "zero1" / "resume")
    with pytest.raises(ArtifactError, match="fingerprint"):
        find_resume_point(resume, fingerprint="another training", zero_stage=1)
    with pytest.raises(
        ArtifactError, match=r"zero_stage: found 1, expected 3; go on with zero_stage=1"
    ):
        find_resume_point(resume, fingerprint="one training", zero_stage=3)


def test_a_damaged_marker_is_named(
    interrupted: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    resume = copy_of(interrupted, tmp_path_factory) / "zero1" / "resume"
    (resume / "step-00000004" / "COMPLETE").write_bytes(b"{")
    with pytest.raises(ArtifactError, match=r"step-00000004/COMPLETE: damaged"):
        complete_points(str(resume))


def test_the_best_states_are_kept_beside_the_last_ones(tmp_path: Path) -> None:
    perplexities = {2: 9.0, 4: 5.0, 6: 6.0, 8: 7.0}
    for step, perplexity in perplexities.items():
        point = ResumePoint(
            step=step,
            samples_seen=step,
            fingerprint="one training",
            num_workers=1,
            zero_stage=1,
            reports=[{"step": step, "validation_perplexity": perplexity}],
        )
        (tmp_path / point.tag).mkdir()
        (tmp_path / point.tag / "COMPLETE").write_text(point.model_dump_json())
    (tmp_path / "step-00000007").mkdir()
    drop_states(str(tmp_path), keep_last=1, keep_best=2)
    assert [point.step for point in complete_points(str(tmp_path))] == [4, 6, 8]
    assert not (tmp_path / "step-00000007").exists()
