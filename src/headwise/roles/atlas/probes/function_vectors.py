"""Function-vector heads (Todd et al. 2023, Yin and Steinhardt 2025): heads whose output carries a task.

A head's mean output at the last token of prompts with correct examples replaces its output on prompts with shuffled
answers; the score is the increase of the correct answer's probability. This takes one pass per head, over the last
tokens only: the keys and values of the other tokens are computed once.
"""

from __future__ import annotations

import copy
import inspect
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
    """The increase for every head, and the model's own accuracy on both kinds of prompts."""
    prompts = few_shot_prompts(subject.tokenizer, COUNT, SHUFFLED, subject.seed)
    model = subject.model
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _last_token_logits(model):
            right, shuffled = PromptBatch(subject, prompts.right), PromptBatch(subject, prompts.shuffled)
            means, right_logits = _mean_outputs(model, right)
            shuffled.read_all_but_last(model)
            plain = shuffled.logits(model)
            rises = _rises(model, shuffled, means, plain)
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
    """Prompts, padded on the left, so that all have their last token at the end."""

    def __init__(self, subject: Subject, prompts: Sequence[FewShotPrompt]) -> None:
        self.prompts, device = prompts, device_of(subject.model)
        length = max(len(prompt.ids) for prompt in prompts)
        padding = getattr(subject.tokenizer, "pad_token_id", None) or 0
        rows = [[padding] * (length - len(prompt.ids)) + prompt.ids for prompt in prompts]
        self.mask = torch.tensor([[int(i >= length - len(prompt.ids)) for i in range(length)] for prompt in prompts])
        self.inputs: dict[str, Any] = {
            "input_ids": torch.tensor(rows, device=device), "attention_mask": self.mask.to(device),
        }  # fmt: skip
        if "position_ids" in inspect.signature(subject.model.forward).parameters:
            self.inputs["position_ids"] = (self.mask.cumsum(1) - 1).clamp(min=0).to(device)
        self.answers = torch.tensor([prompt.answer for prompt in prompts], device=device)
        self.cache: Any = None  # of all tokens but the last

    def read_all_but_last(self, model: Any) -> None:
        """Keep the keys and values of all tokens but the last, which no change of the last one's heads changes."""
        before = {name: x[:, :-1] for name, x in self.inputs.items()}
        output = run_on_tokens(model, before | {"use_cache": True})
        self.cache = getattr(output, "past_key_values", None)

    def logits(self, model: Any) -> Tensor:
        """(B, vocabulary) of the last tokens."""
        if self.cache is None:
            inputs = self.inputs | {"use_cache": False}
        else:
            inputs = {name: x if name == "attention_mask" else x[:, -1:] for name, x in self.inputs.items()}
            inputs |= {"past_key_values": copy.deepcopy(self.cache), "use_cache": True}
        return run_on_tokens(model, inputs).logits[:, -1].float()

    def probability(self, logits: Tensor) -> np.ndarray:
        """(B,): of the right answers."""
        return logits.softmax(-1).gather(1, self.answers[:, None])[:, 0].double().cpu().numpy()

    def accuracy(self, logits: Tensor) -> float:
        return round(float((logits.argmax(-1) == self.answers).double().mean()), DIGITS)


@contextmanager
def _last_token_logits(model: Any) -> Iterator[None]:
    """Inside `with`, the unembedding reads only the last token of each row."""
    find = getattr(model, "get_output_embeddings", None)
    unembedding = find() if callable(find) else None
    if unembedding is None:
        raise UnsupportedError(f"{type(model).__name__} has no unembedding, so no answer has a probability")
    hook = unembedding.register_forward_pre_hook(lambda module, args: (args[0][:, -1:], *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def _mean_outputs(model: Any, batch: PromptBatch) -> tuple[dict[tuple[str, Key], Tensor], Tensor]:
    """{(task, layer): (H, width)}, each head's mean output at the last token; and the logits."""
    means: dict[tuple[str, Key], Tensor] = {}
    tasks = [prompt.task for prompt in batch.prompts]

    def read(site: Site, heads: Tensor, real: Tensor | None) -> None:
        outputs = heads[:, -1]  # (B, H, width)
        for task in dict.fromkeys(tasks):
            means[task, site.key] = outputs[[x == task for x in tasks]].mean(0)

    with head_outputs(model, read):
        logits = batch.logits(model)
    return means, logits


def _rises(
    model: Any, batch: PromptBatch, means: dict[tuple[str, Key], Tensor], plain: Tensor
) -> dict[Key, np.ndarray]:
    """{layer: (B, H)}: how much more probable the right answer becomes by each head's mean output."""
    before = batch.probability(plain)
    target: tuple[Key, int] | None = None

    def replace(site: Site, heads: Tensor, real: Tensor | None) -> Tensor | None:
        if target is None or site.key != target[0]:
            return None
        changed = heads.clone()
        values = torch.stack([means[prompt.task, site.key][target[1]] for prompt in batch.prompts])  # (B, width)
        changed[:, -1, target[1]] = values
        return changed

    rises: dict[Key, np.ndarray] = {}
    with head_outputs(model, replace):
        for site in attention_sites(model):
            columns = []
            for head in range(query_heads(model, site)):
                target = site.key, head
                columns.append(batch.probability(batch.logits(model)) - before)
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
    return subject.tally(units, int(batch.mask.sum()))
