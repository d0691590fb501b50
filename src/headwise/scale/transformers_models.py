"""transformers' own tensor parallelism: loading a split model; `watch` and `mask_heads` over ranks.

transformers splits the projections by rows without regard to heads: a number of ranks that does not divide them fails
deep inside it, or gives wrong results. Here the number is checked first.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from ..card import read
from ..errors import HeadwiseError, UnsupportedError
from ..models.intervene import MaskedHeads
from ..models.intervene import mask_heads as mask_model_heads
from ..models.loading import DEFAULT, directory, load
from ..models.watching import Watch, WatchOptions
from ..models.watching import watch as watch_model
from .head_plan import check_divides
from .ranks import ranks_of


def load_split(name: Any = DEFAULT, *, attn_implementation: str | None = None, dtype: Any = None) -> Any:
    """headwise.load of a model that transformers splits over the ranks (tp_plan="auto"). All ranks must call it.

    Args:
        name: as in headwise.load.
        attn_implementation, dtype: as in headwise.load.

    Returns:
        The model; in a single process, the whole model.

    Raises:
        RankError: if the number of ranks does not divide the model's heads; the message names the numbers that do.

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
    return load(name, attn_implementation=attn_implementation, dtype=dtype, distributed=distributed)


def watch(model: nn.Module, **options: Unpack[WatchOptions]) -> Watch:
    """headwise.watch, which sees all heads of a split model too. All ranks must call it and run the model alike.

    Args:
        model: split by `split_heads` or `load_split`, or any other.
        options: as in headwise.watch, by the head numbers of the whole model.

    Returns:
        A context manager. At its end the records of all heads are gathered on every rank.

    Example:
        >>> with headwise.scale.watch(model) as seen:
        ...     model(**inputs)
        >>> seen.layers[0].stats["entropy"]  # of all heads
    """
    return watch_model(model, **options)


def mask_heads(model: nn.Module, heads: Any, value: Any = "zero") -> MaskedHeads:
    """headwise.mask_heads, by the heads' numbers in the whole model also where each rank has some of them.

    Args:
        model: split by `split_heads` or `load_split`, or any other.
        heads, value: as in headwise.mask_heads, the same on all ranks.

    Example:
        >>> with headwise.scale.mask_heads(model, {0: [3, 5]}):
        ...     logits = model(**inputs).logits
    """
    return mask_model_heads(model, heads, value)


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
