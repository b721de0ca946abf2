"""Two tiny trainings on real text -> their losses, step by step; one rank, without Ray.

    python -m tests.programs.golden_losses

writes `tests/golden/losses.txt` anew: after a change that is meant to change trainings.
"""

import gzip
import json
import tempfile
from itertools import islice
from pathlib import Path

from ray_jobs.train.config import TrainConfig
from scone_core.corpus.tokenizer import Tokenizer
from scone_core.model.decoders import DecoderConfig
from scone_core.model.fgram_model import FGramModelConfig
from scone_core.training.optimizer import OptimizerConfig
from tests import BUNDLED, ROOT
from tests.builders.corpora import write_fgrams, write_tokens
from tests.programs.train_here import train_here

GOLDEN = ROOT / "tests" / "golden" / "losses.txt"
NUM_STEPS = 20
NUM_SPEECHES = 4
NUM_TOKENS = 5000
"""Of each speech."""


def golden_losses(folder: Path) -> dict[str, list[float]]:
    """The loss (nats per token) of every step, of a plain and of a SCONE model."""
    scone = _write_inputs(folder)
    configs = {"plain": scone.replace(fgrams=None, out=str(folder / "plain")), "scone": scone}
    return {
        name: [report["loss"] for report in train_here(config)] for name, config in configs.items()
    }


def read_golden() -> dict[str, list[float]]:
    """The losses in `GOLDEN`."""
    header, *rows = (line.split() for line in GOLDEN.read_text().splitlines())
    columns = zip(*rows, strict=True)
    return {name: list(map(float, column)) for name, column in zip(header, columns, strict=True)}


def _write_inputs(folder: Path) -> TrainConfig:
    tokenizer = Tokenizer(BUNDLED / "tokenizer.json")
    with gzip.open(BUNDLED / "sotu.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, NUM_SPEECHES)]
    documents = [tokenizer.encode(text)[:NUM_TOKENS].tolist() for text in texts]
    options = {"vocab_size": tokenizer.vocab_size, "separator_id": 0}
    tokens, fgrams = str(folder / "tokens"), str(folder / "fgrams")
    write_tokens(tokens, documents, **options)
    write_fgrams(fgrams, documents, num_fgrams=1000, **options)
    return TrainConfig(
        train_tokens=tokens,
        validation_tokens=tokens,
        fgrams=fgrams,
        model=DecoderConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
        fgram_model=FGramModelConfig(num_layers=1),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=4),
        sequence_length=64,
        global_batch=8,
        micro_batch=4,
        steps=NUM_STEPS,
        num_workers=1,
        eval_every=NUM_STEPS,
        report_every=1,
        out=str(folder / "scone"),
    )


def main() -> None:
    """Write `GOLDEN`: a line per step, a column per model."""
    with tempfile.TemporaryDirectory() as folder:
        losses = golden_losses(Path(folder))
    rows = zip(*losses.values(), strict=True)
    lines = [" ".join(losses), *(" ".join(f"{loss:.6f}" for loss in row) for row in rows)]
    GOLDEN.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
