"""The laws of the engine on two ranks: every ZeRO stage gives the update of plain PyTorch, also
where a rank has no hit.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_jobs.train.config import TrainConfig
from ray_jobs.train.start import build_model
from scone_core.corpus.token_stream import TokenStream
from scone_core.fgrams.index import FGramIndex
from scone_core.model.decoders import DecoderConfig
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.training.batches import TrainingBatches
from scone_core.training.optimizer import OptimizerConfig, parameter_groups
from tests.builders.corpora import write_fgrams, write_tokens, zipf_documents
from tests.programs.train_ranks import load, run_ranks

VOCAB_SIZE = 2048
STEPS = 3
CELLS = {
    f"zero{stage}-accumulate{accumulation}-{tied}": (stage, accumulation, tied)
    for stage, accumulation, tied in itertools.product((0, 1, 2, 3), (1, 2), ("tied", "untied"))
}

BF16_STAGES = (1, 2, 3)


def cell_config(folder: Path, stage: int, accumulation: int, tied: str) -> TrainConfig:
    """Matrices of more than 100,000 weights, below which ZeRO-3 does not spread them."""
    return TrainConfig(
        out=str(folder / f"out-{stage}-{accumulation}-{tied}"),
        train_tokens=str(folder / "tokens"),
        validation_tokens=str(folder / "tokens"),
        fgrams=str(folder / "fgrams"),
        model=DecoderConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=1600,
            tie_word_embeddings=tied == "tied",
        ),
        fgram_model=FGramModelConfig(num_layers=1),
        sequence_length=16,
        global_batch=8,
        micro_batch=4 // accumulation,
        steps=STEPS,
        # Adam turns rounding errors of tiny gradients into steps of up to the learning rate
        optimizer=OptimizerConfig(warmup_steps=1, learning_rate=3e-5, fgram_learning_rate=1e-5),
        zero_stage=stage,
        eval_every=1000,
        report_every=1000,
        checkpoint_every=1000,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every cell trained on two ranks. The f-gram occurs in one document only, so that in most
    steps a rank has no hit.
    """
    folder = tmp_path_factory.mktemp("cells")
    documents = zipf_documents(num_documents=20, mean_length=40, vocab_size=2000, seed=1)
    documents[7:7] = [[2001, 2002] * 8] * 2
    write_tokens(str(folder / "tokens"), documents, vocab_size=VOCAB_SIZE)
    write_fgrams(str(folder / "fgrams"), [[2001, 2002]] * 2, num_fgrams=1, vocab_size=VOCAB_SIZE)
    configs = {name: cell_config(folder, *cell) for name, cell in CELLS.items()}
    for stage in BF16_STAGES:
        config = cell_config(folder, stage, 2, "tied")
        configs[f"bf16-zero{stage}"] = config.replace(
            precision="bf16", out=f"{config.out}-bf16", recompute_activations="layers"
        )
    run_ranks(folder, configs, num_ranks=2, stop=STEPS)
    return folder


def plain_pytorch(config: TrainConfig) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and gradient norms after the same steps of AdamW in one process, whole batches at a
    time.
    """
    stream = TokenStream.open(config.train_tokens)
    model = build_model(config, stream)
    options = config.optimizer
    groups = parameter_groups(model, options)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, options.beta2), eps=1e-8)
    batches = TrainingBatches(
        stream,
        FGramIndex.open(config.fgrams),
        sequence_length=config.sequence_length,
        global_batch=config.global_batch,
        seed=config.seed,
    )
    norms = []
    for step in range(config.steps):
        (batch,) = batches.micro_batches(step, micro_batch=config.global_batch, rank=0, num_ranks=1)
        output = model(batch.tokens_BT, batch.targets_BT, batch.fgrams)
        optimizer.zero_grad()
        (output.loss_sum / output.num_targets).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)))
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * options.rate(step, num_steps=config.steps)
        optimizer.step()
    return model.state_dict(), norms


@pytest.mark.parametrize("name", CELLS)
def test_every_stage_and_accumulation_gives_the_update_of_plain_pytorch(
    folder: Path, name: str
) -> None:
    """Ranks that run a module differently often wait for ever (deepspeedai/DeepSpeed#7998, #7044),
    two models need two engines (#65, #3472), accumulation loses gradients (#7985, #7981).
    """
    trained = torch.load(folder / f"{name}.pt")
    expected, norms = plain_pytorch(cell_config(folder, *CELLS[name]))
    found = [step["gradient_norm"] for step in load(folder, name)["steps"]]
    assert found == pytest.approx(norms, rel=1e-4)  # DeepSpeed sums squares in fp32
    assert trained.keys() == expected.keys()
    start = build_model(
        cell_config(folder, *CELLS[name]), TokenStream.open(str(folder / "tokens"))
    ).state_dict()
    assert not torch.allclose(
        start["main_model.model.embed_tokens.weight"],
        expected["main_model.model.embed_tokens.weight"],
        atol=2e-5,
    )
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, atol=1e-6, rtol=0, msg=key)


@pytest.mark.parametrize("name", CELLS)
def test_the_weights_that_were_tied_are_still_tied(folder: Path, name: str) -> None:
    """deepspeedai/DeepSpeed#1896, NVIDIA-NeMo/Automodel#2511: ties that get lost."""
    trained = torch.load(folder / f"{name}.pt")
    embedding, head = (
        trained[f"main_model.{part}.weight"] for part in ("model.embed_tokens", "lm_head")
    )
    assert torch.equal(embedding, head) == (CELLS[name][2] == "tied")


def test_in_some_step_one_rank_had_hits_and_the_other_none(folder: Path) -> None:
    """What makes the cells above a test of ranks that could wait for each other."""
    name = next(iter(CELLS))
    hits_RS = np.array(
        [[step["hits"] for step in load(folder, name, rank=rank)["steps"]] for rank in (0, 1)]
    )
    assert ((hits_RS > 0).sum(0) == 1).any()


@pytest.mark.parametrize("name", CELLS)
def test_weights_of_the_f_gram_model_come_as_a_whole_under_zero_3(folder: Path, name: str) -> None:
    """deepspeedai/DeepSpeed#5008: the remedy for modules that ranks run differently."""
    expected = ["FGramModel"] if CELLS[name][0] == 3 else []
    assert load(folder, name)["leaves"] == expected


@pytest.mark.parametrize("stage", BF16_STAGES)
def test_bf16_weights_train_over_gloo(folder: Path, stage: int) -> None:
    """pytorch/pytorch#111131: Gloo refused bfloat16. Gradients are summed in float32."""
    trained = torch.load(folder / f"bf16-zero{stage}.pt")
    expected, norms = plain_pytorch(cell_config(folder, stage, 2, "tied"))
    found = [step["gradient_norm"] for step in load(folder, f"bf16-zero{stage}")["steps"]]
    assert found == pytest.approx(norms, rel=0.02)
    for key, value in expected.items():
        torch.testing.assert_close(trained[key].float(), value, atol=2e-4, rtol=2**-7, msg=key)
