"""A model behind the view: what the server and the notebook answer to the questions that the page asks."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import HeadwiseError
from ..inspection import run
from ..models.loading.resolve import resolve
from ..models.structure import sites
from ..models.structure.text_model import text_model
from . import capture, payload
from .ablation_effect import effect
from .capture import Pass, Stopped
from .overlays import given

KEPT = 8  # passes: two to compare, and some to come back to
LONGEST = 40_000  # characters of a text
TOKENS = 8_192
SECONDS = 60.0
LABEL = re.compile(r"(?:([\w.]{1,80}) )?(\d{1,6})\.(\d{1,6})")


class Service:
    """Answers questions about a few models, whose names are fixed: a request can name no other, and no path."""

    def __init__(
        self,
        models: Sequence[str] | Mapping[str, tuple[Any, Any]],
        *,
        text: str = run.SENTENCE,
        target: str | None = None,
        scores: Any = None,
        longest: int = LONGEST,
        tokens: int = TOKENS,
        seconds: float = SECONDS,
    ) -> None:
        """target: what decoders beside an encoder are given first; scores: of the first model, to colour its map by."""
        self.names = list(models)
        self.target, self.scores = target, given(scores)
        self._loaded = dict(models) if isinstance(models, Mapping) else {}
        self._passes: OrderedDict[tuple[str, ...], Pass] = OrderedDict()
        self.text, self.longest, self.tokens, self.seconds = text, longest, tokens, seconds

    @property
    def live(self) -> dict[str, Any]:
        """What the page is told about it."""
        return {"models": self.names, "text": self.text, "target": self.target, "longest": self.longest}

    def load(self, name: str) -> tuple[Any, Any]:
        if name not in self.names:
            raise HeadwiseError(f"there is no model of that name here; there are {', '.join(self.names)}")
        if name not in self._loaded:
            _, model, tokenizer = resolve(name)
            self._loaded[name] = model, tokenizer
        return self._loaded[name]

    def answer(self, request: Any, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """A run, or the steps of one head. stop: asked now and then; True ends the work by Stopped."""
        if not isinstance(request, dict):
            raise HeadwiseError("a request is an object")
        asked = {name: request.get(name) or "" for name in ("ask", "text", "target", "model", "off", "head")}
        if not all(isinstance(value, str) for value in asked.values()):
            raise HeadwiseError("ask, text, target, model, off and head are texts")
        for text in asked.values():
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise HeadwiseError("a text holds half of a character (a lone surrogate); send whole ones")
        for text in (asked["text"], asked["target"]):
            if len(text) > self.longest:
                raise HeadwiseError(f"the text has {len(text):,} characters, {self.longest:,} are allowed here")
        seen = self._pass(asked["model"] or self.names[0], asked["text"], asked["target"], asked["off"][:10_000], stop)
        if asked["ask"] == "run":
            return self._run(seen, stop)
        if asked["ask"] == "steps":
            row, head = payload.named(seen, asked["head"])
            return {"steps": payload.steps(seen.layers[row], [head])}
        raise HeadwiseError("ask for run or steps")

    def _run(self, seen: Pass, stop: Callable[[], bool]) -> dict[str, Any]:
        model, tokenizer = self.load(seen.name)
        if stop():
            raise Stopped
        scores = self.scores if seen.name == self.names[0] else None
        return {**payload.run(seen, live=True, scores=scores), "effect": effect(seen, model, tokenizer)}

    def _pass(self, name: str, text: str, target: str, off: str, stop: Callable[[], bool]) -> Pass:
        key = name, text, target, off
        if key not in self._passes:
            model, tokenizer = self.load(name)
            ends = time.monotonic() + self.seconds

            def ended() -> bool:
                if time.monotonic() > ends:
                    raise HeadwiseError(f"this took more than {self.seconds:g} seconds and was stopped")
                return stop()

            self._passes[key] = capture.run(
                text, model, tokenizer=tokenizer, target=target or None, off=heads_off(model, off, whole=bool(target)),
                stop=ended, most=self.tokens, name=name,
            )  # fmt: skip
        self._passes.move_to_end(key)
        while len(self._passes) > KEPT:
            self._passes.popitem(last=False)
        return self._passes[key]


def heads_off(model: Any, labels: str, *, whole: bool = False) -> dict[tuple[str, int], list[int]]:
    """ "3.1,5.11", or "cross 3.1" where there are several kinds -> as mask_heads takes them; whole: decoder too."""
    body = model if whole else text_model(model, purpose="inspect needs", name="the model")[0]
    kinds = list(dict.fromkeys(site.kind for site in sites.attention_sites(body)))
    found: dict[tuple[str, int], list[int]] = {}
    for label in filter(None, (part.strip() for part in labels.split(","))):
        parts = LABEL.fullmatch(label)
        if not parts:
            raise HeadwiseError(f"a head is written layer.head, such as 3.1, got {label[:40]!r}")
        found.setdefault((parts[1] or kinds[0], int(parts[2])), []).append(int(parts[3]))
    return {key: sorted(set(heads)) for key, heads in found.items()}
