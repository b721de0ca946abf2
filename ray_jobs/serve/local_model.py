"""A model that lies on every node already: nothing to fetch before its engine starts."""

from ray.llm._internal.common.callbacks.base import CallbackBase


class LocalModel(CallbackBase):
    """Named in the engine's configuration, as Ray's guide to engine callbacks describes."""

    async def on_before_node_init(self) -> None:
        """Else every replica waits for a task whose only work is to import vLLM, seconds long."""
        self.ctx.run_init_node = False
