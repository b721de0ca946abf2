"""DeepSpeed state <-> `step-<n>/` folders; a COMPLETE file in one makes it a state to go on from.

DeepSpeed's own `latest` is not written atomically, and a missing one only warns. COMPLETE is
written in one step after every rank has written, so a kill at any moment leaves a whole state.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import ValidationError

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import ArtifactError, require_equal

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

COMPLETE = "COMPLETE"


class ResumePoint(Frozen):
    """The content of COMPLETE. The step says all about the data: sample g of a training is the
    same on any number of workers.
    """

    step: int
    """Steps done."""
    samples_seen: int
    """Sequences, all workers together: where the data go on."""
    fingerprint: str
    """Of the training that it belongs to."""
    num_workers: int
    zero_stage: Literal[0, 1, 2, 3]
    reports: list[dict[str, float]]
    """All that was reported so far."""

    @property
    def tag(self) -> str:
        """Folder of the state."""
        return f"step-{self.step:08d}"

    @property
    def universal_tag(self) -> str:
        """Folder of its universal form, as long as it is needed."""
        return f"universal-{self.tag}"

    @property
    def perplexity(self) -> float:
        """Held-out perplexity at the last evaluation before; infinite without any."""
        seen = [report.get("validation_perplexity") for report in self.reports]
        return next((value for value in reversed(seen) if value is not None), float("inf"))


def find_resume_point(folder: str, *, fingerprint: str, zero_stage: int) -> ResumePoint | None:
    """The newest complete state; None when training starts at its beginning.

    Raises:
        ArtifactError: it belongs to another training or to another ZeRO stage.
    """
    points = complete_points(folder)
    if not points:
        return None
    point = points[-1]
    require_equal(
        f"{folder}: fingerprint", point.fingerprint, fingerprint, "choose another resume_folder"
    )
    require_equal(
        f"{folder}: zero_stage",
        point.zero_stage,
        zero_stage,
        f"go on with zero_stage={point.zero_stage} or delete {folder} to start again",
    )
    return point


def complete_points(folder: str) -> list[ResumePoint]:
    """The complete states in `folder`, oldest first.

    Raises:
        ArtifactError: a COMPLETE file is damaged.
    """
    points = []
    for path in sorted(Path(folder).glob(f"step-*/{COMPLETE}")):
        try:
            points.append(ResumePoint.model_validate_json(path.read_bytes()))
        except ValidationError as error:
            raise ArtifactError(
                f"{path}: damaged ({error}); delete {path.parent} to go on from an older state"
            ) from error
    return points


def save_resume_state(
    engine: "DeepSpeedEngine", folder: str, point: ResumePoint, *, keep_last: int, keep_best: int
) -> None:
    """Write the state of all ranks, then COMPLETE, then drop what need not be kept. Every rank
    calls it.
    """
    engine.save_checkpoint(folder, tag=point.tag, save_latest=False)
    torch.distributed.barrier()
    if engine.global_rank == 0:
        state = Path(folder) / point.tag
        for file in state.iterdir():
            _sync(file)
        storage.write_bytes(str(state / COMPLETE), point.model_dump_json().encode())
        drop_states(folder, keep_last=keep_last, keep_best=keep_best)
    torch.distributed.barrier()


def drop_states(folder: str, *, keep_last: int, keep_best: int) -> None:
    """Delete all states but the newest and the best. COMPLETE goes first, so that no half-deleted
    state has one.
    """
    points = complete_points(folder)
    best = sorted(points, key=lambda point: point.perplexity)[:keep_best]
    kept = {point.tag for point in [*points[-keep_last:], *best]}
    for state in Path(folder).glob("step-*"):
        if state.name not in kept:
            (state / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(state)


def load_resume_state(engine: "DeepSpeedEngine", folder: str, tag: str) -> None:
    """Bring weights and optimizer of every rank to a state. Every rank calls it.

    Raises:
        ArtifactError: a file of the state is missing.
    """
    assert engine.optimizer is not None
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)  # inside ZeRO's own
    groups = optimizer.param_groups
    options = [{name: group[name] for name in group if name != "params"} for group in groups]
    path, _ = engine.load_checkpoint(folder, tag=tag)
    # A universal state under ZeRO-3 gives all groups the weight decay of the first, and all
    # parameters one step counter, which then advances as often as there are parameters.
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()
    if path is None:
        raise ArtifactError(
            f"{folder}/{tag}: incomplete; restore it or delete {folder} to start again"
        )


def needs_universal(point: ResumePoint | None, *, num_workers: int) -> bool:
    """DeepSpeed's own states fit the number of workers that wrote them; without ZeRO, any."""
    return point is not None and point.zero_stage > 0 and point.num_workers != num_workers


def make_universal(folder: str, point: ResumePoint) -> None:
    """Convert a state to DeepSpeed's universal form, which any number of workers can load.

    Raises:
        ArtifactError: the conversion failed.
    """
    num_processes = max(1, (os.cpu_count() or 1) // 4)  # each spends 5 s on its start
    drop_universal(folder, point)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
            *("--input_folder", str(Path(folder) / point.tag)),
            *("--output_folder", str(Path(folder) / point.universal_tag)),
            *("--num_extract_workers", str(num_processes)),
            *("--num_merge_workers", str(num_processes)),
            "--inject_missing_state",
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        raise ArtifactError(
            f"{folder}/{point.tag}: no universal form for another number of workers ({reason}); "
            f"go on with num_workers={point.num_workers}"
        )


def drop_universal(folder: str, point: ResumePoint) -> None:
    """Delete the universal form of a state, if there is one."""
    shutil.rmtree(Path(folder) / point.universal_tag, ignore_errors=True)


def _sync(file: Path) -> None:
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
