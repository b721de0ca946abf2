"""Laws of the export: the served folder is the trained model, or there is no served folder."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from ray_jobs.serve.export import ExportConfig, run
from scone_core.artifacts.manifests import ArtifactError
from scone_core.model.scone_lm import SconeLM
from scone_core.serving.transformers_model import load_served_model
from scone_core.table.embedding_table import EmbeddingTable
from tests import BUNDLED
from tests.builders.corpora import write_tokens
from tests.builders.served_models import (
    VOCAB,
    publish_checkpoint,
    publish_fgrams,
    publish_table,
    random_fgrams,
    trained_model,
)
from tests.programs.stages import snapshot

REAL_TOKENIZER = BUNDLED / "tokenizer.json"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with its f-grams, table and tokens, and a plain one."""
    folder = tmp_path_factory.mktemp("inputs")
    grams = random_fgrams(per_length=500)
    fgrams = publish_fgrams(str(folder / "fgrams"), grams)
    checkpoint = publish_checkpoint(str(folder / "checkpoint"), trained_model(), fgrams)
    plain = SconeLM(trained_model().main_model)
    publish_checkpoint(str(folder / "plain"), plain, None)
    rows_SD = torch.randn(len(grams), 64)
    publish_table(str(folder / "table"), rows_SD, fgrams, checkpoint=checkpoint.fingerprint)
    publish_table(str(folder / "other_table"), rows_SD, fgrams, checkpoint="another")
    write_tokens(str(folder / "tokens"), [[1, 2, 3]], vocab_size=VOCAB)
    return folder


def config_for(inputs: Path, out: Path, **changes: object) -> ExportConfig:
    config = ExportConfig(
        checkpoint=str(inputs / "checkpoint"),
        tokens=str(inputs / "tokens"),
        fgrams=str(inputs / "fgrams"),
        table=str(inputs / "table"),
        out=str(out),
    )
    return config.replace(**changes)


@torch.inference_mode()
def test_the_served_model_is_the_main_model_with_rows_of_the_table(
    inputs: Path, tmp_path: Path
) -> None:
    run(config_for(inputs, tmp_path / "served"))
    served = load_served_model(str(tmp_path / "served"))
    main_model = SconeLM.load(str(inputs / "checkpoint")).main_model
    tokens_BT = torch.from_numpy(np.random.default_rng(0).integers(1, VOCAB, (2, 30)))
    fgram_ids_BT = served.lookup.index.match(tokens_BT.numpy()).fgram_ids_BT
    inputs_BTD = main_model.get_input_embeddings()(tokens_BT)
    table = EmbeddingTable.open(str(inputs / "table"))
    for b, t in np.argwhere(fgram_ids_BT >= 0):
        inputs_BTD[b, t] = table.vectors(fgram_ids_BT[b, t : t + 1])[0]
    assert (fgram_ids_BT >= 0).any()
    assert torch.equal(served(tokens_BT).logits, main_model(inputs_embeds=inputs_BTD).logits)


@torch.inference_mode()
def test_a_plain_checkpoint_is_served_as_it_is(inputs: Path, tmp_path: Path) -> None:
    plain = str(inputs / "plain")
    run(config_for(inputs, tmp_path / "served", checkpoint=plain, fgrams=None, table=None))
    tokens_BT = torch.arange(1, 30)[None]
    expected = SconeLM.load(plain).main_model(tokens_BT).logits
    assert torch.equal(load_served_model(str(tmp_path / "served"))(tokens_BT).logits, expected)


def test_exporting_again_changes_nothing(inputs: Path, tmp_path: Path) -> None:
    run(config_for(inputs, tmp_path / "one/served"))
    before = snapshot(tmp_path / "one/served")
    run(config_for(inputs, tmp_path / "one/served"))
    run(config_for(inputs, tmp_path / "two/served"))
    assert before == snapshot(tmp_path / "one/served") == snapshot(tmp_path / "two/served")


def test_text_that_looks_like_a_control_token_stays_text(inputs: Path, tmp_path: Path) -> None:
    run(config_for(inputs, tmp_path / "served"))
    (tmp_path / "served/tokenizer.json").write_bytes(REAL_TOKENIZER.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "served")
    ids = tokenizer("a<|endoftext|>b")["input_ids"]
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"table": "other_table"}, "table=.*checkpoint: found 'another'"),
        ({"table": None}, "was trained with f-grams; name both"),
        ({"fgrams": "checkpoint"}, "fgrams/v1.* is needed"),
        ({"table": "nowhere"}, "nowhere: no artifact"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    inputs: Path, tmp_path: Path, changes: dict[str, str | None], reason: str
) -> None:
    paths = {name: value and str(inputs / value) for name, value in changes.items()}
    with pytest.raises(ArtifactError, match=reason):
        run(config_for(inputs, tmp_path / "served", **paths))
    assert not (tmp_path / "served").exists()


def test_another_tokenizer_is_refused(inputs: Path, tmp_path: Path) -> None:
    write_tokens(str(tmp_path / "tokens"), [[1]], vocab_size=VOCAB + 1)
    with pytest.raises(ArtifactError, match="tokens=.*tokenizer_sha256"):
        run(config_for(inputs, tmp_path / "served", tokens=str(tmp_path / "tokens")))
    assert not (tmp_path / "served").exists()
