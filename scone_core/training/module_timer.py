"""a module -> the seconds that its forward and backward passes take, measured by hooks."""

import time
from typing import Any

import torch
from torch import nn


class ModuleTimer:
    """Times the training passes of `module`; its first argument must need a gradient.

    On a GPU the time is that of the stream, so nothing waits before `take` is called.
    """

    def __init__(self, module: nn.Module) -> None:
        self._spans: list[tuple[Any, Any]] = []
        self._started: Any = None
        module.register_forward_pre_hook(self._start)
        module.register_forward_hook(self._stop)
        module.register_full_backward_pre_hook(self._start)
        module.register_full_backward_hook(self._stop)

    def take(self) -> float:
        """Seconds since the last call."""
        seconds = sum(_seconds_between(*span) for span in self._spans)
        self._spans.clear()
        return seconds

    def _start(self, module: nn.Module, *_: Any) -> None:
        self._started = _now() if module.training else None

    def _stop(self, module: nn.Module, *_: Any) -> None:
        if module.training:
            self._spans.append((self._started, _now()))


def _now() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(start: Any, stop: Any) -> float:
    if isinstance(start, float):
        return stop - start
    stop.synchronize()
    return start.elapsed_time(stop) / 1000
