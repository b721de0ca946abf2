"""Laws of the optimizer's options: the learning rate of every step, the groups of weights."""

import pytest
import torch
from torch import nn

from scone_core.model.decoders import DecoderConfig, build_causal_lm, hugging_face_config
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.model.input_embeddings import OverEncodingConfig
from scone_core.model.scone_lm import EmbeddingOptions, SconeLM
from scone_core.training.optimizer import OptimizerConfig, parameter_groups


def rates(options: OptimizerConfig, num_steps: int) -> list[float]:
    return [options.rate(step, num_steps=num_steps) for step in range(num_steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_rate_rises_linearly_to_its_peak_and_never_rises_again(schedule: str) -> None:
    options = OptimizerConfig.model_validate({"schedule": schedule, "warmup_steps": 10})
    found = rates(options, 100)
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(found) == found[9] == 1
    assert all(later <= earlier for earlier, later in zip(found[9:], found[10:], strict=False))
    assert all(options.final_learning_rate <= rate for rate in found[9:])


@pytest.mark.parametrize(
    ("schedule", "halfway"), [("cosine", (1 + 0.1) / 2), ("linear", (1 + 0.1) / 2), ("wsd", 1.0)]
)
def test_halfway_through_the_decay_cosine_and_linear_are_in_the_middle_and_wsd_is_stable(
    schedule: str, halfway: float
) -> None:
    options = OptimizerConfig.model_validate({"schedule": schedule, "warmup_steps": 20})
    assert options.rate(20 + 100, num_steps=220) == pytest.approx(halfway)
    assert options.rate(220, num_steps=220) == pytest.approx(options.final_learning_rate)


def test_wsd_decays_linearly_over_the_last_part_of_the_steps() -> None:
    options = OptimizerConfig(
        schedule="wsd", wsd_decay=0.2, warmup_steps=0, final_learning_rate=0.0
    )
    found = rates(options, 100)
    assert found[:81] == [1.0] * 81
    assert found[80:] == pytest.approx([1 - step / 20 for step in range(20)])


def test_a_training_shorter_than_its_warm_up_has_a_rate_at_every_step() -> None:
    assert rates(OptimizerConfig(warmup_steps=20), 3) == pytest.approx([0.05, 0.1, 0.15])


def model_with(options: EmbeddingOptions) -> SconeLM:
    torch.manual_seed(0)
    main = DecoderConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = hugging_face_config(main, vocab_size=32, separator_id=0)
    return SconeLM.start(build_causal_lm(config), options, separator_id=0)


@pytest.mark.parametrize(
    "options", [None, FGramModelConfig(token_embedding="own"), OverEncodingConfig(rows_per_n=8)]
)
def test_every_weight_is_in_exactly_one_group(options: EmbeddingOptions) -> None:
    model = model_with(options)
    grouped = [
        weight for group in parameter_groups(model, OptimizerConfig()) for weight in group["params"]
    ]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(model.parameters())


def test_matrices_decay_and_embeddings_norms_and_gains_do_not() -> None:
    model = model_with(FGramModelConfig(token_embedding="own"))
    groups = parameter_groups(model, OptimizerConfig(weight_decay=0.3, fgram_weight_decay=0.2))
    decay_of = {weight: group["weight_decay"] for group in groups for weight in group["params"]}
    fgram_weights = set(model.input_embedding.parameters())
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    assert len(embeddings) == 2
    for weight, decay in decay_of.items():
        is_matrix = weight.ndim > 1 and not any(weight is embedding for embedding in embeddings)
        assert decay == (0.0 if not is_matrix else 0.2 if weight in fgram_weights else 0.3)


def test_the_fgram_model_has_its_own_peak_rate_and_by_default_that_of_the_main_model() -> None:
    model = model_with(FGramModelConfig())
    main_weights = set(model.main_model.parameters())
    for fgram_rate, expected in ((1e-4, 1e-4), (None, 1e-3)):
        options = OptimizerConfig(learning_rate=1e-3, fgram_learning_rate=fgram_rate)
        for group in parameter_groups(model, options):
            is_main = group["params"][0] in main_weights
            assert group["lr"] == group["peak_lr"] == (1e-3 if is_main else expected)
