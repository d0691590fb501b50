"""Function-vector heads (Todd et al. 2023, Yin and Steinhardt 2025): heads whose output carries a task.

A head's mean output at the last token of prompts with right examples takes the place of its output on prompts whose
examples have each other's answers; the score is the rise of the right answer's probability. One forward pass per head,
so this is the slowest of the probes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....errors import UnsupportedError
from ....models.intervene.head_outputs import head_outputs
from ....models.structure.heads import query_heads
from ....models.structure.sites import Site, attention_sites
from ....models.text_inputs import device_of, run_on_tokens
from ....role_definitions import CAUSAL
from ..export import WORDS
from ..observer import BatchSums
from ..sums import Key
from .few_shot import SHOTS, FewShotPrompt, few_shot_prompts
from .subject import Measurement, Subject

COUNT, SHUFFLED = 8, 5  # prompts per task: with right examples, and with shuffled ones
DIGITS = 4


def measure(subject: Subject) -> Measurement:
    """The rise of every head, and what the model itself makes of both kinds of prompts."""
    prompts = few_shot_prompts(subject.tokenizer, COUNT, SHUFFLED, subject.seed)
    model = subject.model
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _last_token_logits(model) as last:
            right = PromptBatch(subject, prompts.right)
            shuffled = PromptBatch(subject, prompts.shuffled)
            means, right_logits = _mean_outputs(model, right, last)
            plain = shuffled.logits(model, last)
            rises = _rises(model, shuffled, last, means, plain)
    finally:
        model.train(training)
    facts: dict[str, Any] = {
        "prompts": len(prompts.shuffled), "shots": SHOTS, "tasks": sorted({x.task for x in prompts.shuffled}),
        "accuracy": right.accuracy(right_logits), "shuffled": shuffled.accuracy(plain),
        "right_prompts": len(prompts.right),
    }  # fmt: skip
    facts[WORDS] = (
        f"{len(prompts.shuffled)} prompts of {len(facts['tasks'])} tasks with {SHOTS} shuffled examples; the model "
        f"answers {facts['shuffled']:.0%} of them, and {facts['accuracy']:.0%} of {len(prompts.right)} with right "
        "examples; in brackets, a head drawn at random"
    )
    return Measurement(_tally(subject, shuffled, rises), facts)


class PromptBatch:
    """Prompts, padded on the right."""

    def __init__(self, subject: Subject, prompts: Sequence[FewShotPrompt]) -> None:
        device = device_of(subject.model)
        tokens = subject.batch([x.ids for x in prompts], [x.name for x in prompts]).source.to(device)
        self.prompts = prompts
        self.inputs = {"input_ids": tokens.ids, "attention_mask": tokens.real.long()}
        if hasattr(getattr(subject.model, "config", None), "use_cache"):
            self.inputs["use_cache"] = False
        self.rows = torch.arange(len(prompts), device=device)
        self.last = tokens.real.sum(1) - 1  # (B,)
        self.answers = torch.tensor([x.answer for x in prompts], device=device)

    def logits(self, model: Any, last: LastToken) -> Tensor:
        """(B, vocabulary) of the last tokens."""
        last.batch = self
        output = run_on_tokens(model, self.inputs)
        logits = output if isinstance(output, Tensor) else output.logits
        return logits[:, 0].float()

    def probability(self, logits: Tensor) -> np.ndarray:
        """(B,): of the right answers."""
        return logits.softmax(-1)[self.rows, self.answers].double().cpu().numpy()

    def accuracy(self, logits: Tensor) -> float:
        return round(float((logits.argmax(-1) == self.answers).double().mean()), DIGITS)


class LastToken:
    """Which batch is running, so that only its last tokens are unembedded."""

    batch: PromptBatch


@contextmanager
def _last_token_logits(model: Any) -> Iterator[LastToken]:
    """Inside `with`, the unembedding reads the last real token of each row alone."""
    find = getattr(model, "get_output_embeddings", None)
    unembedding = find() if callable(find) else None
    if unembedding is None:
        raise UnsupportedError(f"{type(model).__name__} has no unembedding, so no answer has a probability")
    last = LastToken()

    def select(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *others = arguments
        return (states[last.batch.rows, last.batch.last][:, None], *others)

    hook = unembedding.register_forward_pre_hook(select)
    try:
        yield last
    finally:
        hook.remove()


def _mean_outputs(model: Any, batch: PromptBatch, last: LastToken) -> tuple[dict[tuple[str, Key], Tensor], Tensor]:
    """{(task, layer): (H, width)}, each head's mean output at the last token; and the logits."""
    means: dict[tuple[str, Key], Tensor] = {}
    tasks = [prompt.task for prompt in batch.prompts]

    def read(site: Site, heads: Tensor, real: Tensor | None) -> None:
        outputs = heads[batch.rows, batch.last]  # (B, H, width)
        for task in dict.fromkeys(tasks):
            means[task, site.key] = outputs[[x == task for x in tasks]].mean(0)

    with head_outputs(model, read):
        logits = batch.logits(model, last)
    return means, logits


def _rises(
    model: Any, batch: PromptBatch, last: LastToken, means: dict[tuple[str, Key], Tensor], plain: Tensor
) -> dict[Key, np.ndarray]:
    """{layer: (B, H)}: how much more probable the right answer becomes by each head's mean output."""
    before = batch.probability(plain)
    target: tuple[Key, int] | None = None

    def replace(site: Site, heads: Tensor, real: Tensor | None) -> Tensor | None:
        if target is None or site.key != target[0]:
            return None
        changed = heads.clone()
        values = torch.stack([means[prompt.task, site.key][target[1]] for prompt in batch.prompts])  # (B, width)
        changed[batch.rows, batch.last, target[1]] = values
        return changed

    rises: dict[Key, np.ndarray] = {}
    with head_outputs(model, replace):
        for site in attention_sites(model):
            columns = []
            for head in range(query_heads(model, site)):
                target = site.key, head
                columns.append(batch.probability(batch.logits(model, last)) - before)
            rises[site.key] = np.stack(columns, 1)
    return rises


def _tally(subject: Subject, batch: PromptBatch, rises: dict[Key, np.ndarray]) -> Any:
    """A prompt is a unit; the baseline is the mean over all heads, which is what a head drawn at random has."""
    measured = {key: rise for key, rise in rises.items() if subject.is_measured(key[0])}
    random_head = np.concatenate(list(measured.values()), 1).mean(1)  # (B,)
    units = []
    for i, prompt in enumerate(batch.prompts):
        layers = {
            key: BatchSums(("function",), CAUSAL, np.array([[[*rise[i], random_head[i]]]]), np.ones((1, 1)))
            for key, rise in measured.items()
        }
        units.append((layers, prompt.name))
    return subject.tally(units, int(batch.inputs["attention_mask"].sum()))
