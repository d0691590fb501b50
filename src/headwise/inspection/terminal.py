"""An Inspection or a Comparison drawn for the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from ..terminal import console
from . import heatmap
from .comparison import Comparison
from .result import STATISTICS, Inspection, Link

BAR = 20  # cells of a weight of 1
FIRST_TARGET_HEADS = 5  # heads on the first target
HEADS_PER_KIND = 4  # heads of a kind
FURTHER_TARGET_HEADS = 2  # heads per further target
TARGETS = 4  # of a followed word
FAINT = 0.1  # smaller weights are not shown
RANKING_LENGTH = 15  # heads in a ranking
LONG = 300  # characters of a text that are shown
PLAIN_WIDTH = 100


def plain(value: Any) -> str:
    """A value as it would be printed, without colours."""
    out = io.StringIO()
    console(file=out, width=PLAIN_WIDTH, color_system=None).print(value)
    return out.getvalue().rstrip("\n")


def overview(result: Inspection, width: int, *, colour: bool, statistic: str = "entropy") -> RenderableType:
    """The followed words, the heads that stand out, and all heads by one statistic."""
    followed = [
        part for place, reason in result.followed() for part in (_followed_word(result, place, reason, colour), Text())
    ]
    return Group(title(result), Text(), *followed, _standouts(result), Text(), _table(result, statistic, width, colour))


def named_heads(result: Inspection) -> list[tuple[int, int]]:
    """The heads that the overview names, in its order."""
    links = [
        _rows(strong_links, earlier=result.is_pronoun(place))
        for place, _ in result.followed()
        if (strong_links := _strong(result, place))
    ]
    heads = [(link.layer, link.head) for rows in links for link in rows]
    heads += [(head.layer, head.head) for kind in result.kinds for head in result.standouts(kind)[:HEADS_PER_KIND]]
    return list(dict.fromkeys(heads))


def title(result: Inspection) -> Text:
    layers, count = len(result.layers), len(list(result.heads))
    even = len(set(map(len, result.weights))) == 1
    size = f"{layers} layers x {count // layers} heads" if even else f"{count} heads in {layers} layers"
    text = Text.assemble((result.text if len(result.text) <= LONG else result.text[:LONG] + "…", "bold"), "\n")
    text.append(
        f"{result.model}: {size}; {_several(result.tokens, 'token')}, {_several(len(result.words.names), 'word')}",
        "dim",
    )
    text.append("".join(f"; {note}" for note in result.notes), "dim")
    return text


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# --- the followed word ---


def _followed_word(result: Inspection, place: int, reason: str, colour: bool) -> Text:
    word = result.words.names[place]
    links = _strong(result, place)
    text = Text.assemble("Where ", (f"“{word}”", "bold"), " looks", (f" ({reason})" if reason else "", "dim"), "\n")
    if not links:
        strongest = next(iter(result.links(place)), None)
        nearest = f"; the strongest is {_describe(result, strongest)}" if strongest else ""
        return text.append(f"  no head sends {FAINT} or more of it to another word beyond its neighbours{nearest}")
    rows = _rows(links, earlier=result.is_pronoun(place))
    if colour:
        text.append_text(_shaded(result, rows[0])).append("\n")
    size = max(cell_len(result.words.names[link.target]) for link in rows)
    for number, link in enumerate(rows):
        target = result.words.names[link.target]
        same_target = number and rows[number - 1].target == link.target
        label = (
            " " * (cell_len(word) + 3 + size) if same_target else f"{word} → {' ' * (size - cell_len(target))}{target}"
        )
        text.append(f"  {label}  ").append(f"{link.name:<5}", "bold cyan")
        text.append(f" {link.weight:.2f} ").append(heatmap.bar(link.weight, BAR), "cyan").append("\n")
    return text.append(
        f"  equal attention sends {_equal_weight(result, place):.2f} to each token{_sink_note(result)}", "dim"
    )


def _strong(result: Inspection, place: int) -> list[Link]:
    return [link for link in result.links(place) if link.weight >= FAINT]


def _sink_note(result: Inspection) -> str:
    return "; first word left out, an attention sink in causal models" if result.causal else ""


def _equal_weight(result: Inspection, place: int) -> float:
    """The weight per token of equal attention from a word to all visible tokens."""
    return 1 / (result.words.pieces[place][-1] + 1 if result.causal else result.tokens)


def _rows(links: Sequence[Link], *, earlier: bool) -> list[Link]:
    """The strongest links, target by target; earlier: an earlier word first, which a pronoun may stand for."""
    targets: dict[int, list[Link]] = {}
    for link in links:
        targets.setdefault(link.target, []).append(link)
    before = next((target for target in targets if earlier and target < links[0].source), links[0].target)
    order = [before, *(target for target in targets if target != before)][:TARGETS]
    return [
        link
        for target in order
        for link in targets[target][: FIRST_TARGET_HEADS if target == before else FURTHER_TARGET_HEADS]
    ]


def _shaded(result: Inspection, link: Link) -> Text:
    """The words on the colours of one head's weights from the followed word."""
    row = result.matrix((link.layer, link.head))[link.source]
    largest = max(float(row.max()), 1e-9)
    text = Text("  ").append(f"{link.name:<6}", "bold cyan")
    for place, (name, weight, special) in enumerate(zip(result.words.names, row, result.words.special, strict=True)):
        if not special:
            text.append(
                name, heatmap.style(heatmap.ramp(float(weight) / largest)) + " underline bold" * (place == link.source)
            )
            text.append(" ")
    return text


