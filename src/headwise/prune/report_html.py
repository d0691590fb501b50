"""The report of a pruning run as one HTML page that loads nothing but the picture beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .. import html
from ..terminal import one_line
from .report import PruneReport, comparison_rows, export_lines, recovery_summary, savings_limit, score_rows

if TYPE_CHECKING:
    from .rank_scores import ScoreComparison

PICTURE = (
    '<section class="hw-card"><img src="curve.png" alt="Quality against the share of heads kept" width="800"></section>'
)
HeadKey = tuple[str, int, int]  # kind, layer, head

SHADES = 20  # steps from the least to the most important head; classes, since the policy allows no style attribute
STYLE = """
body { margin: 0 }
.headwise { min-height: 100vh }
.headwise h2 { font-size: 17px; margin: 0 0 8px }
.hw-card { margin: 18px 0; max-width: 64em; overflow-x: auto }
.hw-card img { max-width: 100%; height: auto; background: #ffffff; border-radius: 6px }
table { border-collapse: collapse }
td, th { padding: .25rem .8rem .25rem 0; text-align: right; font-weight: normal; border-bottom: 1px solid var(--line) }
td:first-child, th:first-child { text-align: left }
th { color: var(--soft); font-size: 13px }
ul { margin: 8px 0; padding-left: 20px }
.heads { border-collapse: separate; border-spacing: 3px }
.heads th { border: 0; white-space: nowrap; padding: 0 8px 0 0 }
.headwise .heads td { width: 36px; min-width: 22px; height: 30px; padding: 0; text-align: center; font-size: 12px;
  border: 1px solid var(--edge); border-radius: 5px }
.headwise .heads td.gone { background: none; border: 1px dashed var(--soft); color: var(--soft) }
@media (max-width: 620px) {
  .headwise h1 { font-size: 20px }
  .heads { border-spacing: 1px }
  .headwise .heads td, .heads th { width: 19px; min-width: 17px; font-size: 11px }
  .heads th { padding: 0 3px 0 0 }
}
""" + "".join(
    f".heads td.s{step} {{ background: color-mix(in oklab, light-dark(#0096b0, #3f9fd8) "
    f"{60 * step / SHADES:.0f}%, var(--ground)) }}\n"
    for step in range(SHADES + 1)
)
BODY = """
<main class="headwise">
<header><div class="hw-brand"><b>headwise</b><span class="soft">pruning</span></div>
<h1>{title}</h1></header>
<p class="soft">The most that removing heads can save: {ceiling}.</p>
<section class="hw-card"><table><thead><tr><th></th><th>before</th><th>after</th></tr></thead><tbody>{table}</tbody>
</table><ul>{verdict}</ul><p class="soft">{texts}</p></section>
{picture}
<section class="hw-card"><h2>The plan</h2>{heads}{notes}</section>
{against}
{recovery}
<p>{saved}</p>
</main>
"""


def escape(text: str) -> str:
    """A text from outside on one line of HTML: a model's name may be "<b>"."""
    return html.escape(one_line(text))


def page(report: PruneReport, picture: bool = False) -> str:
    """The whole page; picture: curve.png lies beside it."""
    title = f"{report.model}, {report.plan.removed} of {report.plan.total} heads removed"
    body = BODY.format(
        title=escape(title),
        ceiling=escape(savings_limit(report)),
        table=table_rows(comparison_rows(report)),
        verdict="".join(f"<li>{escape(line)}</li>" for line in report.verdict()),
        texts=f"Scored on {report.scored} texts, measured on {report.measured} others; 95 % intervals by bootstrap.",
        picture=PICTURE if picture else "",
        heads=_head_map(report),
        notes="".join(f"<p>{escape(note)}</p>" for note in report.plan.notes),
        against=_score_section(report.comparison) if report.comparison is not None else "",
        recovery=_section("Recovery", f"<p>{escape(recovery_summary(report))}</p>") if report.losses else "",
        saved="</p>\n<p>".join(map(escape, [str(report.saved), *export_lines(report)])) if report.saved else "",
    )
    images = "'self' file:"  # the picture is a file beside the page
    return html.page(one_line(title), body, html.theme() + STYLE, images=images)[0]


def table_rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)


def _head_map(report: PruneReport) -> str:
    """Every head as a cell, the darker the more it matters within the model; removed heads are crossed out."""
    plan = report.plan
    tips, ranks = _tips_and_ranks(report)
    removed = {(key if isinstance(key, tuple) else (plan.layers[0][0], key)): set(h) for key, h in plan.heads.items()}
    lines = []
    for kind, index, query, _ in plan.layers:
        removed_heads = removed.get((kind, index), set())
        keys = [(kind, index, head) for head in range(query)]
        cells = "".join(_head_cell(key[2], key[2] in removed_heads, tips.get(key), ranks.get(key)) for key in keys)
        name = escape(f"{kind} {index}")
        lines.append(f"<tr><th>{name}</th>{cells}<th>{query - len(removed_heads)} of {query}</th></tr>")
    legend = f"{plan.removed} of {plan.total} heads go (score: {plan.score}, budget: {plan.budget}), marked ×."
    shades = " The stronger the colour of a head, the higher it ranks in the model." if ranks else ""
    return f'<p class="soft">{escape(legend + shades)}</p><table class="heads"><tbody>{"".join(lines)}</tbody></table>'


def _tips_and_ranks(report: PruneReport) -> tuple[dict[HeadKey, str], dict[HeadKey, float]]:
    """For each head its score in words, and its rank from 0 to 1; empty where heads were not scored singly."""
    if report.scores is None or report.scores.unit != "head":
        return {}, {}
    rows = list(report.scores.rows())
    tips = {row[:3]: f"{report.scores.name} {row[3]:.3g} ({row[4]:.3g} to {row[5]:.3g})" for row in rows}
    ascending = sorted(rows, key=lambda row: row[3])
    return tips, {row[:3]: i / max(len(rows) - 1, 1) for i, row in enumerate(ascending)}


def _head_cell(head: int, removed: bool, tip: str | None, rank: float | None) -> str:
    shade = f"s{round(SHADES * (0.5 if rank is None else rank))}"
    title = escape(", ".join(filter(None, (f"head {head}", tip, "removed" if removed else ""))))
    return f'<td class="{"gone " * removed}{shade}" title="{title}">{"×" if removed else head}</td>'


def _score_section(comparison: ScoreComparison) -> str:
    header = "<tr><th>score</th><th>rank correlation</th><th>seconds</th></tr>"
    table = f"<table><thead>{header}</thead><tbody>{table_rows(score_rows(comparison))}</tbody></table>"
    return _section("Scores against ablation", f"{table}<p>{escape(comparison.summary())}</p>")


def _section(title: str, content: str) -> str:
    return f'<section class="hw-card"><h2>{title}</h2>{content}</section>'
