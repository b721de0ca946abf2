"""The options of training, and the learning-rate schedule they describe."""

from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from ray_jobs.runtime.config import JobConfig
from scone_core.artifacts import storage
from scone_core.artifacts.config import (
    InputPath,
    OptionalInputPath,
    OptionalOutputPath,
    Resource,
)
from scone_core.model.decoders import DecoderConfig
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.model.input_embeddings import Method, OverEncodingConfig
from scone_core.model.micro_batch import AttentionSpan
from scone_core.model.scone_lm import EmbeddingOptions
from scone_core.training.optimizer import OptimizerConfig


class TrainConfig(JobConfig):
    """Options of the train stage."""

    train_tokens: InputPath
    """Folder or URI of a tokens/v1 artifact."""
    validation_tokens: InputPath
    """The same for the held-out text."""
    fgrams: OptionalInputPath = None
    """Folder or URI of a fgrams/v1 artifact; without it the plain baseline is trained."""
    method: Method | None = None
    """How input embeddings are made: plain, scone, fgram_mean (the mean of an f-gram's token
    embeddings, no training) or over_encoding (hashed n-gram rows); by default scone with f-grams,
    plain without.
    """
    model: DecoderConfig = DecoderConfig()
    """The main model, when it starts from scratch."""
    pretrained: OptionalInputPath = None
    """A Hugging Face folder that the main model starts from, in place of `model`."""
    fgram_model: FGramModelConfig = FGramModelConfig()
    """The f-gram model of method scone."""
    over_encoding: OverEncodingConfig = OverEncodingConfig()
    """The hashed rows of method over_encoding."""
    sequence_length: PositiveInt = 256
    global_batch: PositiveInt = 16
    """Sequences per step, all workers together."""
    attention_span: AttentionSpan = "sequence"
    """sequence: attention crosses the documents that are packed into a sequence. document: it ends
    at their borders, and positions count from there.
    """
    steps: PositiveInt = 1000
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of weights and activations in forward and backward passes, beside fp32 master weights; auto
    is bf16 on GPUs and fp32 on CPUs.
    """
    seed: NonNegativeInt = 0

    num_workers: Resource[PositiveInt] = 2
    """Data-parallel workers. Batches are the same for any number of them."""
    cpus_per_worker: Resource[PositiveInt] = 1
    micro_batch: Resource[PositiveInt] = 8
    """Sequences of one forward pass of one worker; the rest of a step is accumulated."""
    gpus_per_worker: Resource[Literal[0, 1]] = 0
    """1 trains on GPUs."""
    zero_stage: Resource[Literal[0, 1, 2, 3]] = 1
    """What is spread over the workers: 1 optimizer state, 2 also gradients, 3 also weights."""
    recompute_activations: Resource[Literal["none", "layers"]] = "none"
    """layers: keep the inputs of layers alone, and compute the rest again in the backward pass."""
    eval_every: Resource[PositiveInt] = 100
    """Steps between evaluations on the validation tokens."""
    checkpoint_every: Resource[PositiveInt] = 100
    """Steps between resume states."""
    keep_last: Resource[PositiveInt] = 1
    """Resume states to keep, newest first."""
    keep_best: Resource[NonNegativeInt] = 0
    """Resume states to keep beside them, lowest held-out perplexity first."""
    report_every: Resource[PositiveInt] = 10
    """Steps between reports of loss, gradient norm and speed."""
    max_failures: Resource[NonNegativeInt] = 3
    """Worker failures after which training goes on from the last resume state."""
    resume_folder: OptionalOutputPath = None
    """A folder that all workers share, for the resume states; by default `resume` in `out`."""
    network_interface: Resource[str | None] = None
    """Network interface through which the workers reach each other, where Gloo (or NCCL) picks a
    wrong one, e.g. eth0.
    """

    gflops_per_second: Resource[PositiveFloat | None] = None
    """FLOPs of one worker, in billions a second, for the hours of the plan; by default half the
    rate at which the driver's machine multiplies matrices.
    """

    @model_validator(mode="after")
    def _require_fgrams(self) -> Self:
        needs = self.chosen_method in ("scone", "fgram_mean")
        if needs != (self.fgrams is not None):
            raise ValueError(
                f"fgrams={self.fgrams!r}: method={self.chosen_method!r} "
                + ("needs f-grams" if needs else "takes none; leave fgrams away")
            )
        return self

    @property
    def chosen_method(self) -> Method:
        return self.method or ("scone" if self.fgrams else "plain")

    def embedding_options(self) -> EmbeddingOptions:
        """What SconeLM.start takes."""
        by_method: dict[Method, EmbeddingOptions] = {
            "plain": None,
            "scone": self.fgram_model,
            "fgram_mean": "fgram_mean",
            "over_encoding": self.over_encoding,
        }
        return by_method[self.chosen_method]

    def local_resume_folder(self) -> str:
        """The folder of the resume states.

        Raises:
            ValueError: `out` is a URI, where DeepSpeed cannot write, and no folder is given.
        """
        if self.resume_folder is None and not storage.is_local(self.out):
            raise ValueError(
                f"resume_folder: needed because out={self.out!r} is not a local folder; "
                "give one that all workers share"
            )
        return self.resume_folder or storage.join(self.out, "resume")
