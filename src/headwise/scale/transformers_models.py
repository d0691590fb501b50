"""transformers' own tensor parallelism: loading a split model, and `watch` and `mask_heads` of all its heads.

transformers splits the projections by rows without regard to heads: a number of ranks that does not divide them fails
deep inside it, or gives wrong results. Here the number is checked first.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..card import read
from ..errors import HeadwiseError, UnsupportedError
from ..heads import Heads
from ..models.intervene import HeadChange, MaskedHeads, head_changes
from ..models.loading import DEFAULT, directory, load
from ..models.structure import Site, attention_sites, check_watchable, input_width, query_heads, require_sites, w_o
from ..models.watching import HeadRows, Layer, Links, Request, Watch, WatchOptions
from ..models.watching import watch as watch_model
from .head_gather import gather_stats
from .head_plan import HeadPlan, check_divides
from .ranks import Ranks, ranks_of

_ranks_by_model: WeakKeyDictionary[nn.Module, Ranks] = WeakKeyDictionary()  # models that load_split split


def load_split(name: Any = DEFAULT, *, attn_implementation: str | None = None, dtype: Any = None) -> Any:
    """headwise.load of a model that transformers splits over the ranks (tp_plan="auto"). All ranks must call it.

    Args:
        name: as in headwise.load.
        attn_implementation, dtype: as in headwise.load.

    Returns:
        The model; in a single process the whole one.

    Raises:
        RankError: where the number of ranks does not divide the model's heads; it names the numbers that do.

    Example:
        >>> with headwise.scale.init_ranks():
        ...     model = headwise.scale.load_split("smollm2")
    """
    ranks = ranks_of()
    if ranks.count == 1:
        return load(name, attn_implementation=attn_implementation, dtype=dtype)
    folder = directory(name)

    def describe_model() -> str:
        card = read(folder)
        config = _config(folder)
        if not getattr(config, "base_model_tp_plan", None):
            raise UnsupportedError(
                f"transformers has no tensor-parallel plan for {config.model_type}; split its corpus, not its heads"
            )
        check_divides(str(name), [layer.heads for layer in card.attention.layers if layer.heads], ranks.count)
        return f"{config.model_type}, digest {_digest(folder)}"

    ranks.agree("the model", describe_model)
    from transformers.distributed import DistributedConfig

    distributed = DistributedConfig(tp_plan="auto", tp_size=ranks.count)
    model = load(name, attn_implementation=attn_implementation, dtype=dtype, distributed=distributed)
    _ranks_by_model[model] = ranks
    return model


def is_split(model: nn.Module) -> bool:
    """Whether `load_split` split a model, so that every rank has other heads."""
    return model in _ranks_by_model


def watch(model: nn.Module, **options: Unpack[WatchOptions]) -> Watch:
    """headwise.watch of a split model. All ranks must call it and run the model alike.

    Args:
        model: from `load_split`; any other model is watched as headwise.watch does.
        options: as in headwise.watch, by the head numbers of the whole model.

    Returns:
        A context manager. At its end the records of all heads are gathered on every rank.

    Example:
        >>> with headwise.scale.watch(model) as seen:
        ...     model(**inputs)
        >>> seen.layers[0].stats["entropy"]  # of all heads
    """
    ranks = _ranks_by_model.get(model)
    if ranks is None:
        return watch_model(model, **options)
    sites = attention_sites(model)
    check_watchable(model, sites)
    for site in sites:
        if site.source == "function":
            raise UnsupportedError(
                f"{type(site.module).__name__} (at {site.place}) computes its attention itself; of a model that is "
                "split over ranks, only attention in transformers' registry can be watched"
            )
    return SplitWatch(ranks, model, sites, Request.of(model, sites, **options))


def mask_heads(model: nn.Module, heads: Any, value: Any = "zero") -> MaskedHeads:
    """headwise.mask_heads of a split model: heads have their numbers in the whole model, and each rank masks its own.

    Args:
        model: from `load_split`; in any other model heads are masked as headwise.mask_heads does.
        heads, value: as in headwise.mask_heads, the same on all ranks.

    Example:
        >>> with headwise.scale.mask_heads(model, {0: [3, 5]}):
        ...     logits = model(**inputs).logits
    """
    ranks = _ranks_by_model.get(model)
    sites = require_sites(model)
    changes = head_changes(model, sites, heads, value)
    if ranks is not None:
        changes = [SplitChange(ranks, model, **vars(change)) for change in changes]
    return MaskedHeads(model, sites, changes)


class SplitWatch(Watch):
    """Records this rank's heads inside the `with` block; at its end the heads of all ranks."""

    def __init__(self, ranks: Ranks, model: nn.Module, sites: list[Site], request: Request) -> None:
        # head numbers are those of the whole model, not those here: all heads are recorded, and chosen in the end
        super().__init__(model, sites, request.with_all_heads())
        self.ranks, self._whole_request = ranks, request

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if error is not None:
            return
        self.ranks.agree("what was watched", "; ".join(map(_describe_layer, self.layers)))
        for site, layer in self.recording.layers.items():
            self._gather(layer, site)

    def _gather(self, layer: Layer, site: Site) -> None:
        whole, local = query_heads(self.model, site), layer.heads
        if local.query == whole:  # transformers left this layer whole
            return
        layer.heads = Heads(local.width, whole, local.kv * self.ranks.count, local.dim, local.value_dim)
        plan = HeadPlan(layer.heads, self.ranks.count)
        layer.runs = [run.changed(lambda stats: gather_stats(stats, plan, self.ranks)) for run in layer.runs]
        weights, outputs = (x.heads(site) for x in (self._whole_request.weights, self._whole_request.outputs))
        by_call = zip(layer.all_weights, layer.all_rows, strict=True)
        layer.all_weights = [_pick(self._gather_tensor(x), weights, rows) for x, rows in by_call]
        layer.all_outputs = [_pick(self._gather_tensor(x), outputs, None) for x in layer.all_outputs]
        layer.all_links = [Links(self._gather_tensor(x.keys), self._gather_tensor(x.weights)) for x in layer.all_links]

    def _gather_tensor(self, x: Any) -> Tensor:
        """(B, heads here, ...) -> (B, all heads, ...)."""
        return torch.cat(self.ranks.all_gather(x), 1)


