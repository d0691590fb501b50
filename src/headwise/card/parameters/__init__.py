"""Exact parameter counts: one row of facts per model type."""
