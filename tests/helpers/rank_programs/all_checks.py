"""All checks that need nothing but ranks, in one launch: most of its time goes into starting."""

from __future__ import annotations

from headwise.scale import started
from helpers.rank_checks import context_parallel as on_ring
from helpers.rank_checks import data_parallel as on_corpus
from helpers.rank_checks import tensor_parallel as on_heads
from helpers.rank_checks import transformers_models as on_models
from helpers.torchrun import report

CHECKS = {**on_heads.CHECKS, **on_ring.CHECKS, **on_models.CHECKS, **on_corpus.CHECKS}

if __name__ == "__main__":
    with started(timeout=60) as ranks:
        report(CHECKS, ranks)
