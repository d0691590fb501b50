"""`generate` of a model whose heads stream: it keeps its keys in a HeadCache unless another cache is chosen."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...plans import StreamPlan

CACHES = ("past_key_values", "cache_params")  # arguments of generate by which a user gives a cache


class HeadCacheGeneration:
    """Gives a HeadCache to the calls of a model's `generate`, from `install` to `remove`."""

    def __init__(self, model: nn.Module, plan: StreamPlan) -> None:
        self._model: Any = model
        self._plan = plan
        self._installed: Any = None
        self._own: Any = None  # what was in the model's own attributes before

    def install(self) -> None:
        original = getattr(self._model, "generate", None)
        if not callable(original):
            return

        @functools.wraps(original)
        def generate(*args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
            if not self._takes_our_cache(config, kwargs):
                return original(*args, **kwargs)
            from .head_cache import HeadCache

            cache = kwargs["past_key_values"] = HeadCache(self._plan)
            if getattr(config, "is_assistant", False):
                cache.activate_past_recording()
            with self._without_own_cache():
                return original(*args, **kwargs)

        self._own = vars(self._model).get("generate")
        self._installed = generate
        self._model.generate = generate

    def remove(self) -> None:
        if self._installed is None or vars(self._model).get("generate") is not self._installed:
            return
        if self._own is None:
            del self._model.generate
        else:
            self._model.generate = self._own
        self._installed = None

    def _takes_our_cache(self, config: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call of generate uses a cache and the user chose none."""
        if any(kwargs.get(name) is not None for name in CACHES):
            return False
        if kwargs.get("cache_implementation", getattr(config, "cache_implementation", None)) is not None:
            return False
        configs = (config, getattr(self._model, "generation_config", None))
        choices = (kwargs.get("use_cache"), *(getattr(x, "use_cache", None) for x in configs))
        return next((choice for choice in choices if choice is not None), True) is not False

    @contextmanager
    def _without_own_cache(self) -> Iterator[None]:
        """Inside, the model's own generation config names no cache, as some checkpoints' do: it would conflict."""
        config: Any = getattr(self._model, "generation_config", None)
        own = getattr(config, "cache_implementation", None)
        if own is None:
            yield
            return
        config.cache_implementation = None
        try:
            yield
        finally:
            config.cache_implementation = own
