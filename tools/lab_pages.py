"""Write the verdicts, pages and pictures of docs/lab again from the figures in its JSON files; nothing is measured.

python tools/lab_pages.py           docs/lab, after a change of words (`make lab-pages`)
python tools/lab_pages.py FOLDER    another folder that `headwise lab --out` wrote
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from headwise.errors import HeadwiseError
from headwise.lab import load_claim, read_results, write_result
from headwise.lab.result_page import stem
from headwise.lab.session import judge

DOCS = Path(__file__).parents[1] / "docs" / "lab"


def rewrite_pages(folder: Path) -> list[int]:
    """The numbers of the claims whose files were written again."""
    records = read_results([folder])
    if not records:
        raise HeadwiseError(f"{str(folder)!r} has no results of the lab; headwise lab NUMBER --out makes some")
    for number, record in records.items():
        claim = load_claim(number)
        try:
            verdicts = [asdict(verdict) for verdict in judge(claim, record["figures"])]
            write_result({**record, "title": claim.title, "verdicts": verdicts}, folder)
        except HeadwiseError:
            raise
        except Exception as error:  # each claim reads its figures in its own way
            message = f"{type(error).__name__} {' '.join(str(error).split())}"
            raise HeadwiseError(
                f"{str(folder / stem(number))!r}.json has figures that claim {number} cannot read ({message}); "
                "run it again"
            ) from error
    return list(records)


if __name__ == "__main__":
    try:
        sys.stderr.write(f"written again: {rewrite_pages(Path(*sys.argv[1:2]) if sys.argv[1:] else DOCS)}\n")
    except HeadwiseError as error:
        sys.exit(str(error))
