"""Entry points of a few lines each, and the recipes and the story that tie the stages together."""
