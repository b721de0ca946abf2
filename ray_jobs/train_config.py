"""The options of training, and the learning-rate schedule they describe."""

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from ray_jobs.runtime import JobConfig
from scone_core import storage
from scone_core.config import Frozen, InputPath, Resource, Role
from scone_core.decoders import DecoderConfig
from scone_core.model import FgramModelConfig


class OptimizerConfig(Frozen):
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: PositiveFloat = 3e-3
    fgram_learning_rate: PositiveFloat | None = None
    """Of the f-gram model; by default as the main model's."""
    warmup_steps: NonNegativeInt = 20
    final_learning_rate: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a part of the highest."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Of matrices; embeddings, norms and gains have none."""
    beta2: float = Field(default=0.95, gt=0, lt=1)
    clip_norm: PositiveFloat = 1.0
    """Largest norm of the gradient of all parameters together."""

    def schedule(self, step: int, *, num_steps: int) -> float:
        """The part of the learning rates that applies to `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * done)) / 2
        return self.final_learning_rate + (1 - self.final_learning_rate) * cosine


class TrainConfig(JobConfig):
    """Options of the train stage."""

    train_tokens: InputPath
    """Folder or URI of a tokens/v1 artifact."""
    validation_tokens: InputPath
    """The same for the held-out text."""
    fgrams: Annotated[str | None, Role("input")] = None
    """Folder or URI of a fgrams/v1 artifact; without it the plain baseline is trained."""
    model: DecoderConfig = DecoderConfig()
    """The main model, when it starts from scratch."""
    pretrained: Annotated[str | None, Role("input")] = None
    """A Hugging Face folder that the main model starts from, in place of `model`."""
    fgram_model: FgramModelConfig = FgramModelConfig()
    """The f-gram model; without f-grams there is none."""
    sequence_length: PositiveInt = 256
    global_batch: PositiveInt = 16
    """Sequences per step, all workers together."""
    steps: PositiveInt = 1000
    optimizer: OptimizerConfig = OptimizerConfig()
    seed: NonNegativeInt = 0

    num_workers: Resource[PositiveInt] = 2
    """Data-parallel workers. Batches are the same for any number of them."""
    cpus_per_worker: Resource[PositiveInt] = 1
    micro_batch: Resource[PositiveInt] = 8
    """Sequences of one forward pass of one worker; the rest of a step is accumulated."""
    zero_stage: Resource[Literal[0, 1, 2]] = 1
    eval_every: Resource[PositiveInt] = 100
    """Steps between evaluations on the validation tokens."""
    checkpoint_every: Resource[PositiveInt] = 100
    """Steps between resume states."""
    report_every: Resource[PositiveInt] = 10
    """Steps between reports of loss, gradient norm and speed."""
    max_failures: Resource[NonNegativeInt] = 3
    """Worker failures after which training goes on from the last resume state."""
    resume_folder: Annotated[str | None, Role("output")] = None
    """A folder that all workers share, for the resume states; by default `resume` in `out`."""
    network_interface: Resource[str | None] = None
    """Network interface through which the workers reach each other, where Gloo (or NCCL) picks a
    wrong one, e.g. eth0.
    """

    def local_resume_folder(self) -> str:
        """Where the resume states lie.

        Raises:
            ValueError: `out` is a URI, where DeepSpeed cannot write, and no folder is given.
        """
        if self.resume_folder is None and not storage.is_local(self.out):
            raise ValueError(
                f"resume_folder: needed because out={self.out!r} is not a local folder; "
                "give one that all workers share"
            )
        return self.resume_folder or storage.join(self.out, "resume")
