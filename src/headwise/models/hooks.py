"""Hooks on a model inside a `with` block, set and removed together, also after an exception.

Compiled code does not call hooks that were set after it was compiled, so compiled models run uncompiled inside the
block. Hooks belong to a model and not to a thread, so two threads may not have hooks on one model at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import HeadwiseError, UnsupportedError
from . import multihead

Context = TypeVar("Context")
# where a module keeps its hooks; the functions are in the last two, from which the others are removed by number
HOOK_TABLES = (
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_hooks",
)  # fmt: skip

# the public function behind each word for what hooks do
FUNCTIONS = {
    "watch": "watch", "mask": "mask_heads", "score": "importance", "attribute": "attribute", "patch": "patch",
    "stream": "streaming",
}  # fmt: skip


class Hook:
    """A function that one module's calls call. In a copy of the module it does nothing."""

    is_headwise = True

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
    """The hook in a copy of a module that had hooks."""


class Hooks:
    """The hooks of one `with`."""

    def __init__(
        self, model: nn.Module, modules: Iterable[nn.Module], doing: str, undo: Callable[[], None] | None = None
    ) -> None:
        """modules: the attention modules that are hooked; undo: what else to do when the hooks are removed."""
        self.model, self.doing = model, doing  # doing: a word of FUNCTIONS
        self.attention_modules = set(modules)  # by these, hooks on a model and on a part of it meet
        self.undo = undo
        self.on = False
        self._hooked_modules: list[nn.Module] = []  # modules that were ever given a hook

    def before(self, module: nn.Module, function: Callable[..., Any], kwargs: bool = False) -> None:
        """Call function(module, args) before a module's calls; with kwargs: function(module, args, kwargs)."""
        self._hooked_modules.append(module)
        module.register_forward_pre_hook(Hook(self, module, function), with_kwargs=kwargs)

    def after(self, module: nn.Module, function: Callable[..., Any], always: bool = False) -> None:
        """Call function(module, args, output) after a module's calls; always: also after calls that raise."""
        self._hooked_modules.append(module)
        module.register_forward_hook(Hook(self, module, function), always_call=always)

    def set(self, context: Context, *steps: Callable[[], None]) -> Context:
        """Set the hooks of a context by these steps, all or none; returns the context."""
        try:
            self.on = True
            _claim(self)
            _run_uncompiled(self)
            multihead.open_modules(self, self.attention_modules)
            for step in steps:
                step()
            return context
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove all hooks, also where an interrupt comes in between."""
        try:
            self._undo_all()
        except BaseException:
            self._undo_all()
            raise

    def _undo_all(self) -> None:
        error = None
        steps = (
            self.undo or (lambda: None), self._unhook, lambda: multihead.close_modules(self),
            lambda: _run_compiled(self), lambda: _release(self),
        )  # fmt: skip
        for step in steps:
            try:
                step()
            except BaseException as problem:  # the other steps must run in any case
                error = error or problem
        self.on = False
        if error is not None:
            raise error

    def _unhook(self) -> None:
        # searched in the modules' own tables: an interrupt may have come before a handle was stored
        for module in self._hooked_modules:
            numbers = [
                number
                for name in ("_forward_pre_hooks", "_forward_hooks")
                for number, hook in getattr(module, name).items()
                if isinstance(hook, Hook) and hook.hooks is self
            ]
            for number in numbers:
                for name in HOOK_TABLES:
                    getattr(module, name).pop(number, None)


def has_hooks(model: nn.Module) -> bool:
    """Whether a module of a model has a hook of ours."""
    return any(isinstance(hook, Hook) for module in model.modules() for hook in module._forward_pre_hooks.values())


# threads

_lock = threading.RLock()
_claims: dict[int, tuple[Hooks, threading.Thread]] = {}  # by id of the hooks


def _claim(hooks: Hooks) -> None:
    """From now on no other thread may set hooks on these modules."""
    current_thread = threading.current_thread()
    with _lock:
        for other, thread in _claims.values():
            if thread is not current_thread and thread.is_alive() and other.attention_modules & hooks.attention_modules:
                raise HeadwiseError(
                    f"cannot {hooks.doing} {type(hooks.model).__name__} here: thread {thread.name!r} has a "
                    f"headwise.{FUNCTIONS[other.doing]} on the same layers, and each would see the other's; take "
                    "turns, or give each thread a copy.deepcopy of the model"
                )
        _claims[id(hooks)] = hooks, current_thread


def _release(hooks: Hooks) -> None:
    with _lock:
        _claims.pop(id(hooks), None)


# compiled code

_uncompiled_for: dict[int, Hooks] = {}  # by id: the hooks for which compiled code runs uncompiled
_stance: list[Any] = []  # the context manager that restores torch.compile's stance


def _run_uncompiled(hooks: Hooks) -> None:
    with _lock:
        _uncompiled_for[id(hooks)] = hooks
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
        _uncompiled_for.pop(id(hooks), None)
        if not _uncompiled_for and _stance:
            _stance[0].__exit__(None, None, None)
            _stance.clear()


@contextmanager
def compiled_as_before() -> Iterator[None]:
    """Inside, compiled code runs compiled again: for functions without hooks in them, such as flex attention."""
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


# tensors without values


def check_values(x: Tensor, module: nn.Module, doing: str) -> None:
    """Refuse a call whose tensors have no values, or values that do not outlive the call."""
    reason = _no_values_reason(x)
    if reason is not None:
        raise UnsupportedError(
            f"cannot {doing} {type(module).__name__} {reason}; {doing} it while it runs on values, and trace, export "
            "or transform it outside of the `with`"
        )


def _no_values_reason(x: Tensor) -> str | None:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if torch.compiler.is_compiling() or get_proxy_mode() is not None or torch.jit.is_tracing():
        return "while it is traced, which records operations and not what they give"
    if x.is_meta or isinstance(x, FakeTensor):
        return "on the meta device or on fake tensors, which have no values"
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "under torch.func (vmap, grad, jvp), whose values do not outlive the call"
    return None
