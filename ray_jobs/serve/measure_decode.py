"""two served/v1 folders -> decode/v1: tokens per second of a model and of its plain baseline.

Both run at the same time behind one API, and their rounds take turns, so that whatever else the
machine does hits both. This is the one artifact that holds a measurement: a rerun would differ.
"""

import json
import logging
import socket
import statistics
import time
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
from pydantic import Field
from ray import serve
from ray.serve.schema import ApplicationStatus

from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.config import JobConfig
from ray_jobs.runtime.progress import Progress
from ray_jobs.runtime.stage import run_stage
from ray_jobs.runtime.tracking import RunLog
from ray_jobs.serve.serve_scone import ServeConfig, openai_app
from scone_core.artifacts.config import InputPath
from scone_core.artifacts.folders import SharedFields
from scone_core.artifacts.manifests import DecodeManifest, TokensManifest, load_manifest
from scone_core.corpus.token_shards import map_documents
from scone_core.serving.served_folder import ServedManifest

APPLICATION = "decode"
MODELS = ("scone", "baseline")
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
QUIET_SERVE = {"log_level": "ERROR", "enable_access_log": False}


class DecodeConfig(JobConfig):
    """Options of the measurement."""

    model: InputPath
    """Folder of the served/v1 artifact with f-grams."""
    baseline: InputPath
    """Folder of the served/v1 artifact of the plain model."""
    tokens: InputPath
    """Folder or URI of the tokens/v1 artifact whose first tokens are the prompts."""
    num_streams: int = Field(default=4, ge=1)
    """Requests that are answered at the same time."""
    prompt_length: int = Field(default=32, ge=1)
    """Tokens of each prompt."""
    num_tokens: int = Field(default=64, ge=1)
    """Tokens of each answer."""
    num_rounds: int = Field(default=5, ge=1)
    """Rounds of each model; the result is their median."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations."""
    device: Literal["cpu", "gpu"] = "cpu"
    engine: dict[str, Any] = Field(default_factory=lambda: {"enforce_eager": True})
    """Engine arguments of vLLM. Without compilation engines start in half the time."""


def run(config: DecodeConfig) -> DecodeManifest:
    """Serve a model and its baseline, ask both through HTTP, and stop them."""
    inputs = {
        "model": load_manifest(ServedManifest, config.model).fingerprint,
        "baseline": load_manifest(ServedManifest, config.baseline).fingerprint,
        "tokens": load_manifest(TokensManifest, config.tokens).fingerprint,
    }
    return run_stage(DecodeManifest, config, inputs, partial(_decode, config), stage="decode")


def _decode(config: DecodeConfig, shared: SharedFields, log: RunLog) -> DecodeManifest:
    prompts = _prompts(config)
    connect(config.cluster)
    with _serving(config) as url:
        answer = _complete(url, "scone", prompts[0], config.num_tokens)
        rates = _measure(config, url, prompts)
    manifest = DecodeManifest(
        **shared,
        shards=(),
        decode_tokens_per_second=rates["scone"],
        decode_tokens_per_second_baseline=rates["baseline"],
        answer=answer,
    )
    log.log_metrics(
        {
            "decode_tokens_per_second": manifest.decode_tokens_per_second,
            "decode_tokens_per_second_baseline": manifest.decode_tokens_per_second_baseline,
        }
    )
    return manifest


def _prompts(config: DecodeConfig) -> list[list[int]]:
    manifest = load_manifest(TokensManifest, config.tokens)
    tokens_L, _ = map_documents(config.tokens, manifest.shards[0])
    needed = config.num_streams * config.prompt_length
    return np.resize(tokens_L, needed).reshape(config.num_streams, -1).tolist()


@contextmanager
def _serving(config: DecodeConfig) -> Generator[str]:
    """The address of an API with both models."""
    port = _free_port()
    models = zip(MODELS, (config.model, config.baseline), strict=True)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    shared = config.model_dump(include={"dtype", "device", "engine"}) | {"env": QUIET}
    application = openai_app(
        [ServeConfig(model=folder, model_id=name, **shared) for name, folder in models]
    )
    options = {"host": "127.0.0.1", "port": port}
    serve.start(http_options=options, logging_config=QUIET_SERVE)
    try:
        target = serve.RunTarget(application, APPLICATION, logging_config=QUIET_SERVE)
        serve.run_many([target], wait_for_applications_running=False)
        _wait_until_running()
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        serve.shutdown()


def _wait_until_running() -> None:
    """Say every five seconds that engines are starting.

    Raises:
        ValueError: they did not.
    """
    started = time.monotonic()
    for tick in range(10_000):
        application = serve.status().applications[APPLICATION]
        if application.status == ApplicationStatus.RUNNING:
            return
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            reasons = [d.message for d in application.deployments.values() if d.message]
            raise ValueError(f"decode: the engines did not start: {application.message} {reasons}")
        if tick % 5 == 0:
            print(f"decode: engines are starting, {time.monotonic() - started:.0f} s", flush=True)
        time.sleep(1)


def _measure(config: DecodeConfig, url: str, prompts: list[list[int]]) -> dict[str, float]:
    """Median tokens per second of each model; the first round of each only warms up."""
    rates: dict[str, list[float]] = {name: [] for name in MODELS}
    progress = Progress("decode", unit="rounds", total=config.num_rounds + 1)
    with ThreadPoolExecutor(config.num_streams) as pool:
        for _ in range(config.num_rounds + 1):
            for name in MODELS:
                started = time.monotonic()
                list(pool.map(lambda p, n=name: _complete(url, n, p, config.num_tokens), prompts))
                seconds = time.monotonic() - started
                rates[name].append(config.num_streams * config.num_tokens / seconds)
            progress.advance(note=", ".join(f"{n} {rates[n][-1]:.0f} tokens/s" for n in MODELS))
    return {name: round(statistics.median(rates[name][1:]), 1) for name in MODELS}


def _complete(url: str, model: str, prompt: list[int], num_tokens: int) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    request = urllib.request.Request(
        url,
        json.dumps({**body, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        content: dict[str, Any] = json.load(response)
    return content["choices"][0]["text"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
