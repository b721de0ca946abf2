"""The laws of the chunked loss: that of all logits at once, bit-equal at any thread count."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from scone_core.model.head_loss import HeadLoss


def random_inputs(
    num_positions: int, *, vocab_size: int = 30, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, nn.Parameter, torch.Tensor]:
    """Hidden states, weight of the head, targets of which a fifth is none."""
    generator = torch.Generator().manual_seed(num_positions)
    hidden_PD = torch.randn(num_positions, 16, generator=generator).to(dtype).requires_grad_()
    weight_VD = nn.Parameter(torch.randn(vocab_size, 16, generator=generator).to(dtype))
    targets_P = torch.randint(0, vocab_size, (num_positions,), generator=generator)
    targets_P[torch.rand(num_positions, generator=generator) < 0.2] = -100
    return hidden_PD, weight_VD, targets_P


@settings(max_examples=20)
@given(st.integers(1, 40), st.sampled_from([1, 7, 1000]))
def test_loss_and_gradients_equal_those_of_all_logits_at_once(num_positions, chunk_positions):
    hidden_PD, weight_VD, targets_P = random_inputs(num_positions)
    loss_of = HeadLoss(weight_VD, chunk_logits=30 * chunk_positions)
    found = loss_of(hidden_PD, targets_P)
    expected = F.cross_entropy(hidden_PD @ weight_VD.T, targets_P, reduction="sum")
    torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad(loss * 0.25, [hidden_PD, weight_VD]) for loss in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_low_precision_sums_the_gradient_of_the_head_in_float32():
    inputs = random_inputs(2000, dtype=torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in inputs[:2]]
    (found_VD,) = torch.autograd.grad(
        HeadLoss(inputs[1], chunk_logits=30 * 4)(inputs[0], inputs[2]), inputs[1]
    )
    loss = F.cross_entropy(exact[0] @ exact[1].T, inputs[2], reduction="sum")
    (expected_VD,) = torch.autograd.grad(loss, exact[1])
    assert found_VD.dtype == torch.bfloat16
    assert (found_VD - expected_VD).norm() < 0.01 * expected_VD.norm()


def test_loss_and_gradients_are_bit_equal_at_any_thread_count():
    inputs = random_inputs(700, vocab_size=400)
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            loss = HeadLoss(inputs[1], chunk_logits=400 * 64)(inputs[0], inputs[2])
            results.append([loss, *torch.autograd.grad(loss, inputs[:2])])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, results[0] * 2, results[1] + results[2]))


def test_without_gradients_the_loss_is_the_same():
    hidden_PD, weight_VD, targets_P = random_inputs(50)
    with torch.no_grad():
        alone = HeadLoss(weight_VD)(hidden_PD, targets_P)
    assert torch.equal(alone, HeadLoss(weight_VD)(hidden_PD, targets_P))


@pytest.mark.parametrize(("model_type", "is_plain"), [("llama", True), ("cohere", False)])
def test_logits_that_are_more_than_a_product_are_left_to_the_model(model_type, is_plain):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(model_type, vocab_size=30, intermediate_size=16, **sizes)
    assert (HeadLoss.of(AutoModelForCausalLM.from_config(config)) is not None) is is_plain
