"""watch: exact statistics of every head of a transformers model, while it runs as it always does."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import contract
from ..errors import HeadwiseError, UnsupportedError
from ..heads import Heads
from . import anatomy, registry
from .anatomy import Key, Site
from .eager import EagerReading
from .layers import Layer, Links, Rows
from .masks import LazyMask, Recipe
from .reading import Given, Reading, agrees, read

Chosen = bool | Key | Iterable[Key] | dict[Key, Any] | None


def watch(
    model: nn.Module,
    *,
    weights: Chosen = None,
    outputs: Chosen = None,
    rows: Iterable[int] | None = None,
    links: int = 0,
    classes: dict[str, Any] | None = None,
) -> Watch:
    """See what every head of a model does: `with headwise.watch(model) as seen: model(**inputs)`, then `seen.layers`.

    The model runs as before and its output does not change. weights and outputs keep whole rows of weights, or each
    head's output before W_O: True for all, a layer, several layers, or {layer: heads}; rows keeps only these queries'
    weights. links=k keeps the k strongest keys of every query. classes {name: (B, T) bool}: keys whose share of the
    weight is wanted; with several kinds of attention {kind: {name: ...}}.
    """
    return Watch(model, weights, outputs, None if rows is None else list(rows), links, classes or {})


class Watch:
    """A model under watch, and what was seen of it."""

    def __init__(
        self,
        model: nn.Module,
        weights: Chosen,
        outputs: Chosen,
        rows: list[int] | None,
        links: int,
        classes: dict[str, Any],
    ) -> None:
        self.model = model
        self._sites = anatomy.sites(model)
        anatomy.check_registered(model, self._sites)
        self._site = {(id(site.module), site.turn): site for site in self._sites}
        self._modules = list({id(site.module): site.module for site in self._sites}.values())
        self._owner = anatomy.owners(model, self._sites)
        self._weights, self._outputs = (_chosen(model, self._sites, x) for x in (weights, outputs))
        self._rows, self._links = rows, contract_links(links)
        kinds = {site.kind for site in self._sites}
        self._classes = classes if classes and set(classes) <= kinds else dict.fromkeys(kinds, classes)
        if classes and len(kinds) > 1 and not set(classes) <= kinds:
            raise HeadwiseError(
                f"with {len(kinds)} kinds of attention give classes by kind: {', '.join(sorted(kinds))}"
            )
        self._seen: dict[tuple[int, int], Layer] = {}
        self._hooks: list[Any] = []
        self._turn: dict[int, int] = {}
        self._padding: dict[int, Tensor | None] = {}  # by owner
        self._last: dict[int, tuple[Tensor | None, bool]] = {}  # by owner: its newest real queries, and if it decodes
        self._trusted: dict[Any, bool] = {}  # readings that were checked: True, or False where eager must serve
        self._ran = False

    @property
    def layers(self) -> list[Layer]:
        """What was seen, kind by kind and layer by layer."""
        order = {site.kind: rank for rank, site in enumerate(reversed(self._sites))}
        return sorted(self._seen.values(), key=lambda layer: (-order.get(layer.kind, 0), layer.index))

    @property
    def unseen(self) -> list[str]:
        """Paths of attention modules that were never called."""
        called = {id(module) for module, _ in ((site.module, 0) for site in self._sites)} & {at[0] for at in self._seen}
        return [site.name for site in self._sites if id(site.module) not in called]

    def __getitem__(self, key: Key) -> Layer:
        """A layer by its number, (kind, number) or module path."""
        site = anatomy.find(self.model, self._sites, key)
        if (id(site.module), site.turn) not in self._seen:
            raise HeadwiseError(f"{site} was not called while the model was watched")
        return self._seen[id(site.module), site.turn]

    def __enter__(self) -> Watch:
        if self._hooks:
            raise HeadwiseError("this watch is on already; make another with headwise.watch(model)")
        around = {id(owner): owner for owner in [self.model, *self._owner.values()]}
        for owner in around.values():
            self._hooks.append(owner.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._hooks.append(owner.register_forward_hook(self._end, always_call=True))
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._called))
        registry.add(self._modules, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        registry.remove(self._modules, self)
        while self._hooks:
            self._hooks.pop().remove()
        self._padding.clear()
        self._last.clear()
        if error is None and self._ran and not self._seen:
            raise UnsupportedError(
                f"{type(self.model).__name__} ran, but none of its attention layers asked transformers' registry for "
                "an attention function; its heads cannot be watched"
            )

    def __repr__(self) -> str:
        return f"Watch({type(self.model).__name__}, {len(self._seen)} layers seen)"

    def to_json(self) -> dict[str, Any]:
        return {"model": type(self.model).__name__, "layers": [layer.to_json() for layer in self.layers]}

    # hooks

    def _begin(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        registry.here.depth += 1
        self._ran = True
        self._padding[id(owner)] = anatomy.padding(owner, args, kwargs)
        for at, its in self._owner.items():
            if its is owner:
                self._turn.pop(at, None)

    def _end(self, owner: nn.Module, args: Any, output: Any) -> None:
        registry.here.depth -= 1

    def _called(self, module: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not a checkpoint that is run again in backward
            self._turn[id(module)] = self._turn.get(id(module), -1) + 1

    # what the registry calls

    def see(self, given: Given, function: registry.Function, eager: registry.Function) -> tuple[Tensor, Any]:
        """Answer an attention call with the model's own output, and keep what was asked for."""
        turn = self._turn.get(id(given.module), 0)
        site = self._site.get((id(given.module), turn)) or self._repeated(given.module, turn)
        recipe = registry.recipe_of(given.mask)
        near = registry.newest(given.query.shape[2], given.key.shape[2]) if given.mask is not None else None
        cross = site.kind.endswith("cross")
        real = self._real(given, site, recipe or near, cross)
        if isinstance(given.mask, LazyMask) and given.more.get("output_attentions"):
            given = given._replace(mask=given.mask.recipe.whole())
        reading, out, rest = self._run(given, function, eager, recipe, near, real, cross)
        with torch.no_grad():
            self._keep(site, turn, given, reading, out, real, recipe or near, cross)
        return out, rest

    def _run(
        self,
        given: Given,
        function: registry.Function,
        eager: registry.Function,
        recipe: Recipe | None,
        near: Recipe | None,
        real: Tensor | None,
        cross: bool,
    ) -> tuple[Reading | EagerReading, Tensor, Any]:
        """The output, and a reading of the call that is known to give the same."""
        reading = read(given, recipe, near, cross)
        own = EagerReading(given, eager, reading.how["offset"], reading.comparable)
        if isinstance(given.mask, LazyMask):
            out, rest = (
                reading.attend(given.dropout if given.module.training else 0.0).transpose(1, 2).contiguous(),
                None,
            )
            self._trust(given, own, out, real)
            return reading, out, rest
        out, rest = function(given)
        return (reading if self._trust(given, reading, out, real) else self._own(own, out, real)), out, rest

    def _trust(self, given: Given, reading: Reading | EagerReading, out: Tensor, real: Tensor | None) -> bool:
        """Whether a reading gives the output that there is, on a few rows; looked at once for each form of a call."""
        if given.dropout:
            return True  # nothing to compare with
        names = tuple(sorted(name for name, x in given.more.items() if x is not None))
        form = (id(given.module), given.implementation, type(given.mask), names, given.query.shape[2] > 1)
        if form not in self._trusted:
            self._trusted[form] = agrees(reading, out, real)
            if not self._trusted[form] and isinstance(given.mask, LazyMask):
                raise self._odd(given)
        return self._trusted[form]

    def _own(self, own: EagerReading, out: Tensor, real: Tensor | None) -> EagerReading:
        if not own.given.dropout and not agrees(own, out, real):
            raise self._odd(own.given)
        return own

    def _odd(self, given: Given) -> UnsupportedError:
        name = next(site.name for site in self._sites if site.module is given.module)
        return UnsupportedError(
            f"{type(given.module).__name__} (at {name}) does not compute plain softmax attention from what it hands to "
            "its attention function; its statistics would be wrong"
        )

    def _keep(
        self,
        site: Site,
        turn: int,
        given: Given,
        reading: Reading | EagerReading,
        out: Tensor,
        real: Tensor | None,
        where: Recipe | None,
        cross: bool,
    ) -> None:
        layer = self._seen.get((id(given.module), turn)) or self._new(site, turn, given, out)
        decoding = self._decodes(given, reading, where, cross)
        if not cross:
            self._last[id(self._owner[id(given.module)])] = real, decoding
        shares = self._shares(site.kind, reading, where)
        layer.add(reading.stats(real, shares), decoding)
        heads = self._weights.get(id(site.module), {}).get(turn)
        if heads is not None:
            layer.all_weights.append(self._some(reading, heads))
        heads = self._outputs.get(id(site.module), {}).get(turn)
        if heads is not None:
            each = out.detach().reshape(*out.shape[:2], given.query.shape[1], -1).transpose(1, 2)
            layer.all_outputs.append(each if heads is True else Rows(each[:, heads], heads, None))
        if self._links:
            layer.links_asked = self._links
            layer.all_links.append(Links(*reading.links(self._links)))

    def _some(self, reading: Reading | EagerReading, heads: Any) -> Any:
        queries = reading.q.shape[2]
        rows = None if self._rows is None else [i % queries for i in self._rows if -queries <= i < queries]
        kept = reading.weights(rows, None if heads is True else heads)
        return kept if heads is True else Rows(kept, heads, rows)

    def _new(self, site: Site, turn: int, given: Given, out: Tensor) -> Layer:
        query, kv = given.query.shape[1], given.key.shape[1]
        try:
            width = _output_width(anatomy.w_o(self.model, site)[1])
        except UnsupportedError:
            width = query * given.value.shape[3]
        heads = Heads(width, query, kv, given.query.shape[3], given.value.shape[3])
        layer = self._seen[id(given.module), turn] = Layer(site.kind, site.index, site.name, heads)
        return layer

    def _repeated(self, module: nn.Module, turn: int) -> Site:
        """A module that is called more often than its model's structure says: each call is a layer of its own."""
        first = next(site for site in self._sites if site.module is module)
        index = 1 + max(site.index for site in self._sites if site.kind == first.kind)
        site = Site(module, first.name, first.kind, index, turn, True)
        self._sites.append(site)
        self._site[id(module), turn] = site
        return site

    def _decodes(self, given: Given, reading: Reading | EagerReading, where: Recipe | None, cross: bool) -> bool:
        if cross:
            return self._last.get(id(self._owner[id(given.module)]), (None, False))[1]
        if where is not None and where.first_query > 0:
            return True
        offset = reading.offset if isinstance(reading, EagerReading) else reading.how["offset"]
        return reading.comparable and offset > 0

    def _real(self, given: Given, site: Site, where: Recipe | None, cross: bool) -> Tensor | None:
        """(B, Tq): which queries are tokens; None for all."""
        batch, queries = given.query.shape[0], given.query.shape[2]
        owner = id(self._owner[id(given.module)])
        found = None
        if cross:
            found = self._last.get(owner, (None, False))[0]
        elif where is not None:
            found = where.queries_real(queries)
        own = self._padding.get(owner)
        if (
            found is None
            and own is not None
            and (own.shape[1] == queries or (own.shape[1] > queries and given.mask is not None))
        ):
            found = own[:, -queries:]
        if found is None or tuple(found.shape) != (batch, queries) or bool(found.all()):
            return None
        return found.to(given.query.device)

    def _shares(self, kind: str, reading: Reading | EagerReading, where: Recipe | None) -> dict[str, Tensor]:
        """The user's classes for the keys at hand: those of a cache come with time, or have gone."""
        keys = reading.k.shape[2] if isinstance(reading, Reading) else reading.given.key.shape[2]
        first = 0 if where is None else int(where.given.get("kv_offset", 0))
        shares = {}
        for name, marked in self._classes.get(kind, {}).items():
            cut = torch.as_tensor(marked, device=reading.q.device)[:, first : first + keys]
            shares[name] = torch.nn.functional.pad(cut, (0, keys - cut.shape[1]))
        return shares


