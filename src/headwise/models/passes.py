"""One pass of a model at a time: which layer each attention call belongs to, and which of its tokens are real.

`watch`, `mask_heads` and `head_outputs` all follow a model with a `PassTracker`. It counts the calls of attention
modules that serve several layers, keeps the padding mask that was passed to each whole model, inserts functions before
W_O, and detects modules that were called but never reached the point where their heads can be observed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from .hooks import Hooks
from .padding import real_queries_of
from .structure.heads import w_o
from .structure.partition import head_partition
from .structure.sites import Site, owners

Begin = Callable[[nn.Module], None]  # called with a whole model whose pass begins
End = Callable[[nn.Module, bool], None]  # called with a whole model whose pass ended, and whether it gave an output
ChangeInput = Callable[[Tensor], Tensor | None]  # W_O's input (..., heads * width) -> another, or None


class _PassState(threading.local):
    """Where one thread is in a pass of the model."""

    def __init__(self) -> None:
        self.turns: dict[nn.Module, int] = {}  # by attention module: which of its calls in this pass is running
        self.padding: dict[nn.Module, Tensor | None] = {}  # by whole model: the 2-D mask that it was given
        self.awaited: dict[nn.Module, None] = {}  # attention modules that were called and have not arrived, in order
        self.running = 0  # whole models that are running, one inside the other
        # by the path of the layer around a known module: which queries of its newest self-attention call are tokens
        self.real: dict[str, Tensor | None] = {}


class PassTracker:
    """Follows the passes of a model for as long as its hooks are set."""

    def __init__(
        self,
        model: nn.Module,
        sites: list[Site],
        hooks: Hooks,
        *,
        awaits: Literal["W_O", "attention function"],
        consequence: str,
    ) -> None:
        """A tracker that has set no hooks yet.

        Args:
            model: any whose attention is known.
            sites: its attention layers.
            hooks: where the tracker sets its hooks.
            awaits: what each attention module must call.
            consequence: for the error where a module does not, such as "its heads cannot be masked".
        """
        self.model = model
        self.owners = owners(model, sites)
        self._sites_of: dict[nn.Module, list[Site]] = {}
        for site in sites:
            self._sites_of.setdefault(site.module, []).append(site)
        self.was_called = False  # whether the model, or a part of it, was called
        self.completed = False  # whether a pass gave an output
        self._hooks, self._awaits, self._consequence = hooks, awaits, consequence
        self._state = _PassState()

    def follow(self, modules: list[nn.Module], begin: Begin | None = None, end: End | None = None) -> None:
        """Set the hooks that follow these attention modules and the whole models around them."""
        for owner in dict.fromkeys([self.model, *(self.owners[module] for module in modules)]):
            self._hooks.before(owner, self._begin_pass(begin), kwargs=True)
            self._hooks.after(owner, self._end_pass(end), always=True)
        for module in modules:
            self._hooks.before(module, self._count_call)
        if self._awaits == "W_O":
            for module, sites in self._sites_of.items():
                if sites[0].source == "module" and not sites[0].kind.endswith("cross"):
                    self._hooks.before(module, self._note_real, kwargs=True)

    def before_w_o(self, site: Site, change: ChangeInput) -> None:
        """Set a function before the W_O of a site's module, for all layers that the module serves.

        If processes split the heads, the function gets the heads of all of them, and each process continues with its
        own.
        """
        module, linear = site.module, w_o(self.model, site)[1]
        # of a module whose tokens are split too, statistics are of all heads, and its W_O has some of them
        partition = getattr(module, "output_partition", None) or head_partition(self.model, site)

        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            self.was_called = True
            if self._awaits == "W_O":
                self.arrive(module)
            if partition is None:
                replacement = change(args[0])
            else:
                replacement = change(partition.join(args[0]))
                replacement = None if replacement is None else partition.part(replacement, args[0])
            return None if replacement is None else (replacement, *args[1:])

        self._hooks.before(linear, hook)

    def arrive(self, module: nn.Module) -> None:
        """Note that a module which was called has reached what the tracker awaits."""
        self._state.awaited.pop(module, None)

    def missed_error(self, site: Site) -> UnsupportedError:
        """The error for a layer whose module was called without calling what the tracker awaits."""
        if self._awaits == "W_O":
            failure = "does not call its W_O"
        elif site.source == "registry":
            failure = "did not ask transformers' registry for an attention function when it was called"
        else:
            failure = "did not compute its attention by its base class's forward when it was called"
        return UnsupportedError(f"{type(site.module).__name__} (at {site.place}) {failure}; {self._consequence}")

    def turn(self, module: nn.Module) -> int:
        """Which of its calls in this pass a module is in; 0 for the first."""
        return self._state.turns.get(module, 0)

    def site(self, module: nn.Module) -> Site | None:
        """The layer that a module's current call is; None for calls beyond the layers that it serves."""
        sites, turn = self._sites_of[module], self.turn(module)
        if len(sites) == 1:
            return sites[0]
        return next((site for site in sites if site.turn == turn), None)

    def real_tokens(self, module: nn.Module, batch: int, queries: int, keys: int | None = None) -> Tensor | None:
        """(B, Tq) bool: which queries of a call are tokens and not padding; None if it is not known.

        A mask may be longer than the queries, which are then its last positions; keys: the only other length it may
        have. Where the innermost model was given no mask, that of the outermost serves if it has the queries' shape.
        """
        site = self._sites_of[module][0]
        if site.source == "module":
            real = self._state.real.get(site.parent)
            return real if real is not None and tuple(real.shape) == (batch, queries) else None
        padding = self._state.padding.get(self.owners[module])
        if padding is not None:
            fits = padding.shape[1] >= queries if keys is None else padding.shape[1] in (queries, keys)
            return padding[:, -queries:] if padding.shape[0] == batch and fits else None
        encoder_decoder = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        outer_padding = None if encoder_decoder else self._state.padding.get(self.model)
        return outer_padding if outer_padding is not None and tuple(outer_padding.shape) == (batch, queries) else None

    def model_padding(self, batch: int, length: int) -> Tensor | None:
        """(B, T) bool: the mask that the outermost model was given, where it is of this shape.

        To an encoder-decoder it says which of the encoder's tokens, the keys of cross-attention, are real.
        """
        padding = self._state.padding.get(self.model)
        return padding if padding is not None and tuple(padding.shape) == (batch, length) else None

    def real_inputs(self, site: Site, x: Tensor) -> Tensor | None:
        """(B, T) bool: which positions of W_O's input (B, T, heads * width) are tokens; None where not known."""
        real = self.real_tokens(site.module, x.shape[0], x.shape[1]) if x.dim() == 3 else None
        return None if real is None else real.to(x.device)

    def reset(self) -> list[Site]:
        """Forget the pass; the layers that were called and never arrived."""
        awaited, self._state = self._state.awaited, _PassState()
        return [self._sites_of[module][0] for module in awaited]

    def _begin_pass(self, begin: Begin | None) -> Callable[..., None]:
        def hook(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.was_called = True
            self._state.running += 1
            if begin is not None:
                begin(owner)
            self._state.padding[owner] = _padding(owner, args, kwargs)
            for module, module_owner in self.owners.items():
                if module_owner is owner or owner is self.model:
                    self._state.turns.pop(module, None)

        return hook

    def _end_pass(self, end: End | None) -> Callable[..., None]:
        def hook(owner: nn.Module, args: Any, output: Any) -> None:
            self._state.running = max(0, self._state.running - 1)
            completed = output is not None  # a pass that raised has no output, and its own error
            self.completed = self.completed or completed
            if end is not None:
                end(owner, completed)
            missed = [module for module in self._state.awaited if self.owners[module] is owner]
            for module in missed:
                self.arrive(module)
            if missed and completed:
                raise self.missed_error(self._sites_of[missed[0]][0])

        return hook

    def _note_real(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep which queries of a known self-attention are tokens, for it and for the cross-attention beside it."""
        self._state.real[self._sites_of[module][0].parent] = real_queries_of(module, args, kwargs)

    def _count_call(self, module: nn.Module, args: Any) -> None:
        if not in_backward():
            # outside a pass, as where another method than forward runs a stack, each call begins one of its own
            in_pass = self._state.running or len(self._sites_of[module]) > 1
            self._state.turns[module] = self._state.turns.get(module, -1) + 1 if in_pass else 0
            self._state.awaited[module] = None
        elif self._awaits == "W_O" and len(self._sites_of[module]) > 1:
            raise UnsupportedError(
                f"{type(module).__name__} serves several layers, and a checkpoint that runs it again does not tell "
                f"which; {self._hooks.doing} its heads without gradient checkpointing"
            )


def in_backward() -> bool:
    """Whether a backward pass is running: a module that is called then is run again by gradient checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _padding(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The 2-D mask that a whole model was given: (B, positions) bool."""
    mask = kwargs.get("attention_mask")
    if mask is None and args:
        try:
            mask = inspect.signature(owner.forward).bind_partial(*args, **kwargs).arguments.get("attention_mask")
        except TypeError:
            return None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
