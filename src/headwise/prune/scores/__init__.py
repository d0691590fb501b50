"""Importance scores."""
