"""The door of `serve run ray_jobs.serve_scone:app` and cluster/serve.yaml."""

from ray_jobs.serve.serve_scone import app

__all__ = ["app"]
