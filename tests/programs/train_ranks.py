"""The ranks of a training as processes of their own, without Ray."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import get_z3_leaf_modules
from torch.distributed import init_process_group

from ray_jobs.train.config import TrainConfig
from ray_jobs.train.engine import gather_weights
from ray_jobs.train.worker import Worker
from tests.programs.processes import FORKS, write_output_to

NO_COMPILER = {"CC": "false", "CXX": "false"}
"""None is needed (deepspeedai/DeepSpeed#5677)."""


def run_ranks(folder: Path, configs: dict[str, TrainConfig], *, num_ranks: int, stop: int) -> None:
    """Train every configuration until `stop` steps are done; ranks that wait for each other for
    ever fail.

    Writes `<folder>/<name>.pt` (weights by name) and `<folder>/<name>-<rank>.json` (hits, gradient
    norm of every step; all reports).
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {name: config.model_dump(mode="json") for name, config in configs.items()}
    (folder / "jobs.json").write_text(json.dumps({"stop": stop, "jobs": jobs}))
    (folder / "rendezvous").unlink(missing_ok=True)
    ranks = [
        FORKS.Process(target=do_jobs, args=(rank, num_ranks, folder)) for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(timeout=300)
    finally:
        for rank in ranks:
            rank.kill()
    printed = (folder / "rank-0.log").read_text()
    assert [rank.exitcode for rank in ranks] == [0] * num_ranks, printed[-3000:]


def load(folder: Path, name: str, *, rank: int = 0) -> dict[str, Any]:
    """What a rank saw: "steps" (hits, gradient norm) and "reports"."""
    return json.loads((folder / f"{name}-{rank}.json").read_text())


def do_jobs(rank: int, num_ranks: int, folder: Path) -> None:
    """What one rank does: every job of `jobs.json` in turn. Prints into `rank-<rank>.log`."""
    write_output_to(folder / f"rank-{rank}.log")
    os.environ |= {"LOCAL_RANK": str(rank)} | NO_COMPILER
    init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks
    )
    todo = json.loads((folder / "jobs.json").read_text())
    for name, fields in todo["jobs"].items():
        config = TrainConfig.model_validate(fields)
        worker = Worker(config, "one training", rank=rank, num_ranks=num_ranks, send=lambda _: None)
        steps = []
        for step in range(worker.first_step, min(todo["stop"], config.steps)):
            before = worker.tally.sums[4].item()
            worker.train_step(step)
            num_hits = worker.tally.sums[4].item() - before
            steps.append({"hits": num_hits, "gradient_norm": worker.gradient_norm})
            worker.finish_step(step + 1)
        with gather_weights(worker.model):
            if rank == 0:
                state = {key: value.clone() for key, value in worker.model.state_dict().items()}
                torch.save(state, folder / f"{name}.pt")
        leaves = [type(module).__name__ for module in get_z3_leaf_modules(worker.model)]
        seen = {"first_step": worker.first_step, "steps": steps, "reports": worker.reports}
        seen["leaves"] = leaves
        (folder / f"{name}-{rank}.json").write_text(json.dumps(seen))
    torch.distributed.barrier()
