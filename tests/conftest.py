"""Settings that must hold before anything imports ray, torch or vllm."""

import os

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
# Threads that wait for a core spin: on two busy cores tiny models take 50 times as long with two.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.pop("RAY_ADDRESS", None)
os.environ.pop("MLFLOW_TRACKING_URI", None)

from hypothesis import settings

settings.register_profile("scone", deadline=None)  # a first call may compile a kernel
settings.load_profile("scone")
