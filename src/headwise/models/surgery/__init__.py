"""Heads cut out of a model; pruned models saved and loaded again."""
