"""Which heads follow a relation between words: chosen on one half of the gold links, reported on the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ...errors import HeadwiseError
from ...inspection.run import _pair as pair
from ...resampling import bootstrap_counts
from . import conllu, gold, scoring
from .alignment import Lost
from .gold import SHUFFLED, Sentence
from .result import Head, Relation, Relations
from .scoring import FIXED

Gold = str | os.PathLike[str] | conllu.Treebank | Sequence[Any]
Progress = Callable[[int], None]  # called with the number of texts that were read since the last call

FEWEST = 50  # links of a relation, in each half, to say anything of it
LEVEL = 0.05  # of being wrong about one relation or more, of all that are judged
RESAMPLES = 10_000
AT_ONCE = 200  # resamples that are drawn together
UNITS = 5_000  # more sentences than this are resampled in so many groups


class Choice(NamedTuple):
    """What was picked for a relation on the choosing half."""

    head: Head
    fixed: str  # the best answer that knows no meaning, such as "-1": the word before
    links: int = 0  # it was picked by


@dataclass
class Tally:
    """Sums over the links of each relation: how often each head, and each fixed answer, is right."""

    heads: list[Head] = field(default_factory=list)
    links: dict[str, int] = field(default_factory=dict)
    hits: dict[str, np.ndarray] = field(default_factory=dict)  # (heads,)
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # (heads,)
    fixed: dict[str, np.ndarray] = field(default_factory=dict)  # (FIXED,)
    lost: Lost = field(default_factory=Lost)

    def add(self, names: np.ndarray, hits: np.ndarray, weights: np.ndarray, fixed: np.ndarray) -> None:
        """names (N,), hits and weights (N, heads), fixed (N, FIXED)."""
        for name in map(str, np.unique(names)):
            at = names == name
            self.links[name] = self.links.get(name, 0) + int(at.sum())
            for sums, new in ((self.hits, hits), (self.weights, weights), (self.fixed, fixed)):
                sums[name] = sums.get(name, 0) + new[at].sum(0, dtype=np.float64)

    def choices(self) -> dict[str, Choice]:
        """For each relation the head that is right most often; on a tie the one with more weight there."""
        made = {}
        for name, hits in self.hits.items():
            best = np.lexsort((self.weights[name], hits))[-1]
            made[name] = Choice(self.heads[best], FIXED[int(self.fixed[name].argmax())], self.links[name])
        return made


class Record(NamedTuple):
    """What the chosen head and the chosen fixed answer gave, link by link."""

    names: np.ndarray  # (N,) str
    sentences: np.ndarray  # (N,) int
    hits: np.ndarray  # (N,)
    weights: np.ndarray  # (N,)
    fixed: np.ndarray  # (N,)


def relations(
    model: Any,
    links: Gold,
    *,
    report: Gold | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Relations:
    """Which head follows each relation, and how well, on links that it was not chosen by.

    links: CoNLL-U files, or sentences with gold links. report: others to report on; without them `links` is halved.
    For each relation the head that is right most often on the choosing part is taken, and on the reporting part set
    against the best fixed offset (chosen alike), all heads, and gold that was shuffled.
    """
    first, notes = sentences_of(links)
    if report is None:
        first, second = gold.halves(first)
    else:
        second, more = sentences_of(report)
        notes = (*notes, *more)
    subject = _subject(model, tokenizer)
    tally = _asked(subject, first, seed, progress=progress)[0]
    made = _reported(subject, second, tally.choices(), seed + 1, progress, least=FEWEST)
    return replace(made, notes=(*notes, *made.notes))


def choose_heads(model: Any, links: Gold, *, tokenizer: Any = None, seed: int = 0) -> dict[str, Choice]:
    """The best head and the best fixed answer for each relation: the choosing half alone."""
    return _asked(_subject(model, tokenizer), sentences_of(links)[0], seed)[0].choices()


def evaluate_heads(
    model: Any, links: Gold, chosen: Mapping[str, Choice], *, tokenizer: Any = None, seed: int = 1, least: int = 0
) -> Relations:
    """How heads that were chosen elsewhere do on these links; relations that nothing was chosen for are left out.

    least: links that a head must have been chosen by for its relation to be judged. `relations` is `choices` on one
    half and then this on the other, with at least FEWEST.
    """
    sentences, notes = sentences_of(links)
    made = _reported(_subject(model, tokenizer), sentences, chosen, seed, None, least)
    return replace(made, notes=(*notes, *made.notes))


def sentences_of(links: Gold) -> tuple[list[Sentence], tuple[str, ...]]:
    """Sentences with links from whatever was given: files, a treebank, or sentences already; and what to say."""
    if isinstance(links, (str, os.PathLike)):
        links = conllu.read_conllu(links)
    elif not isinstance(links, conllu.Treebank) and links and isinstance(links[0], (str, os.PathLike)):
        links = conllu.read_conllu(*links)
    if isinstance(links, conllu.Treebank):
        return links.syntax() + (links.coreference() if links.entities else []), links.notes
    if not any(getattr(sentence, "links", ()) for sentence in links):
        raise HeadwiseError(f"{len(links)} sentences without a gold link; relations need some with links")
    return list(links), ()


class Subject(NamedTuple):
    """A model that is asked."""

    name: str
    body: Any
    tokenizer: Any
    causal: bool
    notes: tuple[str, ...]


def _subject(model: Any, tokenizer: Any) -> Subject:
    name, model, tokenizer = pair(model, tokenizer)
    body, notes = scoring.body(model)
    return Subject(name, body, tokenizer, scoring.is_causal(body), notes)


def _asked(
    subject: Subject,
    sentences: list[Sentence],
    seed: int,
    chosen: Mapping[str, Choice] | None = None,
    progress: Progress | None = None,
) -> tuple[Tally, Record]:
    """Every head's sums, and link by link what the chosen heads gave."""
    seen = [gold.visible(one) for one in sentences] if subject.causal else sentences
    moved = gold.shuffled(seen, seed, causal=subject.causal)
    both = [replace(one, links=one.links + other.links) for one, other in zip(seen, moved, strict=True)]
    tally, parts = Tally(), []
    for answers in scoring.ask(subject.body, subject.tokenizer, both, causal=subject.causal, lost=tally.lost):
        batch = answers.batch
        tally.heads = answers.heads
        names = np.array([link.relation for link in batch.links])
        hits, weights, fixed = answers.hits.numpy(), answers.weights.numpy(), scoring.fixed(batch, both).numpy()
        tally.add(names, hits, weights, fixed)
        parts.append(_recorded(names, batch.numbers[batch.sentence.cpu()].numpy(), hits, weights, fixed, tally, chosen))
        if progress:
            progress(len(batch.numbers))
    if not parts:
        raise HeadwiseError(f"none of {len(sentences)} sentences has a link that the model can follow")
    return tally, Record(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _recorded(
    names: np.ndarray,
    numbers: np.ndarray,
    hits: np.ndarray,
    weights: np.ndarray,
    fixed: np.ndarray,
    tally: Tally,
    chosen: Mapping[str, Choice] | None,
) -> Record:
    """Of a batch, what the chosen heads gave; links of relations that nothing was chosen for are left out."""
    chosen = chosen or {}
    column = {head: i for i, head in enumerate(tally.heads)}
    rows = np.array([i for i, name in enumerate(names) if name in chosen], dtype=int)
    heads = np.array([column[chosen[name].head] for name in names[rows]], dtype=int)
    answers = np.array([FIXED.index(chosen[name].fixed) for name in names[rows]], dtype=int)
    return Record(names[rows], numbers[rows], hits[rows, heads], weights[rows, heads], fixed[rows, answers])


def _reported(
    subject: Subject,
    sentences: list[Sentence],
    chosen: Mapping[str, Choice],
    seed: int,
    progress: Progress | None,
    least: int,
) -> Relations:
    """least: links that a head must have been chosen by."""
    tally, record = _asked(subject, sentences, seed, chosen, progress)
    reach = _reach(sentences) if subject.causal else {}
    rows = [_row(name, chosen[name], tally, record, reach) for name in sorted(tally.links) if name in chosen]
    judged = [row.name for row in rows if row.links >= FEWEST and chosen[row.name].links >= least]
    level = LEVEL / max(1, sum(not name.startswith(SHUFFLED) for name in judged))
    ranges = _intervals(record, judged, level, seed)
    rows = [replace(row, **ranges.get(row.name, {})) for row in rows]
    return Relations(
        model=subject.name,
        causal=subject.causal,
        sentences=len(sentences),
        level=level,
        rows=tuple(row for row in rows if not row.name.startswith(SHUFFLED)),
        shuffled=tuple(row for row in rows if row.name.startswith(SHUFFLED)),
        heads=tuple(tally.heads),
        scores={name: tally.hits[name] / tally.links[name] for name in judged if not name.startswith(SHUFFLED)},
        notes=(*subject.notes, *tally.lost.notes(len(sentences))),
        record=record,
    )


def _reach(sentences: Sequence[Sentence]) -> dict[str, float]:
    """The share of each relation's links that a causal model can follow."""
    counts: dict[str, list[int]] = {}
    for sentence in sentences:
        for link in sentence.links:
            count = counts.setdefault(link.relation, [0, 0])
            count[0] += any(target < link.word for target in link.targets)
            count[1] += 1
    return {name: seen / every for name, (seen, every) in counts.items()}


def _row(name: str, choice: Choice, tally: Tally, record: Record, reach: Mapping[str, float]) -> Relation:
    """Without its intervals yet."""
    at = record.names == name
    every = tally.hits[name] / tally.links[name]
    return Relation(
        name,
        *choice.head,
        links=int(at.sum()),
        chosen_by=choice.links,
        visible=reach.get(name.removeprefix(SHUFFLED), 1.0),
        accuracy=float(record.hits[at].mean()),
        weight=float(record.weights[at].mean()),
        fixed=choice.fixed,
        fixed_accuracy=float(record.fixed[at].mean()),
        median=float(np.median(every)),
        high_heads=float(np.quantile(every, 0.95)),
    )


def _intervals(record: Record, names: Sequence[str], level: float, seed: int) -> dict[str, dict[str, Any]]:
    """Bootstrap over sentences: all relations of a drawn sentence come along, so one drawing serves them all."""
    if not names:
        return {}
    column = {name: i for i, name in enumerate(names)}
    used = np.array([name in column for name in record.names])
    _, units = np.unique(record.sentences[used] % UNITS, return_inverse=True)
    at = (units, np.array([column[name] for name in record.names[used]]))
    sums = np.zeros((units.max() + 1, len(names), 4))  # links, hits, weight, hits of the fixed answer
    for part, values in enumerate((np.ones(used.sum()), record.hits[used], record.weights[used], record.fixed[used])):
        np.add.at(sums[..., part], at, values)
    drawn = _resampled(sums, np.random.default_rng(seed))  # (resamples, names, 4)
    with np.errstate(invalid="ignore"):
        hits, weights, fixed = (drawn[..., part] / drawn[..., 0] for part in (1, 2, 3))
    edges = 100 * level / 2, 100 * (1 - level / 2)
    found = [np.nanpercentile(values, edges, axis=0) for values in (hits, weights, hits - fixed)]
    keys = ("low", "high"), ("weight_low", "weight_high"), ("gain_low", "gain_high")
    return {
        name: {
            key: float(ends[side, i]) for pair, ends in zip(keys, found, strict=True) for side, key in enumerate(pair)
        }
        for name, i in column.items()
    }


def _resampled(sums: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    flat = sums.reshape(len(sums), -1)
    drawn = [bootstrap_counts(len(sums), AT_ONCE, chance) @ flat for _ in range(RESAMPLES // AT_ONCE)]
    return np.concatenate(drawn).reshape(RESAMPLES, *sums.shape[1:])
