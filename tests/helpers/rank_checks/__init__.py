"""Checks that every rank of a torchrun launch runs."""