def _pick(x: Tensor, heads: Any, rows: list[int] | None) -> Tensor | HeadRows:
    return x if heads is True else HeadRows(x[:, heads], heads, rows)


class SplitChange(HeadChange):
    """The change of the heads of one site, by their numbers in the whole model."""

    def __init__(self, ranks: Ranks, model: nn.Module, **whole: Any) -> None:
        super().__init__(**whole)
        self.ranks, self.width = ranks, input_width(w_o(model, self.site)[1])

    def apply(self, x: Tensor, real: Tensor | None) -> Tensor:
        """This rank's part of W_O's input (..., heads here * width), changed."""
        if x.shape[-1] == self.width:  # transformers left this layer whole
            return super().apply(x, real)
        count = self.count // self.ranks.count
        own_heads = slice(self.ranks.rank * count, (self.ranks.rank + 1) * count)
        local = x.unflatten(-1, (count, -1))
        padded = local.new_zeros(*local.shape[:-2], self.count, local.shape[-1])
        padded[..., own_heads, :] = local
        return super().apply(padded.flatten(-2), real).unflatten(-1, (self.count, -1))[..., own_heads, :].flatten(-2)


def _describe_layer(layer: Layer) -> str:
    sizes = ", ".join("x".join(map(str, run.all.count.shape)) for run in layer.runs)
    return f"{layer.kind} {layer.index}: {sizes}"


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers fails in many ways on the files of others
        raise HeadwiseError(f"{str(folder)!r} has no config that transformers reads: {error}") from error


def _digest(folder: Path) -> str:
    """A digest of a model's config and the sizes of its weight files."""
    files = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps([config, files], sort_keys=True).encode()).hexdigest()[:12]
