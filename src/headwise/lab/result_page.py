"""The Markdown page of one result, and the index of all results. Both are made from the JSON alone."""

from __future__ import annotations

from typing import Any

from ..timing.machine import machine_summary
from .claim import Claim, Table
from .store import BUDGETS
from .terminal import MARKS, read_verdicts

INTRO = """\
# The lab: what everyone says about multi-head attention, measured

Each sentence below is repeated in tutorials. For each sentence there is an experiment with a verdict: **holds**,
**holds only if**, **does not hold**, or **cannot tell at this scale**. The thresholds are constants in the claim's
file and were fixed before the run. `headwise lab 3` runs one claim on your machine; `headwise lab --all --full` runs
all of them.

What was known before the runs: steps, learning rates and batch sizes were tuned on seed 100, which no verdict uses.
In this tuning, a single head did better on the task of claim 3 than expected. The sentences of claim 3 and one
threshold (0.75, now 0.90) were then rewritten, before any of the runs that count. One more rule of claim 3 was added
late, as its page explains. The text models are small. They train for 4,000 steps with `--full`, and for 1,000 steps
without it, where they are far from converged. Claims 4 and 6 to 10 were first measured with 1,000 steps only. The
longer runs, with the same thresholds, changed four verdicts: W_O and a collapsed head (7), training without the
division by √d_k, saturation after training (9), and the cost of a single key/value head (10).

At first, a sentence counted as undecided as soon as one random start disagreed with the others. This rule was changed
after five starts, which are among those judged, and before any further start was looked at: if all starts agree,
their result is the verdict; if they disagree, the 95 % interval of their mean decides. The thresholds did not change.
`--full` now uses 20 starts (this takes hours; finished pieces are reused), and each page states its number of starts,
which was fixed before they were looked at. A verdict of "cannot tell" states how many starts or what change would be
needed, computed from the spread measured so far.
"""


def stem(number: int) -> str:
    """The name of a claim's files without their suffix: "claim03"."""
    return f"claim{number:02d}"


def result_page(claim: Claim, record: dict[str, Any]) -> str:
    """One claim: its sentences with verdicts, the charts, the tables, the method and the machine."""
    figures = record["figures"]
    parts = [f"# {claim.number}. {claim.title}", ""]
    for verdict in read_verdicts(record):
        parts += [
            f"> “{verdict.says}”",
            "",
            f"**{MARKS[verdict.word]} {str(verdict)[0].upper()}{str(verdict)[1:]}.**",
            "",
        ]
        parts += [f"{verdict.because}{verdict.needs_sentence} *How sure: {verdict.sure}.*", ""]
    parts += [f"![{claim.title}]({stem(claim.number)}.png)", ""]
    for table in claim.tables(figures):
        parts += [*_table(table), ""]
    parts += ["## How", "", claim.experiment.strip(), "", "## Run", "", _run_description(record), ""]
    return "\n".join(parts)


def index_page(records: list[dict[str, Any]]) -> str:
    """All claims, one line per sentence."""
    parts = [INTRO]
    for record in records:
        parts += [f"## {record['claim']}. [{record['title']}]({stem(record['claim'])}.md)", ""]
        parts += [f"- {MARKS[v.word]} **{v}**: “{v.says}” {v.because}{v.needs_sentence}" for v in read_verdicts(record)]
        parts += [""]
    return "\n".join(parts)


def _table(table: Table) -> list[str]:
    lines = [f"**{table.title}**", "", f"| {' | '.join(table.head)} |", f"|{'---|' * len(table.head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in table.rows]


def _run_description(record: dict[str, Any]) -> str:
    flag = {"full": " --full"}.get(record["budget"], "")
    flag += f" --starts {record['starts']}" if record["starts"] != BUDGETS[record["budget"]].starts else ""
    seed = f" --seed {record['seed']}" if record["seed"] else ""
    others = [name for name in record.get("processors", []) if name != record["machine"]["cpu"]]
    elsewhere = f"; parts of it were computed earlier, on {' and '.join(others)}" if others else ""
    return (
        f"`headwise lab {record['claim']}{flag}{seed}` on {record['date']}, device {record['device']}, "
        f"{record['starts']} random starts where something is trained. Figures: "
        f"[{stem(record['claim'])}.json]({stem(record['claim'])}.json). Machine: {machine_summary(record['machine'])}; "
        f"headwise {record['versions']['headwise']}{elsewhere}."
    )
