"""One config of a file: each value with its source, the file itself or the defaults of its model type."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import CheckpointError
from ..types import Source
from .defaults import defaults, version
from .keys import NO_TOWER

DEPTH = 8  # of nested configs; two or three are usual
LARGEST = 10**9  # of any one size
MOST_LAYERS = 10_000  # no model has a tenth of that


class Node:
    """A config inside a file, by its path; keys that it lacks are looked up in the defaults of its model type."""

    def __init__(
        self,
        raw: dict[str, Any],
        path: str = "",
        assumed: dict[str, Any] | None = None,
        key_names: dict[str, str] | None = None,
    ) -> None:
        self.raw, self.path = raw, path
        self.key_names = key_names or {}  # names of keys in the file, where they differ (GGUF)
        model_type = raw.get("model_type", (assumed or {}).get("model_type"))
        if model_type is not None and not isinstance(model_type, str):
            raise CheckpointError(f"{self.place('model_type')} must be a name, got {brief(model_type)}")
        self.model_type: str = model_type or ""
        self.assumed = defaults(self.model_type) | (assumed or {})
        self.map: dict[str, str] = self.assumed.get("_map", {})

    def place(self, key: str) -> str:
        key = self.key_names.get(key, key)
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def find(self, *keys: str) -> tuple[Any, Source | None]:
        """The value of the first of these keys in the file, else in the defaults of the type."""
        names = [name for key in keys for name in (self.map.get(key), key) if name]
        for key in names:
            if self.raw.get(key) is not None:
                return self.raw[key], Source("read", self.place(key))
        for key in names:
            # a null in the file overrides the default of the type
            if self.assumed.get(key) is not None and not (key in self.raw and self.raw[key] is None):
                return self.assumed[key], Source("defaulted", f"{key} of {self.model_type} in {version()}")
        return None, None

    def used(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Those of these keys about heads that the model type uses; all where transformers has no model of the type.

        Files also have keys that nothing reads, such as a head_dim in those of StableLM.
        """
        used = self.assumed.get("_uses")
        return keys if used is None else tuple(key for key in keys if key in used)

    def value(self, *keys: str) -> Any:
        return self.find(*keys)[0]

    def flag(self, key: str) -> bool:
        got = self.value(key)
        if got is not None and not isinstance(got, bool | int):
            raise CheckpointError(f"{self.place(key)} must be true or false, got {brief(got)}")
        return bool(got)

    def number(self, *keys: str, least: int = 0, largest: int = LARGEST) -> tuple[int | None, Source | None]:
        """A whole number; a list gives its largest (stages of a pyramid), a dict its sum."""
        got, source = self.find(*keys)
        if got is None:
            return None, None
        if isinstance(got, dict) and source and got:  # LXMERT: layers by kind
            return sum(self._whole(source, item, least, largest // len(got)) for item in got.values()), source
        if isinstance(got, list) and got:
            return max(self._whole(source, item, least, largest) for item in got), source
        return self._whole(source, got, least, largest), source

    def amount(self, *keys: str, least: int = 0, largest: int = LARGEST) -> int | None:
        return self.number(*keys, least=least, largest=largest)[0]

    def _whole(self, source: Source | None, got: Any, least: int, largest: int) -> int:
        if isinstance(got, float) and math.isfinite(got) and got == int(got):
            got = int(got)
        if isinstance(got, bool) or not isinstance(got, int) or not least <= got <= largest:
            name = source.detail if source else "a number"
            raise CheckpointError(f"{name} must be a whole number from {least} to {largest:,}, got {brief(got)}")
        return got

    def sequence(self, key: str) -> Sequence[Any] | None:
        got = self.value(key)
        return got if isinstance(got, list) and got else None

    def _tower(self, key: str) -> bool:
        return isinstance(self.assumed.get(key), dict) and not key.startswith("_") and key not in NO_TOWER

    def children(self) -> Iterator[tuple[str, Node]]:
        """The configs inside this one, in the file or in the defaults of the type."""
        if self.path.count(".") + 2 > DEPTH:
            raise CheckpointError(f"configs nest deeper than {DEPTH} at {self.path}; is this a model's config.json?")
        wrong = [key for key, value in self.raw.items() if self._tower(key) and not isinstance(value, dict | None)]
        if wrong:
            raise CheckpointError(
                f"{self.place(wrong[0])} must be a config of its own, got {brief(self.raw[wrong[0]])}"
            )
        keys = [key for key, value in self.raw.items() if isinstance(value, dict)]
        keys += [key for key, value in self.assumed.items() if isinstance(value, dict) and key not in self.raw]
        for key in keys:
            if key.startswith("_") or key in NO_TOWER:
                continue
            raw, assumed = self.raw.get(key), self.assumed.get(key)
            if not isinstance(assumed, dict):
                assumed = None
            elif isinstance(raw, dict) and raw:
                assumed = {"model_type": assumed["model_type"]}  # a tower in the file has the defaults of its own type
            yield key, Node(raw if isinstance(raw, dict) else {}, self.place(key), assumed)


def brief(got: Any) -> str:
    """A value for an error message, shortened."""
    if isinstance(got, int) and not isinstance(got, bool) and abs(got) >= 10**40:
        return f"a number of about {math.log10(abs(got)):.0f} digits"
    text = json.dumps(got, default=str) if isinstance(got, str | int | float | bool | None) else type(got).__name__
    return text if len(text) <= 60 else text[:57] + "..."
