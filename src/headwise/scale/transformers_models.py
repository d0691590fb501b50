"""transformers' own tensor parallelism: loading a split model, and `watch` and `mask_heads` of all its heads.

transformers splits the projections by rows without regard to heads: a number of ranks that does not divide them fails
deep inside it, or gives wrong results. Here the number is checked first.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..card import read
from ..errors import HeadwiseError, UnsupportedError
from ..heads import Heads
from ..models.intervene.masking import Change, MaskedHeads
from ..models.loading.loader import load
from ..models.loading.locate import DEFAULT, directory
from ..models.structure import sites
from ..models.structure.selection import asked
from ..models.watching.layers import Layer, Links, Rows
from ..models.watching.watcher import Watch
from ..models.watching.watcher import watch as watch_one
from .head_gather import gather_stats
from .head_plan import HeadPlan, check_divides
from .ranks import Ranks, ranks_of

RANKS = "headwise_ranks"  # attribute of a model that load_split split


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

    split = DistributedConfig(tp_plan="auto", tp_size=ranks.count)
    model = load(name, attn_implementation=attn_implementation, dtype=dtype, distributed=split)
    setattr(model, RANKS, ranks)
    return model


def watch(model: nn.Module, **how: Any) -> Watch:
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
    ranks: Ranks | None = getattr(model, RANKS, None)
    if ranks is None:
        return watch_one(model, **how)
    rest: dict[str, Any] = dict.fromkeys(("weights", "outputs", "rows", "classes", "each"))
    return SplitWatch(ranks, model, **{**rest, "links": 0, "exact": False, **how})


def mask_heads(model: nn.Module, heads: Any, value: Any = "zero") -> MaskedHeads:
    """headwise.mask_heads of a split model: heads have their numbers in the whole model, and each rank masks its own.

    Args:
        model: from `load_split`; in any other model heads are masked as headwise.mask_heads does.
        heads, value: as in headwise.mask_heads, the same on all ranks.

    Example:
        >>> with headwise.scale.mask_heads(model, {0: [3, 5]}):
        ...     logits = model(**inputs).logits
    """
    ranks: Ranks | None = getattr(model, RANKS, None)
    return MaskedHeads(model, heads, value) if ranks is None else SplitMaskedHeads(ranks, model, heads, value)


class SplitWatch(Watch):
    """Records this rank's heads inside the `with` block; at its end the heads of all ranks."""

    def __init__(self, ranks: Ranks, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.ranks = ranks
        self._wanted = self._weights, self._outputs  # by numbers of the whole model, which are not those here
        self._weights, self._outputs = (
            {at: dict.fromkeys(turns, True) for at, turns in x.items()} for x in self._wanted
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, where)
        if error is not None:
            return
        self.ranks.agree("what was watched", "; ".join(map(_seen, self.layers)))
        for at, layer in self._seen.items():
            self._gather(layer, self._site[at])

    def _gather(self, layer: Layer, site: sites.Site) -> None:
        linear = sites.w_o(self.model, site)[1]
        whole = sites.query_heads(self.model, site, sites.input_width(linear) or 0)
        here = layer.heads
        if here.query == whole:  # transformers left this layer whole
            return
        layer.heads = Heads(here.width, whole, here.kv * self.ranks.count, here.dim, here.value_dim)
        plan = HeadPlan(layer.heads, self.ranks.count)
        for run in layer._runs:
            for name in ("all", "prefill", "decode"):
                part = getattr(run, name)
                setattr(run, name, None if part is None else gather_stats(part, plan, self.ranks))
        heads = [asked(wanted, site) for wanted in self._wanted]
        kept = zip(layer.all_weights, layer.all_rows, strict=True)
        layer.all_weights = [_picked(self._all(x), heads[0], rows) for x, rows in kept]
        layer.all_outputs = [_picked(self._all(x), heads[1], None) for x in layer.all_outputs]
        layer.all_links = [Links(self._all(x.keys), self._all(x.weights)) for x in layer.all_links]

    def _all(self, x: Tensor) -> Tensor:
        """(B, heads here, ...) -> (B, all heads, ...)."""
        return torch.cat(self.ranks.all_gather(x), 1)


def _picked(x: Tensor, heads: Any, rows: list[int] | None) -> Any:
    return x if heads is True else Rows(x[:, heads], heads, rows)


class SplitMaskedHeads(MaskedHeads):
    """A split model with some heads changed: each rank changes those that it has."""

    def __init__(self, ranks: Ranks, model: nn.Module, heads: Any, value: Any) -> None:
        super().__init__(model, heads, value)
        self._changes = [SplitChange(ranks, model, **vars(change)) for change in self._changes]


class SplitChange(Change):
    """The change of the heads of one site, by their numbers in the whole model."""

    def __init__(self, ranks: Ranks, model: nn.Module, **whole: Any) -> None:
        super().__init__(**whole)
        self.ranks, self.width = ranks, sites.input_width(sites.w_o(model, self.site)[1])

    def apply(self, x: Tensor, real: Tensor | None) -> Tensor:
        """This rank's part of W_O's input (..., heads here * width), changed."""
        if x.shape[-1] == self.width:  # transformers left this layer whole
            return super().apply(x, real)
        count = self.count // self.ranks.count
        here = slice(self.ranks.rank * count, (self.ranks.rank + 1) * count)
        local = x.unflatten(-1, (count, -1))
        padded = local.new_zeros(*local.shape[:-2], self.count, local.shape[-1])
        padded[..., here, :] = local
        return super().apply(padded.flatten(-2), real).unflatten(-1, (self.count, -1))[..., here, :].flatten(-2)


def _seen(layer: Layer) -> str:
    sizes = ", ".join("x".join(map(str, run.all.count.shape)) for run in layer._runs)
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
