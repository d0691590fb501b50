"""`headwise.relations`: heads that follow a relation, chosen on one half of the gold links, evaluated on the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ...errors import HeadwiseError
from ...models.loading.resolve import resolve
from ...resampling import bootstrap_counts
from . import conllu, gold, scoring
from .alignment import Exclusions
from .gold import SHUFFLED, Sentence
from .result import Head, Relation, Relations
from .scoring import FIXED_ANSWERS

Gold = str | os.PathLike[str] | conllu.Treebank | Sequence[Any]
Progress = Callable[[int], None]  # called with the number of texts that were read since the last call

FEWEST = 50  # links of a relation in each half; with fewer it is not judged
LEVEL = 0.05  # chance of being wrong about one relation or more, of all that are judged
RESAMPLES = 10_000
CHUNK = 200  # resamples that are drawn together, for memory
UNITS = 5_000  # more sentences than this are resampled in this many groups


class ChosenHead(NamedTuple):
    """The best head and the best fixed answer for a relation, on the half for choosing."""

    head: Head
    fixed: str  # the best answer that ignores meaning, such as "-1": the word before
    links: int = 0  # that they were chosen on


@dataclass
class RelationSums:
    """Sums over the links of each relation: how often each of H heads, and each of F fixed answers, is right."""

    heads: list[Head] = field(default_factory=list)
    links: dict[str, int] = field(default_factory=dict)
    hits: dict[str, np.ndarray] = field(default_factory=dict)  # (H,)
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # (H,)
    fixed: dict[str, np.ndarray] = field(default_factory=dict)  # (F,)
    exclusions: Exclusions = field(default_factory=Exclusions)

    def add(self, names: np.ndarray, hits: np.ndarray, weights: np.ndarray, fixed: np.ndarray) -> None:
        """Add the links of a batch: names (N,), hits and weights (N, H), fixed (N, F)."""
        for name in map(str, np.unique(names)):
            rows = names == name
            self.links[name] = self.links.get(name, 0) + int(rows.sum())
            for sums, new in ((self.hits, hits), (self.weights, weights), (self.fixed, fixed)):
                sums[name] = sums.get(name, 0) + new[rows].sum(0, dtype=np.float64)

    def choices(self) -> dict[str, ChosenHead]:
        """Per relation the head that is right most often; on a tie the one with more weight on the gold words."""
        choices = {}
        for name, hits in self.hits.items():
            best = np.lexsort((self.weights[name], hits))[-1]
            fixed = FIXED_ANSWERS[int(self.fixed[name].argmax())]
            choices[name] = ChosenHead(self.heads[best], fixed, self.links[name])
        return choices


class LinkRecord(NamedTuple):
    """The results of the chosen head and the chosen fixed answer, link by link."""

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
    """Find which head follows each relation between words, and how well, on links that it was not chosen on.

    For each relation, the head with the highest accuracy on one part of the links is evaluated on the other part. It is
    compared with the best fixed offset (chosen in the same way), all heads, and shuffled gold links.

    Args:
        model: a name as in `headwise.load`, or a transformers model with its tokenizer.
        links: CoNLL-U files, a Treebank, or sentences with gold links.
        report: links to evaluate on, in the same form; by default `links` is split in halves, by document if there are
            many.
        tokenizer: the tokenizer of a model that is passed as an object.
        seed: the seed of the shuffled gold links and of the bootstrap.
        progress: called with the number of texts that were read since the last call.

    Returns:
        Relations, with one row per relation: head, accuracy, interval, verdict.

    Raises:
        HeadwiseError: if no sentence has a link that the model can follow.

    Example:
        >>> from headwise.roles.relations import probe_sentences
        >>> sentences = [sentence for sentence in probe_sentences() if "objects" in sentence.document]
        >>> row = headwise.relations("minilm", sentences)["object > verb"]
        >>> row.label, row.verdict
        ('4.11', 'found')
    """
    first, notes = sentences_of(links)
    if report is None:
        first, second = gold.halves(first)
    else:
        second, second_notes = sentences_of(report)
        notes = (*notes, *second_notes)
    text_model = _text_model(model, tokenizer)
    sums = _score(text_model, first, seed, progress=progress)[0]
    result = _evaluate(text_model, second, sums.choices(), seed + 1, progress, least=FEWEST)
    return replace(result, notes=(*notes, *result.notes))


def choose_heads(model: Any, links: Gold, *, tokenizer: Any = None, seed: int = 0) -> dict[str, ChosenHead]:
    """The best head and the best fixed answer per relation on these links, to be evaluated on others."""
    return _score(_text_model(model, tokenizer), sentences_of(links)[0], seed)[0].choices()


def evaluate_heads(
    model: Any, links: Gold, choices: Mapping[str, ChosenHead], *, tokenizer: Any = None, seed: int = 1, least: int = 0
) -> Relations:
    """Evaluate chosen heads on other links; relations without a chosen head are left out.

    `relations` is `choose_heads` on one half and then this on the other, with least=FEWEST.

    Args:
        model: a name as in `headwise.load`, or a transformers model with its tokenizer.
        links: CoNLL-U files, a Treebank, or sentences with gold links.
        chosen: as `choose_heads` gives it.
        tokenizer: the tokenizer of a model that is passed as an object.
        seed: the seed of the shuffled gold links and of the bootstrap.
        least: links that a head must have been chosen on for its relation to be judged.
    """
    sentences, notes = sentences_of(links)
    result = _evaluate(_text_model(model, tokenizer), sentences, choices, seed, None, least)
    return replace(result, notes=(*notes, *result.notes))


def sentences_of(links: Gold) -> tuple[list[Sentence], tuple[str, ...]]:
    """Sentences with links, from files, a treebank or sentences; and notes about what was left out."""
    if isinstance(links, (str, os.PathLike)):
        links = conllu.read_conllu(links)
    elif not isinstance(links, conllu.Treebank) and links and isinstance(links[0], (str, os.PathLike)):
        links = conllu.read_conllu(*links)
    if isinstance(links, conllu.Treebank):
        return links.syntax() + (links.coreference() if links.entities else []), links.notes
    if not any(getattr(sentence, "links", ()) for sentence in links):
        raise HeadwiseError(f"{len(links)} sentences without a gold link; relations need some with links")
    return list(links), ()


class TextModel(NamedTuple):
    """The part of a model that reads text, with its tokenizer."""

    name: str
    body: Any
    tokenizer: Any
    causal: bool
    notes: tuple[str, ...]


def _text_model(model: Any, tokenizer: Any) -> TextModel:
    name, model, tokenizer = resolve(model, tokenizer)
    body, notes = scoring.body(model)
    return TextModel(name, body, tokenizer, scoring.is_causal(body), notes)


def _score(
    model: TextModel,
    sentences: list[Sentence],
    seed: int,
    choices: Mapping[str, ChosenHead] | None = None,
    progress: Progress | None = None,
) -> tuple[RelationSums, LinkRecord]:
    """The sums of every head, and link by link the results of the chosen heads."""
    visible = [gold.visible_links(sentence) for sentence in sentences] if model.causal else sentences
    shuffled_sentences = gold.shuffle_links(visible, seed, causal=model.causal)
    with_shuffled = [
        replace(sentence, links=sentence.links + other.links)
        for sentence, other in zip(visible, shuffled_sentences, strict=True)
    ]
    sums, parts = RelationSums(), []
    for scores in scoring.score_batches(
        model.body, model.tokenizer, with_shuffled, causal=model.causal, exclusions=sums.exclusions
    ):
        batch = scores.batch
        sums.heads = scores.heads
        names = np.array([link.relation for link in batch.links])
        hits, weights = scores.hits.numpy(), scores.weights.numpy()
        fixed = scoring.score_fixed_answers(batch, with_shuffled).numpy()
        sums.add(names, hits, weights, fixed)
        parts.append(_record(names, batch.numbers[batch.sentence.cpu()].numpy(), hits, weights, fixed, sums, choices))
        if progress:
            progress(len(batch.numbers))
    if not parts:
        raise HeadwiseError(f"none of {len(sentences)} sentences has a link that the model can follow")
    return sums, LinkRecord(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _record(
    names: np.ndarray,
    numbers: np.ndarray,
    hits: np.ndarray,
    weights: np.ndarray,
    fixed: np.ndarray,
    sums: RelationSums,
    choices: Mapping[str, ChosenHead] | None,
) -> LinkRecord:
    """The results of the chosen heads in a batch; links of relations without a chosen head are left out."""
    choices = choices or {}
    column = {head: i for i, head in enumerate(sums.heads)}
    rows = np.array([i for i, name in enumerate(names) if name in choices], dtype=int)
    heads = np.array([column[choices[name].head] for name in names[rows]], dtype=int)
    answers = np.array([FIXED_ANSWERS.index(choices[name].fixed) for name in names[rows]], dtype=int)
    return LinkRecord(names[rows], numbers[rows], hits[rows, heads], weights[rows, heads], fixed[rows, answers])


def _evaluate(
    model: TextModel,
    sentences: list[Sentence],
    choices: Mapping[str, ChosenHead],
    seed: int,
    progress: Progress | None,
    least: int,
) -> Relations:
    """See evaluate_heads."""
    sums, record = _score(model, sentences, seed, choices, progress)
    visible = _visible_shares(sentences) if model.causal else {}
    rows = [_row(name, choices[name], sums, record, visible) for name in sorted(sums.links) if name in choices]
    judged = [row.name for row in rows if row.links >= FEWEST and choices[row.name].links >= least]
    level = LEVEL / max(1, sum(not name.startswith(SHUFFLED) for name in judged))
    ranges = _intervals(record, judged, level, seed)
    rows = [replace(row, **ranges.get(row.name, {})) for row in rows]
    return Relations(
        model=model.name,
        causal=model.causal,
        sentences=len(sentences),
        level=level,
        rows=tuple(row for row in rows if not row.name.startswith(SHUFFLED)),
        shuffled=tuple(row for row in rows if row.name.startswith(SHUFFLED)),
        heads=tuple(sums.heads),
        scores={name: sums.hits[name] / sums.links[name] for name in judged if not name.startswith(SHUFFLED)},
        notes=(*model.notes, *sums.exclusions.notes(len(sentences))),
        record=record,
    )


def _visible_shares(sentences: Sequence[Sentence]) -> dict[str, float]:
    """The share of each relation's links that a causal model can follow."""
    counts: dict[str, list[int]] = {}
    for sentence in sentences:
        for link in sentence.links:
            count = counts.setdefault(link.relation, [0, 0])
            count[0] += any(target < link.word for target in link.targets)
            count[1] += 1
    return {name: visible / total for name, (visible, total) in counts.items()}


