"""Contracts on disk: configs, manifests, folders, shards, storage."""
