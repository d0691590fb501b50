"""Checks that every rank of a torchrun launch runs; tests/scale/test_ranks.py reports each as a test of its own.

A check takes the ranks and a folder that they share. It compares what the ranks compute together with the same
computation in one process, and fails on any rank by raising. Importing this package registers all of them.
"""

from __future__ import annotations

from . import (  # noqa: F401
    compiled,
    composition,
    context_parallel,
    data_parallel,
    heads_and_sequence,
    kept_rows,
    recorder,
    tensor_parallel,
    training,
    transformers_models,
    watching,
)
from .registry import CHECKS as CHECKS
