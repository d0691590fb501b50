"""`headwise.view`: the interactive view as a widget in a notebook, or as a page."""

from __future__ import annotations

import functools
import html
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ..errors import HeadwiseError
from ..inspection import SENTENCE
from ..inspection.run import check_image_alone
from ..models.loading.loader import tokenizer as load_tokenizer
from ..models.loading.resolve import resolve, resolve_image_model
from . import bundle, capture, image_capture, page
from .capture import Pass, RunOptions, StoppedError
from .payload import data
from .service import Service

HEIGHT = 820  # pixels of a page inside a notebook


def view(
    text: str | Pass | Sequence[Pass] = SENTENCE,
    model: Any = None,
    *,
    image: Any = None,
    tokenizer: Any = None,
    processor: Any = None,
    against: str | None = None,
    beside: Any = None,
    target: str | None = None,
    off: Any = None,
    heads: str | Sequence[str] = (),
    scores: Any = None,
    truncate: bool = False,
) -> Any:
    """The interactive view of what every head does with a text, or with an image.

    Args:
        text: the text; or one or two passes that `headwise.ui.capture.run` recorded.
        model: a model or its name; the bundled model by default.
        image: a file or a Pillow image, instead of a text; the model must then be a vision model.
        tokenizer: the tokenizer of the model, if it cannot be found by name.
        processor: the transformers image processor of a vision model, if it cannot be found by name.
        against: a second text, to compare with the first.
        beside: a second model to compare with on the same text, by name or as (model, tokenizer).
        target: the decoder input of an encoder-decoder model; with an image, the text that goes with it.
        off: {layer: [heads]} to switch off; the result is compared with the same pass with all heads on.
        heads: a head such as "3.1", or several, to show first.
        scores: to colour the map by: importance, an atlas, or {name: {kind: (layers, heads)}}.
        truncate: truncate a text that is too long for the model.

    Returns:
        A Jupyter widget if anywidget is installed, else a `Page`. Both have `.save(path)`, which writes one HTML file.

    Raises:
        HeadwiseError: for a text that is empty or too long, a head that does not exist, or scores of another shape.

    Example:
        >>> shown = headwise.view("The animal was too tired.", heads="3.1")  # doctest: +SKIP
        >>> shown.save("heads.html")  # doctest: +SKIP
    """
    service = None
    if image is not None:
        check_image_alone(text, against)
        if target is not None and tokenizer is None and isinstance(model, (str, os.PathLike)):
            tokenizer = load_tokenizer(model)
        name, model, processor = resolve_image_model(model, processor)
        options: ImageOptions = {"processor": processor, "tokenizer": tokenizer, "target": target, "name": name}
        passes = run_image_passes(image, model, beside=beside, off=off, **options)
    elif isinstance(text, str):
        name, model, tokenizer = resolve(model, tokenizer)
        passes = run_passes(
            text,
            model,
            against=against,
            beside=beside,
            off=off,
            tokenizer=tokenizer,
            name=name,
            target=target,
            truncate=truncate,
        )
        service = Service({name: (model, tokenizer)}, scores=scores)
    else:
        passes = list(text) if isinstance(text, Iterable) else [text]
        for item in passes:
            if not isinstance(item, Pass):
                raise HeadwiseError(
                    f"a view is of a text or of passes of headwise.ui.capture.run, got {type(item).__name__}"
                )
    if not 1 <= len(passes) <= 2:
        raise HeadwiseError(f"the view shows one pass or two beside each other, got {len(passes)}")
    widget_class = _widget_class()
    live = service.live if service is not None and widget_class is not None else None
    content = data(passes, heads=_labels(heads), scores=scores, live=live)
    return Page(content, passes[0].text) if widget_class is None else widget_class(content, service)


def run_passes(
    text: str,
    model: Any,
    *,
    against: str | None = None,
    beside: Any = None,
    off: Any = None,
    **options: Unpack[RunOptions],
) -> list[Pass]:
    """The requested pass, and the one to compare it with: another text, another model, or all heads on."""
    if against is not None and beside is not None:
        raise HeadwiseError("a second text or a second model can stand beside the first, not both")
    first = capture.run(text, model, off=off, **options)
    if against is not None:
        return [first, capture.run(against, model, off=off, **options)]
    if beside is not None:
        name, other, tokenizer = resolve(*(beside if isinstance(beside, tuple) else (beside, None)))
        return [first, capture.run(text, other, **{**options, "name": name, "tokenizer": tokenizer})]
    return [first, capture.run(text, model, **options)] if off else [first]


class ImageOptions(TypedDict, total=False):
    """Options of `image_capture.run_image` that both passes of a comparison share."""

    processor: Any
    tokenizer: Any
    target: str | None
    name: str | None


def run_image_passes(
    image: Any, model: Any, *, beside: Any = None, off: Any = None, **options: Unpack[ImageOptions]
) -> list[Pass]:
    """The requested pass over an image, and the one to compare it with: another model, or all heads on."""
    first = image_capture.run_image(image, model, off=off, **options)
    if beside is not None:
        if options.get("target") is not None:
            raise HeadwiseError("two models are compared on an image alone; leave the text or the second model out")
        other, processor = beside if isinstance(beside, tuple) else (beside, None)
        return [first, image_capture.run_image(image, other, processor=processor)]
    return [first, image_capture.run_image(image, model, **options)] if off else [first]


def save_passes(
    passes: Sequence[Pass], path: str | Path, *, heads: str | Sequence[str] = (), scores: Any = None
) -> Path:
    """Write passes as a page."""
    return Page(data(passes, heads=_labels(heads), scores=scores), passes[0].text).save(path)


def _labels(heads: str | Sequence[str]) -> tuple[str, ...]:
    return (heads,) if isinstance(heads, str) else tuple(heads)


class Page:
    """The view as a page: shown inside a notebook, or written by `.save(path)`."""

    def __init__(self, content: dict[str, Any], title: str = "headwise") -> None:
        self.data, self.title = content, title

    def save(self, path: str | Path) -> Path:
        page.save(self.data, path, title=_short(self.title))
        return Path(path)

    @functools.cached_property
    def path(self) -> Path:
        """A temporary file with the page, to open in a browser."""
        return self.save(Path(tempfile.mkdtemp(prefix="headwise-")) / "view.html")

    def _repr_html_(self) -> str:
        # a frame without the notebook's origin: its content cannot reach the notebook
        escaped = html.escape(page.page(self.data, title=_short(self.title))[0], quote=True)
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{escaped}" style="width:100%;height:{HEIGHT}px;border:0" '
            'title="headwise"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Page({_short(self.title)!r}); open {self.path}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


@functools.cache
def _widget_class() -> Any:
    """The class of the widget, or None if anywidget is not installed."""
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

        def __init__(self, content: dict[str, Any], service: Service | None) -> None:
            super().__init__(data=content)
            self._service = service
            self.on_msg(self._on_message)

        def __repr__(self) -> str:
            return "View(...): .save(path) writes it as a page"  # shown where a front end draws no widgets

        def _on_message(self, widget: Any, message: Any, buffers: Any) -> None:
            """Answer a request of the page; the answer carries its number."""
            if not isinstance(message, dict) or self._service is None:
                return
            try:
                answer = self._service.answer(message.get("request"))
            except (HeadwiseError, StoppedError) as error:
                answer = {"error": " ".join(str(error).split())}
            self.send({"number": message.get("number"), "answer": answer})

        def save(self, path: str | Path) -> Path:
            return Page({**self.data, "live": None}, self.data["runs"][0]["text"]).save(path)

    return View