def _describe(result: Inspection, link: Link) -> str:
    return f"{result.words.names[link.target]} {link.weight:.2f} in {link.name}"


def ranking(result: Inspection) -> RenderableType:
    """The heads by what they do with each followed word: the strongest word first, neighbours too."""
    parts = [part for place, reason in result.followed() for part in (Text(), _ranking_lines(result, place, reason))]
    return Group(title(result), *parts)


def _ranking_lines(result: Inspection, place: int, reason: str) -> Text:
    names, links = result.words.names, result.ranking(place)
    text = Text.assemble("Heads by where ", (f"“{names[place]}”", "bold"), " looks most")
    text.append(f" ({reason})\n" if reason else "\n", "dim")
    size = max((cell_len(names[link.target]) for link in links[:RANKING_LENGTH]), default=0)
    for number, link in enumerate(links[:RANKING_LENGTH], start=1):
        target = names[link.target]
        text.append(f"{number:>4}  ", "dim").append(f"{link.name:<6}", "bold cyan")
        near = "±1" if abs(link.target - place) == 1 else "  "
        text.append(f"{' ' * (size - cell_len(target))}{target} ").append(near, "dim").append(f" {link.weight:.2f} ")
        text.append(f"{heatmap.bar(link.weight, BAR):<{BAR}}", "cyan")
        row = result.matrix((link.layer, link.head))[place]
        delimiter_weight = sum(float(x) for x, mark in zip(row, result.words.delimiter, strict=True) if mark)
        text.append(f" delimiters {delimiter_weight:.2f}\n", "dim")
    count = len(list(result.heads))
    return text.append(
        f"{len(links)} of {count} heads look at another word, {_excluded_words(result)} aside; to_json() lists all",
        "dim",
    )


# --- the heads that stand out ---


def _standouts(result: Inspection) -> Text:
    text = Text.assemble("Heads that stand out on this text\n")
    empty = []
    for kind in result.kinds:
        standouts = result.standouts(kind)
        if not standouts:
            empty.append(kind)
            continue
        text.append(f"  {kind.name:<15}")
        for head in standouts[:HEADS_PER_KIND]:
            text.append(f"{head.name:>5}", "bold cyan").append(f" {head.score:.2f} ")
        note = f"and {len(standouts) - HEADS_PER_KIND} more" if len(standouts) > HEADS_PER_KIND else ""
        text.append(f" {note}".rstrip() + "\n")
        text.append(f"      {result.criterion(kind)} ({_equal_note(standouts[0].equal)})\n", "dim")
    absent = [kind for kind in empty if result.can_tell(kind)]
    untold = [kind for kind in empty if not result.can_tell(kind)]
    text.append("".join(f"  none: {kind.name}, {result.criterion(kind)}\n" for kind in absent), "dim")
    text.append("".join(f"  the text is too short to tell: {kind.name}\n" for kind in untold), "dim")
    text.right_crop(1)
    return text


def _equal_note(equal: float) -> str:
    return f"equal attention: {equal:.2f}"


