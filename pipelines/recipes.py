"""Whole runs as plain functions: every option of every stage in one place. Copy and change."""

from dataclasses import dataclass
from pathlib import Path

from ray_jobs.count.config import CountConfig
from ray_jobs.evaluate.config import EvaluateConfig
from ray_jobs.precompute.config import PrecomputeConfig
from ray_jobs.runtime.config import Cluster
from ray_jobs.serve.export import ExportConfig
from ray_jobs.serve.measure_decode import DecodeConfig
from ray_jobs.tokenize.config import TokenizeConfig
from ray_jobs.train.config import TrainConfig
from scone_core.corpus.documents import DocumentFormat
from scone_core.model.decoders import DecoderConfig
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.training.optimizer import OptimizerConfig

BUNDLED = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Recipe:
    """One configuration per stage, in the order in which they run."""

    train_tokens: TokenizeConfig
    validation_tokens: TokenizeConfig
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
    names = ("tokens-train", "tokens-validation", "fgrams", "baseline", "scone", "table")
    out = {name: f"{root}/{name}" for name in (*names, "served-baseline", "served-scone")}
    train_tokens = TokenizeConfig(
        inputs=(str(BUNDLED / "austen.jsonl.gz"), str(BUNDLED / "sotu.jsonl.gz")),
        tokenizer=str(BUNDLED / "tokenizer.json"),
        form=DocumentFormat(split="train"),
        shard_mb=4,
        out=out["tokens-train"],
        cluster=cluster,
    )
    fgrams = CountConfig(
        tokens=out["tokens-train"], num_fgrams=100_000, out=out["fgrams"], cluster=cluster
    )
    scone = TrainConfig(
        train_tokens=out["tokens-train"],
        validation_tokens=out["tokens-validation"],
        fgrams=out["fgrams"],
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
        out=out["scone"],
        cluster=cluster,
    )
    evaluate_fly = EvaluateConfig(
        checkpoint=out["scone"],
        tokens=out["tokens-validation"],
        fgrams=out["fgrams"],
        out=f"{root}/evaluation-fly",
        cluster=cluster,
    )
    return Recipe(
        train_tokens=train_tokens,
        validation_tokens=train_tokens.replace(
            form=DocumentFormat(split="validation"), out=out["tokens-validation"]
        ),
        fgrams=fgrams,
        baseline=scone.replace(fgrams=None, out=out["baseline"]),
        scone=scone,
        table=PrecomputeConfig(
            checkpoint=out["scone"], fgrams=out["fgrams"], out=out["table"], cluster=cluster
        ),
        evaluate_baseline=evaluate_fly.replace(
            checkpoint=out["baseline"], fgrams=None, out=f"{root}/evaluation-baseline"
        ),
        evaluate_fly=evaluate_fly,
        evaluate_table=evaluate_fly.replace(table=out["table"], out=f"{root}/evaluation-table"),
        export_baseline=ExportConfig(
            checkpoint=out["baseline"], tokens=out["tokens-train"], out=out["served-baseline"]
        ),
        export_scone=ExportConfig(
            checkpoint=out["scone"],
            tokens=out["tokens-train"],
            fgrams=out["fgrams"],
            table=out["table"],
            out=out["served-scone"],
        ),
        decode=DecodeConfig(
            model=out["served-scone"],
            baseline=out["served-baseline"],
            tokens=out["tokens-validation"],
            out=f"{root}/decode",
            cluster=cluster,
        ),
    )


def chat_finetuning(
    root: str, *, model: str, chats: str, fgrams: str
) -> tuple[TokenizeConfig, TrainConfig]:
    """The paper's fine-tuning (section 4.4) in small: a pretrained main model, a residual f-gram
    model beside it, conversations of which assistants' turns are learned.

    Args:
        model: a Hugging Face folder with tokenizer.json and tokenizer_config.json.
        chats: JSONL with a list of messages, or a folder of such files.
        fgrams: a fgrams/v1 artifact, counted on text of that tokenizer.
    """
    tokens = TokenizeConfig(
        inputs=(chats,),
        tokenizer=f"{model}/tokenizer.json",
        content="chat",
        chat_template=f"{model}/tokenizer_config.json",
        form=DocumentFormat(text_field="messages"),
        out=f"{root}/chats",
    )
    training = TrainConfig(
        train_tokens=tokens.out,
        validation_tokens=tokens.out,
        fgrams=fgrams,
        pretrained=model,
        fgram_model=FGramModelConfig(num_layers=2),
        attention_span="document",
        optimizer=OptimizerConfig(
            learning_rate=2e-5, fgram_learning_rate=2e-4, schedule="linear", weight_decay=0.0
        ),
        sequence_length=1024,
        global_batch=32,
        out=f"{root}/model",
    )
    return tokens, training
