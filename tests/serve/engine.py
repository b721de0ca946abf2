"""Run a vLLM engine on a served folder and write what it answers: a process of its own.

python -m tests.serve.engine <served folder> <placement> <answers.json> [<worker class>]

Nothing here may import numba: vLLM 0.32's search for CPU kernels trips over llvmlite's objects.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray

VOCAB = 96
LENGTHS = [1, 2, 3, 4, 5, 17, 31, 32, 33, 64, 65, 100, 128, 200, 258, 259]
NUM_NEW, NUM_NEW_CROWDED = 32, 96
CHUNK = 64
"""Tokens per engine step: longer prompts are prefilled in chunks."""
NUM_BLOCKS = 64
"""KV cache of 64 x 32 tokens: enough for the prompts and short answers, not for the long ones."""


SCONE_WORKER = "ray_jobs.serve.vllm_plugin.runner.SconeCPUWorker"


def main(served: str, placement: str, answers: str, worker: str = SCONE_WORKER) -> None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: two imports of vLLM less
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": f"{answers}.cache",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if placement == "actor":
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    from vllm import LLM  # reads the environment

    engine = LLM(
        served,
        worker_cls=worker,
        additional_config={"placement": placement},
        dtype="float32",
        enforce_eager=True,
        max_num_batched_tokens=CHUNK,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=512,
        max_num_seqs=len(LENGTHS),
        block_size=32,
        disable_log_stats=False,
    )
    Path(answers).write_text(json.dumps(run_scenarios(engine)))


def run_scenarios(engine: Any) -> dict[str, Any]:
    """Answers to fresh, repeated and continued prompts and to more than the cache holds, all of a
    scenario at once.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB, length).tolist() for length in LENGTHS]
    fresh = answer(engine, prompts, NUM_NEW)
    longer = [p + a + [7, 8] for p, a in zip(prompts, fresh["answers"], strict=True)]
    return {
        "fresh": fresh,
        "repeated": answer(engine, prompts, NUM_NEW),
        "continued": answer(engine, longer, NUM_NEW),
        "crowded": answer(engine, [prompt[::-1] for prompt in prompts], NUM_NEW_CROWDED),
    }


def answer(engine: Any, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=num_new, ignore_eos=True, logprobs=1, detokenize=False
    )
    before = counters(engine)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = [o.outputs[0] for o in engine.generate(inputs, greedy, use_tqdm=False)]
    after = counters(engine)
    return {
        "prompts": prompts,
        "answers": [list(answer.token_ids) for answer in answers],
        "logprobs": [answer.cumulative_logprob for answer in answers],
        **{name: value - before[name] for name, value in after.items()},
    }


def counters(engine: Any) -> dict[str, int]:
    prefix, names = "vllm:", ("num_preemptions", "prefix_cache_hits")
    found = {metric.name.removeprefix(prefix): metric for metric in engine.get_metrics()}
    return {name: found[name].value for name in names}


if __name__ == "__main__":
    main(*sys.argv[1:])
