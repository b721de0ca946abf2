"""The laws of evaluation: every token once, in its document and source, however the work is cut;
the table tells the truth.
"""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from scone_core.corpus.token_stream import TokenStream
from scone_core.evaluation.embed import embed_from_table, embed_on_the_fly
from scone_core.evaluation.scores import ALL_SOURCES
from scone_core.evaluation.sources import read_sources, source_name
from scone_core.evaluation.sums import DocumentSums, Score
from scone_core.evaluation.text import evaluate_documents, num_windows, text_scores
from scone_core.fgrams.fgram_shards import read_fgrams
from scone_core.fgrams.index import FGramIndex
from scone_core.model.decoders import DecoderConfig, build_causal_lm, hugging_face_config
from scone_core.model.forest import build_forest
from scone_core.model.scone_lm import SconeLM
from scone_core.table.embedding_table import EmbeddingTable
from tests.builders.corpora import file_of, text_of, write_fgrams, write_tokens, zipf_documents
from tests.builders.served_models import publish_table, trained_model

VOCAB_SIZE = 96
FILES = ("books.jsonl.gz", "web/0.parquet", "web/1.parquet")
DOCUMENTS = zipf_documents(num_documents=12, mean_length=60, vocab_size=VOCAB_SIZE, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_tokens(
        str(folder / "tokens"), DOCUMENTS, vocab_size=VOCAB_SIZE, num_shards=3, files=FILES
    )
    write_fgrams(str(folder / "fgrams"), DOCUMENTS, num_fgrams=200, vocab_size=VOCAB_SIZE)
    return folder


def score_all(folder: Path, model: SconeLM, *, length: int, parts: int, batch_size: int) -> Score:
    stream = TokenStream.open(str(folder / "tokens"))
    embed = partial(embed_on_the_fly, model=model, matcher=FGramIndex.open(str(folder / "fgrams")))
    sums = [
        evaluate_documents(
            model.main_model,
            embed,
            stream,
            windows=np.arange(part, num_windows(stream, length), parts),
            sequence_length=length,
            batch_size=batch_size,
        )
        for part in range(parts)
    ]
    return DocumentSums.join(sums).total()


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


def sums_of_documents(folder: Path, *, parts: int) -> DocumentSums:
    stream = TokenStream.open(str(folder / "tokens"))
    model = trained_model()
    embed = partial(embed_on_the_fly, model=model, matcher=FGramIndex.open(str(folder / "fgrams")))
    windows = np.arange(num_windows(stream, 16))
    return DocumentSums.join(
        evaluate_documents(
            model.main_model, embed, stream, windows=part, sequence_length=16, batch_size=3
        )
        for part in np.array_split(windows, parts)
    )


@torch.no_grad()
def test_every_document_gets_the_losses_of_its_own_tokens(folder):
    """Walk through the stream token by token; the model sees its windows one at a time."""
    stream = TokenStream.open(str(folder / "tokens"))
    model, index = trained_model(), FGramIndex.open(str(folder / "fgrams"))
    loss_A, tokens_A, document = np.zeros(len(DOCUMENTS)), np.zeros(len(DOCUMENTS)), 0
    for window in range(num_windows(stream, 16)):
        window_1T = stream.windows([window], 16)
        inputs = embed_on_the_fly(window_1T[:, :-1], model=model, matcher=index)
        logits_TV = model.main_model(inputs_embeds=inputs.embeddings_BTD).logits[0]
        log_p_TV = logits_TV.log_softmax(-1)
        for place, token in enumerate(window_1T[0, 1:]):
            if token == 0:
                document += 1
            elif document < len(DOCUMENTS):
                loss_A[document] -= log_p_TV[place, token].item()
                tokens_A[document] += 1
    assert tokens_A.tolist() == [len(document) for document in DOCUMENTS]
    for parts in (1, 4):
        sums = sums_of_documents(folder, parts=parts)
        assert sums.document_A.tolist() == list(range(len(DOCUMENTS)))
        assert sums.tokens_A.tolist() == tokens_A.tolist()
        np.testing.assert_allclose(sums.loss_A, loss_A, rtol=1e-5)


def test_sources_are_the_files_of_their_documents_and_add_up_to_all_text(folder):
    sums, sources = sums_of_documents(folder, parts=1), read_sources(str(folder / "tokens"))
    scores = text_scores(sums, sources)
    assert list(scores) == [ALL_SOURCES, "books", "web"]
    of_books = [
        document
        for number, document in enumerate(DOCUMENTS)
        if file_of(number, num_documents=len(DOCUMENTS), num_files=3) == 0
    ]
    assert scores["books"].num_documents == len(of_books) == 4
    assert scores["books"].num_tokens == sum(map(len, of_books))
    whole, parts = scores[ALL_SOURCES], (scores["books"], scores["web"])
    assert whole.num_bytes_text == sum(len(text_of(document)) for document in DOCUMENTS)
    assert whole.num_bytes_text == pytest.approx(sum(p.num_bytes_text for p in parts), abs=1)
    loss = sum(part.num_tokens * math.log(part.perplexity) for part in parts)
    assert loss == pytest.approx(whole.num_tokens * math.log(whole.perplexity), rel=1e-9)


def test_intervals_hold_their_figures_and_are_absent_below_five_documents(folder):
    sums, sources = sums_of_documents(folder, parts=1), read_sources(str(folder / "tokens"))
    scores = text_scores(sums, sources)
    assert scores["books"].perplexity_interval is None
    for score in (scores[ALL_SOURCES], scores["web"]):
        low, high = score.perplexity_interval
        assert low < score.perplexity < high
        low, high = score.bits_per_byte_interval
        assert low < score.bits_per_byte < high


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("austen.jsonl.gz", "austen"),
        ("web/2024/part-1.parquet", "web"),
        ("c4.en-00003-of-00008.jsonl.zst", "c4.en"),
        ("sotu-2020.txt", "sotu-2020"),
        ("documents", "documents"),
    ],
)
def test_a_source_is_a_file_or_the_folder_that_holds_it(file, source):
    assert source_name(file) == source
