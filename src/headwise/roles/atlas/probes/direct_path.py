"""The direct path from a head's output to the logits: W_O, the residual stream, the final norm and the unembedding.

The norms are located in one pass of the model, and the output that attention adds to the stream is compared with the
input of the next norm or layer. A model whose blocks do anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....circuits.norms import Norm, is_norm, read_norm
from ....errors import UnsupportedError
from ....models.structure.heads import query_heads, w_o
from ....models.structure.linear_layers import row_dim, weight_problem
from ....models.structure.sites import Site, attention_sites
from ....models.text_inputs import run_on_tokens
from ..sums import Key

# between what attention is said to add and what the stream is found to have, relative to the stream
CLOSE, ROUNDINGS = 1e-4, 4  # at least, and in units of the precision, for sums in another order


@dataclass(frozen=True)
class Writer:
    """How the heads of one layer write into the residual stream."""

    site: Site
    block: str  # path of the layer around the attention
    linear: nn.Module  # W_O
    heads: int
    norm: Norm | None  # after W_O
    factor: float  # that a model multiplies its blocks' outputs by

    def write(self, outputs: Tensor) -> Tensor:
        """The contribution of each head to the stream, (H, n, d), from its outputs (n, H, width), in float64."""
        weight = self.linear.get_parameter("weight").detach().double()
        rows = (weight.T if row_dim(self.linear) == 0 else weight).unflatten(0, (self.heads, -1))  # (H, width, d)
        written = torch.einsum("nhw,hwd->hnd", outputs.double(), rows)  # without the bias, which is no head's
        if self.norm is not None:
            with torch.no_grad():
                scales = self.norm.scales(self.linear(outputs.flatten(1)).double())
            written = self.norm.after(written.transpose(1, 2)).transpose(1, 2) / scales
        return self.factor * written


@dataclass(frozen=True)
class DirectPath:
    """A model's writers, its final norm and its unembedding."""

    writers: dict[Key, Writer]
    final: str | None  # path of the final norm, in the model
    norm: Norm | None
    unembedding: Tensor  # (vocabulary, d)

    def readers(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """(n, d): what the logits of some tokens read from the stream, before its scale is taken off, in float64."""
        rows = self.unembedding[torch.as_tensor(tokens, device=self.unembedding.device)].detach().double()
        return rows if self.norm is None else self.norm.before(rows)

    def scales(self, stream: Tensor) -> Tensor:
        """(..., 1): the scale of the final norm for a stream (..., d)."""
        return stream.new_ones(*stream.shape[:-1], 1) if self.norm is None else self.norm.scales(stream)


@dataclass
class _Seen:
    """The inputs and outputs of modules in one pass."""

    norms: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    blocks: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    children: dict[str, list[Tensor]] = field(default_factory=dict)  # outputs of modules inside each block
    written: dict[str, Tensor] = field(default_factory=dict)  # W_O -> its output
    last: Tensor | None = None  # what the unembedding is given


def direct_path(model: Any, inputs: dict[str, Any], is_measured: Callable[[str], bool]) -> DirectPath:
    """The direct path of a decoder, from one pass over some inputs.

    Raises:
        UnsupportedError: for a model without an unembedding, or whose blocks add anything else than W_O's output.
    """
    find = getattr(model, "get_output_embeddings", None)
    unembedding = find() if callable(find) else None
    weight = getattr(unembedding, "weight", None)
    if unembedding is None or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise UnsupportedError(f"{type(model).__name__} has no unembedding, so that what a head writes is no token")
    width = weight.shape[1]
    sites = [site for site in attention_sites(model) if is_measured(site.kind)]
    blocks = {site: block_path(site) for site in sites}
    seen = _Seen()
    with torch.no_grad(), _watching(model, unembedding, blocks, seen):
        run_on_tokens(model, inputs)
    final, norm = _final_norm(model, seen, width)
    writers = {site.key: _writer(model, site, blocks[site], seen, width) for site in sites}
    return DirectPath(writers, final, norm, weight)


def block_path(site: Site) -> str:
    """The path of the layer around an attention module: up to the last number in its path."""
    parts = site.name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        raise UnsupportedError(f"{site} ({site.place}) is in no list of layers, so its residual stream is not known")
    return ".".join(parts[: numbers[-1] + 1])


@contextmanager
def _watching(model: Any, unembedding: nn.Module, blocks: dict[Site, str], seen: _Seen) -> Iterator[None]:
    handles = []

    def on(module: nn.Module, hook: Callable[[Any, Any], None]) -> None:
        def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = args[0] if args else kwargs.get("hidden_states")
            y = output[0] if isinstance(output, tuple) and output else output
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                hook(x, y)

        handles.append(module.register_forward_hook(call, with_kwargs=True))

    try:
        for path, module in model.named_modules():
            if is_norm(module):
                on(module, partial(_store_call, seen.norms, path))
        for site, block in blocks.items():
            inside = model.get_submodule(block)
            on(inside, partial(_store_call, seen.blocks, block))
            for child in inside.children():
                on(child, partial(_add_output, seen.children, block))
            path, out = w_o(model, site)
            on(out, partial(_store_output, seen.written, path))
        on(unembedding, lambda x, y: setattr(seen, "last", x))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _store_call(calls: dict[str, tuple[Tensor, Tensor]], name: str, x: Tensor, y: Tensor) -> None:
    calls[name] = x, y


def _store_output(outputs: dict[str, Tensor], name: str, x: Tensor, y: Tensor) -> None:
    outputs[name] = y


def _add_output(outputs: dict[str, list[Tensor]], name: str, x: Tensor, y: Tensor) -> None:
    outputs.setdefault(name, []).append(y)


def _final_norm(model: Any, seen: _Seen, width: int) -> tuple[str | None, Norm | None]:
    name = type(model).__name__
    if seen.last is None:
        raise UnsupportedError(f"{name} did not call its unembedding, so what stands before it is not known")
    for path, (_, y) in reversed(seen.norms.items()):
        if y.shape == seen.last.shape and torch.equal(y, seen.last):
            return path, read_norm(model.get_submodule(path), path, width, torch.float64)
    last_block = next(reversed(seen.blocks.values()), None)
    if last_block is not None and _close(last_block[1], seen.last):
        return None, None
    raise UnsupportedError(f"what {name} does between its last layer and its unembedding is not known")


def _writer(model: Any, site: Site, block: str, seen: _Seen, width: int) -> Writer:
    path, linear = w_o(model, site)
    if problem := weight_problem(linear):
        raise UnsupportedError(
            f"W_O of {site} is not a plain linear layer ({problem[0]}), so what a head writes is not known"
        )
    written = seen.written.get(path)
    if written is None or block not in seen.blocks:
        raise UnsupportedError(f"{site} was not seen writing into a residual stream, so its direct effect is not known")
    norm_path = next(
        (name for name, (x, _) in seen.norms.items() if x.shape == written.shape and torch.equal(x, written)), None
    )
    norm = None
    if norm_path is not None:
        norm = read_norm(model.get_submodule(norm_path), norm_path, width, torch.float64)
        written = seen.norms[norm_path][1]
    config = getattr(model, "config", None)
    factor = float(getattr(config, "residual_multiplier", None) or 1.0)
    if not _adds(factor * written, block, seen):
        raise UnsupportedError(
            f"{type(model).__name__} adds something else to the stream of {site} than W_O's output, so the direct "
            "effect of its heads is not known"
        )
    return Writer(site, block, linear, query_heads(model, site), norm, factor)


def _adds(written: Tensor, block: str, seen: _Seen) -> bool:
    """Whether a block's stream has this added: in front of its next norm, or beside another module at its end."""
    before, after = seen.blocks[block]
    if written.shape != before.shape:
        return False
    stream = before + written
    inner = [x for path, (x, _) in seen.norms.items() if path.startswith(f"{block}.")]
    if any(_close(x, stream) for x in inner) or _close(after, stream):
        return True
    return any(_close(after, stream + y) for y in seen.children.get(block, ()))


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    tolerance = max(CLOSE, ROUNDINGS * torch.finfo(a.dtype).eps)
    return float((a.double() - b.double()).norm()) <= tolerance * float(b.double().norm())
