"""The laws of training: one run, resumed or not, gives one model; ranks never wait for ever."""

import json
import os
import signal
import time
from pathlib import Path

import mlflow
import numpy as np
import pytest

from ray_jobs import train_scone
from ray_jobs.runtime import Tracking
from ray_jobs.train_config import OptimizerConfig, TrainConfig
from scone_core.artifacts import ArtifactError
from scone_core.decoders import DecoderConfig
from scone_core.model import FgramModelConfig, SconeLM
from tests.corpora import write_fgrams, write_tokens, zipf_documents

VOCAB_SIZE = 96

TINY = DecoderConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    options={"intermediate_size": 48},
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokens/v1 of training and validation text, and the fgrams/v1 of the training text."""
    folder = tmp_path_factory.mktemp("inputs")
    corpora = {
        name: zipf_documents(num_documents=40, mean_length=80, vocab_size=VOCAB_SIZE, seed=seed)
        for name, seed in (("train", 1), ("validation", 2))
    }
    for name, documents in corpora.items():
        write_tokens(str(folder / name), documents, vocab_size=VOCAB_SIZE)
    write_fgrams(str(folder / "fgrams"), corpora["train"], num_fgrams=300, vocab_size=VOCAB_SIZE)
    return folder


def config_for(inputs: Path, out: Path, **changes: object) -> TrainConfig:
    config = TrainConfig(
        out=str(out),
        train_tokens=str(inputs / "train"),
        validation_tokens=str(inputs / "validation"),
        fgrams=str(inputs / "fgrams"),
        model=TINY,
        fgram_model=FgramModelConfig(num_layers=1),
        sequence_length=16,
        global_batch=8,
        steps=8,
        optimizer=OptimizerConfig(warmup_steps=2),
        micro_batch=2,
        eval_every=4,
        checkpoint_every=3,
        report_every=1,
        tracking=Tracking(uri=f"sqlite:///{out.parent}/mlflow.db"),
    )
    return config.replace(**changes)


def weights(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob("*_model/*.safetensors")
    }


def losses(config: TrainConfig) -> dict[int, float]:
    """The logged loss of every step."""
    (run,) = logged_runs(config)
    client = mlflow.MlflowClient(config.tracking.uri)
    return {point.step: point.value for point in client.get_metric_history(run.info.run_id, "loss")}


def logged_runs(config: TrainConfig) -> list:
    client = mlflow.MlflowClient(config.tracking.uri)
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    return client.search_runs([experiment.experiment_id])


@pytest.mark.parametrize("fgrams", ["fgrams", None])
def test_training_lowers_the_loss_and_publishes_a_model(fgrams, inputs, tmp_path):
    changes = {"fgrams": fgrams and str(inputs / fgrams), "steps": 24}
    config = config_for(inputs, tmp_path / "model", **changes)
    manifest = train_scone.run(config)
    assert manifest.step == 24
    logged = losses(config)
    assert logged[24] < logged[1] - 0.3
    model = SconeLM.load(config.out)
    assert (model.fgram_model is None) == (fgrams is None)
