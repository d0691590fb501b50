"""Around every call of a split module: do all ranks make the same call, and do all of them finish it?"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Token
from typing import Any

import torch
from torch import nn

from ..attention.nn.module import MultiHeadAttention
from ..attention.nn.stack import Decoder
from ..errors import RankError
from . import collective_operators
from .agreement import (
    all_tensors,
    describe_arguments,
    describe_random_state,
    floating_tensors,
    plain_numbers,
    short_digest,
)
from .kept_rows import KeptRows, end_call
from .parallel_linear import local_tensor
from .ranks import Ranks

SHAPES = "shapes"  # a weaker check: of everything but floating-point values


class CallAgreement:
    """Forward hooks of a split module.

    Args:
        ranks: that call it.
        module: the split module.
        checked: what is compared before a call; see `split_heads`.
    """

    def __init__(self, ranks: Ranks, module: nn.Module, checked: bool | str) -> None:
        self.ranks, self.checked = ranks, checked
        self.defers_errors = False  # whether another hook raises the error of an agreement, for ranks of other groups
        self.error: Exception | None = None  # such an error
        self.activity = f"the call of {type(module).__name__}"
        self.rows = KeptRows(module)
        self.calls: list[Token[KeptRows | None]] = []  # under way
        self.dropouts = [part for part in module.modules() if isinstance(part, nn.Dropout | MultiHeadAttention)]
        module.register_forward_pre_hook(self.agree_on_inputs, with_kwargs=True)
        for decoder in (part for part in module.modules() if isinstance(part, Decoder)):
            decoder.decoding_context = self.keep_rows  # its steps do not call the module
        module.register_forward_hook(self.end, with_kwargs=True, always_call=True)

    def agree_on_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Agree about the arguments, and about which weights need not be fetched."""
        self.error, keeps_rows = None, self.rows.possible
        if torch.is_grad_enabled():
            self.rows.drop()
        if not (self.checked or keeps_rows):
            return
        parts = [describe_arguments(list(args)), describe_arguments(kwargs), self._describe_state(module)]
        text = ", ".join(filter(None, parts)) if self.checked else ""
        activity = f"the inputs of {type(module).__name__}"
        if torch.compiler.is_compiling():
            tensors = [*all_tensors(list(args)).values(), *all_tensors(kwargs).values()]
            numbers = [*plain_numbers(list(args)), *plain_numbers(kwargs), *self._dropout_rates()]
            compare_values, random = self.checked != SHAPES, any(self._dropout_rates())
            collective_operators.agree(tensors, numbers, self.ranks.key, activity, text, compare_values, random)
            return
        compared = self.checked and self.checked != SHAPES
        values = floating_tensors(list(args)) | floating_tensors(kwargs) if compared else {}
        try:
            states = self.ranks.agree(activity, text, values=values, number=self.rows.state() if keeps_rows else 0)
        except Exception as error:
            if not self.defers_errors:
                raise
            self.error = error
            return
        if keeps_rows:
            self.calls.append(self.rows.begin_call(states))

    @contextmanager
    def keep_rows(self) -> Iterator[None]:
        """Context for calls between which no parameter changes: one agreement on which weights need not be fetched."""
        if not self.rows.possible:
            yield
            return
        token = self.rows.begin_call(self.ranks.agree("the weights to decode with", "", number=self.rows.state()))
        try:
            yield
        finally:
            end_call(token)

    def end(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """End the call, and tell the other ranks where it failed on this one."""
        if torch.compiler.is_compiling():
            return
        if self.calls:
            end_call(self.calls.pop())
        error = sys.exc_info()[1]
        if result is None and isinstance(error, Exception) and not isinstance(error, RankError):
            self.ranks.report_failure(self.activity, error)

    def _describe_state(self, module: nn.Module) -> str:
        """What a call depends on besides its arguments: dropout, which parameters are trained, and the precision."""
        parts = ["training" if module.training else "not training"]
        rates = self._dropout_rates()
        if any(rates) and not torch.compiler.is_compiling():  # outside attention all ranks must draw the same numbers
            parts.append(f"dropout {_abbreviate(rates)}, {describe_random_state(self.ranks.device)}")
        if torch.is_grad_enabled():
            trainable = [x.requires_grad for x in module.parameters()]
            parts.append(f"{sum(trainable)} of {len(trainable)} parameters trained, {_abbreviate(trainable)}")
        if torch.is_autocast_enabled(self.ranks.device.type):
            parts.append(f"autocast {torch.get_autocast_dtype(self.ranks.device.type)}")
        return ", ".join(parts)

    def _dropout_rates(self) -> list[float]:
        return [_dropout_rate(part) if part.training else 0.0 for part in self.dropouts]


def agreement_of(module: nn.Module) -> CallAgreement | None:
    """The agreement about a module's calls that `split_heads` added to it."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, CallAgreement)), None)


def _dropout_rate(part: Any) -> float:
    return float(part.p if isinstance(part, nn.Dropout) else part.dropout)


def _abbreviate(numbers: list[Any]) -> str:
    """A digest of some numbers; while a call is compiled the numbers themselves, since a compiler traces no digest."""
    text = ",".join(str(x) for x in numbers)
    return text if torch.compiler.is_compiling() else short_digest(text.encode())


def describe_module(module: nn.Module) -> str:
    """A module's class and size, with a digest of its parameters' names and shapes, and of the sums of what is here."""
    digest = hashlib.sha256()
    count = 0
    for name, x in module.named_parameters():
        local = local_tensor(x.detach())
        total = 0.0 if x.is_meta else float(local.double().sum())
        digest.update(f"{name} {tuple(x.shape)} {x.dtype} {total!r}".encode())
        count += x.numel()
    return f"a {type(module).__name__} of {count:,} parameters, digest {digest.hexdigest()[:12]}"
