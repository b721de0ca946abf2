"""Whole runs as plain functions: every option of every stage in one place. Copy and change."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Literal

from ray_jobs.count.config import CountConfig
from ray_jobs.evaluate.config import EvaluateConfig
from ray_jobs.precompute.config import PrecomputeConfig
from ray_jobs.runtime.config import Cluster
from ray_jobs.serve.export import PLAIN_CHAT, ExportConfig
from ray_jobs.serve.measure_decode import DecodeConfig
from ray_jobs.tokenize.config import TokenizeConfig
from ray_jobs.train.config import TrainConfig
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.storage import is_local
from scone_core.corpus.chat import read_template
from scone_core.corpus.documents import DocumentFormat
from scone_core.model.decoders import DecoderConfig
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.training.optimizer import OptimizerConfig

BUNDLED = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Recipe:
    """The configurations of a run, in the order in which end_to_end.py runs their stages."""

    tokens: tuple[TokenizeConfig, ...]
    """The training text first, then held-out text and whatever else is counted."""
    fgrams: CountConfig
    baseline: TrainConfig
    scone: TrainConfig
    table: PrecomputeConfig
    evaluate_baseline: EvaluateConfig
    evaluate_fly: EvaluateConfig
    evaluate_table: EvaluateConfig
    export_baseline: ExportConfig
    export_scone: ExportConfig
    decode: DecodeConfig


def quickstart(root: str) -> Recipe:
    """16 MB of real text, a main model of 1.4 M parameters, minutes on two cores."""
    cluster = Cluster(num_cpus=2, object_store_mb=512)
    tokens = TokenizeConfig(
        inputs=(str(BUNDLED / "austen.jsonl.gz"), str(BUNDLED / "sotu.jsonl.gz")),
        tokenizer=str(BUNDLED / "tokenizer.json"),
        form=DocumentFormat(split="train"),
        shard_mb=4,
        out=f"{root}/tokens-train",
        cluster=cluster,
    )
    held_out = tokens.replace(
        form=DocumentFormat(split="validation"), out=f"{root}/tokens-validation"
    )
    fgrams = CountConfig(
        tokens=tokens.out, num_fgrams=100_000, out=f"{root}/fgrams", cluster=cluster
    )
    scone = TrainConfig(
        train_tokens=tokens.out,
        validation_tokens=held_out.out,
        fgrams=fgrams.out,
        model=DecoderConfig(
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=344,
        ),
        fgram_model=FGramModelConfig(num_layers=2),
        optimizer=OptimizerConfig(learning_rate=3e-3, fgram_learning_rate=3e-4, warmup_steps=40),
        sequence_length=256,
        global_batch=8,
        micro_batch=4,
        steps=500,
        out=f"{root}/scone",
        cluster=cluster,
    )
    return with_comparison(root, (tokens, held_out), fgrams, scone)


def chat_finetuning(root: str, *, model: str, text: str, chats: str, held_out_chats: str) -> Recipe:
    """The paper's fine-tuning (section 4.4) in small: a pretrained main model learns conversations,
    and a residual f-gram model beside it. The loss is on the assistants' turns only.

    Args:
        model: a Hugging Face folder with tokenizer.json, and a chat template in its
            tokenizer_config.json.
        text: files or a folder of text, whose n-grams are counted.
        chats: JSONL files with a list of messages in every line, or a folder of such files.
        held_out_chats: more of them, for evaluation.
    """
    template = f"{model}/tokenizer_config.json"
    learned = TokenizeConfig(
        inputs=(chats,),
        tokenizer=f"{model}/tokenizer.json",
        content="chat",
        chat_template=template,
        form=DocumentFormat(text_field="messages"),
        out=f"{root}/chats",
    )
    held_out = learned.replace(inputs=(held_out_chats,), out=f"{root}/held-out-chats")
    counted = TokenizeConfig(inputs=(text,), tokenizer=learned.tokenizer, out=f"{root}/text")
    fgrams = CountConfig(tokens=counted.out, num_fgrams=1_000_000, out=f"{root}/fgrams")
    scone = TrainConfig(
        train_tokens=learned.out,
        validation_tokens=held_out.out,
        fgrams=fgrams.out,
        pretrained=model,
        fgram_model=FGramModelConfig(num_layers=2),
        attention_span="document",
        optimizer=OptimizerConfig(
            learning_rate=2e-5, fgram_learning_rate=2e-4, schedule="linear", weight_decay=0.0
        ),
        sequence_length=1024,
        global_batch=32,
        out=f"{root}/scone",
    )
    tokens = (learned, held_out, counted)
    return with_comparison(root, tokens, fgrams, scone, chat_template=read_template(template))


def with_comparison(
    root: str,
    tokens: tuple[TokenizeConfig, ...],
    fgrams: CountConfig,
    scone: TrainConfig,
    *,
    chat_template: str = PLAIN_CHAT,
) -> Recipe:
    """`scone` beside an equal model without f-grams: both are evaluated, and both are served."""
    baseline = scone.replace(fgrams=None, out=f"{root}/baseline")
    table = PrecomputeConfig(
        checkpoint=scone.out, fgrams=fgrams.out, out=f"{root}/table", cluster=scone.cluster
    )
    evaluate_fly = EvaluateConfig(
        checkpoint=scone.out,
        tokens=scone.validation_tokens,
        fgrams=fgrams.out,
        out=f"{root}/evaluation-fly",
        cluster=scone.cluster,
    )
    export_baseline = ExportConfig(
        checkpoint=baseline.out,
        tokens=scone.train_tokens,
        chat_template=chat_template,
        out=f"{root}/served-baseline",
    )
    export_scone = export_baseline.replace(
        checkpoint=scone.out, fgrams=fgrams.out, table=table.out, out=f"{root}/served-scone"
    )
    return Recipe(
        tokens=tokens,
        fgrams=fgrams,
        baseline=baseline,
        scone=scone,
        table=table,
        evaluate_baseline=evaluate_fly.replace(
            checkpoint=baseline.out, fgrams=None, out=f"{root}/evaluation-baseline"
        ),
        evaluate_fly=evaluate_fly,
        evaluate_table=evaluate_fly.replace(table=table.out, out=f"{root}/evaluation-table"),
        export_baseline=export_baseline,
        export_scone=export_scone,
        decode=DecodeConfig(
            model=export_scone.out,
            baseline=export_baseline.out,
            tokens=scone.validation_tokens,
            out=f"{root}/decode",
            cluster=scone.cluster,
        ),
    )


RecipeName = Literal["quickstart", "chat_finetuning"]
RECIPES: dict[RecipeName, Callable[..., Recipe]] = {
    "quickstart": quickstart,
    "chat_finetuning": chat_finetuning,
}


class RecipeChoice(Frozen):
    """Which recipe runs, and what it is given."""

    recipe: RecipeName = "quickstart"
    """A function of recipes.py; its docstring says what it takes beside `root`."""
    root: str | None = None
    """Folder or URI below which every stage writes; by default runs/<recipe>."""
    model: str | None = None
    """A Hugging Face folder, where the recipe starts from a trained model."""
    text: str | None = None
    """Files or a folder of text, where the recipe counts n-grams of yours."""
    chats: str | None = None
    """JSONL files of conversations to learn, where the recipe trains on them."""
    held_out_chats: str | None = None
    """JSONL files of conversations to evaluate on."""


def build_recipe(choice: RecipeChoice) -> Recipe:
    """The configurations of the chosen recipe.

    Raises:
        ValueError: an input is missing, or the recipe takes no such input.
    """
    given = {"root": f"runs/{choice.recipe}"}
    given |= choice.model_dump(exclude={"recipe"}, exclude_none=True)
    given |= {name: os.path.abspath(path) for name, path in given.items() if is_local(path)}
    recipe = RECIPES[choice.recipe]
    try:
        signature(recipe).bind(**given)
    except TypeError as error:
        raise ValueError(f"recipe={choice.recipe!r}: {error}; see pipelines/recipes.py") from error
    return recipe(**given)
