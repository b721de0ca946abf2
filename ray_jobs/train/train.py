"""tokens/v1 + fgrams/v1 -> checkpoint/v1: train main and f-gram model together, with Ray Train and
DeepSpeed.
"""

import os
import tempfile
from functools import partial

import ray
import torch
from ray.train import UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.v2.api.exceptions import RayTrainError

from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.command_line import root_cause
from ray_jobs.runtime.stage import run_stage
from ray_jobs.runtime.tracking import RunLog
from ray_jobs.train.config import TrainConfig
from ray_jobs.train.engine import chosen_precision
from ray_jobs.train.export import EXPORT, ExportReceipt
from ray_jobs.train.reports import TrainingLog, follow_reports
from ray_jobs.train.resume import find_resume_point
from ray_jobs.train.start import main_model_config, training_batches
from ray_jobs.train.worker import train_worker
from scone_core.artifacts.folders import SharedFields
from scone_core.artifacts.manifests import (
    CheckpointManifest,
    FGramsManifest,
    TokensManifest,
    load_manifest,
    require_equal,
)
from scone_core.artifacts.units import read_receipt
from scone_core.corpus.token_stream import TokenStream
from scone_core.model.decoders import build_causal_lm, fingerprint_folder
from scone_core.model.scone_lm import SconeLM
from scone_core.planning.estimate import TrainPlan, measured_flops_per_second, plan_training
from scone_core.training.batches import split_step

