"""All checks that need nothing but ranks, in one launch: most of its time goes into starting."""

from __future__ import annotations

import on_corpus
import on_heads
import on_models
import on_ring

from headwise.scale import started
from helpers.torchrun import report

CHECKS = {**on_heads.CHECKS, **on_ring.CHECKS, **on_models.CHECKS, **on_corpus.CHECKS}

if __name__ == "__main__":
    with started(timeout=60) as ranks:
        report(CHECKS, ranks)
