"""The models behind the page: answers requests that the page sends to a server or a notebook."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import HeadwiseError
from ..inspection import SENTENCE
from ..models.loading.resolve import resolve
from ..models.structure import attention_sites
from ..models.structure.text_model import text_model
from . import capture, payload
from .ablation_effect import measure_effect
from .capture import Pass, StoppedError
from .causes import measure_causes
from .overlays import to_overlays

MOST_PASSES = 8  # that are cached: two to compare, and some earlier ones
MOST_CHARACTERS = 40_000  # of a text
MOST_TOKENS = 8_192
SECONDS = 60.0
LABEL = re.compile(r"(?:([\w.]{1,80}) )?(\d{1,6})\.(\d{1,6})")


class Service:
    """Answers requests about a fixed list of models: a request cannot name another one, nor a path."""

    def __init__(
        self,
        models: Sequence[str] | Mapping[str, tuple[Any, Any]],
        *,
        text: str = SENTENCE,
        target: str | None = None,
        scores: Any = None,
        longest: int = MOST_CHARACTERS,
        tokens: int = MOST_TOKENS,
        seconds: float = SECONDS,
    ) -> None:
        """Answer requests about some models.

        Args:
            models: names, loaded at the first request, or {name: (model, tokenizer)}.
            text: the first text.
            target: the first input of the decoder of encoder-decoder models.
            scores: of the first model, to colour its map by.
            longest: characters that a text may have.
            tokens: tokens that a text may have.
            seconds: that one pass may take.
        """
        self.names = list(models)
        self.target, self.scores = target, to_overlays(scores)
        self._models = dict(models) if isinstance(models, Mapping) else {}
        self._passes: OrderedDict[tuple[str, ...], Pass] = OrderedDict()
        self.text, self.longest, self.tokens, self.seconds = text, longest, tokens, seconds

    @property
    def live(self) -> dict[str, Any]:
        """The facts about this service that the page receives."""
        return {"models": self.names, "text": self.text, "target": self.target, "longest": self.longest}

    def load(self, name: str) -> tuple[Any, Any]:
        if name not in self.names:
            raise HeadwiseError(f"there is no model of that name here; there are {', '.join(self.names)}")
        if name not in self._models:
            _, model, tokenizer = resolve(name)
            self._models[name] = model, tokenizer
        return self._models[name]

    def answer(self, request: Any, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """The answer to a request: a run, the steps of one head, or the causes of a prediction.

        stop: checked often; True raises `StoppedError`.
        """
        if not isinstance(request, dict):
            raise HeadwiseError("a request is an object")
        fields = {
            name: request.get(name) or ""
            for name in ("ask", "text", "target", "model", "off", "head", "answer", "other")
        }
        if not all(isinstance(value, str) for value in fields.values()):
            raise HeadwiseError("ask, text, target, model, off, head, answer and other are texts")
        for text in fields.values():
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise HeadwiseError("a text holds half of a character (a lone surrogate); send whole ones")
        for text in (fields["text"], fields["target"]):
            if len(text) > self.longest:
                raise HeadwiseError(f"the text has {len(text):,} characters, {self.longest:,} are allowed here")
        name = fields["model"] or self.names[0]
        pass_ = self._pass(name, fields["text"], fields["target"], fields["off"][:10_000], stop)
        if fields["ask"] == "run":
            return self._run_payload(pass_, stop)
        if fields["ask"] == "steps":
            row, head = payload.parse_head(pass_, fields["head"])
            return {"steps": payload.steps(pass_.layers[row], [head])}
        if fields["ask"] == "causes":
            model, tokenizer = self.load(name)
            tokens = fields["answer"], fields["other"]
            return {"causes": measure_causes(pass_, model, tokenizer, *tokens, self._expiry(stop))}
        raise HeadwiseError("ask for run, steps or causes")

    def _run_payload(self, pass_: Pass, stop: Callable[[], bool]) -> dict[str, Any]:
        model, tokenizer = self.load(pass_.name)
        if stop():
            raise StoppedError
        scores = self.scores if pass_.name == self.names[0] else None
        return {**payload.run(pass_, live=True, scores=scores), "effect": measure_effect(pass_, model, tokenizer)}

    def _expiry(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """The same check, which also raises an error when one pass has taken too long from now on."""
        deadline = time.monotonic() + self.seconds

        def expired() -> bool:
            if time.monotonic() > deadline:
                raise HeadwiseError(f"this took more than {self.seconds:g} seconds and was stopped")
            return stop()

        return expired

    def _pass(self, name: str, text: str, target: str, off: str, stop: Callable[[], bool]) -> Pass:
        key = name, text, target, off
        if key not in self._passes:
            model, tokenizer = self.load(name)
            self._passes[key] = capture.run(
                text,
                model,
                tokenizer=tokenizer,
                target=target or None,
                truncate=None,
                off=parse_heads_off(model, off, with_decoder=bool(target)),
                stop=self._expiry(stop),
                max_tokens=self.tokens,
                name=name,
            )
        self._passes.move_to_end(key)
        while len(self._passes) > MOST_PASSES:
            self._passes.popitem(last=False)
        return self._passes[key]


def parse_heads_off(model: Any, labels: str, *, with_decoder: bool = False) -> dict[tuple[str, int], list[int]]:
    """Labels such as "3.1,5.11", or "cross 3.1" with several kinds of attention, as `mask_heads` takes them."""
    body = model if with_decoder else text_model(model, purpose="inspect needs", name="the model")[0]
    return parse_head_labels(body, labels)


def parse_head_labels(body: Any, labels: str) -> dict[tuple[str, int], list[int]]:
    """The same for the part of a model that is run."""
    kinds = list(dict.fromkeys(site.kind for site in attention_sites(body)))
    heads_by_layer: dict[tuple[str, int], list[int]] = {}
    for label in filter(None, (part.strip() for part in labels.split(","))):
        parts = LABEL.fullmatch(label)
        if not parts:
            raise HeadwiseError(f"a head is written layer.head, such as 3.1, got {label[:40]!r}")
        heads_by_layer.setdefault((parts[1] or kinds[0], int(parts[2])), []).append(int(parts[3]))
    return {key: sorted(set(heads)) for key, heads in heads_by_layer.items()}