def _excluded_words(result: Inspection) -> str:
    """The words that links leave out."""
    return "itself, delimiters and the first word" if result.causal else "itself and delimiters"


def _table(result: Inspection, statistic: str, width: int, colour: bool) -> Text:
    table = result.table(statistic)
    equal = result.equal[statistic]
    text = Text.assemble((f"{statistic}", "bold"), f": {STATISTICS[statistic]} ({_equal_note(float(equal.mean()))})\n")
    return text.append_text(heatmap.head_table(table, result.layers, width, colour=colour))


def matrix(result: Inspection, head: str, width: int, *, colour: bool) -> RenderableType:
    """One head's weights: each row a word, each column a word it looks at."""
    layer, number = result.head_key(head)
    weights = result.matrix(head)
    row = result.layers.index(layer)
    facts = ", ".join(
        f"{name} {result.stats[name][row, number]:.2f}" for name in ("entropy", "previous", "delimiter", "self")
    )
    text, count = heatmap.matrix(weights, result.words.names, width, colour=colour)
    head_line = Text.assemble("Head ", (f"{layer}.{number}", "bold cyan"), f": {facts}\n")
    head_line.append("Each row is a word, the columns are where it looks; a row sums to 1.", "dim")
    parts: list[RenderableType] = [title(result), Text(), head_line, Text(), text]
    if count < len(result.words.names):
        parts.append(Text(f"The first {count} of {len(result.words.names)} words; to_json() has all.", "dim"))
    return Group(*parts)


# --- two texts ---


def comparison(two: Comparison, width: int, *, colour: bool, statistic: str = "entropy") -> RenderableType:
    """Two texts side by side: where the followed word looks in each, and the heads that changed most."""
    difference = Text.assemble((statistic, "bold"), ": the second text less the first\n")
    difference.append_text(
        heatmap.head_table(two.difference(statistic), two.first.layers, width, colour=colour, signed=True)
    )
    return Group(title(two.first), title(two.second), Text(), _turns(two), Text(), _changes(two), Text(), difference)


def _turns(two: Comparison) -> Text:
    first_place, second_place, reason = two.followed()
    words = two.first.words.names[first_place], two.second.words.names[second_place]
    quoted = f"“{words[0]}”" if words[0].casefold() == words[1].casefold() else f"“{words[0]}” and “{words[1]}”"
    text = Text.assemble("Where ", (quoted, "bold"), " looks in each", (f" ({reason})" if reason else "", "dim"), "\n")
    turns = [turn for turn in two.turns()[: 2 * FIRST_TARGET_HEADS] if _strongest(turn.first, turn.second) >= FAINT]
    if not turns:
        return text.append(f"  no head sends {FAINT} or more of it to another word beyond its neighbours")
    sides = [
        [_side(result, turn.first if result is two.first else turn.second) for turn in turns]
        for result in (two.first, two.second)
    ]
    sizes = [max(len("first text"), *map(cell_len, column)) for column in sides]
    text.append(f"  {'head':<6}{_pad('first text', sizes[0])}   second text\n", "dim")
    for turn, first_side, second_side in zip(turns, *sides, strict=True):
        text.append(f"  {turn.name:<6}", "bold cyan")
        text.append(_pad(first_side, sizes[0]) + "   " + _pad(second_side, sizes[1]))
        text.append("" if turn.moved is None else f"   {turn.moved:.2f} moved", "dim").append("\n")
    note = (
        "moved: the share of the word's attention that went to another word"
        if two.aligned
        else "the texts differ in their number of words, so no moved share is given"
    )
    return text.append(f"  {note}", "dim")


def _strongest(*links: Link | None) -> float:
    return max(link.weight if link else 0.0 for link in links)


def _side(result: Inspection, link: Link | None) -> str:
    return f"{result.words.names[link.target]} {link.weight:.2f}" if link else "nowhere"


def _pad(words: str, size: int) -> str:
    return words + " " * (size - cell_len(words))


def _changes(two: Comparison) -> Text:
    text = Text("Heads that changed most\n")
    for change in two.changes()[: 2 * FIRST_TARGET_HEADS]:
        text.append(f"  {change.name:<6}", "bold cyan").append(
            f"{change.statistic:<11}{change.first:.2f} → {change.second:.2f}\n"
        )
    return text.append("  entropy and distance as shares of equal attention's", "dim")