EFFICIENCY = 0.5
"""Part of the rate of matrix products that a step reaches: 0.4 to 0.6 in the quickstart."""
QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Environment of the workers: what their libraries print would bury the progress line."""
POLL_SECONDS = "0.2"
"""Ray Train takes one report of each worker a poll, and a training ends when all are taken: at its
default of 2 s, a hundred reports last at least 200 s.
"""


def run(config: TrainConfig) -> CheckpointManifest:
    """Train a SCONE model, or its plain baseline when no f-grams are given."""
    inputs = check_inputs(config)
    return run_stage(CheckpointManifest, config, inputs, partial(_build, config), stage="train")


def _build(config: TrainConfig, shared: SharedFields, log: RunLog) -> CheckpointManifest:
    connect(config.cluster)
    log.log_dict(config.model_dump(mode="json"), "config.json")
    if read_receipt(config.out, EXPORT, ExportReceipt) is None:
        print("\n".join(plan(config).lines()), flush=True)
        _train(config, shared["fingerprint"], log)
    log.register_model()
    return checkpoint_manifest(config, shared)


def check_inputs(config: TrainConfig) -> dict[str, str]:
    """The fingerprints of the inputs, which must have one tokenizer."""
    split_step(0, config.global_batch, config.micro_batch, 0, config.num_workers)
    config.local_resume_folder()
    tokens = load_manifest(TokensManifest, config.train_tokens)
    found: dict[str, TokensManifest | FGramsManifest] = {
        "train_tokens": tokens,
        "validation_tokens": load_manifest(TokensManifest, config.validation_tokens),
    }
    if config.fgrams:
        found["fgrams"] = load_manifest(FGramsManifest, config.fgrams)
    for name, manifest in found.items():
        require_equal(
            f"{name}: tokenizer_sha256",
            manifest.tokenizer_sha256,
            tokens.tokenizer_sha256,
            "make all inputs with one tokenizer",
        )
    inputs = {name: manifest.fingerprint for name, manifest in found.items()}
    if config.pretrained:
        inputs["pretrained"] = fingerprint_folder(config.pretrained)
    return inputs


def plan(config: TrainConfig) -> TrainPlan:
    """What the run will cost, from a model without weights and a sample of the text.

    Raises:
        ValueError: the options of the model do not go together.
    """
    stream = TokenStream.open(config.train_tokens)
    with torch.device("meta"):
        model = SconeLM.start(
            build_causal_lm(main_model_config(config, stream)),
            config.embedding_options(),
            separator_id=stream.manifest.separator_id,
        )
    batches = training_batches(config, stream)
    sample = next(batches.micro_batches(0, micro_batch=config.micro_batch, rank=0, num_ranks=1))
    num_nodes = 0 if sample.fgrams is None else sample.fgrams.forest.num_nodes
    rate = config.gflops_per_second
    return plan_training(
        model,
        sequence_length=config.sequence_length,
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        steps=config.steps,
        num_ranks=config.num_workers,
        nodes_per_position=num_nodes / sample.tokens_BT.numel(),
        bytes_per_weight=2 if chosen_precision(config) == "bf16" else 4,
        flops_per_second=rate * 1e9
        if rate is not None
        else EFFICIENCY * measured_flops_per_second(config.cpus_per_worker),
    )


def _train(config: TrainConfig, fingerprint: str, run: RunLog) -> None:
    folder = config.local_resume_folder()
    point = find_resume_point(folder, fingerprint=fingerprint, zero_stage=config.zero_stage)
    _require_cpus(config)
    log = TrainingLog(run, steps=config.steps, steps_before=point.step if point else 0)
    if point is not None:
        print(f"train: resumed after step {point.step}")
        log.log(point.reports)
    with follow_reports(log) as send_reports, tempfile.TemporaryDirectory() as scratch:
        try:
            _trainer(config, fingerprint, send_reports, scratch).fit()
        except RayTrainError as error:
            raise explain_network(error, config) from error
    log.log(_exported(config).reports)


def _exported(config: TrainConfig) -> ExportReceipt:
    receipt = read_receipt(config.out, EXPORT, ExportReceipt)
    assert receipt is not None, "rank 0 exported the model"
    return receipt


def _trainer(
    config: TrainConfig, fingerprint: str, send_reports: UserCallback, scratch: str
) -> TorchTrainer:
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", POLL_SECONDS)
    gpus = {"GPU": 1} if config.gpus_per_worker else {}
    return TorchTrainer(
        train_worker,
        train_loop_config={"config": config.model_dump(mode="json"), "fingerprint": fingerprint},
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=config.num_workers,
            use_gpu=bool(gpus),
            resources_per_worker={"CPU": config.cpus_per_worker, **gpus},
        ),
        run_config=RunConfig(
            name="train",
            storage_path=scratch,  # unused: resume states are ours
            failure_config=FailureConfig(max_failures=config.max_failures),
            logging_config=LoggingConfig(log_level="WARNING"),
            callbacks=[send_reports],
            worker_runtime_env={"env_vars": worker_environment(config)},
        ),
    )


def explain_network(error: RayTrainError, config: TrainConfig) -> Exception:
    """A rendezvous that failed says neither which interface was used nor how to choose one."""
    signs = ("connectFullMesh", "Gloo", "gloo/transport", "NCCL error", "ncclSystemError")
    text = str(root_cause(error)) + str(error)
    if not any(sign in text for sign in signs):
        return error
    return ConnectionError(
        f"network_interface={config.network_interface!r}: the workers do not reach each other "
        f"({str(root_cause(error)).strip().splitlines()[-1]}); name the interface that joins the "
        "nodes (`ip addr` lists them), e.g. --network-interface eth0"
    )


def _require_cpus(config: TrainConfig) -> None:
    needed = config.num_workers * config.cpus_per_worker
    available = ray.cluster_resources().get("CPU", 0)
    if needed > available:
        raise ValueError(
            f"num_workers={config.num_workers} * cpus_per_worker={config.cpus_per_worker} needs "
            f"{needed} CPUs, the cluster has {available:g}; lower one of them or add nodes"
        )


def worker_environment(config: TrainConfig) -> dict[str, str]:
    """Environment variables of the workers, where PyTorch's backends look for the interface."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if config.network_interface else ()
    return QUIET | dict.fromkeys(names, config.network_interface or "")


def checkpoint_manifest(config: TrainConfig, shared: SharedFields) -> CheckpointManifest:
    """What the exported model is."""
    tokens = load_manifest(TokensManifest, config.train_tokens)
    fgrams = load_manifest(FGramsManifest, config.fgrams) if config.fgrams else None
    return CheckpointManifest(
        **shared,
        shards=_exported(config).shards,
        step=config.steps,
        tokens_seen=config.steps * config.global_batch * config.sequence_length,
        tokenizer_sha256=tokens.tokenizer_sha256,
        method=config.chosen_method,
        fgrams_fingerprint=fgrams.fingerprint if fgrams else None,
        max_n=fgrams.max_n if fgrams else None,
        fgram_output=config.fgram_model.output if config.chosen_method == "scone" else None,
    )
