"""watch: exact statistics of every head of a transformers model, while it runs as it always does."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.stats import SHARE, HeadStats
from ...errors import HeadwiseError, UnsupportedError
from ...heads import Heads
from ..hooks import Hooks, check_values
from ..register import NAME
from ..structure import sites
from ..structure.selection import Chosen, asked, chosen_of, classes_of, links_of, rows_of
from ..structure.sites import Key, Site
from . import registry
from .call_reader import Given, Reading, agrees, by_head, few_rows, read, same
from .eager import EagerReading
from .layers import Layer, Links, Rows
from .lazy_masks import LazyMask, Recipe
from .packing import PackedReading, is_paged, packed, pages_read

Each = Callable[[Layer, Reading | EagerReading, Tensor | None], None]
GOLDEN = 0.6180339887  # its multiples, modulo 1, are spread evenly
FIRST = "\0first"  # a class of our own, beside the user's


def watch(
    model: nn.Module,
    *,
    weights: Chosen = None,
    outputs: Chosen = None,
    rows: Iterable[int] | None = None,
    links: int = 0,
    classes: dict[str, Any] | None = None,
    exact: bool = False,
    stats: bool = True,
    each: Each | None = None,
) -> Watch:
    """See what every head of a model does: `with headwise.watch(model) as seen: model(**inputs)`, then `seen.layers`.

    The model runs as before and its output does not change: to the bit where its own attention function runs, which
    exact=True insists on; long inputs get output and statistics from one pass, the same to rounding.
    weights and outputs keep whole rows of weights, or each head's output before W_O: True for all, a layer, several
    layers, or {layer: heads}; rows keeps only these queries' weights. links=k keeps the k strongest keys of every
    query. classes {name: (B, T) bool}: keys whose share of the weight is wanted; with several kinds of attention
    {kind: {name: ...}}. each(layer, reading, real) is called after every attention call of a layer: what was seen of
    the layer so far, the call itself (it gives any row of weights while its tensors live), and which queries (B, Tq)
    are tokens, None for all. stats=False leaves the statistics out, for those who take their own from each call.
    """
    return Watch(model, weights, outputs, rows, links, classes, exact, each, stats)


class Scene(NamedTuple):
    """Around one attention call: whose it is, how its mask was made, and which of its queries count."""

    site: Site
    recipe: Recipe | None  # of its very mask
    near: Recipe | None  # of a mask of its size in the same pass
    real: Tensor | None  # (B, Tq), None for all
    cross: bool


class Watch:
    """A model under watch, and what was seen of it."""

    def __init__(
        self,
        model: nn.Module,
        weights: Chosen,
        outputs: Chosen,
        rows: Iterable[int] | None,
        links: int,
        classes: dict[str, Any] | None,
        exact: bool,
        each: Each | None = None,
        stats: bool = True,
    ) -> None:
        self.model = model
        self._exact, self._each, self._stats = exact, each, stats
        self._sites = sites.sites(model)
        sites.check_registered(model, self._sites)
        self._site = {(id(site.module), site.turn): site for site in self._sites}
        self._modules = list({id(site.module): site.module for site in self._sites}.values())
        self._owner = sites.owners(model, self._sites)
        self._weights, self._outputs = (chosen_of(model, self._sites, x) for x in (weights, outputs))
        mixing = {id(site.module): site for site in self._sites if id(site.module) in self._outputs}
        self._mixers = [(site.module, sites.w_o(model, site)[1]) for site in mixing.values()]
        self._rows, self._links = rows_of(rows), links_of(links)
        if self._rows is not None and not self._weights:
            raise HeadwiseError("rows says which rows of weights to keep, and no weights are; watch with weights=True")
        self._classes = classes_of(classes, {site.kind for site in self._sites})
        self._seen: dict[tuple[int, int], Layer] = {}
        self._hooks = Hooks(model, self._modules, "watch", lambda: registry.remove(self._modules, self))
        self._runner: tuple[threading.Thread, int] | None = None  # who runs the model, in how many models of it
        self._turn: dict[int, int] = {}
        self._padding: dict[int, Tensor | None] = {}  # by owner
        self._last: dict[int, tuple[Tensor | None, bool]] = {}  # by owner: its newest real queries, and if it decodes
        self._trusted: dict[Any, bool] = {}  # readings that were checked: True, or False where eager must serve
        self._waiting: set[int] = set()  # modules that were called and have not attended yet
        self._looks: dict[int, Any] = {}  # by module: the queries and keys of its newest call
        self._ran = False
        self._checks = 0
        self._rows_left = self._rows or []  # that no call had
        self._longest = 0  # call of which rows were wanted

    @property
    def layers(self) -> list[Layer]:
        """What was seen, kind by kind and layer by layer."""
        order = {site.kind: rank for rank, site in enumerate(reversed(self._sites))}
        return sorted(self._seen.values(), key=lambda layer: (-order.get(layer.kind, 0), layer.index))

    @property
    def unseen(self) -> list[str]:
        """Paths of attention modules that were never called."""
        called = {module for module, _ in self._seen}
        return list(dict.fromkeys(site.name for site in self._sites if id(site.module) not in called))

    def __getitem__(self, key: Key) -> Layer:
        """A layer by its number, (kind, number) or module path."""
        site = sites.find(self.model, self._sites, key)
        if (id(site.module), site.turn) not in self._seen:
            raise HeadwiseError(f"{site} was not called while the model was watched")
        return self._seen[id(site.module), site.turn]

    def __enter__(self) -> Watch:
        if self._hooks.on:
            raise HeadwiseError("this watch is on already; make another with headwise.watch(model)")
        return self._hooks.set(self, self._set_hooks, functools.partial(registry.add, self._modules, self))

    def _set_hooks(self) -> None:
        around = {id(owner): owner for owner in [self.model, *self._owner.values()]}
        for owner in around.values():
            self._hooks.before(owner, self._begin, kwargs=True)
            self._hooks.after(owner, self._end, always=True)
        for module in self._modules:
            self._hooks.before(module, self._called)
        for module, linear in self._mixers:
            self._hooks.before(linear, functools.partial(self._mixed, module))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._hooks.remove()
        self._runner = None
        self._padding.clear()
        self._last.clear()
        waiting, self._waiting = sorted(self._waiting), set()
        if error is None and self._longest and self._rows_left:
            raise HeadwiseError(
                f"rows {', '.join(map(str, self._rows_left))} were not in any call: the longest had {self._longest} "
                f"queries; rows are from {-self._longest} to {self._longest - 1}"
            )
        if error is None and waiting:
            raise self._missed(waiting[0])
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
        registry.here.begin()
        self._run(owner)
        self._padding[id(owner)] = sites.padding(owner, args, kwargs)
        for at, its in self._owner.items():
            if its is owner or owner is self.model:
                self._turn.pop(at, None)

    def _run(self, owner: nn.Module) -> None:
        """One thread at a time: calls of two passes, mixed, would be taken for one."""
        thread = threading.current_thread()
        if self._runner is not None and self._runner[0] is not thread and self._runner[0].is_alive():
            raise HeadwiseError(
                f"threads {self._runner[0].name!r} and {thread.name!r} run {type(self.model).__name__} at once while "
                "it is watched; run it in one thread at a time, or give each a copy.deepcopy of it and its own watch"
            )
        deep = 0 if self._runner is None or owner is self.model else self._runner[1]
        self._runner = thread, deep + 1

    def _end(self, owner: nn.Module, args: Any, output: Any) -> None:
        registry.here.end()
        self._ran = self._ran or output is not None  # a pass that raised has said so itself
        if self._runner is not None and self._runner[0] is threading.current_thread():
            self._runner = None if self._runner[1] == 1 else (self._runner[0], self._runner[1] - 1)
        missed = [at for at in self._waiting if self._owner[at] is owner]
        self._waiting.difference_update(missed)
        if missed and output is not None:
            raise self._missed(missed[0])

    def _missed(self, at: int) -> UnsupportedError:
        site = next(site for site in self._sites if id(site.module) == at)
        return UnsupportedError(
            f"{type(site.module).__name__} (at {site.name}) did not ask transformers' registry for an attention "
            "function when it was called; its heads cannot be watched"
        )

    def _called(self, module: nn.Module, args: Any) -> None:
        if not sites.in_backward():  # not a checkpoint that is run again in backward
            self._turn[id(module)] = self._turn.get(id(module), -1) + 1
            self._waiting.add(id(module))

    def _mixed(self, module: nn.Module, linear: nn.Module, args: tuple[Any, ...]) -> None:
        """What W_O is given are the heads' outputs, with all that a model does to them before (gates, norms)."""
        if sites.in_backward():
            return
        at = id(module), self._turn.get(id(module), 0)
        heads = None if at not in self._seen else asked(self._outputs, self._site[at])
        if heads is not None:
            layer = self._seen[at]
            x = args[0].detach()
            x = x[None] if x.dim() == 2 else x
            each = x.flatten(1, -2).unflatten(-1, (layer.heads.query, -1)).transpose(1, 2)
            layer.all_outputs.append(each if heads is True else Rows(each[:, heads], heads, None))

    # what the registry calls

    def see(
        self, given: Given, function: registry.Function, eager: registry.Function, inmost: bool
    ) -> tuple[Tensor, Any]:
        """Answer an attention call with the model's output, and keep what was asked for."""
        self._waiting.discard(id(given.module))
        check_values(given.query, given.module, "watch")
        if is_paged(given):
            with pages_read(given) as read_as:
                out, rest = function(given)
            self._see_output(read_as[-1], eager, out)
            return out, rest
        scene = self._scene(given)
        if isinstance(given.mask, LazyMask) and (
            given.more.get("output_attentions") or given.implementation not in ("eager", "sdpa")
        ):
            given = given._replace(mask=given.mask.recipe.whole())
        reading, own = self._readings(given, scene, eager)
        new = self._is_new(given)
        if inmost and new and self._at_once(given, reading):
            right = self._right(reading, own, None, scene.real)
            if right is reading:
                dropout = given.dropout if given.module.training else 0.0
                shares = self._shares(scene.site.kind, reading, scene.recipe or scene.near)
                out, stats = reading.observe(scene.real, shares, dropout)
                with torch.no_grad():
                    self._keep(scene, given, reading, stats)
                return out.transpose(1, 2).contiguous(), None
        out, rest = function(given)
        if new:
            with torch.no_grad():
                known = self._step(scene, reading, own, out)
                right = reading if known is not None else self._right(reading, own, out, scene.real)
                self._keep(scene, given, right, known)
        return out, rest

    def _step(self, scene: Scene, reading: Reading, own: EagerReading, out: Tensor) -> HeadStats | None:
        """Statistics of a decoding step of a trusted form, from the same pass as the output that checks them."""
        few = reading.q.shape[2] == 1 and reading.recipe is None and self._stats and not own.given.dropout
        if not few or not self._trusted.get((_form(own.given), False)):
            return None
        ours, stats = reading.observe(scene.real, self._shares(scene.site.kind, reading, scene.recipe or scene.near))
        return stats if same(ours, by_head(out, reading), reading.v, scene.real) else None

    def _see_output(self, given: Given, eager: registry.Function, out: Tensor) -> None:
        """Keep what was asked for of a call that has been answered."""
        if self._is_new(given):
            scene = self._scene(given)
            with torch.no_grad():
                self._keep(scene, given, self._right(*self._readings(given, scene, eager), out, scene.real))

    def _readings(self, given: Given, scene: Scene, eager: registry.Function) -> tuple[Reading, EagerReading]:
        """What the call means in our terms, and in the model's own."""
        reading = read(given, scene.recipe, scene.near, scene.cross)
        own = EagerReading(given, eager, reading.how["offset"], reading.comparable, scene.recipe)
        return packed(reading, given, scene.recipe or scene.near), own

    def _is_new(self, given: Given) -> bool:
        """False where a module attends again with the same queries and keys: other values only."""
        looks = weakref.ref(given.query), weakref.ref(given.key)
        before, self._looks[id(given.module)] = self._looks.get(id(given.module)), looks
        return before is None or before[0]() is not given.query or before[1]() is not given.key

    def _at_once(self, given: Given, reading: Reading) -> bool:
        """Whether our own pass gives the output too: where a mask was never made, or where that is faster."""
        if isinstance(given.mask, LazyMask):
            return True
        plain = given.implementation in ("sdpa", NAME) and not given.more.get("output_attentions")
        return plain and not self._exact and self._stats and not given.dropout and reading.in_one_pass()

    def _scene(self, given: Given) -> Scene:
        turn = self._turn.get(id(given.module), 0)
        site = self._site.get((id(given.module), turn)) or self._repeated(given.module, turn)
        recipe = registry.recipe_of(given.mask)
        near = registry.newest(given.query.shape[2], given.key.shape[2], made=given.mask is not None)
        cross = site.kind.endswith("cross")
        return Scene(site, recipe, near, self._real(given, recipe or near, cross), cross)

    def _right(
        self, reading: Reading, own: EagerReading, out: Tensor | None, real: Tensor | None
    ) -> Reading | EagerReading:
        """The reading that gives the output there is: on a few rows of the first call of a form, on one of each other.

        Where there is no output yet, or dropout went over it, the model's eager function is what to compare with.
        """
        given, form = own.given, (_form(own.given), out is None)
        rows = self._rows_to_check(form, given.query.shape[2])
        if self._trusted.get(form, True):
            other = own.exact() if out is None or given.dropout else out
            self._trusted[form] = agrees(reading, other, real, rows)
        if self._trusted[form]:
            return reading
        if isinstance(reading, PackedReading) or isinstance(given.mask, LazyMask):
            raise self._odd(given)
        unknown = given.implementation != "eager" if given.dropout else out is not None and not agrees(own, out, real)
        if unknown:
            raise self._odd(given)
        return own

    def _rows_to_check(self, form: Any, queries: int) -> list[int]:
        if form not in self._trusted or queries <= 2:
            return few_rows(queries)
        self._checks += 1
        return [int(self._checks * GOLDEN * queries) % queries]  # another one each time

    def _odd(self, given: Given) -> UnsupportedError:
        name = next(site.name for site in self._sites if site.module is given.module)
        return UnsupportedError(
            f"{type(given.module).__name__} (at {name}) does not compute plain softmax attention from what it hands to "
            "its attention function; its statistics would be wrong"
        )

    def _keep(
        self, scene: Scene, given: Given, reading: Reading | EagerReading, stats: HeadStats | None = None
    ) -> None:
        site, where = scene.site, scene.recipe or scene.near
        layer = self._seen.get((id(given.module), site.turn)) or self._new(site, given)
        decoding = self._decodes(given, where, scene.cross)
        if not scene.cross:
            self._last[id(self._owner[id(given.module)])] = scene.real, decoding
        if self._stats:
            if stats is None:
                stats = reading.stats(scene.real, self._shares(site.kind, reading, where))
            if isinstance(reading, PackedReading):
                layer.add_packed(_named(stats), [one.offset > 0 for one in reading.sequences])
            else:
                layer.add(_named(stats), decoding)
        heads = asked(self._weights, site)
        if heads is not None:
            layer.all_rows.append(self._kept_rows(reading))
            layer.all_weights.append(self._some(reading, heads, given.key.shape[2]))
        if self._links:
            layer.links_asked = self._links
            layer.all_links.append(Links(*reading.links(self._links)))
        if self._each is not None:
            self._each(layer, reading, scene.real)

    def _some(self, reading: Reading | EagerReading, heads: Any, keys: int) -> Any:
        rows, queries = self._kept_rows(reading), reading.q.shape[2]
        if self._rows is not None:
            self._longest = max(self._longest, queries)
            self._rows_left = [i for i in self._rows_left if not -queries <= i < queries]
        if rows == []:  # a decoding step has few queries
            return self._no_rows(reading, heads, keys)
        kept = reading.weights(rows, None if heads is True else heads)
        kept = torch.nn.functional.pad(kept, (0, keys - kept.shape[-1]))  # a cache may hold more keys than exist yet
        return kept if heads is True else Rows(kept, heads, rows)

    def _kept_rows(self, reading: Reading | EagerReading) -> list[int] | None:
        """Which of a call's queries keep their weights; None for all."""
        queries = reading.q.shape[2]
        return None if self._rows is None else [i % queries for i in self._rows if -queries <= i < queries]

    def _no_rows(self, reading: Reading | EagerReading, heads: Any, keys: int) -> Any:
        batch, count = reading.q.shape[:2]
        kept = reading.q.new_zeros(batch, count if heads is True else len(heads), 0, keys)
        return kept if heads is True else Rows(kept, heads, [])

    def _new(self, site: Site, given: Given) -> Layer:
        query, kv = given.query.shape[1], given.key.shape[1]
        try:
            width = _output_width(sites.w_o(self.model, site)[1])
        except UnsupportedError:
            width = query * given.value.shape[3]
        heads = Heads(width, query, kv, given.query.shape[3], given.value.shape[3])
        layer = self._seen[id(given.module), site.turn] = Layer(site.kind, site.index, site.name, heads)
        return layer

    def _repeated(self, module: nn.Module, turn: int) -> Site:
        """A module that is called more often than its model's structure says: each call is a layer of its own."""
        first = next(site for site in self._sites if site.module is module)
        index = 1 + max(site.index for site in self._sites if site.kind == first.kind)
        site = Site(module, first.name, first.kind, index, turn, True)
        self._sites.append(site)
        self._site[id(module), turn] = site
        return site

    def _decodes(self, given: Given, where: Recipe | None, cross: bool) -> bool:
        if cross:
            return self._last.get(id(self._owner[id(given.module)]), (None, False))[1]
        if where is not None:
            return where.first_query > 0
        begins = registry.first_query(given.query.shape[2])
        return begins > 0 if begins is not None else given.query.shape[2] < given.key.shape[2]

    def _real(self, given: Given, where: Recipe | None, cross: bool) -> Tensor | None:
        """(B, Tq): which queries are tokens; None for all."""
        batch, queries = given.query.shape[0], given.query.shape[2]
        owner = id(self._owner[id(given.module)])
        found = None
        if cross:
            found = self._last.get(owner, (None, False))[0]
        elif where is not None:
            found = where.queries_real(queries)
        own = self._padding.get(owner)
        if found is None and own is not None and own.shape[1] in (queries, given.key.shape[2]):
            found = own[:, -queries:]
        if found is None or tuple(found.shape) != (batch, queries) or bool(found.all()):
            return None
        return found.to(given.query.device)

    def _shares(self, kind: str, reading: Reading | EagerReading, where: Recipe | None) -> dict[str, Tensor]:
        """The user's classes for the keys at hand: those of a cache come with time, or have gone."""
        keys = reading.k.shape[2] if isinstance(reading, Reading) else reading.given.key.shape[2]
        first = 0 if where is None else where.first_key
        shares = {}
        for name, marked in self._classes.get(kind, {}).items():
            cut = torch.as_tensor(marked, device=reading.q.device)[:, first : first + keys]
            shares[name] = torch.nn.functional.pad(cut, (0, keys - cut.shape[1]))
        if isinstance(reading, PackedReading):
            shares[FIRST] = reading.first_keys()
        elif where is not None and (first or isinstance(reading, EagerReading) or reading.recipe is not None):
            # then what this call may look at does not tell which token came first
            shares[FIRST] = where.first_token(keys).to(reading.q.device).expand(reading.q.shape[0], -1)
        return shares


def _form(given: Given) -> Any:
    """What two calls share that are read alike."""
    names = tuple(sorted(name for name, x in given.more.items() if x is not None))
    mask = given.mask
    look = (mask.dtype, *(size > 1 for size in mask.shape)) if isinstance(mask, Tensor) else None
    known = registry.recipe_of(mask) is not None
    return (
        id(given.module), given.implementation, type(mask), look, known, names, given.query.shape[2] > 1,
        given.query.shape[2] == given.key.shape[2],
    )  # fmt: skip


def _named(stats: HeadStats) -> HeadStats:
    if SHARE + FIRST in stats:
        stats.sums["first"] = stats.sums.pop(SHARE + FIRST)
    return stats


def _output_width(linear: nn.Module) -> int:
    return int(getattr(linear, "out_features", 0) or getattr(linear, "nf", 0) or linear.weight.shape[0])  # type: ignore[index]
