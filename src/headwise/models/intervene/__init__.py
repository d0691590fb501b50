"""Heads masked, gated or replaced while a model runs."""
