"""The laws of the joint model: causality, its start, its gradients, its folders."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from scone_core.artifacts.folders import publish
from scone_core.artifacts.manifests import ArtifactError, CheckpointManifest, FGramsManifest, Shard
from scone_core.model.decoders import DecoderConfig, build_causal_lm, hugging_face_config
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.model.forest import BatchForest, build_batch_forest, build_forest
from scone_core.model.scone_lm import SconeLM

VOCAB_SIZE = 50
EVERY_FORM = [
    FGramModelConfig(num_layers=2),
    FGramModelConfig(num_layers=1, width=64),
    FGramModelConfig(num_layers=2, output="replace"),
    FGramModelConfig(num_layers=1, width=16, output="replace"),
]


def small_model(fgram: FGramModelConfig | None, *, seed: int = 0) -> SconeLM:
    torch.manual_seed(seed)
    decoder = DecoderConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        options={"num_key_value_heads": 2},
    )
    config = hugging_face_config(decoder, vocab_size=VOCAB_SIZE, separator_id=0)
    return SconeLM.start(build_causal_lm(config), fgram, separator_id=0)


def trained_model(fgram: FGramModelConfig | None) -> SconeLM:
    """A model none of whose parts is at its special starting point."""
    model = small_model(fgram)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return model.eval()


def random_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, BatchForest]:
    """tokens [3, 20], targets and a forest of random matches."""
    rng = np.random.default_rng(seed)
    window_BT1 = rng.integers(0, VOCAB_SIZE, (3, 21))
    tokens_BT = window_BT1[:, :-1]
    match_len_BT = rng.integers(1, 6, tokens_BT.shape).clip(max=np.arange(1, 21))
    forest = build_batch_forest(tokens_BT, match_len_BT)
    tokens, targets = torch.from_numpy(tokens_BT), torch.from_numpy(window_BT1[:, 1:])
    return tokens, targets, forest


def no_hits(tokens_BT: torch.Tensor) -> BatchForest:
    return build_batch_forest(tokens_BT.numpy(), np.ones(tokens_BT.shape, np.uint8))


def logits_of(model: SconeLM, tokens_BT: torch.Tensor, match_len_BT: np.ndarray) -> torch.Tensor:
    forest = build_batch_forest(tokens_BT.numpy(), match_len_BT)
    inputs_BTD = model.input_embeddings(tokens_BT, forest)
    return model.main_model(inputs_embeds=inputs_BTD).logits


@pytest.mark.parametrize("fgram", EVERY_FORM)
@torch.no_grad()
def test_a_later_token_never_changes_an_earlier_logit(fgram):
    model = trained_model(fgram)
    tokens_BT, _, _ = random_batch()
    match_len_BT = np.random.default_rng(3).integers(1, 6, (3, 20)).clip(max=np.arange(1, 21))
    changed_BT, changed_len_BT = tokens_BT.clone(), match_len_BT.copy()
    changed_BT[:, 12:] = (changed_BT[:, 12:] + 7) % VOCAB_SIZE
    changed_len_BT[:, 12:] = 1
    before, after = (
        logits_of(model, *inputs)
        for inputs in ((tokens_BT, match_len_BT), (changed_BT, changed_len_BT))
    )
    torch.testing.assert_close(after[:, :12], before[:, :12], atol=1e-5, rtol=0)
    assert not torch.allclose(after[:, 12:], before[:, 12:], atol=1e-2)


@torch.no_grad()
def test_every_position_gets_the_vector_of_its_own_fgram():
    model = trained_model(EVERY_FORM[0])
    tokens_BT, _, _ = random_batch()
    match_len_BT = np.random.default_rng(3).integers(1, 6, (3, 20)).clip(max=np.arange(1, 21))
    forest = build_batch_forest(tokens_BT.numpy(), match_len_BT)
    inputs_BTD = model.input_embeddings(tokens_BT, forest)
    for b, t in np.ndindex(*match_len_BT.shape):
        n = match_len_BT[b, t]
        expected_D = model.token_embedding(tokens_BT[b, t])
        if n > 1:
            fgram_1N = tokens_BT[b : b + 1, t - n + 1 : t + 1].numpy()
            alone = build_forest(fgram_1N, np.array([n]))
            expected_D = model.fgram_vectors(alone)[alone.node_of_S[0]]
        torch.testing.assert_close(inputs_BTD[b, t], expected_D, atol=2e-6, rtol=0)


@torch.no_grad()
def test_residual_starts_at_exactly_the_loss_of_the_plain_model():
    tokens_BT, targets_BT, forest = random_batch()
    plain = small_model(None)(tokens_BT, targets_BT)
    for fgram in EVERY_FORM[:2]:
        scone = small_model(fgram)(tokens_BT, targets_BT, forest)
        assert torch.equal(scone.loss_sum, plain.loss_sum)


@pytest.mark.parametrize("fgram", EVERY_FORM[2:])
@torch.no_grad()
def test_replace_starts_near_the_token_embedding(fgram):
    model = small_model(fgram)
    forest = build_forest(np.arange(VOCAB_SIZE)[:, None], np.ones(VOCAB_SIZE, int))
    vectors_ND = model.fgram_vectors(forest)
    embeddings_ND = model.token_embedding(forest.tokens_N)
    cosine_N = torch.cosine_similarity(vectors_ND, embeddings_ND)
    assert cosine_N.min() > (0.999 if fgram.width is None else 0.3)
    assert 0.5 < vectors_ND.square().mean() / embeddings_ND.square().mean() < 2


@pytest.mark.parametrize("fgram", EVERY_FORM)
def test_every_parameter_gets_a_gradient_with_and_without_hits(fgram):
    model = trained_model(fgram)
    tokens_BT, targets_BT, forest = random_batch()
    for batch in (forest, no_hits(tokens_BT)):
        model.zero_grad()
        model(tokens_BT, targets_BT, batch).loss_sum.backward()
        assert all(weight.grad is not None for weight in model.parameters())
    for weight in model.fgram_model.parameters():
        assert not weight.grad.any()


@torch.no_grad()
def test_squares_of_hits_and_misses_add_up_to_those_of_all_inputs():
    model = trained_model(EVERY_FORM[0])
    tokens_BT, targets_BT, forest = random_batch()
    output = model(tokens_BT, targets_BT, forest)
    inputs_BTD = model.input_embeddings(tokens_BT, forest)
    total = output.hit_square_sum + output.miss_square_sum
    torch.testing.assert_close(total, inputs_BTD.square().mean(-1).sum())
    assert output.num_targets == tokens_BT.numel()


def publish_checkpoint(model: SconeLM, folder: Path, fgrams: FGramsManifest | None) -> None:
    model.save(folder, fgrams=fgrams)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = CheckpointManifest(
        fingerprint="0" * 64,
        config={},
        inputs={},
        shards=tuple(
            Shard(
                name=str(path.relative_to(folder)),
                num_rows=0,
                num_bytes=path.stat().st_size,
                sha256="",
            )
            for path in files
        ),
        step=1,
        tokens_seen=1,
        tokenizer_sha256="",
        method=model.input_embedding.method,
        fgrams_fingerprint=fgrams.fingerprint if fgrams else None,
        max_n=fgrams.max_n if fgrams else None,
        fgram_output=model.fgram_model.config.output if model.fgram_model else None,
    )
    publish(str(folder), manifest)


def fgrams_manifest(fingerprint: str = "f" * 64) -> FGramsManifest:
    return FGramsManifest(
        fingerprint=fingerprint,
        config={},
        inputs={},
        shards=(),
        tokenizer_sha256="",
        vocab_size=VOCAB_SIZE,
        separator_id=0,
        max_n=5,
        min_count=5,
        num_fgrams=1,
        num_fgrams_per_n={2: 1},
        num_tokens=1,
        index=Shard(name="index/trie.npy", num_rows=0, num_bytes=0, sha256=""),
    )


@pytest.mark.parametrize("fgram", EVERY_FORM)
@torch.no_grad()
def test_saved_and_loaded_model_gives_equal_loss(fgram, tmp_path):
    model = trained_model(fgram)
    publish_checkpoint(model, tmp_path, fgrams_manifest())
    loaded = SconeLM.load(str(tmp_path), fgrams=fgrams_manifest())
    batch = random_batch()
    assert torch.equal(loaded(*batch).loss_sum, model(*batch).loss_sum)
    assert loaded.main_model.lm_head.weight is loaded.token_embedding.weight


@torch.no_grad()
def test_main_model_loads_with_plain_transformers(tmp_path):
    model = trained_model(EVERY_FORM[0])
    publish_checkpoint(model, tmp_path, fgrams_manifest())
    tokens_BT, _, _ = random_batch()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "main_model")
    assert torch.equal(plain(tokens_BT).logits, model.main_model(tokens_BT).logits)
    scone = json.loads((tmp_path / "main_model/config.json").read_text())["scone"]
    assert scone["fgrams_fingerprint"] == "f" * 64
    assert "not the model that was trained" in scone["warning"]


def test_tied_weights_are_stored_once_and_only_as_safetensors(tmp_path):
    """deepspeedai/DeepSpeed#8376, hiyouga/LlamaFactory#10813: aborted, or stored both copies."""
    publish_checkpoint(trained_model(EVERY_FORM[0]), tmp_path, fgrams_manifest())
    with safe_open(tmp_path / "main_model/model.safetensors", "pt") as file:
        assert sum(VOCAB_SIZE in file.get_slice(key).get_shape() for key in file.keys()) == 1
    weights = {path.suffix for path in tmp_path.rglob("*") if path.is_file()} - {".json"}
    assert weights == {".safetensors"}


def test_a_checkpoint_refuses_other_fgrams(tmp_path):
    publish_checkpoint(trained_model(EVERY_FORM[0]), tmp_path, fgrams_manifest())
    with pytest.raises(ArtifactError, match="fgrams: fingerprint .0000.*later generations"):
        SconeLM.load(str(tmp_path), fgrams=fgrams_manifest("0" * 64))


def test_a_checkpoint_with_a_missing_weight_is_refused(tmp_path):
    model = trained_model(None)
    del model.main_model.model.norm.weight
    publish_checkpoint(model, tmp_path, None)
    with pytest.raises(ArtifactError, match=r"model\.norm\.weight"):
        SconeLM.load(str(tmp_path))


def test_fgram_width_that_the_heads_cannot_have_is_refused():
    with pytest.raises(ValueError, match=r"fgram_model\.width=20"):
        small_model(FGramModelConfig(width=20))


def test_an_option_that_has_a_field_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"options: \['hidden_size'\] have fields of their own"):
        DecoderConfig(options={"hidden_size": 64})
