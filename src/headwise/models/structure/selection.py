"""What a watcher is asked to keep, checked before the model runs: layers, heads, rows and links."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ...attention import validation
from ...errors import HeadwiseError, UnsupportedError
from . import sites as anatomy
from .sites import Key, Site

Chosen = bool | Key | Iterable[Key] | dict[Key, Any] | None


def links_of(links: int) -> int:
    if isinstance(links, bool) or not isinstance(links, int) or links < 0:
        raise HeadwiseError(f"links must be a number of keys of at least 0, got {links!r}")
    return links


def chosen_of(model: nn.Module, sites: list[Site], wanted: Chosen) -> dict[int, dict[int | None, Any]]:
    """What to keep: by id of the module and its turn (None: any), True for all heads or a list of them."""
    if wanted is None or wanted is False:
        return {}
    if wanted is True:
        return {id(site.module): {None: True} for site in sites}
    if isinstance(wanted, dict):
        pairs: list[tuple[Site, Any]] = [(anatomy.find(model, sites, key), heads) for key, heads in wanted.items()]
    else:
        pair = isinstance(wanted, tuple) and [type(x) for x in wanted] == [str, int]
        keys: Any = wanted if isinstance(wanted, Iterable) and not pair and not isinstance(wanted, str) else [wanted]
        pairs = [(anatomy.find(model, sites, key), True) for key in keys]
    chosen: dict[int, dict[int | None, Any]] = {}
    for site, heads in pairs:
        chosen.setdefault(id(site.module), {})[site.turn] = _heads(model, site, heads)
    return chosen


def _heads(model: nn.Module, site: Site, heads: Any) -> Any:
    if heads is True:
        return True
    try:
        linear = anatomy.w_o(model, site)[1]
        count = anatomy.query_heads(model, site, anatomy.input_width(linear) or 0)
    except UnsupportedError:
        count = None  # then the first call tells
    return head_numbers(site, heads, count)


def head_numbers(site: Site, wanted: Any, count: int | None) -> list[int]:
    """Heads as they are named for a site, one or several, checked against how many there are."""
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        wanted = [wanted]
    if isinstance(wanted, (str, bytes)) or not isinstance(wanted, Iterable):
        raise HeadwiseError(f"the heads of {site} must be a list of numbers, got {wanted!r}")
    try:
        return validation.pick("head", wanted, 1 << 30 if count is None else count)
    except HeadwiseError as error:
        raise HeadwiseError(f"{site}: {error}") from None


def rows_of(rows: Any) -> list[int] | None:
    """The numbers of queries whose weights are wanted, None for all."""
    if rows is None:
        return None
    wanted = list(rows) if isinstance(rows, Iterable) else rows
    if not isinstance(wanted, list) or not all(hasattr(i, "__index__") and not isinstance(i, bool) for i in wanted):
        raise HeadwiseError(f"rows must be numbers of queries, got {wanted!r}")
    return [int(i) for i in wanted]


def classes_of(classes: Any, kinds: set[str]) -> dict[str, dict[str, Any]]:
    """The user's classes of keys for each kind of attention."""
    if not isinstance(classes, (dict, type(None))):
        raise HeadwiseError(f"classes must be {{name: (B, T) bool}}, got {type(classes).__name__}")
    if not classes or all(name in kinds and isinstance(x, dict) for name, x in classes.items()):
        return classes or {}
    if len(kinds) > 1:
        raise HeadwiseError(f"with {len(kinds)} kinds of attention give classes by kind: {', '.join(sorted(kinds))}")
    return dict.fromkeys(kinds, classes)


def asked(chosen: dict[int, dict[int | None, Any]], site: Site) -> Any:
    """The heads of a site that are to be kept: True for all, None for none."""
    turns = chosen.get(id(site.module), {})
    return turns.get(site.turn, turns.get(None))
