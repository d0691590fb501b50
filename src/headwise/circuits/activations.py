"""The activations that patching replaces: a head's output, query, key, value or pattern, in one form.

Every kind of activation is passed to a visitor as a tensor (B, T, heads, width). A pattern is passed as the head's
output: applying the weights of another run to the values of this one is attention with that run's queries and keys, so
no matrix of weights is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..models.intervene.attention_calls import HeadInputs, attention_calls
from ..models.intervene.head_outputs import head_outputs
from ..models.structure.sites import Site

KINDS = ("output", "query", "key", "value", "pattern")
PER_KV_HEAD = ("key", "value")
Kept = tuple[Tensor, ...]  # of one layer of one run


class Visit(NamedTuple):
    """The activations of one layer's heads, in a pass that is running."""

    site: Site
    value: Tensor  # (B, T, heads, width): what is patched
    real: Tensor | None  # (B, T) bool: which positions are tokens; None for all
    kept: Kept  # what another run needs of this one in order to put these activations in place of its own
    substitute: Callable[[Kept], Tensor]  # what the activations of another run are here: (its B, T, heads, width)
    per_query_head: bool  # False: one per KV head, of which there are fewer


Visitor = Callable[[Visit], Tensor | None]  # -> the activations to use instead, or None


@contextmanager
def visit_activations(
    model: nn.Module, what: str, visitor: Visitor, sites: Sequence[Site], *, by_query_head: bool = False
) -> Iterator[None]:
    """Inside `with`, the activations of some layers pass through a visitor.

    Args:
        model: any whose attention is known.
        what: one of KINDS.
        visitor: gets the activations, and returns those to use instead, in the same shape, or None.
        sites: the layers.
        by_query_head: whether keys and values are shown once per query head, and may differ among the query heads
            that share them.
    """
    if what == "output":
        with head_outputs(model, _output_function(visitor), sites=sites, doing="patch"):
            yield
        return

    def function(call: HeadInputs) -> Tensor | None:
        if what == "pattern":
            return _visit_pattern(call, visitor)
        if by_query_head and what in PER_KV_HEAD and call.query.shape[1] != call.key.shape[1]:
            return _visit_group_members(call, what, visitor)
        return _visit_input(call, what, visitor)

    with attention_calls(model, function, sites=sites):
        yield


def _output_function(visitor: Visitor) -> Callable[[Site, Tensor, Tensor | None], Tensor | None]:
    def function(site: Site, heads: Tensor, real: Tensor | None) -> Tensor | None:
        # (tokens, H, D) of models that read all prompts as one sequence; (B, height, width, H, D) of images
        value = heads[None] if heads.dim() == 3 else heads.flatten(1, -3)
        changed = visitor(Visit(site, value, real, (value,), _first, True))
        return None if changed is None else changed.reshape(heads.shape)

    return function


def _visit_input(call: HeadInputs, what: str, visitor: Visitor) -> Tensor | None:
    value = getattr(call, what).transpose(1, 2)  # (B, T, heads, D)
    real = call.real_queries if what == "query" else call.real_keys
    per_query_head = value.shape[2] == call.query.shape[1]
    changed = visitor(Visit(call.site, value, real, (value,), _first, per_query_head))
    return None if changed is None else call.attend(**{what: changed.transpose(1, 2)})


def _visit_group_members(call: HeadInputs, what: str, visitor: Visitor) -> Tensor | None:
    """Keys or values as each query head sees them; those of a group need not be the same afterwards."""
    shared = getattr(call, what).transpose(1, 2)  # (B, T, KV heads, D)
    kv_heads = shared.shape[2]
    members = call.query.shape[1] // kv_heads
    value = shared.repeat_interleave(members, 2)
    changed = visitor(Visit(call.site, value, call.real_keys, (value,), _first, True))
    if changed is None:
        return None
    by_member = changed.unflatten(2, (kv_heads, members))
    outputs = []
    for member in range(members):
        output = call.attend(**{what: by_member[:, :, :, member].transpose(1, 2)})  # (B, Tq, H, Dv)
        outputs.append(output.unflatten(2, (kv_heads, members))[:, :, :, member])
    return torch.stack(outputs, 3).flatten(2, 3)


def _visit_pattern(call: HeadInputs, visitor: Visitor) -> Tensor | None:
    def substitute(kept: Kept) -> Tensor:
        copies = len(call.query) // len(kept[0])
        query, key = (x.repeat(copies, 1, 1, 1) if copies > 1 else x for x in kept)
        return call.attend(query=query, key=key)

    output = call.attend()
    visit = Visit(call.site, output, call.real_queries, (call.query, call.key), substitute, True)
    changed = visitor(visit)
    return output if changed is None else changed


def _first(kept: Kept) -> Tensor:
    return kept[0]
