"""All checks in one launch, since starting the ranks takes most of the time: all_checks FOLDER."""

from __future__ import annotations

from headwise.scale import init_ranks
from helpers.rank_checks import CHECKS
from helpers.torchrun import report_checks

if __name__ == "__main__":
    with init_ranks(timeout=60) as ranks:
        report_checks(CHECKS, ranks)
