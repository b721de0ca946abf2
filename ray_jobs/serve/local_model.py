"""A hook of Ray's LLM engine: the node has the model already, so Ray fetches nothing."""

from ray.llm._internal.common.callbacks.base import CallbackBase


class LocalModel(CallbackBase):
    """The engine's configuration names this class, as Ray's guide to engine callbacks describes."""

    async def on_before_node_init(self) -> None:
        """Skip the task that would fetch the model: it only imports vLLM, which takes seconds."""
        self.ctx.run_init_node = False
