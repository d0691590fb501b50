"""What a watcher is asked to keep, checked before the model runs: layers, heads, rows and links."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..attention import contract
from ..errors import HeadwiseError, UnsupportedError
from . import anatomy
from .anatomy import Key, Site

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
        keys: Any = [wanted] if pair or isinstance(wanted, (int, str)) else wanted
        pairs = [(anatomy.find(model, sites, key), True) for key in keys]
    chosen: dict[int, dict[int | None, Any]] = {}
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


def asked(chosen: dict[int, dict[int | None, Any]], site: Site) -> Any:
    """The heads of a site that are to be kept: True for all, None for none."""
    turns = chosen.get(id(site.module), {})
    return turns.get(site.turn, turns.get(None))
