"""What effects are measured in: a number per prompt, from a model's output."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import HeadwiseError, ShapeError
from ..json_documents import brief
from ..models.batches import batch_size
from .inputs import named_tensors

Token = str | int


@dataclass(frozen=True)
class LogitDifference:
    """The answer's logit minus another token's, at each prompt's last real token.

    Args:
        answers: one token for all prompts or one per prompt, as ids or as strings that are one token each, their
            leading space included (" Mary").
        others: the same for the token to compare with; None for the answer's logit alone.
        tokenizer: needed for strings; functions with a tokenizer argument use that one instead.

    Example:
        >>> metric = headwise.LogitDifference(" Mary", " John", tokenizer=headwise.tokenizer("smollm2"))
        >>> effects = headwise.attribute(model, inputs, metric)
    """

    answers: Token | Sequence[Token] | Tensor
    others: Token | Sequence[Token] | Tensor | None = None
    tokenizer: Any = None

    def __str__(self) -> str:
        answer = _describe_tokens(self.answers, "each prompt's answer")
        if self.others is None:
            return f"logit of {answer}"
        return f"logit of {answer} minus {_describe_tokens(self.others, 'its other token')}"


Metric = LogitDifference | Callable[[Any], Tensor]  # a function of the model's output: (B,) numbers, or one


def metric_key(metric: Metric) -> Any:
    """A key that distinguishes metrics that may read different parts of a model's output; it keeps no metric alive."""
    if isinstance(metric, LogitDifference):
        return "logits"
    try:
        return weakref.ref(metric)
    except TypeError:
        return object()  # equal to no other


class Measure:
    """A metric for some batches: `measure(output, number)` gives one number per prompt of batch `number`.

    Attributes:
        words: what is measured.
        per_example: whether the metric gives one number per prompt; None before it was first computed.
    """

    def __init__(self, metric: Metric, batches: Sequence[Any], tokenizer: Any = None) -> None:
        if not isinstance(metric, LogitDifference) and not callable(metric):
            raise HeadwiseError(
                "metric must be headwise.LogitDifference(answers, others) or a function of the model's output, got "
                f"{brief(metric)}"
            )
        self._metric, self._batches = metric, batches
        sizes = [batch_size(batch) for batch in batches]
        self._first_rows = [sum(sizes[:i]) for i in range(len(sizes))]
        self.per_example: bool | None = None
        if isinstance(metric, LogitDifference):
            tokenizer = metric.tokenizer or tokenizer
            self.words = str(metric)
            self._answers = token_ids(metric.answers, sum(sizes), tokenizer)
            self._others = None if metric.others is None else token_ids(metric.others, sum(sizes), tokenizer)
        else:
            self.words = getattr(metric, "__name__", type(metric).__name__)

    def __call__(self, output: Any, number: int, copies: int = 1) -> Tensor:
        """(copies, B): the metric of an output whose rows are `copies` runs of batch `number`, one after the other.

        A metric that gives one number for the whole batch gives (copies, 1).

        Raises:
            HeadwiseError: for a metric of another shape, or one that is not finite.
        """
        rows = [self._measure(part, number) for part in split_output(output, copies)]
        values = torch.stack(rows)
        if not bool(torch.isfinite(values.detach()).all()):
            raise HeadwiseError(f"the metric ({self.words}) is not a finite number; check the model's output for NaN")
        return values

    def first_prompt(self) -> LogitDifference:
        """The same logit difference for the first prompt only."""
        others = None if self._others is None else int(self._others[0])
        return LogitDifference(int(self._answers[0]), others)

    def _measure(self, output: Any, number: int) -> Tensor:
        batch = self._batches[number]
        if isinstance(self._metric, LogitDifference):
            self.per_example = True
            return self._difference(output, number)
        value = self._metric(output)
        if not isinstance(value, Tensor) or value.dim() > 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(f"the metric must give (B,) numbers or one number as a tensor, got {shape}")
        if value.dim() == 1 and len(value) != batch_size(batch):
            raise ShapeError(f"the metric gave {len(value)} numbers for {batch_size(batch)} prompts; one per prompt")
        if value.is_complex():
            raise HeadwiseError(f"the metric must give real numbers, got {value.dtype}; use .abs() or .real")
        self.per_example = value.dim() == 1
        return (value if value.is_floating_point() else value.double()).reshape(-1)  # counts, right or wrong

    def _difference(self, output: Any, number: int) -> Tensor:
        batch, logits = self._batches[number], logits_of(output)
        if logits.dim() == 3:
            places = last_tokens(batch, logits.shape[1]).to(logits.device)
            logits = logits[torch.arange(len(logits), device=logits.device), places]  # (B, vocabulary)
        first = self._first_rows[number]
        answers = self._answers[first : first + len(logits)].to(logits.device)
        vocabulary = logits.shape[-1]
        for ids in (self._answers, self._others):
            if ids is not None and int(ids.max()) >= vocabulary:
                raise HeadwiseError(f"token {int(ids.max())} is not among the model's {vocabulary:,} logits")
        value = logits.gather(1, answers[:, None])[:, 0]
        if self._others is not None:
            others = self._others[first : first + len(logits)].to(logits.device)
            value = value - logits.gather(1, others[:, None])[:, 0]
        return value


