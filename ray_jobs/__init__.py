"""One module per stage: a config and `run(config) -> Manifest`. Ray, MLflow, DeepSpeed and vLLM are
wired here.
"""
