"""vLLM's workers, which put f-gram rows into the input embeddings before every engine step."""

from typing import Any

import vllm.v1.worker.cpu.shm  # noqa: F401 (vLLM wants it imported before its CPU worker)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from ray_jobs.serve.vllm_plugin.model import SconeMixin

AnyBase: Any = object
"""Stands for what the mixins below are put before."""


class SconeRunner(AnyBase):
    """Put before a model runner of vLLM (V1)."""

    def _preprocess(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM fills its persistent `inputs_embeds` with token embeddings; hits get their rows."""
        inputs = super()._preprocess(scheduler_output, *args, **kwargs)
        model = self.get_model()
        if isinstance(model, SconeMixin) and inputs[1] is not None:
            num_tokens = scheduler_output.total_num_scheduled_tokens
            batch = self.input_batch
            model.lookup.put_rows(
                batch.token_ids_cpu,
                batch.num_computed_tokens_cpu,
                self.query_start_loc.np[: batch.num_reqs + 1],
                self.inputs_embeds.gpu[:num_tokens],
            )
        return inputs


class SconeWorker(AnyBase):
    """Put before a worker of vLLM; serves plain models as well."""

    runner_class: type[SconeRunner]

    def init_device(self) -> None:
        super().init_device()
        if not hasattr(self.model_config.hf_config, "scone"):
            return
        if self.use_v2_model_runner or self.scheduler_config.async_scheduling:
            raise ValueError(
                "a SCONE model reads generated tokens from the host's token table: start vLLM with "
                "VLLM_USE_V2_MODEL_RUNNER=0 and --no-async-scheduling"
            )
        runner = self.model_runner
        # Swapping the class keeps vLLM's own construction of the runner, which differs per device.
        runner.__class__ = self.runner_class
        # Input embeddings then come from one persistent buffer in every run, profiling, compilation
        # and graph capture included. Only the runner is told: the API keeps refusing embeddings.
        runner.enable_prompt_embeds = True


class SconeCPUModelRunner(SconeRunner, CPUModelRunner):
    pass


class SconeGPUModelRunner(SconeRunner, GPUModelRunner):
    pass


class SconeCPUWorker(SconeWorker, CPUWorker):
    runner_class = SconeCPUModelRunner


class SconeGPUWorker(SconeWorker, GPUWorker):
    runner_class = SconeGPUModelRunner
