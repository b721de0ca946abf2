"""The laws of the timer: every training pass is counted once, no other pass is."""

import torch
from torch import nn

from scone_core.training.module_timer import ModuleTimer


def test_forward_and_backward_of_training_are_counted_once():
    module = nn.Linear(4, 4)
    timer = ModuleTimer(module)
    output = module(torch.ones(2, 4, requires_grad=True))
    assert timer.take() > 0
    assert timer.take() == 0
    output.sum().backward()
    assert timer.take() > 0
    assert timer.take() == 0


def test_passes_of_evaluation_are_not_counted():
    module = nn.Linear(4, 4)
    timer = ModuleTimer(module)
    module.eval()
    module(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert timer.take() == 0


def test_timing_changes_neither_values_nor_gradients():
    torch.manual_seed(0)
    module, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    plain = [module(x), *torch.autograd.grad(module(x).square().sum(), [x, module.weight])]
    ModuleTimer(module)
    timed = [module(x), *torch.autograd.grad(module(x).square().sum(), [x, module.weight])]
    assert all(map(torch.equal, plain, timed))
