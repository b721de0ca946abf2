"""An evaluation by one copy of the model in this process: the same evaluator, without Ray."""

from ray_jobs.evaluate.config import EvaluateConfig
from ray_jobs.evaluate.worker import Evaluator, TextReceipt, plan_units
from scone_core.evaluation.scores import TextScore
from scone_core.evaluation.sources import read_sources
from scone_core.evaluation.sums import DocumentSums
from scone_core.evaluation.text import text_scores


def evaluate_here(config: EvaluateConfig) -> dict[str, TextScore]:
    """The scores of the text that `config` names, by source."""
    assert config.tokens is not None, "text is asked for"
    resolved = config.resolve()
    evaluator = Evaluator(resolved)
    receipts = [evaluator.score(unit)[1] for unit in plan_units(resolved)]
    sums = DocumentSums.join(part.sums() for part in receipts if isinstance(part, TextReceipt))
    return text_scores(sums, read_sources(config.tokens))
