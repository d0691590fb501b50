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
from .image_result import ImageInspection
from .result import STATISTICS, Inspection, Link

BAR_CELLS = 20  # cells of a weight of 1
FIRST_TARGET_HEADS = 5  # heads on the first target
STANDOUT_HEADS = 4  # heads of a kind
FURTHER_TARGET_HEADS = 2  # heads per further target
MAX_TARGETS = 4  # of a followed word
MIN_WEIGHT = 0.1  # smaller weights are not shown
RANKING_HEADS = 15  # heads in a ranking
COMPARED_HEADS = 10  # heads in a table of a comparison
MAX_CHARACTERS = 300  # characters of a text that are shown
PLAIN_WIDTH = 100


def render_plain(value: Any) -> str:
    """A value as it would be printed, without colours."""
    out = io.StringIO()
    console(file=out, width=PLAIN_WIDTH, color_system=None).print(value)
    return out.getvalue().rstrip("\n")


def draw_overview(result: Inspection, width: int, *, colour: bool, statistic: str = "entropy") -> RenderableType:
    """The followed words, the heads that stand out, and all heads by one statistic."""
    followed_words = [
        part
        for place, reason in result.followed_words()
        for part in (_draw_followed_word(result, place, reason, colour), Text())
    ]
    return Group(
        draw_title(result),
        Text(),
        *followed_words,
        _draw_standouts(result),
        Text(),
        draw_statistic_table(result, statistic, width, colour),
    )


def named_heads(result: Inspection) -> list[tuple[int, int]]:
    """The heads that the overview names, in its order."""
    link_rows = [
        _links_by_target(links, earlier_first=result.is_pronoun(place))
        for place, _ in result.followed_words()
        if (links := _strong_links(result, place))
    ]
    heads = [(link.layer, link.head) for rows in link_rows for link in rows]
    heads += [(head.layer, head.head) for kind in result.kinds for head in result.standouts(kind)[:STANDOUT_HEADS]]
    return list(dict.fromkeys(heads))


def draw_title(result: Inspection) -> Text:
    layers, count = len(result.layers), len(list(result.heads))
    even = len(set(map(len, result.weights))) == 1
    size = f"{layers} layers x {count // layers} heads" if even else f"{count} heads in {layers} layers"
    text = Text.assemble(
        (result.text if len(result.text) <= MAX_CHARACTERS else result.text[:MAX_CHARACTERS] + "…", "bold"), "\n"
    )
    text.append(f"{result.model}: {size}; {_input_size(result)}", "dim")
    text.append("".join(f"; {note}" for note in result.notes), "dim")
    return text


def _input_size(result: Inspection) -> str:
    tokens = _count_noun(result.tokens, "token")
    if isinstance(result, ImageInspection):
        special = f", {' '.join(result.image.special)}" if result.image.special else ""
        return f"{tokens}: {result.image.rows} x {result.image.columns} patches{special}"
    return f"{tokens}, {_count_noun(len(result.words.names), 'word')}"


