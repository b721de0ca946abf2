"""The laws of the methods that make input embeddings."""

import numpy as np
import pytest
import torch
from torch import nn

from scone_core.model.decoders import DecoderConfig, build_causal_lm, hugging_face_config
from scone_core.model.forest import build_batch_forest
from scone_core.model.input_embeddings import FGramMean, OverEncoding, OverEncodingConfig
from scone_core.model.scone_lm import EmbeddingOptions, SconeLM

VOCAB_SIZE, SEPARATOR = 50, 0


def model_of(options: EmbeddingOptions) -> SconeLM:
    torch.manual_seed(0)
    decoder = DecoderConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = hugging_face_config(decoder, vocab_size=VOCAB_SIZE, separator_id=SEPARATOR)
    return SconeLM.start(build_causal_lm(config), options, separator_id=SEPARATOR)


def random_tokens(seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(1, VOCAB_SIZE, (3, 20)))


@torch.no_grad()
def test_fgram_mean_is_the_mean_of_the_token_embeddings_of_the_fgram():
    model = model_of("fgram_mean")
    tokens_BT = random_tokens()
    match_len_BT = np.random.default_rng(1).integers(1, 6, (3, 20)).clip(max=np.arange(1, 21))
    inputs_BTD = model.input_embeddings(
        tokens_BT, build_batch_forest(tokens_BT.numpy(), match_len_BT)
    )
    for b, t in np.ndindex(3, 20):
        fgram = tokens_BT[b, t - match_len_BT[b, t] + 1 : t + 1]
        expected_D = model.token_embedding(fgram).mean(0)
        torch.testing.assert_close(inputs_BTD[b, t], expected_D, atol=1e-6, rtol=0)


def test_fgram_mean_trains_nothing_beside_the_main_model():
    assert list(FGramMean().parameters()) == []


@pytest.mark.parametrize("max_n", [2, 3, 5])
@torch.no_grad()
def test_over_encoding_is_the_mean_of_the_token_embedding_and_one_row_per_n(max_n):
    model = model_of(OverEncodingConfig(rows_per_n=64, max_n=max_n))
    embedding, tokens_BT = model.input_embedding, random_tokens()
    inputs_BTD = model.input_embeddings(tokens_BT, None)
    parts = [model.token_embedding(tokens_BT)]
    for rows, hash_BT in zip(embedding.rows, embedding.hashes(tokens_BT), strict=True):
        parts.append(rows(hash_BT % 64))
    torch.testing.assert_close(inputs_BTD, torch.stack(parts).mean(0))
    assert len(parts) == max_n


def over_encoding() -> OverEncoding:
    return OverEncoding(OverEncodingConfig(max_n=4), width=8, separator_id=SEPARATOR)


def test_equal_ngrams_have_equal_hashes_and_others_do_not():
    tokens_BT = torch.randint(1, 4, (1, 400), generator=torch.Generator().manual_seed(0))
    for n, hash_BT in enumerate(over_encoding().hashes(tokens_BT), start=2):
        seen: dict[tuple[int, ...], int] = {}
        for t in range(400):
            ngram = tuple(tokens_BT[0, max(0, t - n + 1) : t + 1].tolist())
            assert seen.setdefault(ngram, int(hash_BT[0, t])) == hash_BT[0, t]
        assert len(set(seen.values())) == len(seen)


def test_hashes_see_neither_the_future_nor_the_document_before():
    tokens_BT = random_tokens()
    tokens_BT[:, 9] = SEPARATOR
    before, after = tokens_BT.clone(), tokens_BT.clone()
    before[:, :9] = before[:, :9] % (VOCAB_SIZE - 1) + 1
    after[:, 15:] = after[:, 15:] % (VOCAB_SIZE - 1) + 1
    embedding = over_encoding()
    for mine, other in zip(embedding.hashes(tokens_BT), embedding.hashes(before), strict=True):
        assert torch.equal(mine[:, 9:], other[:, 9:])
        assert not torch.equal(mine[:, :9], other[:, :9])
    for mine, other in zip(embedding.hashes(tokens_BT), embedding.hashes(after), strict=True):
        assert torch.equal(mine[:, :15], other[:, :15])


@pytest.mark.parametrize("options", [None, "fgram_mean", OverEncodingConfig(rows_per_n=64)])
def test_every_weight_gets_a_gradient(options):
    model, tokens_BT = model_of(options), random_tokens()
    fgrams = None
    if options == "fgram_mean":
        fgrams = build_batch_forest(tokens_BT.numpy(), np.full((3, 20), 1, np.uint8))
    model(tokens_BT, tokens_BT, fgrams).loss_sum.backward()
    assert all(isinstance(w.grad, torch.Tensor) for w in nn.ModuleList([model]).parameters())
