"""Sets of f-grams: index, shards, growth, figures."""
