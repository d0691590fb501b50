"""Run the campaigns in their long form: `python -m campaigns [name ...] [--tries N] [--seed N]`, tests/ on the path."""

from __future__ import annotations

import argparse
import sys
import time

from campaigns import campaigns


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaigns", description=__doc__)
    known_campaigns = dict(campaigns())
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(known_campaigns))
    parser.add_argument("--tries", type=int, help="instead of each campaign's own number")
    parser.add_argument("--seed", type=int, default=20261116)
    options = parser.parse_args()
    unknown = set(options.names) - set(known_campaigns)
    if unknown:
        parser.error(f"no campaign is called {', '.join(sorted(unknown))}; there are {', '.join(known_campaigns)}")
    failure_count = 0
    for name in options.names or known_campaigns:
        start = time.monotonic()
        report = known_campaigns[name].campaign(options.tries or known_campaigns[name].LONG, options.seed)
        sys.stdout.write(f"{name}: {report}, {time.monotonic() - start:.0f} s\n")
        for line in report.failures:
            sys.stdout.write(f"  {line}\n")
        sys.stdout.flush()
        failure_count += len(report.failures)
    return 1 if failure_count else 0


if __name__ == "__main__":
    sys.exit(main())