def contract_links(links: int) -> int:
    if isinstance(links, bool) or not isinstance(links, int) or links < 0:
        raise HeadwiseError(f"links must be a number of keys of at least 0, got {links!r}")
    return links


def _chosen(model: nn.Module, sites: list[Site], wanted: Chosen) -> dict[int, dict[int, Any]]:
    """What to keep: by id of the module and its turn, True for all heads or a list of them."""
    if wanted is None or wanted is False:
        return {}
    if wanted is True:
        pairs: list[tuple[Site, Any]] = [(site, True) for site in sites]
    elif isinstance(wanted, dict):
        pairs = [(anatomy.find(model, sites, key), heads) for key, heads in wanted.items()]
    else:
        lone = isinstance(wanted, (int, str)) or (
            isinstance(wanted, tuple) and len(wanted) == 2 and isinstance(wanted[0], str)
        )
        keys: Any = [wanted] if lone else wanted
        pairs = [(anatomy.find(model, sites, key), True) for key in keys]
    chosen: dict[int, dict[int, Any]] = {}
    for site, heads in pairs:
        chosen.setdefault(id(site.module), {})[site.turn] = _heads(model, site, heads)
    return chosen


def _heads(model: nn.Module, site: Site, heads: Any) -> Any:
    if heads is True:
        return True
    wanted = [heads] if isinstance(heads, int) and not isinstance(heads, bool) else list(heads)
    try:
        linear = anatomy.w_o(model, site)[1]
        count = anatomy.query_heads(model, site, anatomy.input_width(linear) or 0)
    except UnsupportedError:
        return wanted  # then the first call tells
    return contract.pick("head", wanted, count)


def _output_width(linear: nn.Module) -> int:
    return int(getattr(linear, "out_features", 0) or getattr(linear, "nf", 0) or linear.weight.shape[0])  # type: ignore[index]
