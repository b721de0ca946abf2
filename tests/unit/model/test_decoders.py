"""The laws that hold for every decoder: Llama, OLMo 2, Qwen 3, GPT-2."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from scone_core.model.decoders import (
    DecoderConfig,
    build_causal_lm,
    build_fgram_body,
    fgram_body_config,
    hugging_face_config,
    load_causal_lm,
)
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.model.forest import BatchForest, build_batch_forest
from scone_core.model.micro_batch import positions
from scone_core.model.scone_lm import SconeLM

VOCAB_SIZE, SEPARATOR = 50, 0
DECODERS = ["llama", "olmo2", "qwen3", "gpt2"]
every_decoder = pytest.mark.parametrize("model_type", DECODERS)


def main_config(model_type: str):
    decoder = DecoderConfig(
        model_type=model_type,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        options={} if model_type == "gpt2" else {"num_key_value_heads": 2},
    )
    return hugging_face_config(decoder, vocab_size=VOCAB_SIZE, separator_id=SEPARATOR)


def start(model_type: str, fgram: FGramModelConfig | None) -> SconeLM:
    torch.manual_seed(0)
    main_model = build_causal_lm(main_config(model_type))
    return SconeLM.start(main_model, fgram, separator_id=SEPARATOR).eval()


def shaken(model: SconeLM) -> SconeLM:
    """None of its parts is at its special starting point."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return model


def random_batch() -> tuple[torch.Tensor, np.ndarray, BatchForest]:
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(1, VOCAB_SIZE, (3, 20))
    match_len_BT = rng.integers(1, 6, (3, 20)).clip(max=np.arange(1, 21))
    return torch.from_numpy(tokens_BT), match_len_BT, build_batch_forest(tokens_BT, match_len_BT)


@every_decoder
@torch.no_grad()
def test_the_sizes_are_those_that_were_asked_for(model_type):
    main_model = build_causal_lm(main_config(model_type))
    shapes = {tuple(weight.shape) for weight in main_model.parameters()}
    assert {(VOCAB_SIZE, 32), (32,)} <= shapes
    assert {(32, 64), (64, 32)} & shapes
    assert main_model.config.num_hidden_layers == 2
    assert main_model.get_output_embeddings().weight is main_model.get_input_embeddings().weight


@every_decoder
@pytest.mark.parametrize("width", [None, 16])
@torch.no_grad()
def test_forest_equals_padded_evaluation(model_type, width):
    """Hugging Face's own attention on every f-gram as a padded sequence, as in the paper."""
    torch.manual_seed(0)
    config = fgram_body_config(main_config(model_type), num_layers=3, width=width)
    body = build_fgram_body(config).eval()
    padded = AutoModel.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    padded.load_state_dict(body.state_dict(), strict=False)
    tokens_BT, match_len_BT, batch = random_batch()
    embedding_VE = torch.randn(VOCAB_SIZE, body.config.hidden_size)
    vector_NE = body(
        inputs_embeds=embedding_VE[batch.forest.tokens_N][None],
        position_ids=batch.forest.depth_N[None],
        use_cache=False,
        forest=batch.forest,
    ).last_hidden_state[0]
    hits = zip(*np.nonzero(match_len_BT > 1), strict=True)
    for (b, t), node in zip(hits, batch.forest.node_of_S, strict=True):
        fgram_1n = tokens_BT[b : b + 1, t - match_len_BT[b, t] + 1 : t + 1]
        alone_nE = padded(inputs_embeds=embedding_VE[fgram_1n], use_cache=False).last_hidden_state
        torch.testing.assert_close(vector_NE[node], alone_nE[0, -1], atol=5e-6, rtol=0)


@every_decoder
@torch.no_grad()
def test_residual_starts_at_exactly_the_loss_of_the_plain_model(model_type):
    tokens_BT, _, fgrams = random_batch()
    plain = start(model_type, None)(tokens_BT, tokens_BT)
    for token_embedding in ("shared", "own"):
        fgram = FGramModelConfig(width=16, token_embedding=token_embedding)
        assert torch.equal(
            start(model_type, fgram)(tokens_BT, tokens_BT, fgrams).loss_sum, plain.loss_sum
        )


@every_decoder
@torch.no_grad()
def test_replace_starts_near_the_token_embedding(model_type):
    model = start(model_type, FGramModelConfig(output="replace"))
    _, _, fgrams = random_batch()
    cosine_N = torch.cosine_similarity(
        model.fgram_vectors(fgrams.forest), model.token_embedding(fgrams.forest.tokens_N)
    )
    # GPT-2's final norm subtracts the mean
    assert cosine_N.min() > (0.95 if model_type == "gpt2" else 0.99)


@every_decoder
@pytest.mark.parametrize("fgram", [FGramModelConfig(), FGramModelConfig(token_embedding="own")])
def test_every_weight_gets_a_gradient(model_type, fgram):
    model = shaken(start(model_type, fgram))
    tokens_BT, _, fgrams = random_batch()
    model(tokens_BT, tokens_BT, fgrams).loss_sum.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.any(), name


@every_decoder
@torch.no_grad()
def test_document_attention_gives_each_document_the_logits_that_it_has_alone(model_type):
    """Changing document 1 leaves the logits of document 2 unchanged."""
    model = shaken(start(model_type, FGramModelConfig()))
    tokens_1T = random_batch()[0][:1]
    tokens_1T[0, 8] = SEPARATOR

    def logits(tokens_BT: torch.Tensor) -> torch.Tensor:
        return model.main_model(
            inputs_embeds=model.token_embedding(tokens_BT),
            position_ids=positions(tokens_BT, SEPARATOR, "document"),
            use_cache=False,
        ).logits

    changed_1T = tokens_1T.clone()
    changed_1T[0, :8] = changed_1T[0, :8] % (VOCAB_SIZE - 1) + 1
    packed, changed, alone = map(logits, (tokens_1T, changed_1T, tokens_1T[:, 8:]))
    assert not torch.allclose(packed[0, :8], changed[0, :8], atol=1e-3)
    assert torch.equal(packed[0, 8:], changed[0, 8:])
    torch.testing.assert_close(packed[0, 8:], alone[0], atol=1e-5, rtol=0)


def test_positions_count_from_the_separator_that_begins_a_document():
    tokens_BT = torch.tensor([[5, 6, 0, 7, 0, 0, 8, 9], [0, 1, 1, 1, 1, 1, 1, 0]])
    expected = [[0, 1, 0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 0]]
    assert positions(tokens_BT, 0, "document").tolist() == expected
    assert positions(tokens_BT, 0, "sequence") is None


@every_decoder
@torch.no_grad()
def test_a_saved_main_model_is_loaded_by_transformers(model_type, tmp_path: Path):
    model = shaken(start(model_type, FGramModelConfig()))
    model.save(tmp_path)
    tokens_BT = random_batch()[0]
    expected = model.main_model(tokens_BT).logits
    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "main_model"),
        load_causal_lm(tmp_path / "main_model"),
    ):
        torch.testing.assert_close(loaded.eval()(tokens_BT).logits, expected, atol=1e-6, rtol=0)
