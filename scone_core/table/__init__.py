"""Rows of f-grams: formats, tiers, build, check, lookup."""
