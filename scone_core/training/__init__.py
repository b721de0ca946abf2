"""Batches and optimizer of a training."""
