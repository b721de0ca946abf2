"""The laws of evaluation: every token once, however the work is cut; the table tells the truth."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from scone_core.batches import TokenStream
from scone_core.decoders import DecoderConfig, build_causal_lm, hugging_face_config
from scone_core.evaluation import Score, embed_from_table, embed_on_the_fly, evaluate, num_windows
from scone_core.fgram_index import FGramIndex
from scone_core.fgrams import read_fgrams
from scone_core.forest import build_forest
from scone_core.model import SconeLM
from scone_core.table import EmbeddingTable
from tests.corpora import write_fgrams, write_tokens, zipf_documents
from tests.served_models import publish_table, trained_model

VOCAB_SIZE = 96
DOCUMENTS = zipf_documents(num_documents=12, mean_length=60, vocab_size=VOCAB_SIZE, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_tokens(str(folder / "tokens"), DOCUMENTS, vocab_size=VOCAB_SIZE)
    write_fgrams(str(folder / "fgrams"), DOCUMENTS, num_fgrams=200, vocab_size=VOCAB_SIZE)
    return folder


def score_all(folder: Path, model: SconeLM, *, length: int, parts: int, batch_size: int) -> Score:
    stream = TokenStream.open(str(folder / "tokens"))
    embed = partial(embed_on_the_fly, model=model, matcher=FGramIndex.open(str(folder / "fgrams")))
    scores = [
        evaluate(
            model.main_model,
            embed,
            stream,
            windows=range(part, num_windows(stream, length), parts),
            sequence_length=length,
            batch_size=batch_size,
        )
        for part in range(parts)
    ]
    return sum(scores, start=Score())


def test_every_token_is_scored_once_however_the_work_is_cut(folder):
    model = trained_model()
    whole = score_all(folder, model, length=16, parts=1, batch_size=8)
    assert whole.num_tokens == sum(map(len, DOCUMENTS))
    for parts, batch_size in ((1, 3), (2, 8), (5, 1)):
        score = score_all(folder, model, length=16, parts=parts, batch_size=batch_size)
        assert score.loss_sum == pytest.approx(whole.loss_sum, rel=1e-6)
        assert score.model_copy(update={"loss_sum": 0}) == whole.model_copy(update={"loss_sum": 0})


def test_hits_and_match_lengths_are_those_of_the_index(folder):
    index = FGramIndex.open(str(folder / "fgrams"))
    stream = TokenStream.open(str(folder / "tokens"))
    tokens_BT = stream.windows(range(num_windows(stream, 16)), 16)[:, :-1]
    match_len_BT = index.match(tokens_BT).match_len_BT
    score = score_all(folder, trained_model(), length=16, parts=1, batch_size=8)
    num_fillers = int((tokens_BT == 0).sum())
    assert score.num_hits == (match_len_BT > 1).sum() > 100
    assert score.match_len_sum == match_len_BT.sum() - num_fillers


def test_a_uniform_model_has_the_vocabulary_as_its_perplexity(folder):
    config = hugging_face_config(
        DecoderConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1),
        vocab_size=VOCAB_SIZE,
        separator_id=0,
    )
    model = SconeLM(build_causal_lm(config))
    torch.nn.init.zeros_(model.main_model.lm_head.weight)
    metrics = score_all(folder, model, length=16, parts=1, batch_size=8).metrics(num_bytes_text=100)
    assert metrics["perplexity"] == pytest.approx(VOCAB_SIZE, rel=1e-6)
    expected = sum(map(len, DOCUMENTS)) * math.log2(VOCAB_SIZE) / 100
    assert metrics["bits_per_byte"] == pytest.approx(expected, rel=1e-6)


@torch.no_grad()
def test_table_gives_the_inputs_of_the_fgram_model_to_storage_precision(folder, tmp_path):
    model, index = trained_model(), FGramIndex.open(str(folder / "fgrams"))
    tokens_SK, n_S, _ = read_fgrams(str(folder / "fgrams"))
    forest = build_forest(tokens_SK, n_S)
    vectors_SD = model.fgram_vectors(forest)[forest.node_of_S]
    publish_table(str(tmp_path), vectors_SD, index.manifest)
    tokens_BT = TokenStream.open(str(folder / "tokens")).windows(range(20), 16)
    fly = embed_on_the_fly(tokens_BT, model=model, matcher=index)
    table = EmbeddingTable.open(str(tmp_path))
    read = embed_from_table(tokens_BT, model=model, index=index, table=table)
    assert (read.match_len_BT == fly.match_len_BT).all()
    torch.testing.assert_close(read.embeddings_BTD, fly.embeddings_BTD, rtol=2**-8, atol=1e-5)
    assert not torch.equal(read.embeddings_BTD, model.token_embedding(torch.tensor(tokens_BT)))
