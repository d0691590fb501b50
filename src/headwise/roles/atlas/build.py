"""`headwise.atlas`: a model and a corpus in, an Atlas out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import HeadwiseError
from ...json_documents import LARGEST, brief
from ...models.fingerprint import fingerprint, tokenizer_fingerprint
from ...models.loading.resolve import resolve
from ...models.structure.config_sizes import max_positions
from ...models.structure.text_model import check_takes_text
from ...models.surgery.kept_heads import pruned_layers
from ...models.text_inputs import is_encoder_decoder
from ...role_definitions import added_scores
from .corpus import Corpus, TextEncoder, batch_sizes, read
from .corpus_run import CorpusRun, Progress
from .from_sums import with_probes
from .induction import vocabulary_size
from .observer import Observer
from .probes.run import probe_names, run_probes
from .probes.subject import Subject
from .result import Atlas
from .sums import REPLICATES, Key, identity

LENGTH = 512  # tokens per text at most
FORMAT = 2  # of the checkpoint


def atlas(
    model: Any,
    texts: Any,
    tokenizer: Any = None,
    *,
    conllu: Any = None,
    probes: str | Sequence[str] = (),
    name: str | None = None,
    limit: int | None = None,
    length: int = LENGTH,
    field: str = "text",
    part: tuple[int, int] = (0, 1),
    resume: str | os.PathLike[str] | None = None,
    keep_checkpoint: bool = False,
    replicates: int = REPLICATES,
    seed: int = 0,
    progress: Progress | None = None,
) -> Atlas:
    """Measure what every head of a model does on a corpus.

    Texts are streamed, so memory does not grow with the corpus.

    Args:
        model: a name as in `headwise.load`, or a model that reads token ids, with its tokenizer.
        texts: a file with one text per line, or .jsonl with a field; or any iterable of texts. For encoder-decoders
            also pairs (source, target); otherwise the decoder reads the text itself.
        tokenizer: the tokenizer of a model that is passed as an object.
        conllu: CoNLL-U files with gold links, to find which heads follow which relation between words;
            `headwise.relations` does only this.
        probes: roles of decoder heads that need special inputs, which are English and bundled: "retrieval",
            "streaming", "copying" (and suppression), "successor", "function", several of them, or "all". They need
            additional passes. Probes that do not apply to a model are listed in the result with the reason.
        name: the name of the model in the result.
        limit: the maximum number of texts.
        length: the maximum number of tokens per text; longer texts are truncated.
        field: the field of a .jsonl line that contains the text.
        part: (i, n) takes every n-th text from the i-th on; the atlases of all parts can be merged into that of the
            whole corpus.
        resume: a checkpoint file. An interrupted run resumes from it if weights, tokenizer, texts and settings are the
            same; the file is removed at the end.
        keep_checkpoint: keep that file, for callers that remove it after they have saved the atlas.
        replicates: the number of resampled corpora in the bootstrap.
        seed: the seed of the random tokens that are repeated for the induction scores, and of the probes.
        progress: called with the number of finished texts and their total number, or None.

    Returns:
        an Atlas, which prints as a table by role.

    Raises:
        HeadwiseError: for texts, settings or a checkpoint that cannot be used; each message explains what to do.

    Example:
        >>> atlas = headwise.atlas("minilm", "texts.txt")
        >>> print(atlas)
        >>> atlas.heads_with("previous")[0].name
        '0.2'
        >>> atlas.save("atlas.json")
    """
    _check(length, part, replicates, seed)
    probe_list = probe_names(probes)
    name, model, tokenizer = resolve(model, tokenizer, name)
    stream, total = read(texts, field, limit)
    observer = Observer.of(model)
    encoder = encoder_of(observer.model, tokenizer, length)
    corpus = Corpus.of(stream, encoder)
    about = {
        "corpus": _corpus_name(texts), "length": encoder.length, "seed": seed,
        "counts": f"{identity(corpus.counts.tobytes().hex()):016x}", "part": list(part), "notes": _notes(encoder),
    }  # fmt: skip
    content = {"weights": fingerprint(model), "tokenizer": tokenizer_fingerprint(tokenizer)}
    settings = {
        "format": FORMAT, "batch": batch_sizes(),  # a checkpoint counts windows and batches
        **content, "model": name, "beginning": corpus.beginning, "limit": limit, "replicates": replicates,
        "scores": added_scores() or None, **about,  # null, as in checkpoints of versions without such scores
    }  # fmt: skip
    run = CorpusRun(observer, corpus, Path(resume) if resume else None, settings, part, progress, total)
    tally, repetition = run.measure(vocabulary_size(observer.model, tokenizer), seed, replicates)
    about["fingerprint"] = {**content, "texts": corpus.fingerprint}
    result = Atlas.from_sums(tally, repetition, name, _original_heads(model), about)
    if probe_list and part[0] == 0:  # as the repetition, once for all parts
        subject = Subject(model, observer, encoder, max_positions(observer.model), seed, replicates)
        result = with_probes(result, *run_probes(subject, probe_list))
    if conllu is not None:
        from ..relations.find import relations

        result = replace(result, relations=relations(model, conllu, tokenizer=tokenizer, seed=seed))
    if resume and not keep_checkpoint:
        Path(resume).unlink(missing_ok=True)
    return result


def add_probes(
    atlas: Atlas,
    model: Any,
    tokenizer: Any = None,
    *,
    probes: str | Sequence[str] = "all",
    seed: int = 0,
    progress: Progress | None = None,
) -> Atlas:
    """An atlas with the scores of probes, which need no corpus, measured on the model that the atlas is of.

    Args:
        atlas: it is not changed.
        model: a name as `headwise.load` takes it, or a model.
        tokenizer: the tokenizer of a model that is passed as an object.
        probes: as in `headwise.atlas`.
        seed: of the probes.
        progress: called with the number of finished probes and their total number.

    Raises:
        HeadwiseError: for a model with other weights or heads than the atlas has, and for probes that do not exist.

    Example:
        >>> print(add_probes(headwise.Atlas.load("atlas.json"), "smollm2", probes="retrieval"))
    """
    _, model, tokenizer = resolve(model, tokenizer)
    weights = atlas.about.get("fingerprint", {}).get("weights")
    if weights not in (None, fingerprint(model)):
        raise HeadwiseError(f"this atlas of {atlas.model} was measured with other weights; measure the model's own")
    observer = Observer.of(model)
    observer.ways = dict(atlas.ways)
    positions = max_positions(observer.model)
    encoder = encoder_of(observer.model, tokenizer, positions or LENGTH)
    replicates = atlas.about.get("replicates", REPLICATES)
    subject = Subject(model, observer, encoder, positions, seed, replicates)
    tallies, facts = run_probes(subject, probe_names(probes), progress)
    shapes = {
        (kind, i): len(row)
        for kind in atlas.layers
        for i, row in zip(atlas.layers[kind], atlas.heads[kind], strict=True)
    }
    for tally in tallies.values():
        if any(shapes.get(key) != sums.top.shape[1] - 1 for key, sums in tally.sums.items()):
            raise HeadwiseError(f"this atlas of {atlas.model} has other heads than the model; measure the model's own")
    return with_probes(atlas, tallies, facts)


def _check(length: int, part: tuple[int, int], replicates: int, seed: int) -> None:
    if not 0 <= seed <= LARGEST:
        raise HeadwiseError(f"the seed must be a whole number from 0 to {LARGEST}, got {brief(seed)}")
    if length < 4:
        raise HeadwiseError(f"length is the most tokens of a text, at least 4, got {length}")
    if not (len(part) == 2 and 0 <= part[0] < part[1]):
        raise HeadwiseError(f"part is (i, n) with 0 <= i < n, got {part!r}")
    if replicates < 1:
        raise HeadwiseError(f"replicates must be at least 1, got {replicates}")


def encoder_of(body: Any, tokenizer: Any, length: int) -> TextEncoder:
    """The tokenizer, cutting texts to `length` and to the positions that the model has."""
    check_takes_text(body, purpose="an atlas needs")
    positions = max_positions(body)
    return TextEncoder(tokenizer, length if positions is None else min(length, positions), _start(body))


def _start(body: Any) -> int | None:
    """The token that the decoder of an encoder-decoder begins with; None for other models."""
    if not is_encoder_decoder(body):
        return None
    config = getattr(body, "config", None)
    for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if getattr(config, key, None) is not None:
            return int(getattr(config, key))
    return 0


def _notes(encoder: TextEncoder) -> list[str]:
    notes = []
    if encoder.start is not None:
        notes.append("the decoder reads the text itself, or the second of a pair")
    if not getattr(encoder.tokenizer, "is_fast", False):
        notes.append("this tokenizer knows no offsets: words are tokens")
    return notes


def _corpus_name(texts: Any) -> str:
    return Path(texts).name if isinstance(texts, (str, os.PathLike)) else type(texts).__name__


def _original_heads(model: Any) -> dict[Key, list[int | None]]:
    """Of pruned layers, the numbers of their heads before pruning."""
    return {key: list(kept.query) for key, kept in pruned_layers(model).items()}
