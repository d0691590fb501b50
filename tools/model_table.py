"""Write into docs/models.md what can be watched, masked and pruned of every transformers model type: `make models`.

Each type is built without memory, from its default config with two layers, and headwise is asked where its heads are.
Nothing is run, so a type counts as far as its structure is known; what `prune_heads` and `watch` check while they work
is not in the table.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from markdown_sections import write_section
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from headwise.errors import UnsupportedError
from headwise.models.structure.heads import query_heads, w_o
from headwise.models.structure.projections import projections
from headwise.models.structure.sites import Site, attention_sites, check_watchable

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
SECTION = "models"
LAYERS = 2
# the names that configs have for a number of layers
LAYER_COUNTS = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers "
    "depth"
).split()
SOURCES = {
    "registry": "transformers' attention registry",
    "module": "modules of PyTorch or headwise",
    "function": "the functions that its code calls",
}
REASON_LENGTH = 150  # characters of a reason in the table


@dataclass(frozen=True)
class ModelType:
    """What can be done with the heads of one model type."""

    name: str
    sources: tuple[str, ...] = ()  # how its attention is seen; none: it has no attention that headwise knows
    unbuilt: str = ""  # why it could not be built here
    mask: str = ""  # why its heads cannot be masked; "": they can
    prune: str = ""  # why its heads cannot be cut out; "": they can


def examine(name: str) -> ModelType:
    """Build one type and look for the parts that masking and pruning need."""
    try:
        model = build(name)
    except Exception as error:  # configs and models raise any kind of error
        return ModelType(name, unbuilt=_one_line(error))
    sites = attention_sites(model)
    if not sites:
        return ModelType(name)
    try:
        check_watchable(model, sites)
    except UnsupportedError as error:
        return ModelType(name, unbuilt=_one_line(error))
    sources = tuple(source for source in SOURCES if any(site.source == source for site in sites))
    mask, prune = (_problem(model, sites, find) for find in (_find_heads, projections))
    return ModelType(name, sources, mask=mask, prune=prune)


def build(name: str) -> nn.Module:
    """A model of the type with few layers, on the meta device; with its own number of layers where those do not fit."""
    error: Exception | None = None
    for layers in (LAYERS, None):
        try:
            config = transformers.AutoConfig.for_model(name)
            if layers is not None:
                set_layers(config, layers)
            with torch.device("meta"), redirect_stderr(StringIO()):
                model: nn.Module = transformers.AutoModel.from_config(config)
            return model
        except Exception as why:  # the next attempt may fit
            error = error or why
    assert error is not None
    raise error


def set_layers(config: Any, layers: int) -> None:
    """Give a config, and those inside it, this many layers at most."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            set_layers(value, layers)
        elif name in LAYER_COUNTS and isinstance(value, int):
            setattr(config, name, min(layers, value))
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list):
            setattr(config, name, (list(dict.fromkeys(kinds)) * layers)[:layers])


def _find_heads(model: nn.Module, site: Site) -> None:
    """What masking needs: the layer that reads the heads, and their number."""
    w_o(model, site)
    query_heads(model, site)


def _problem(model: nn.Module, sites: list[Site], find: Callable[[nn.Module, Site], object]) -> str:
    """Why `find` refuses one of the sites, without advice; "" where it refuses none."""
    for site in sites:
        try:
            find(model, site)
        except UnsupportedError as error:
            return (str(getattr(error, "reason", "")) or _one_line(error)).partition(";")[0]
    return ""


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= REASON_LENGTH else words[:REASON_LENGTH].rsplit(" ", 1)[0] + " ..."


def table(types: list[ModelType]) -> str:
    """Types by what can be done with them; one row per type where something cannot."""
    built = [kind for kind in types if kind.sources]
    free = [kind for kind in built if not kind.mask and not kind.prune]
    limited = [kind for kind in built if kind.mask or kind.prune]
    counts = Counter(source for kind in built for source in kind.sources)
    lines = [
        f"transformers {transformers.__version__}, {len(types)} model types with a base model.",
        "",
        "| types | watched | masked | pruned |",
        "|--:|---|---|---|",
        f"| {len(free)} | yes | yes | yes |",
        f"| {sum(not kind.mask for kind in limited)} | yes | yes | refused, with a reason |",
        f"| {sum(bool(kind.mask) for kind in limited)} | yes | not all layers | refused, with a reason |",
        f"| {sum(not kind.sources and not kind.unbuilt for kind in types)} | no attention heads known | | |",
        f"| {sum(bool(kind.unbuilt) for kind in types)} | not built here, so not known | | |",
        "",
        "Their attention is seen in "
        + ", ".join(f"{words} ({counts[source]} types)" for source, words in SOURCES.items())
        + ".",
        "",
        "### Watched, masked and pruned",
        _names(free),
        "",
        "### With limits",
        "| type | masked | why heads are not cut out |",
        "|---|---|---|",
        *(f"| {kind.name} | {'no' if kind.mask else 'yes'} | {_cell(kind.prune or kind.mask)} |" for kind in limited),
        "",
        "### Without attention heads that are known",
        _names(kind for kind in types if not kind.sources and not kind.unbuilt),
        "",
        "### Not built here",
        "Their default config does not build, or they need a package that was missing.",
        "",
        _names(kind for kind in types if kind.unbuilt),
    ]
    return "\n".join(lines)


def _names(types: Any) -> str:
    return ", ".join(f"`{kind.name}`" for kind in types) or "None."


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("__", "\\_\\_")


def examine_all(names: list[str]) -> Iterator[ModelType]:
    for i, name in enumerate(names):
        sys.stderr.write(f"\r{i + 1} of {len(names)} {name:40}")
        yield examine(name)
    sys.stderr.write("\n")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    write_section(PAGE, SECTION, table(list(examine_all(sorted(MODEL_MAPPING_NAMES)))))
