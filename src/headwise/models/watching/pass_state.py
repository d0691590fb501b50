"""Where a watched model is in its pass: the layer of each attention call, its mask's recipe and its real tokens."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import HeadwiseError
from ..passes import PassTracker
from ..structure.sites import Site
from .call_reader import ModelCall
from .lazy_masks import MaskRecipe
from .registry import first_query, newest_recipe, pass_masks, recipe_of
from .sources import KnownCall


class CallContext(NamedTuple):
    """What is known about one attention call besides its arguments."""

    site: Site
    recipe: MaskRecipe | None  # of the call's own mask
    similar: MaskRecipe | None  # of a mask of the same size in the same pass
    real: Tensor | None  # (B, Tq) bool: which queries are tokens; None for all
    cross: bool
    decoding: bool  # whether its queries follow cached keys
    keys: int  # of the call, also those that do not exist yet
    first_key: int = 0  # the place of the first key in its sequence: a cache may have dropped others
    first_token: Tensor | None = None  # (B, Tk) bool: each sequence's first token, where the keys do not tell

    @property
    def positions(self) -> MaskRecipe | None:
        """The recipe that says at which positions the queries and keys are."""
        return self.recipe or self.similar


class PassState:
    """The current pass of a watched model. One thread at a time may run it."""

    def __init__(self, model: nn.Module, sites: list[Site], tracker: PassTracker) -> None:
        self.model = model
        self.sites = sites  # grows where a module is called more often than the model's structure says
        self._tracker = tracker
        self._site_by_turn = {(site.module, site.turn): site for site in sites}
        self._runner: tuple[threading.Thread, int] | None = None  # who runs the model, and how many models deep
        # by whole model, or by the path of the layer around a known call: of the newest self-attention call there,
        # which queries are tokens, and whether it decodes
        self._newest: dict[nn.Module | str, tuple[Tensor | None, bool]] = {}
        # by attention module: the first real key of each sequence (B,) in its newest call on whole sequences
        self._first_tokens: dict[nn.Module, Tensor] = {}
        # by attention module: the queries and keys of its newest call
        self._operands: dict[nn.Module, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}

    def begin(self, owner: nn.Module) -> None:
        """A whole model begins to run. Calls of two passes at the same time would be taken for one pass."""
        pass_masks.begin()
        thread = threading.current_thread()
        if self._runner is not None and self._runner[0] is not thread and self._runner[0].is_alive():
            raise HeadwiseError(
                f"threads {self._runner[0].name!r} and {thread.name!r} run {type(self.model).__name__} at once while "
                "it is watched; run it in one thread at a time, or give each a copy.deepcopy of it and its own watch"
            )
        depth = 0 if self._runner is None or owner is self.model else self._runner[1]
        self._runner = thread, depth + 1

    def end(self, owner: nn.Module, completed: bool) -> None:
        """A whole model has run."""
        pass_masks.end()
        if self._runner is not None and self._runner[0] is threading.current_thread():
            self._runner = None if self._runner[1] == 1 else (self._runner[0], self._runner[1] - 1)

    def reset(self) -> None:
        """Forget the pass."""
        self._runner = None
        self._newest.clear()
        self._first_tokens.clear()

    def knows(self, module: nn.Module, turn: int) -> bool:
        """Whether a layer is known."""
        return (module, turn) in self._site_by_turn

    def relabel(self, sites: list[Site]) -> None:
        """The model's layers, after some were seen that were not known before."""
        self.sites = sites
        self._site_by_turn = {(site.module, site.turn): site for site in sites}

    def site(self, module: nn.Module, turn: int | None = None) -> Site:
        """The layer of a module's current call; a call beyond its known layers is a layer of its own."""
        turn = self._tracker.turn(module) if turn is None else turn
        site = self._site_by_turn.get((module, turn))
        if site is None:
            first = next(site for site in self.sites if site.module is module)
            index = 1 + max(site.index for site in self.sites if site.kind == first.kind)
            site = self._site_by_turn[module, turn] = Site(module, first.name, first.kind, index, turn, first.source)
            self.sites.append(site)
        return site

    def is_new(self, call: ModelCall) -> bool:
        """False where a module attends again with the same queries and keys: with other values only."""
        last = self._operands.get(call.module)
        self._operands[call.module] = weakref.ref(call.query), weakref.ref(call.key)
        return last is None or last[0]() is not call.query or last[1]() is not call.key

    def context(self, call: ModelCall) -> CallContext:
        """The context of a call; cross-attention uses the context of the self-attention before it."""
        site = self.site(call.module)
        recipe = recipe_of(call.mask)
        similar = newest_recipe(call.query.shape[2], call.key.shape[2], has_mask=call.mask is not None)
        cross = site.kind.endswith("cross")
        owner = self._tracker.owners[call.module]
        real, decoding = self._newest.get(owner, (None, False)) if cross else (None, False)
        real = self._real_queries(call, real, None if cross else recipe or similar)
        if not cross:
            decoding = _decodes(call, recipe or similar)
            self._newest[owner] = real, decoding
        positions = recipe or similar
        first_key = 0 if positions is None else positions.first_key
        return CallContext(site, recipe, similar, real, cross, decoding, call.key.shape[2], first_key)

    def known_context(self, call: KnownCall) -> CallContext:
        """The context of a call whose meaning is known."""
        site, reading = self.site(call.module, call.turn), call.reading
        cross, layer = site.kind.endswith("cross"), site.parent
        real = self._newest.get(layer, (None, False))[0] if cross and call.real is None else call.real
        batch, queries = reading.q.shape[0], reading.q.shape[2]
        if real is not None and (tuple(real.shape) != (batch, queries) or bool(real.all())):
            real = None
        if not cross:
            self._newest[layer] = real, call.decoding
        first_token = self._first_token(call)
        return CallContext(
            site, None, None, real, cross, call.decoding, reading.keys, call.first_key, first_token
        )  # fmt: skip

    def _first_token(self, call: KnownCall) -> Tensor | None:
        """(B, Tk) bool: each sequence's first token, where a sliding cache dropped keys; else None."""
        reading = call.reading
        if not call.first_key:
            visible = reading.options.get("mask")
            if visible is None or visible.shape[2] > 1 or visible.dtype != torch.bool:
                self._first_tokens.pop(call.module, None)
            else:
                self._first_tokens[call.module] = visible.any(1)[:, 0].long().argmax(-1)  # (B,)
            return None
        first = self._first_tokens.get(call.module)
        place = torch.zeros(1, device=reading.q.device) if first is None else first
        columns = call.first_key + torch.arange(reading.keys, device=reading.q.device)
        return (columns == place[:, None]).expand(reading.q.shape[0], -1)

    def _real_queries(self, call: ModelCall, previous: Tensor | None, positions: MaskRecipe | None) -> Tensor | None:
        """(B, Tq): which queries are tokens; None for all."""
        batch, queries, keys = call.query.shape[0], call.query.shape[2], call.key.shape[2]
        real = previous if positions is None else positions.queries_real(queries)
        if real is None:
            real = self._tracker.real_tokens(call.module, batch, queries, keys)
        if real is None or tuple(real.shape) != (batch, queries) or bool(real.all()):
            return None
        return real.to(call.query.device)


def _decodes(call: ModelCall, positions: MaskRecipe | None) -> bool:
    """Whether the queries of a self-attention call follow cached keys."""
    if positions is not None:
        return positions.first_query > 0
    begins = first_query(call.query.shape[2])
    return begins > 0 if begins is not None else call.query.shape[2] < call.key.shape[2]
