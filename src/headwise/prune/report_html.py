"""The report of a pruning run as one HTML page that loads nothing but the picture beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import html
from ..terminal import one_line
from .report import ceiling, compared, recovered, rows

if TYPE_CHECKING:
    from .rank_scores import Against
    from .session import Report

SHADES = 20  # steps from the least to the most important head; classes, since the policy allows no style attribute
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse }
td, th { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8886 }
td:first-child, th:first-child { text-align: left }
pre { line-height: 1.2; overflow-x: auto }
.heads td { width: 1.6rem; padding: .2rem; text-align: center; border: 2px solid Canvas; font-size: .8rem }
.heads td.gone { outline: 1px dashed #8889; outline-offset: -4px; color: #888 }
""" + "".join(
    f".heads td.s{step} {{ background: rgb(70 130 180 / {0.08 + 0.62 * step / SHADES:.3f}) }}\n"
    f".heads td.gone.s{step} {{ background: rgb(70 130 180 / {(0.08 + 0.62 * step / SHADES) / 3:.3f}) }}\n"
    for step in range(SHADES + 1)
)
BODY = """
<h1>{title}</h1>
<p>The most that removing heads can save: {ceiling}.</p>
<table><thead><tr><th></th><th>before</th><th>after</th></tr></thead><tbody>{table}</tbody></table>
<ul>{verdict}</ul>
<p>{texts}</p>
{picture}
<h2>The plan</h2>
{heads}
{notes}
{against}
{recovery}
<p>{saved}</p>
"""


def said(text: str) -> str:
    """One line of text as HTML: a model's name may be "<b>"."""
    return html.escape(one_line(text))


def page(report: Report, picture: bool = False) -> str:
    cells = "".join(f"<tr><td>{said(a)}</td><td>{said(b)}</td><td>{said(c)}</td></tr>" for a, b, c in rows(report))
    title = f"{report.model}, {report.plan.removed} of {report.plan.total} heads removed"
    body = BODY.format(
        title=said(title),
        ceiling=said(ceiling(report)),
        table=cells,
        verdict="".join(f"<li>{said(line)}</li>" for line in report.verdict()),
        texts=f"Scored on {report.scored} texts, measured on {report.measured} others; 95 % intervals by bootstrap.",
        picture='<img src="curve.png" alt="Quality against the share of heads kept" width="800">' if picture else "",
        heads=_heads(report),
        notes="".join(f"<p>{said(note)}</p>" for note in report.plan.notes),
        against=_against(report.against) if report.against is not None else "",
        recovery=f"<h2>Recovery</h2><p>{said(recovered(report))}</p>" if report.losses else "",
        saved=said(str(report.saved)) if report.saved else "",
    )
    return html.page(one_line(title), body, STYLE, images="'self' file:")[0]  # the picture is a file beside the page


def _heads(report: Report) -> str:
    """Every head as a cell, the darker the more it matters within the model; those that go are crossed out."""
    made = report.plan
    told, ranks = _told(report)
    gone = {(key if isinstance(key, tuple) else (made.layers[0][0], key)): set(off) for key, off in made.heads.items()}
    lines = []
    for kind, index, query, _ in made.layers:
        off = gone.get((kind, index), set())
        cells = [
            _cell(head, head in off, told.get((kind, index, head)), ranks.get((kind, index, head)))
            for head in range(query)
        ]
        name = said(f"{kind} {index}")
        lines.append(f"<tr><th>{name}</th>{''.join(cells)}<th>{query - len(off)} of {query}</th></tr>")
    words = f"{made.removed} of {made.total} heads go (score: {made.score}, budget: {made.budget}), marked ×."
    shades = " The darker a head, the higher it ranks in the model." if ranks else ""
    return f'<p>{said(words + shades)}</p><table class="heads"><tbody>{"".join(lines)}</tbody></table>'


def _told(report: Report) -> tuple[dict[tuple[str, int, int], str], dict[tuple[str, int, int], float]]:
    """For each head its score in words, and its rank from 0 to 1; nothing where heads were not scored one by one."""
    if report.scores is None or report.scores.unit != "head":
        return {}, {}
    rows = list(report.scores.rows())
    told = {row[:3]: f"{report.scores.name} {row[3]:.3g} ({row[4]:.3g} to {row[5]:.3g})" for row in rows}
    order = sorted(rows, key=lambda row: row[3])
    return told, {row[:3]: i / max(len(rows) - 1, 1) for i, row in enumerate(order)}


def _cell(head: int, gone: bool, told: str | None, rank: float | None) -> str:
    shade = f"s{round(SHADES * (0.5 if rank is None else rank))}"
    tip = said(", ".join(filter(None, (f"head {head}", told, "removed" if gone else ""))))
    return f'<td class="{"gone " * gone}{shade}" title="{tip}">{"×" if gone else head}</td>'


def _against(found: Against) -> str:
    cells = "".join(f"<tr><td>{said(a)}</td><td>{b}</td><td>{c}</td></tr>" for a, b, c in compared(found))
    head = "<tr><th>score</th><th>rank correlation</th><th>seconds</th></tr>"
    return (
        f"<h2>Scores against ablation</h2><table><thead>{head}</thead><tbody>{cells}</tbody></table>"
        f"<p>{said(found.words())}</p>"
    )
