"""Seconds per decoded token with a cache that is filled with random keys, and per prefill, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from ..models.evaluation import evaluating
from ..models.text_inputs import device_of, vocabulary_size
from ..plans import StreamPlan
from ..timing import race_on_one_thread
from .stream_quality import streams

MEMORY_SHARE = 0.5  # of the free memory that all caches of one race may take
ROUNDS = 3