def _count_noun(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# --- the followed word ---


def _draw_followed_word(result: Inspection, place: int, reason: str, colour: bool) -> Text:
    word = result.words.names[place]
    links = _strong_links(result, place)
    text = Text.assemble("Where ", (f"“{word}”", "bold"), " looks", (f" ({reason})" if reason else "", "dim"), "\n")
    if not links:
        strongest = next(iter(result.links(place)), None)
        strongest_note = f"; the strongest is {_describe(result, strongest)}" if strongest else ""
        return text.append(
            f"  no head sends {MIN_WEIGHT} or more of it to another word beyond its neighbours{strongest_note}"
        )
    rows = _links_by_target(links, earlier_first=result.is_pronoun(place))
    if colour:
        text.append_text(_draw_shaded_words(result, rows[0])).append("\n")
    size = max(cell_len(result.words.names[link.target]) for link in rows)
    for number, link in enumerate(rows):
        target = result.words.names[link.target]
        same_target = number and rows[number - 1].target == link.target
        left = (
            " " * (cell_len(word) + 3 + size) if same_target else f"{word} → {' ' * (size - cell_len(target))}{target}"
        )
        text.append(f"  {left}  ").append(f"{link.name:<5}", "bold cyan")
        text.append(f" {link.weight:.2f} ").append(heatmap.bar(link.weight, BAR_CELLS), "cyan").append("\n")
    return text.append(
        f"  uniform attention sends {_equal_weight(result, place):.2f} to each token{_sink_note(result)}", "dim"
    )


def _strong_links(result: Inspection, place: int) -> list[Link]:
    return [link for link in result.links(place) if link.weight >= MIN_WEIGHT]


def _sink_note(result: Inspection) -> str:
    return "; first word left out, an attention sink in causal models" if result.causal else ""


def _equal_weight(result: Inspection, place: int) -> float:
    """The weight per token of uniform attention from a word to all visible tokens."""
    return 1 / (result.words.pieces[place][-1] + 1 if result.causal else result.tokens)


def _links_by_target(links: Sequence[Link], *, earlier_first: bool) -> list[Link]:
    """The strongest links, target by target; earlier_first: an earlier word first, which a pronoun may stand for."""
    targets: dict[int, list[Link]] = {}
    for link in links:
        targets.setdefault(link.target, []).append(link)
    first_target = next((target for target in targets if earlier_first and target < links[0].source), links[0].target)
    order = [first_target, *(target for target in targets if target != first_target)][:MAX_TARGETS]
    return [
        link
        for target in order
        for link in targets[target][: FIRST_TARGET_HEADS if target == first_target else FURTHER_TARGET_HEADS]
    ]


def _draw_shaded_words(result: Inspection, link: Link) -> Text:
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


def draw_ranking(result: Inspection) -> RenderableType:
    """The heads by what they do with each followed word: the strongest word first, neighbours too."""
    parts = [
        part
        for place, reason in result.followed_words()
        for part in (Text(), _draw_ranking_of_word(result, place, reason))
    ]
    return Group(draw_title(result), *parts)


def _draw_ranking_of_word(result: Inspection, place: int, reason: str) -> Text:
    names, links = result.words.names, result.ranking(place)
    text = Text.assemble("Heads by where ", (f"“{names[place]}”", "bold"), " looks most")
    text.append(f" ({reason})\n" if reason else "\n", "dim")
    size = max((cell_len(names[link.target]) for link in links[:RANKING_HEADS]), default=0)
    for number, link in enumerate(links[:RANKING_HEADS], start=1):
        target = names[link.target]
        text.append(f"{number:>4}  ", "dim").append(f"{link.name:<6}", "bold cyan")
        distance_mark = "±1" if abs(link.target - place) == 1 else "  "
        text.append(f"{' ' * (size - cell_len(target))}{target} ").append(distance_mark, "dim").append(
            f" {link.weight:.2f} "
        )
        text.append(f"{heatmap.bar(link.weight, BAR_CELLS):<{BAR_CELLS}}", "cyan")
        row = result.matrix((link.layer, link.head))[place]
        delimiter_weight = sum(
            float(x) for x, is_delimiter in zip(row, result.words.delimiter, strict=True) if is_delimiter
        )
        text.append(f" delimiters {delimiter_weight:.2f}\n", "dim")
    count = len(list(result.heads))
    return text.append(
        f"{len(links)} of {count} heads look at another word, {_excluded_words(result)} aside; to_json() lists all",
        "dim",
    )


# --- the heads that stand out ---


def _draw_standouts(result: Inspection) -> Text:
    text = Text.assemble("Heads that stand out on this text\n")
    kinds_without_heads = []
    for kind in result.kinds:
        standouts = result.standouts(kind)
        if not standouts:
            kinds_without_heads.append(kind)
            continue
        text.append(f"  {kind.name:<15}")
        for head in standouts[:STANDOUT_HEADS]:
            text.append(f"{head.name:>5}", "bold cyan").append(f" {head.score:.2f} ")
        rest = f"and {len(standouts) - STANDOUT_HEADS} more" if len(standouts) > STANDOUT_HEADS else ""
        text.append(f" {rest}".rstrip() + "\n")
        text.append(f"      {result.criterion(kind)} ({_equal_note(standouts[0].equal)})\n", "dim")
    absent_kinds = [kind for kind in kinds_without_heads if result.can_tell(kind)]
    undecided_kinds = [kind for kind in kinds_without_heads if not result.can_tell(kind)]
    text.append("".join(f"  none: {kind.name}, {result.criterion(kind)}\n" for kind in absent_kinds), "dim")
    text.append("".join(f"  the text is too short to tell: {kind.name}\n" for kind in undecided_kinds), "dim")
    text.right_crop(1)
    return text


def _equal_note(equal: float) -> str:
    return f"uniform attention: {equal:.2f}"


def _excluded_words(result: Inspection) -> str:
    """The words that links leave out."""
    return "itself, delimiters and the first word" if result.causal else "itself and delimiters"


def draw_statistic_table(result: Inspection, statistic: str, width: int, colour: bool) -> Text:
    """One statistic of every head, with its meaning and that of uniform attention."""
    table = result.table(statistic)
    equal = result.equal[statistic]
    text = Text.assemble((f"{statistic}", "bold"), f": {STATISTICS[statistic]} ({_equal_note(float(equal.mean()))})\n")
    return text.append_text(heatmap.head_table(table, result.layers, width, colour=colour))


def draw_matrix(result: Inspection, head: str, width: int, *, colour: bool) -> RenderableType:
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
    parts: list[RenderableType] = [draw_title(result), Text(), head_line, Text(), text]
    if count < len(result.words.names):
        parts.append(Text(f"The first {count} of {len(result.words.names)} words; to_json() has all.", "dim"))
    return Group(*parts)


# --- two texts ---


def draw_comparison(comparison: Comparison, width: int, *, colour: bool, statistic: str = "entropy") -> RenderableType:
    """Two texts side by side: where the followed word looks in each, and the heads that changed most."""
    difference = Text.assemble((statistic, "bold"), ": the second text less the first\n")
    difference.append_text(
        heatmap.head_table(comparison.difference(statistic), comparison.first.layers, width, colour=colour, signed=True)
    )
    return Group(
        draw_title(comparison.first),
        draw_title(comparison.second),
        Text(),
        _draw_turns(comparison),
        Text(),
        _draw_changes(comparison),
        Text(),
        difference,
    )


def _draw_turns(comparison: Comparison) -> Text:
    first_place, second_place, reason = comparison.followed_words()
    words = comparison.first.words.names[first_place], comparison.second.words.names[second_place]
    label = f"“{words[0]}”" if words[0].casefold() == words[1].casefold() else f"“{words[0]}” and “{words[1]}”"
    text = Text.assemble("Where ", (label, "bold"), " looks in each", (f" ({reason})" if reason else "", "dim"), "\n")
    turns = [
        turn for turn in comparison.turns()[:COMPARED_HEADS] if _strongest_weight(turn.first, turn.second) >= MIN_WEIGHT
    ]
    if not turns:
        return text.append(f"  no head sends {MIN_WEIGHT} or more of it to another word beyond its neighbours")
    columns = [
        [_describe_side(result, turn.first if result is comparison.first else turn.second) for turn in turns]
        for result in (comparison.first, comparison.second)
    ]
    sizes = [max(len("first text"), *map(cell_len, column)) for column in columns]
    text.append(f"  {'head':<6}{_pad('first text', sizes[0])}   second text\n", "dim")
    for turn, left, right in zip(turns, *columns, strict=True):
        text.append(f"  {turn.name:<6}", "bold cyan")
        text.append(_pad(left, sizes[0]) + "   " + _pad(right, sizes[1]))
        text.append("" if turn.moved_share is None else f"   {turn.moved_share:.2f} moved", "dim").append("\n")
    note = (
        "moved: the share of the word's attention that went to another word"
        if comparison.aligned
        else "the texts differ in their number of words, so no moved share is given"
    )
    return text.append(f"  {note}", "dim")


def _strongest_weight(*links: Link | None) -> float:
    return max(link.weight if link else 0.0 for link in links)


def _describe_side(result: Inspection, link: Link | None) -> str:
    return f"{result.words.names[link.target]} {link.weight:.2f}" if link else "nowhere"


def _pad(words: str, size: int) -> str:
    return words + " " * (size - cell_len(words))


def _draw_changes(comparison: Comparison) -> Text:
    text = Text("Heads that changed most\n")
    for change in comparison.changes()[:COMPARED_HEADS]:
        text.append(f"  {change.name:<6}", "bold cyan").append(
            f"{change.statistic:<11}{change.first:.2f} → {change.second:.2f}\n"
        )
    return text.append("  entropy and distance as shares of uniform attention's", "dim")
