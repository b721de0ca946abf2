"""Files -> documents -> tokens."""
