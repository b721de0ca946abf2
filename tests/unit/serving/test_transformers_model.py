"""Laws of the transformers wrapper: history decides, whatever the cache or the padding holds."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from scone_core.artifacts.folders import publish
from scone_core.artifacts.manifests import ArtifactError, EmbeddingsManifest, load_manifest
from scone_core.serving.transformers_model import load_served_model
from tests.builders.served_models import (
    VOCAB,
    Agreement,
    Reference,
    publish_served,
    write_served_folder,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_served_folder(folder)
    return folder


@pytest.fixture(scope="module")
def model(base: Path) -> PreTrainedModel:
    return load_served_model(str(base / "served"))


@pytest.fixture(scope="module")
def reference(base: Path) -> Reference:
    return Reference(base)


def random_prompts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB, length).tolist() for length in lengths]


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    padding = [[0] * (width - len(prompt)) for prompt in prompts]
    mask = [p + [1] * (width - len(p)) for p in padding]
    rows = [p + prompt for p, prompt in zip(padding, prompts, strict=True)]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_equals_full_recomputation(
    model: PreTrainedModel, reference: Reference, use_cache: bool
) -> None:
    prompts = random_prompts([1, 2, 7, 40])
    output = model.generate(
        **left_padded(prompts), max_new_tokens=24, do_sample=False, use_cache=use_cache
    )
    agreement = Agreement()
    for prompt, row in zip(prompts, output.tolist(), strict=True):
        answer = row[40:]
        answer = answer[: answer.index(0) + 1] if 0 in answer else answer
        agreement += reference.check(prompt, answer)
    assert agreement.num_wrong == 0
    assert agreement.num_ties <= 0.01 * agreement.num_tokens
    assert 0.3 < agreement.num_hits / agreement.num_tokens < 0.95


def test_forward_scores_whole_sequences(model: PreTrainedModel, reference: Reference) -> None:
    (tokens,) = random_prompts([60])
    with torch.inference_mode():
        logits_TV = model(torch.tensor([tokens])).logits[0]
    expected_TV = reference.logits(tokens, reference.fgram_ids(tokens))
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=1e-4)


def test_tokens_without_their_history_are_refused(model: PreTrainedModel) -> None:
    tokens = torch.tensor(random_prompts([10]))
    cache = DynamicCache(config=model.config)
    model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values: f-grams reach back"):
        model(tokens[:, :1], past_key_values=cache)
    mask = torch.ones(1, 11, dtype=torch.int64)
    with pytest.raises(ValueError, match="1 tokens after 10 cached.*give the whole sequence"):
        model.generate(tokens[:, :1], attention_mask=mask, past_key_values=cache)


def test_a_continued_conversation_reuses_its_cache(
    model: PreTrainedModel, reference: Reference
) -> None:
    (prompt,) = random_prompts([12])
    cache = DynamicCache(config=model.config)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "past_key_values": cache}
    first = model.generate(torch.tensor([prompt]), do_sample=False, **options)[0].tolist()
    both = model.generate(torch.tensor([[*first, 5]]), do_sample=False, **options)[0].tolist()
    assert reference.check(both[:21], both[21:]).num_wrong == 0
    assert len(both) == 29


def test_a_plain_folder_loads_as_the_plain_model(base: Path, reference: Reference) -> None:
    plain = load_served_model(str(publish_served(base / "plain", None)))
    tokens = torch.tensor(random_prompts([20]))
    with torch.inference_mode():
        assert torch.equal(plain(tokens).logits, reference.model(tokens).logits)


@pytest.mark.parametrize("field", ["fgrams_fingerprint", "table_fingerprint", "max_n"])
def test_artifacts_other_than_the_exported_ones_are_refused(
    base: Path, tmp_path: Path, field: str
) -> None:
    folder = shutil.copytree(base / "served", tmp_path / "served")
    config = json.loads((folder / "config.json").read_text())
    config["scone"][field] = 4 if field == "max_n" else "another"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="max_n" if field == "max_n" else "fingerprint"):
        load_served_model(str(folder))


def test_another_tokenizer_is_refused(base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base / "served", tmp_path / "served")
    content = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(content.replace('"t7"', '"t07"'))
    with pytest.raises(ArtifactError, match=r"tokenizer.json: sha256"):
        load_served_model(str(folder))


def test_a_table_that_was_replaced_behind_the_export_is_refused(base: Path, tmp_path: Path) -> None:
    table = shutil.copytree(base / "table", tmp_path / "table")
    manifest = load_manifest(EmbeddingsManifest, str(table))
    changed = manifest.model_dump() | {"fingerprint": "of another checkpoint"}
    publish(str(table), EmbeddingsManifest.model_validate(changed))
    folder = shutil.copytree(base / "served", tmp_path / "served")
    config = json.loads((folder / "config.json").read_text())
    config["scone"]["table"] = str(table)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="fingerprint: found 'of another checkpoint'"):
        load_served_model(str(folder))
