"""`headwise.view`: the view in a notebook, or as a page where there is none."""

from __future__ import annotations

import functools
import html
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import HeadwiseError
from ..inspection import run
from . import bundle, capture, page
from .capture import Pass, Stopped
from .payload import data
from .service import Service

HEIGHT = 820  # pixels of a page inside a notebook


def view(
    text: str | Pass | Sequence[Pass] = run.SENTENCE,
    model: Any = None,
    *,
    tokenizer: Any = None,
    against: str | None = None,
    beside: Any = None,
    target: str | None = None,
    off: Any = None,
    heads: str | Sequence[str] = (),
    scores: Any = None,
    truncate: bool = False,
) -> Any:
    """The interactive view: a Jupyter widget where anywidget is installed, else a `Page`; both have `.save(path)`.

    against: a second text beside the first; beside: a second model, by name or as (model, tokenizer), on the same text;
    off: {layer: [heads]} to switch off, beside the same with all heads.
    heads: "3.1" or several, shown first; target: what the decoder of an encoder-decoder model is given.
    scores: to colour the map by: what importance gave, an atlas, or {name: {kind: (layers, heads)}}.
    """
    service = None
    if isinstance(text, str):
        name, model, tokenizer = run._pair(model, tokenizer)
        how: dict[str, Any] = {"against": against, "beside": beside, "target": target, "off": off, "truncate": truncate}
        seen = passes(text, model, tokenizer=tokenizer, name=name, **how)
        service = Service({name: (model, tokenizer)}, scores=scores)
    else:
        seen = [text] if isinstance(text, Pass) else list(text)
    if not 1 <= len(seen) <= 2:
        raise HeadwiseError(f"the view shows one pass or two beside each other, got {len(seen)}")
    kind = _widget()
    live = service.live if service is not None and kind is not None else None
    value = data(seen, heads=_several(heads), scores=scores, live=live)
    return Page(value, seen[0].text) if kind is None else kind(value, service)


def passes(
    text: str, model: Any, *, against: str | None = None, beside: Any = None, off: Any = None, **how: Any
) -> list[Pass]:
    """The pass that is asked for, and the one to set beside it: another text, another model, or all heads on."""
    if against is not None and beside is not None:
        raise HeadwiseError("a second text or a second model can stand beside the first, not both")
    first = capture.run(text, model, off=off, **how)
    if against is not None:
        return [first, capture.run(against, model, off=off, **how)]
    if beside is not None:
        name, other, tokenizer = run._pair(*(beside if isinstance(beside, tuple) else (beside, None)))
        return [first, capture.run(text, other, **{**how, "name": name, "tokenizer": tokenizer})]
    return [first, capture.run(text, model, **how)] if off else [first]


def saved(seen: Sequence[Pass], path: str | Path, *, heads: str | Sequence[str] = (), scores: Any = None) -> Path:
    """Passes as a page of their own."""
    return Page(data(seen, heads=_several(heads), scores=scores), seen[0].text).save(path)


def _several(heads: str | Sequence[str]) -> tuple[str, ...]:
    return (heads,) if isinstance(heads, str) else tuple(heads)


class Page:
    """The view as a page: shown inside a notebook, or written by `.save(path)`."""

    def __init__(self, value: dict[str, Any], title: str = "headwise") -> None:
        self.data, self.title = value, title

    def save(self, path: str | Path) -> Path:
        page.save(self.data, path, title=_short(self.title))
        return Path(path)

    @functools.cached_property
    def path(self) -> Path:
        """A file of its own, to open in a browser."""
        return self.save(Path(tempfile.mkdtemp(prefix="headwise-")) / "view.html")

    def _repr_html_(self) -> str:
        # a frame without this notebook's origin: what stands in it cannot reach the notebook
        shown = html.escape(page.page(self.data, title=_short(self.title))[0], quote=True)
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{shown}" style="width:100%;height:{HEIGHT}px;border:0" '
            'title="headwise"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Page({_short(self.title)!r}); open {self.path}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


@functools.cache
def _widget() -> Any:
    """The widget's class, or None where anywidget is not installed."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        return None

    class View(anywidget.AnyWidget):
        """The view in a notebook; `.state` is what it shows, `.save(path)` writes it as a page."""

        _esm = bundle.module()
        _css = bundle.style()
        data = traitlets.Dict().tag(sync=True)
        state = traitlets.Unicode("").tag(sync=True)

        def __init__(self, value: dict[str, Any], service: Service | None) -> None:
            super().__init__(data=value)
            self._service = service
            self.on_msg(self._asked)

        def _asked(self, widget: Any, content: Any, buffers: Any) -> None:
            """A question from the page; the answer carries its number."""
            if not isinstance(content, dict) or self._service is None:
                return
            try:
                answer = self._service.answer(content.get("request"))
            except (HeadwiseError, Stopped) as error:
                answer = {"error": " ".join(str(error).split())}
            self.send({"number": content.get("number"), "answer": answer})

        def save(self, path: str | Path) -> Path:
            return Page({**self.data, "live": None}, self.data["runs"][0]["text"]).save(path)

    return View
