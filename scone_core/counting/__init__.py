"""Tokens -> exact counts -> ranked n-grams."""
