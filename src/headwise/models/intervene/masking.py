"""mask_heads: some heads of a model switched off, scaled or replaced, at the input of W_O."""

from __future__ import annotations

import warnings
from functools import partial
from types import TracebackType

from torch import Tensor, nn

from ...errors import HeadwiseError
from ..hooks import Hooks
from ..passes import PassTracker
from ..structure.sites import ByLayer, Site, first_per_module, require_sites
from ..structure.wrappers import inner_model
from .changes import HeadChange, Heads, Value, head_changes


def mask_heads(model: nn.Module, heads: Heads, value: Value | ByLayer[Value] = "zero") -> MaskedHeads:
    """Inside `with`, replace the outputs of some heads before W_O.

    Compiled models run uncompiled inside the block, because compiled code does not call new hooks.

    Args:
        model: a model, also compiled or wrapped. Attention that no class declares is known after one run inside
            `watch`.
        heads: {layer: [heads]}, where a layer is its number, (kind, number) or its module's path; or gates that
            multiply every head's output, differentiable: a tensor (layers, heads), {kind: such a tensor} for models
            with several kinds of attention, or {layer: (heads,) tensor}.
        value: the replacement of the heads' outputs: "zero"; "mean", each head's own mean over all tokens that the
            model has processed so far; a tensor that broadcasts to (B, chosen heads, T, head width), such as the
            outputs that `watch` records; or {layer: one of these}.

    Returns:
        A context manager. Its `heads` lists the heads that are replaced.

    Raises:
        HeadwiseError: for layers and heads that the model does not have.
        ShapeError: for gates or a value of the wrong shape.
        UnsupportedError: for a layer whose W_O is not known or not called.

    Example:
        >>> with headwise.mask_heads(model, {0: [1, 3]}):
        ...     without = model(**inputs)
    """
    model = inner_model(model)
    sites = require_sites(model)
    return MaskedHeads(model, sites, head_changes(model, sites, heads, value))


class MaskedHeads:
    """A model with some heads changed, for as long as the `with` lasts."""

    def __init__(self, model: nn.Module, sites: list[Site], changes: list[HeadChange]) -> None:
        self.model = model
        self._changes = changes
        self._hooks = Hooks(model, [site.module for site in sites], "mask")
        # a model that reads W_O's weight without calling W_O would go on as if nothing were masked
        self._tracker = PassTracker(model, sites, self._hooks, awaits="W_O", consequence="its heads cannot be masked")

    @property
    def heads(self) -> dict[tuple[str, int], list[int]]:
        """Which heads are replaced, by (kind, layer)."""
        return {change.site.key: change.heads for change in self._changes if change.gates is None}

    def __enter__(self) -> MaskedHeads:
        if self._hooks.on:
            raise HeadwiseError("these heads are masked already; make another with headwise.mask_heads")
        return self._hooks.set(self, self._set_hooks)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.remove()
        self._tracker.reset()
        if error is None and self._changes and not self._tracker.was_called:
            warnings.warn(
                f"{type(self.model).__name__} was not called while its heads were masked, so nothing was; a traced, "
                "scripted or exported copy of a model does not know its mask",
                stacklevel=2,
            )

    def _set_hooks(self) -> None:
        by_site = {change.site: change for change in self._changes}
        first_sites = first_per_module(by_site)
        self._tracker.follow([site.module for site in first_sites])

        def change_heads(module: nn.Module, x: Tensor) -> Tensor | None:
            site = self._tracker.site(module)
            change = None if site is None else by_site.get(site)
            return None if change is None else change.apply(x, self._tracker.real_inputs(change.site, x))

        for site in first_sites:
            self._tracker.before_w_o(site, partial(change_heads, site.module))
