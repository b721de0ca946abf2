"""DeepSpeed state <-> `step-<n>/` folders, of which `COMPLETE` names the one to go on from.

DeepSpeed's own `latest` is not written atomically, and a missing one only warns. COMPLETE is
replaced in one step after every rank has written, so a kill at any moment leaves a whole state.
"""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError

from scone_core import storage
from scone_core.artifacts import ArtifactError, require_equal
from scone_core.config import Frozen

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

COMPLETE = "COMPLETE"


class ResumePoint(Frozen):
    """The content of COMPLETE."""

    step: int
    """Steps done."""
    fingerprint: str
    """Of the training that it belongs to."""
    num_workers: int
    reports: list[dict[str, float]]
    """All that was reported so far."""

    @property
    def tag(self) -> str:
        return f"step-{self.step:08d}"


def find_resume_point(folder: str, *, fingerprint: str, num_workers: int) -> ResumePoint | None:
    """The state to go on from; None when training starts at its beginning.

    Raises:
        ArtifactError: the state belongs to another training or to another number of workers.
    """
    path = storage.join(folder, COMPLETE)
    if not storage.exists(path):
        return None
    try:
        point = ResumePoint.model_validate_json(storage.read_bytes(path))
    except ValidationError as error:
        raise ArtifactError(f"{path}: damaged ({error}); delete {folder} to start again") from error
    require_equal(
        f"{folder}: fingerprint", point.fingerprint, fingerprint, "choose another resume_folder"
    )
    require_equal(
        f"{folder}: num_workers",
        point.num_workers,
        num_workers,
        f"go on with num_workers={point.num_workers} or delete {folder} to start again",
    )
    return point


def save_resume_state(engine: "DeepSpeedEngine", folder: str, point: ResumePoint) -> None:
    """Write the state of all ranks, then COMPLETE, then drop older states. Every rank calls it."""
    engine.save_checkpoint(folder, tag=point.tag, save_latest=False)
    torch.distributed.barrier()
    if engine.global_rank == 0:
        states = list(Path(folder).glob("step-*"))
        for file in (Path(folder) / point.tag).iterdir():
            _sync(file)
        storage.write_bytes(storage.join(folder, COMPLETE), point.model_dump_json().encode())
        for state in states:
            if state.name != point.tag:
                shutil.rmtree(state)
    torch.distributed.barrier()


def load_resume_state(engine: "DeepSpeedEngine", folder: str, point: ResumePoint) -> None:
    """Bring weights and optimizer of every rank to `point`. Every rank calls it.

    Raises:
        ArtifactError: a file of the state is missing.
    """
    path, _ = engine.load_checkpoint(folder, tag=point.tag)
    if path is None:
        raise ArtifactError(
            f"{folder}/{point.tag}: incomplete; restore it or delete {folder} to start again"
        )


def _sync(file: Path) -> None:
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