def _row(
    name: str, choice: ChosenHead, sums: RelationSums, record: LinkRecord, visible: Mapping[str, float]
) -> Relation:
    """Without its intervals yet."""
    links = record.names == name
    accuracies = sums.hits[name] / sums.links[name]  # of all heads
    return Relation(
        name,
        *choice.head,
        links=int(links.sum()),
        chosen_by=choice.links,
        visible=visible.get(name.removeprefix(SHUFFLED), 1.0),
        accuracy=float(record.hits[links].mean()),
        weight=float(record.weights[links].mean()),
        fixed=choice.fixed,
        fixed_accuracy=float(record.fixed[links].mean()),
        median=float(np.median(accuracies)),
        high_heads=float(np.quantile(accuracies, 0.95)),
    )


def _intervals(record: LinkRecord, names: Sequence[str], level: float, seed: int) -> dict[str, dict[str, Any]]:
    """Bootstrap over sentences: a drawn sentence counts with all its relations, so one drawing serves them all."""
    if not names:
        return {}
    column = {name: i for i, name in enumerate(names)}
    judged = np.array([name in column for name in record.names])
    _, units = np.unique(record.sentences[judged] % UNITS, return_inverse=True)
    cells = (units, np.array([column[name] for name in record.names[judged]]))
    sums = np.zeros((units.max() + 1, len(names), 4))  # links, hits, weight, hits of the fixed answer
    for part, values in enumerate(
        (np.ones(judged.sum()), record.hits[judged], record.weights[judged], record.fixed[judged])
    ):
        np.add.at(sums[..., part], cells, values)
    resampled = _resample(sums, np.random.default_rng(seed))  # (resamples, names, 4)
    with np.errstate(invalid="ignore"):
        hits, weights, fixed = (resampled[..., part] / resampled[..., 0] for part in (1, 2, 3))
    edges = 100 * level / 2, 100 * (1 - level / 2)
    intervals = [np.nanpercentile(values, edges, axis=0) for values in (hits, weights, hits - fixed)]
    keys = ("low", "high"), ("weight_low", "weight_high"), ("gain_low", "gain_high")
    return {
        name: {
            key: float(ends[side, i])
            for pair, ends in zip(keys, intervals, strict=True)
            for side, key in enumerate(pair)
        }
        for name, i in column.items()
    }


def _resample(sums: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """(units, names, 4) -> (RESAMPLES, names, 4)."""
    flat = sums.reshape(len(sums), -1)
    parts = [bootstrap_counts(len(sums), CHUNK, random) @ flat for _ in range(RESAMPLES // CHUNK)]
    return np.concatenate(parts).reshape(RESAMPLES, *sums.shape[1:])
