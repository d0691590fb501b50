"""Run the campaigns in their long form: `python -m campaigns [name ...] [--tries N] [--seed N]`, tests/ on the path."""

from __future__ import annotations

import argparse
import sys
import time

from campaigns import campaigns


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaigns", description=__doc__)
    found = dict(campaigns())
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(found))
    parser.add_argument("--tries", type=int, help="instead of each campaign's own number")
    parser.add_argument("--seed", type=int, default=20261116)
    options = parser.parse_args()
    unknown = set(options.names) - set(found)
    if unknown:
        parser.error(f"no campaign is called {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    failed = 0
    for name in options.names or found:
        start = time.monotonic()
        report = found[name].campaign(options.tries or found[name].LONG, options.seed)
        sys.stdout.write(f"{name}: {report}, {time.monotonic() - start:.0f} s\n")
        for line in report.failures:
            sys.stdout.write(f"  {line}\n")
        sys.stdout.flush()
        failed += len(report.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
