"""Hooks on a model for as long as a `with` lasts, and all that must hold meanwhile.

Compiled code does not call hooks that were set after it was compiled, so inside the `with` everything that
torch.compile made runs uncompiled. Hooks belong to a model and not to a thread, so two threads may not have hooks on
one model at once. What is put in place is taken back as a whole, also where an exception comes in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import HeadwiseError, UnsupportedError

Context = TypeVar("Context")
# where a module keeps its hooks; those that hold the functions come last: by them the rest is found again
DICTS = (
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_hooks",
)  # fmt: skip


class Hook:
    """A function of one module's calls. Copies of the module carry one that does nothing."""

    def __init__(self, hooks: Hooks, module: nn.Module, function: Callable[..., Any]) -> None:
        self.hooks, self.module, self.function = hooks, module, function

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        if getattr(module, "_is_replica", False):
            raise UnsupportedError(
                f"{type(module).__name__} runs as a replica of nn.DataParallel, in a thread of its own; "
                f"{self.hooks.doing} the model itself, model.module, on one device"
            )
        return self.function(self.module, *args)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _idle_hook, ()


def _idle_hook() -> Callable[..., None]:
    return idle


def idle(*args: Any, **kwargs: Any) -> None:
    """The hook of a copy: it was made of a model that had hooks, and has none itself."""


class Hooks:
    """The hooks of one `with`."""

    def __init__(
        self, model: nn.Module, modules: Iterable[nn.Module], doing: str, undo: Callable[[], None] | None = None
    ) -> None:
        self.model, self.doing = model, doing  # "watch" or "mask"
        self.claimed = {id(module) for module in modules}  # the attention modules: those of parts and wholes meet
        self.undo = undo  # what else there is to take back
        self.on = False
        self._touched: list[nn.Module] = []  # whatever had a hook of ours, whether it still has or not

    def before(self, module: nn.Module, function: Callable[..., Any], kwargs: bool = False) -> None:
        """function(module, args) before a module's calls; with kwargs (module, args, kwargs)."""
        self._touched.append(module)
        module.register_forward_pre_hook(Hook(self, module, function), with_kwargs=kwargs)

    def after(self, module: nn.Module, function: Callable[..., Any], always: bool = False) -> None:
        """function(module, args, output) after a module's calls; always: after those that raise, too."""
        self._touched.append(module)
        module.register_forward_hook(Hook(self, module, function), always_call=always)

    def set(self, context: Context, *steps: Callable[[], None]) -> Context:
        """Put the hooks of a context in place by these steps, or none of them."""
        try:
            self.on = True
            _claim(self)
            _run_uncompiled(self)
            for step in steps:
                step()
            return context
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take everything back, also where an interrupt comes in between."""
        try:
            self._take_back()
        except BaseException:
            self._take_back()
            raise

    def _take_back(self) -> None:
        error = None
        for step in (self.undo or (lambda: None), self._unhook, lambda: _run_compiled(self), lambda: _release(self)):
            try:
                step()
            except BaseException as problem:  # the other steps must run whatever it is
                error = error or problem
        self.on = False
        if error is not None:
            raise error

    def _unhook(self) -> None:
        # Found in the modules' own tables: an interrupt may have come before a handle was kept.
        for module in self._touched:
            numbers = [
                number
                for name in ("_forward_pre_hooks", "_forward_hooks")
                for number, hook in getattr(module, name).items()
                if isinstance(hook, Hook) and hook.hooks is self
            ]
            for number in numbers:
                for name in DICTS:
                    getattr(module, name).pop(number, None)


# threads

_lock = threading.RLock()
_claims: dict[int, tuple[Hooks, threading.Thread]] = {}  # by id of the hooks


def _claim(hooks: Hooks) -> None:
    """From now on no other thread may set hooks on these modules."""
    here = threading.current_thread()
    with _lock:
        for other, thread in _claims.values():
            if thread is not here and thread.is_alive() and other.claimed & hooks.claimed:
                raise HeadwiseError(
                    f"cannot {hooks.doing} {type(hooks.model).__name__} here: thread {thread.name!r} has a "
                    f"headwise.{FUNCTIONS[other.doing]} on the same layers, and each would see the other's; take "
                    "turns, or give each thread a copy.deepcopy of the model"
                )
        _claims[id(hooks)] = hooks, here


FUNCTIONS = {"watch": "watch", "mask": "mask_heads", "score": "importance"}


def _release(hooks: Hooks) -> None:
    with _lock:
        _claims.pop(id(hooks), None)


# compiled code

_holders: dict[int, Hooks] = {}  # those for whom compiled code stands still
_stance: list[Any] = []  # what puts torch.compile's stance back


def _run_uncompiled(hooks: Hooks) -> None:
    with _lock:
        _holders[id(hooks)] = hooks
        if not _stance:
            try:
                _stance.append(torch.compiler.set_stance("force_eager"))
            except RuntimeError as error:  # in a compiled region the stance cannot be changed
                raise UnsupportedError(
                    f"cannot {hooks.doing} {type(hooks.model).__name__} inside of a function that torch.compile "
                    "compiles; enter the `with` outside of it"
                ) from error


def _run_compiled(hooks: Hooks) -> None:
    with _lock:
        _holders.pop(id(hooks), None)
        if not _holders and _stance:
            _stance[0].__exit__(None, None, None)
            _stance.clear()


@contextmanager
def compiled_as_before() -> Iterator[None]:
    """Inside, what torch.compile made runs compiled again: for functions that no hook is in, such as flex attention."""
    with _lock:
        stance = _stance[0] if _stance else None
        if stance is not None:
            stance.__exit__(None, None, None)
    try:
        yield
    finally:
        with _lock:
            if stance is not None and _stance and _stance[0] is stance:
                stance.__enter__()


# what has no values


def check_values(x: Tensor, module: nn.Module, doing: str) -> None:
    """Refuse to take numbers from a call that has none, or whose numbers do not outlive it."""
    why = _no_values(x)
    if why is not None:
        raise UnsupportedError(
            f"cannot {doing} {type(module).__name__} {why}; {doing} it while it runs on values, and trace, export or "
            "transform it outside of the `with`"
        )


def _no_values(x: Tensor) -> str | None:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if torch.compiler.is_compiling() or get_proxy_mode() is not None or torch.jit.is_tracing():
        return "while it is traced, which records operations and not what they give"
    if x.is_meta or isinstance(x, FakeTensor):
        return "on the meta device or on fake tensors, which have no values"
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "under torch.func (vmap, grad, jvp), whose values do not outlive the call"
    return None
