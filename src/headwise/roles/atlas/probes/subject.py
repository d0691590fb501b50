"""The model that a probe measures, with everything that probes need from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....errors import UnsupportedError
from ....models.text_inputs import is_encoder_decoder
from ....models.watching.request import CallObserver
from ....role_definitions import CAUSAL
from ..accumulator import Accumulator, PendingBatch
from ..corpus import Batch, EncodedText, TextEncoder
from ..observer import BatchSums, Observer
from ..sums import Key, Tally, identity


class Measurement(NamedTuple):
    """The result of a probe: sums for the atlas, and facts to print next to it, as JSON."""

    tally: Tally
    facts: dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model and how it is measured."""

    model: Any  # with its unembedding, where it has one
    observer: Observer  # of the part that attends; a pass over the corpus has shown which way each kind attends
    encoder: TextEncoder
    positions: int | None  # that the model has; None where there is no limit
    seed: int
    replicates: int

    @property
    def tokenizer(self) -> Any:
        return self.encoder.tokenizer

    def check_decoder(self) -> None:
        """Refuse models that do not generate a text from its beginning."""
        if is_encoder_decoder(self.model):
            raise UnsupportedError("probes are for decoders; this model has an encoder beside its decoder")
        if CAUSAL not in self.observer.ways.values():
            raise UnsupportedError("probes are for decoders; this model attends to later tokens too")

    def is_measured(self, kind: str) -> bool:
        """Whether a kind of attention is a decoder's."""
        return self.observer.ways.get(kind) == CAUSAL

    def batch(self, rows: Sequence[Sequence[int]], names: Sequence[str]) -> Batch:
        """Token ids of some sequences, padded on the right. names: what tells the units of the bootstrap apart."""
        special = set(getattr(self.tokenizer, "all_special_ids", ()))
        lines = [
            EncodedText(list(ids), [token in special for token in ids], [-1] * len(ids), [-1] * len(ids), False)
            for ids in rows
        ]
        identities = np.array([identity(name) for name in names], np.uint64)
        return Batch(self.encoder.tokens(lines, np.ones(1, np.int64)), None, identities, 0)

    @contextmanager
    def observing(self, measure: CallObserver) -> Iterator[Observer]:
        """The model is watched, and `measure` gets each attention call."""
        before, self.observer.measure = self.observer.measure, measure
        try:
            with self.observer.watching():
                yield self.observer
        finally:
            self.observer.measure = before

    def logits(self, rows: Sequence[int]) -> Tensor | None:
        """(B, rows, vocabulary) of the observer's last pass; None for a model without an unembedding."""
        output = self.observer.output
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if isinstance(logits, Tensor):
            return logits[:, list(rows)].float()
        states = getattr(output, "last_hidden_state", None)
        find = getattr(self.model, "get_output_embeddings", None)
        unembedding = find() if callable(find) else None
        if unembedding is None or states is None:
            return None
        with torch.inference_mode():
            return unembedding(states[:, list(rows)]).float()

    def tally(self, units: Sequence[tuple[dict[Key, BatchSums], str]], tokens: int) -> Tally:
        """The sums of some units, each with its name: layers -> BatchSums of one unit."""
        accumulator = Accumulator(Tally(replicates=self.replicates))
        for layers, name in units:
            accumulator.pending.append(PendingBatch(layers, np.array([identity(name)], np.uint64), 0, 0))
        accumulator.flush()
        accumulator.tally.tokens = tokens
        return accumulator.tally


def first_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before a text."""
    encoded = tokenizer("a", return_special_tokens_mask=True, verbose=False)
    marks = encoded["special_tokens_mask"]
    begin = next((i for i, special in enumerate(marks) if not special), 0)
    return list(encoded["input_ids"][:begin])
