"""hidden states, targets -> summed token loss of a decoder's head, some positions at a time.

The logits of a micro-batch are its largest array by far: 1.6 GB for 8 x 1024 positions and GPT-2's
50,257 ids, and plain cross entropy holds four arrays of that size. Here the gradient of a chunk is
computed while its logits are in memory: nothing is computed twice, and two arrays of a chunk's size
are all that is held.

Legend: P positions, V vocabulary, D width; C positions of a chunk.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

PLAIN_HEADS = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "olmo", "olmo2", "qwen2", "qwen3"})
"""Architectures whose logits are the product of last hidden state and head weight, nothing else."""
CHUNK_LOGITS = 1 << 25
"""Logits of a chunk. Every chunk adds to the gradient of the head, so smaller ones would spend
their time on that sum.
"""


class HeadLoss(nn.Module):
    """The loss of a head without bias; shares its weight."""

    def __init__(self, weight_VD: nn.Parameter, *, chunk_logits: int = CHUNK_LOGITS) -> None:
        super().__init__()
        self.weight = weight_VD
        self._chunk_positions = max(1, chunk_logits // len(weight_VD))

    @classmethod
    def of(cls, model: PreTrainedModel) -> "HeadLoss | None":
        """The loss of `model`'s own head; None where its logits are more than a product."""
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            return None
        return cls(head.weight) if model.config.model_type in PLAIN_HEADS else None

    def forward(self, hidden_PD: Tensor, targets_P: Tensor) -> Tensor:
        """Negative log-likelihood (nats, float32) summed over the targets; -100 marks no target."""
        size, has_grad = self._chunk_positions, torch.is_grad_enabled()
        return _HeadLoss.apply(hidden_PD, self.weight, targets_P, size, has_grad)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        targets_P: Tensor,
        size: int,
        has_grad: bool,
    ) -> Tensor:
        loss = hidden_PD.new_zeros((), dtype=torch.float32)
        grad_PD, grad_VD = torch.empty_like(hidden_PD), None
        chunks = zip(hidden_PD.split(size), targets_P.split(size), grad_PD.split(size), strict=True)
        buffers = _Buffers(hidden_PD, min(size, len(hidden_PD)), len(weight_VD))
        for hidden_CD, target_C, grad_CD in chunks:
            log_p_CV = buffers.log_softmax(hidden_CD, weight_VD)
            loss += torch.nn.functional.nll_loss(log_p_CV, target_C, reduction="sum")
            if has_grad:
                slope_CV = _slope(log_p_CV, target_C).to(hidden_CD.dtype)
                torch.mm(slope_CV, weight_VD, out=grad_CD)
                grad_VD = _add_product(grad_VD, slope_CV, hidden_CD)
        if grad_VD is not None:
            ctx.save_for_backward(grad_PD, grad_VD.to(weight_VD.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_PD, grad_VD = ctx.saved_tensors
        return grad_PD * grads[0], grad_VD * grads[0], None, None, None


class _Buffers:
    """Logits of a chunk and their log-softmax. Fresh pages for each would cost as much as the
    softmax."""

    def __init__(self, like: Tensor, num_positions: int, vocab_size: int) -> None:
        shape = num_positions, vocab_size
        self._logits, self._log_p = (
            like.new_empty(shape),
            like.new_empty(shape, dtype=torch.float32),
        )

    def log_softmax(self, hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
        logits_CV, log_p_CV = (x[: len(hidden_CD)] for x in (self._logits, self._log_p))
        torch.mm(hidden_CD, weight_VD.T, out=logits_CV)
        return torch.ops.aten._log_softmax.out(logits_CV.float(), -1, False, out=log_p_CV)


def _slope(log_p_CV: Tensor, target_C: Tensor) -> Tensor:
    """The gradient of the loss by the logits, in place."""
    slope_CV = log_p_CV.exp_()
    is_target_C1 = (target_C >= 0)[:, None].float()
    slope_CV.scatter_add_(1, target_C.clamp(min=0)[:, None], -is_target_C1)
    if not bool(is_target_C1.all()):
        slope_CV *= is_target_C1
    return slope_CV


def _add_product(grad_VD: Tensor | None, slope_CV: Tensor, hidden_CD: Tensor) -> Tensor:
    """`grad + slope.T @ hidden`, summed in float32."""
    if grad_VD is None:
        return (slope_CV.T @ hidden_CD).float()
    if hidden_CD.dtype == torch.float32:
        return grad_VD.addmm_(slope_CV.T, hidden_CD)
    return grad_VD.add_((slope_CV.T @ hidden_CD).float())
