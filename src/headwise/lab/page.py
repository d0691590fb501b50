"""A result as a Markdown page, and the page that lists them all. Both come from the JSON alone."""

from __future__ import annotations

from typing import Any

from ..timing.machine import machine_summary
from .claim import Claim, Table
from .terminal import MARKS, verdicts_of

INTRO = """\
# The lab: what everyone says about multi-head attention, measured

Each sentence below is one that tutorials repeat. Each became an experiment with a verdict: **holds**, **holds only
if**, **does not hold**, or **cannot tell at this scale**. The thresholds of a verdict are constants in the claim's
file and were written down before the run. `headwise lab 3` runs one on your machine, `headwise lab --all --full` all.

What was known before: steps, rates and batches were tried out on seed 100, which no verdict rests on. There one head
did better on the task of claim 3 than expected; its sentences and one threshold (0.75, now 0.90) were then written
anew, before any start that counts. One more rule of claim 3 came late, as its page says. The models of text are small
and learn for 4,000 steps with `--full`, for 1,000 without it, where they are far from done. Claims 4 and 6 to 10 were
first measured with 1,000 steps throughout; the longer run, by the same thresholds, changed four verdicts: W_O and a
collapsed head (7), training without the division, saturation after it (9) and what a single key/value head costs (10).
"""


def stem(number: int) -> str:
    return f"claim{number:02d}"


def page(claim: Claim, record: dict[str, Any]) -> str:
    """One claim: sentences with their verdicts, the picture, the figures, how it was done and on what."""
    figures = record["figures"]
    parts = [f"# {claim.number}. {claim.title}", ""]
    for verdict in verdicts_of(record):
        parts += [
            f"> “{verdict.says}”",
            "",
            f"**{MARKS[verdict.word]} {str(verdict)[0].upper()}{str(verdict)[1:]}.**",
            "",
        ]
        parts += [f"{verdict.because} *How sure: {verdict.sure}.*", ""]
    parts += [f"![{claim.title}]({stem(claim.number)}.png)", ""]
    for table in claim.tables(figures):
        parts += [*_table(table), ""]
    parts += ["## How", "", claim.experiment.strip(), "", "## Run", "", _how(record), ""]
    return "\n".join(parts)


def index(records: list[dict[str, Any]]) -> str:
    """All claims, a line a sentence."""
    parts = [INTRO]
    for record in records:
        parts += [f"## {record['claim']}. [{record['title']}]({stem(record['claim'])}.md)", ""]
        parts += [f"- {MARKS[v.word]} **{v}**: “{v.says}” {v.because}" for v in verdicts_of(record)]
        parts += [""]
    return "\n".join(parts)


def _table(table: Table) -> list[str]:
    lines = [f"**{table.title}**", "", f"| {' | '.join(table.head)} |", f"|{'---|' * len(table.head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in table.rows]


def _how(record: dict[str, Any]) -> str:
    flag = {"full": " --full"}.get(record["budget"], "")
    seed = f" --seed {record['seed']}" if record["seed"] else ""
    return (
        f"`headwise lab {record['claim']}{flag}{seed}` on {record['date']}, device {record['device']}, "
        f"{record['starts']} random starts where something is trained. Figures: "
        f"[{stem(record['claim'])}.json]({stem(record['claim'])}.json). Machine: {machine_summary(record['machine'])}; "
        f"headwise {record['versions']['headwise']}."
    )