def token_ids(tokens: Any, count: int, tokenizer: Any = None) -> Tensor:
    """(count,): the ids of one token for all prompts, or of one per prompt.

    Raises:
        HeadwiseError: for a string that is not exactly one token, naming the tokens that it is.
    """
    single = isinstance(tokens, (str, int)) or (isinstance(tokens, Tensor) and tokens.dim() == 0)
    if not single and not isinstance(tokens, (Sequence, Tensor)):
        raise HeadwiseError(f"answers are tokens, one for all prompts or one per prompt, got {brief(tokens)}")
    values = [tokens] if single else list(tokens)
    ids = [_token_id(token, tokenizer) for token in values]
    if single:
        ids *= count
    if len(ids) != count:
        raise ShapeError(f"there are {len(ids)} answer tokens for {count} prompts; give one per prompt, or one for all")
    return torch.tensor(ids, dtype=torch.long)


def _token_id(token: Any, tokenizer: Any) -> int:
    if isinstance(token, Tensor) and token.dim() == 0:
        token = token.item()
    if isinstance(token, int) and not isinstance(token, bool):
        if token < 0:
            raise HeadwiseError(f"a token id is a whole number from 0 on, got {token}")
        return token
    if not isinstance(token, str):
        raise HeadwiseError(f"an answer is a token's id or its text, got {brief(token)}")
    if tokenizer is None:
        raise HeadwiseError(f"the answer {token!r} needs a tokenizer; give tokenizer=headwise.tokenizer(name), or ids")
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = ", ".join(repr(tokenizer.decode([i])) for i in ids)
        raise HeadwiseError(
            f"the answer {token!r} is {len(ids)} tokens for this tokenizer ({pieces}); answers are one token each, so "
            "choose another word, or give the id of its first token"
        )
    return int(ids[0])


def last_tokens(batch: Any, length: int) -> Tensor:
    """(B,): the position of each row's last real token, in an output of this length."""
    tensors = named_tensors(batch)
    for name in ("decoder_attention_mask", "attention_mask"):
        mask = tensors.get(name)
        if mask is not None and tuple(mask.shape[1:]) == (length,):
            positions = torch.arange(length, device=mask.device)
            return torch.where(mask.bool(), positions, -1).amax(1).clamp(min=0)
    return torch.full((batch_size(batch),), length - 1)


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output: (B, T, vocabulary) or (B, classes)."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, Mapping):
        logits = logits.get("logits")
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
        raise HeadwiseError(
            f"the model's output ({type(output).__name__}) has no logits (B, T, vocabulary); load the model with its "
            "language-model head, or give a function of the output as metric"
        )
    return logits


def split_output(output: Any, copies: int) -> list[Any]:
    """The outputs of several copies of a batch that ran as one batch, each in the form of the whole."""
    if copies == 1:
        return [output]
    if isinstance(output, Tensor):
        if output.dim() and output.shape[0] % copies == 0:
            return list(output.unflatten(0, (copies, -1)).unbind(0))
        return [output] * copies
    if isinstance(output, Mapping):  # transformers' ModelOutput is one
        members = {name: value for name, value in output.items() if isinstance(value, (Tensor, tuple))}
        parts = {name: split_output(value, copies) for name, value in members.items()}
        return [type(output)(**{name: values[i] for name, values in parts.items()}) for i in range(copies)]
    if isinstance(output, tuple):
        rows = [split_output(value, copies) for value in output]
        return [tuple(values[i] for values in rows) for i in range(copies)]
    return [output] * copies


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of a model's output."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return [x for value in values for x in tensors_of(value)]


def _describe_tokens(tokens: Any, several: str) -> str:
    """One token by name; several different ones by what they are."""
    if isinstance(tokens, str):
        return repr(tokens)
    if isinstance(tokens, int):
        return f"token {tokens}"
    values = tokens.flatten().tolist() if isinstance(tokens, Tensor) else tokens
    if not isinstance(values, Sequence) or not values or any(value != values[0] for value in values):
        return several
    return _describe_tokens(values[0], several)
