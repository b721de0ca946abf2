"""Laws of recipes: each has a name and is a chain of stages whose trainings can be planned."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from pipelines.recipes import BUNDLED, RECIPES, Recipe, RecipeChoice, RecipeName, build_recipe
from ray_jobs.runtime.config import JobConfig
from ray_jobs.train.config import TrainConfig
from ray_jobs.train.train import check_inputs, plan
from scone_core.artifacts.config import Role
from scone_core.model.decoders import DecoderConfig, build_causal_lm, hugging_face_config
from tests.builders.corpora import word_tokenizer, write_fgrams, write_tokens

VOCAB_SIZE = 256
DOCUMENTS = [[1 + (i * j) % 7 for i in range(400)] for j in range(1, 9)]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What each recipe takes, beside its name."""
    folder = tmp_path_factory.mktemp("recipes")
    main = DecoderConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = hugging_face_config(main, vocab_size=VOCAB_SIZE, separator_id=0)
    build_causal_lm(config).save_pretrained(folder / "pretrained")
    (folder / "pretrained" / "tokenizer.json").write_bytes(word_tokenizer(VOCAB_SIZE))
    template = json.dumps({"chat_template": "{{ messages[0]['content'] }}"})
    (folder / "pretrained" / "tokenizer_config.json").write_text(template)
    inputs = {name: str(folder / name) for name in ("text", "chats", "held_out_chats")}
    inputs["model"] = str(folder / "pretrained")
    return {
        "quickstart": {"root": str(folder / "quickstart")},
        "chat_finetuning": {"root": str(folder / "chat"), **inputs},
    }


def stages(recipe: Recipe) -> list[JobConfig]:
    """The configurations in the order of their stages."""
    return [*recipe.tokens, *(getattr(recipe, f.name) for f in dataclasses.fields(recipe)[1:])]


def recipe_of(name: RecipeName, given: dict[str, dict[str, str]]) -> Recipe:
    return build_recipe(RecipeChoice(recipe=name, **given[name]))


def test_every_recipe_can_be_chosen_by_its_name() -> None:
    assert get_args(RecipeName) == tuple(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_stage_reads_was_given_or_written_by_a_stage_before(
    name: RecipeName, given: dict[str, dict[str, str]]
) -> None:
    root, *inputs = given[name].values()
    written: set[str] = set()
    for config in stages(recipe_of(name, given)):
        fields = config.model_dump(exclude={"out"})
        below_root = {text for text in strings(fields) if text.startswith(f"{root}/")}
        assert below_root <= written, config
        for path in input_paths(config) - written:
            assert path.startswith((str(BUNDLED), *inputs)), f"{path} comes from nowhere"
        assert config.out.startswith(f"{root}/")
        assert config.out not in written, "two stages write one folder"
        written.add(config.out)


@pytest.mark.parametrize("name", RECIPES)
def test_the_trainings_of_a_recipe_can_be_planned(
    name: RecipeName, given: dict[str, dict[str, str]]
) -> None:
    recipe = recipe_of(name, given)
    for config in recipe.tokens:
        write_tokens(config.out, DOCUMENTS, vocab_size=VOCAB_SIZE)
    write_fgrams(recipe.fgrams.out, DOCUMENTS, num_fgrams=50, vocab_size=VOCAB_SIZE)
    baseline, scone = (costs(config) for config in (recipe.baseline, recipe.scone))
    assert baseline.nodes_per_position == baseline.embedding_parameters == 0
    assert scone.nodes_per_position > 0
    assert scone.embedding_parameters > 0
    assert scone.main_parameters == baseline.main_parameters


def costs(config: TrainConfig) -> Any:
    config = config.replace(gflops_per_second=10.0)
    check_inputs(config)
    return plan(config)


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [s for part in parts for s in strings(part)] if isinstance(value, dict | tuple) else []


def input_paths(config: JobConfig) -> set[str]:
    return {
        path
        for name, field in type(config).model_fields.items()
        if Role("input") in field.metadata
        for path in strings((getattr(config, name),))
    }


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (RecipeChoice(recipe="chat_finetuning"), "missing a required argument: 'model'"),
        (RecipeChoice(model="a model"), "unexpected keyword argument 'model'"),
    ],
)
def test_a_recipe_names_the_input_that_it_lacks_or_does_not_take(
    choice: RecipeChoice, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        build_recipe(choice)


def test_the_bundled_corpus_is_there() -> None:
    (tokens, *_) = build_recipe(RecipeChoice()).tokens
    assert all(Path(path).exists() for path in (*tokens.inputs, tokens.tokenizer))
