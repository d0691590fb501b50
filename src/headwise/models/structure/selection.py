"""The selection that `watch` records, checked before the model runs: layers, heads, rows, links, classes of keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ...errors import HeadwiseError, UnsupportedError
from .heads import head_numbers, query_heads
from .sites import RUN_ONCE, ByLayer, Key, Site, find_site, find_sites

# all layers, one layer, several layers, or {layer: heads}
LayerChoice = bool | Key | Iterable[Key] | ByLayer[Any] | None
HeadChoice = Literal[True] | list[int]  # all heads of a layer, or some of them
KeyClasses = Mapping[str, Tensor]  # {name: (B, T) bool}


@dataclass(frozen=True)
class HeadSelection:
    """Heads of some layers of a model."""

    by_module: dict[nn.Module, dict[int | None, HeadChoice]]  # by turn of the module's calls; None: every turn
    everything: bool = False  # all heads, also of layers that are not known before the model runs

    def heads(self, site: Site) -> HeadChoice | None:
        """The chosen heads of a site: True for all, None for none."""
        if self.everything:
            return True
        turns = self.by_module.get(site.module, {})
        return turns.get(site.turn, turns.get(None))

    def with_all_heads(self) -> HeadSelection:
        """The same layers, with all of their heads."""
        modules: dict[nn.Module, dict[int | None, HeadChoice]] = {
            module: dict.fromkeys(turns, True) for module, turns in self.by_module.items()
        }
        return HeadSelection(modules, self.everything)

    def __bool__(self) -> bool:
        return self.everything or bool(self.by_module)


def select_heads(model: nn.Module, sites: list[Site], choice: LayerChoice) -> HeadSelection:
    """The heads that a user chose as True, a layer, several layers, or {layer: heads}."""
    if choice is None or choice is False:
        return HeadSelection({})
    if choice is True:
        return HeadSelection({site.module: {None: True} for site in sites}, everything=True)
    if isinstance(choice, Mapping):
        pairs: list[tuple[Site, Any]] = list(zip(find_sites(model, sites, choice), choice.values(), strict=True))
    else:
        is_key = isinstance(choice, str) or (isinstance(choice, tuple) and [type(x) for x in choice] == [str, int])
        keys: Any = choice if isinstance(choice, Iterable) and not is_key else [choice]
        pairs = [(find_site(model, sites, key), True) for key in keys]
    by_module: dict[nn.Module, dict[int | None, HeadChoice]] = {}
    for site, heads in pairs:
        head_choice: HeadChoice = True if heads is True else head_numbers(site, heads, _head_count(model, site))
        by_module.setdefault(site.module, {})[site.turn] = head_choice
    return HeadSelection(by_module)


def _head_count(model: nn.Module, site: Site) -> int | None:
    try:
        return query_heads(model, site)
    except UnsupportedError:
        return None  # the first call will tell


def check_links(links: int) -> int:
    """How many of each query's strongest keys to keep."""
    if isinstance(links, bool) or not isinstance(links, int) or links < 0:
        raise HeadwiseError(f"links must be a number of keys of at least 0, got {links!r}")
    return links


def select_rows(rows: Any) -> list[int] | None:
    """The numbers of the queries whose weights to keep; None for all."""
    if rows is None:
        return None
    numbers = list(rows) if isinstance(rows, Iterable) else rows
    if not isinstance(numbers, list) or not all(hasattr(i, "__index__") and not isinstance(i, bool) for i in numbers):
        raise HeadwiseError(f"rows must be numbers of queries, got {numbers!r}")
    return [int(i) for i in numbers]


def classes_by_kind(classes: Any, kinds: set[str]) -> dict[str, KeyClasses]:
    """The user's classes of keys for each kind of attention."""
    if not isinstance(classes, (dict, type(None))):
        raise HeadwiseError(f"classes must be {{name: (B, T) bool}}, got {type(classes).__name__}")
    if not classes or all(name in kinds and isinstance(x, dict) for name, x in classes.items()):
        return classes or {}
    if not kinds:
        raise HeadwiseError(f"classes of keys need layers that are known, and none is; {RUN_ONCE}")
    if len(kinds) > 1:
        raise HeadwiseError(f"with {len(kinds)} kinds of attention give classes by kind: {', '.join(sorted(kinds))}")
    return dict.fromkeys(kinds, classes)
