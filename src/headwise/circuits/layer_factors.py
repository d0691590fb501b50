"""The factors of OV and QK of all heads of a layer, with norms folded in and queries and keys rotated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import HeadwiseError, UnsupportedError
from ..models.structure.sites import Site
from .head_weights import LayerWeights, layer_weights
from .low_rank import LowRank
from .norms import Norm, read_norm
from .rotation import head_maps
from .stream_norms import StreamNorms

READERS = {"query": "q", "key": "k", "value": "v"}


@dataclass(frozen=True)
class LayerFactors:
    """W_Q, W_K, W_V and W_O of all heads, as they read the residual stream and write into it."""

    query: Tensor  # (H, d_k, d)
    key: Tensor  # (Hkv, d_k, d of keys)
    value: Tensor  # (Hkv, d_v, d of values)
    output: Tensor  # (H, d, d_v)
    biases: dict[str, Tensor]  # (heads, rows)
    rotation: str
    norm: str
    notes: tuple[str, ...]
    value_norm: Norm | None  # the norm that is folded into W_V

    @property
    def group(self) -> int:
        """How many query heads share a KV head."""
        return len(self.query) // len(self.key)

    def ov(self, head: int) -> LowRank:
        return LowRank(self.output[head].clone(), self.value[head // self.group].clone())  # without the other heads

    def qk(self, head: int) -> LowRank:
        return LowRank(self.query[head].clone().T, self.key[head // self.group].clone())


def layer_factors(
    model: nn.Module, site: Site, norms: StreamNorms, *, distance: int | None = None, fold_norm: bool | None = None
) -> LayerFactors:
    """The factors of a layer's heads; arguments as head_matrices'."""
    if fold_norm is not None and not isinstance(fold_norm, bool):
        raise HeadwiseError(f"fold_norm must be True, False or None, got {fold_norm!r}")
    weights = layer_weights(model, site)
    maps = head_maps(model, weights, norms, distance)
    before, after, words = _norms(model, weights, norms, fold_norm)
    factors = {name: getattr(weights, name) for name in READERS}
    biases = dict(weights.biases)
    for name, norm in before.items():
        if norm.beta is not None and bool(norm.beta.any()):
            constant = factors[name] @ norm.beta
            biases[name] = biases[name] + constant if name in biases else constant
        factors[name] = norm.before(factors[name])
    for name, matrix in (("query", maps.query), ("key", maps.key)):
        if matrix is not None:
            factors[name] = matrix @ factors[name]
            if name in biases:
                biases[name] = (matrix @ biases[name][..., None])[..., 0]
    output = weights.output if after is None else after.after(weights.output)
    multiplier = getattr(getattr(site.module, "config", None), "residual_multiplier", 1.0)
    notes = maps.notes
    if multiplier not in (None, 1.0):
        notes = (*notes, f"the model adds what its heads write times {multiplier:g}, which is not in OV")
    return LayerFactors(
        factors["query"], factors["key"], factors["value"], output, biases,
        maps.rotation, words, notes, before.get("value"),
    )  # fmt: skip


def _norms(
    model: nn.Module, weights: LayerWeights, norms: StreamNorms, fold_norm: bool | None
) -> tuple[dict[str, Norm], Norm | None, str]:
    """The norms to fold into each reader and into W_O, and words about them."""
    site = weights.site
    if fold_norm is False:
        return {}, None, "none folded, as asked; the factors read what the layer's norm gives, if it has one"
    if site.name not in norms.known_modules:
        if fold_norm:
            raise UnsupportedError(f"the norms around {site} are not known: {norms.reason}; give fold_norm=False")
        return {}, None, f"none folded: which norm is before the layer is not known ({norms.reason})"
    before: dict[str, Norm] = {}
    after = None
    try:
        for name, role in READERS.items():
            path = norms.before.get((site.name, role))
            if path is not None:
                rows = getattr(weights, name)
                before[name] = read_norm(model.get_submodule(path), path, rows.shape[-1], rows.dtype)
        path = norms.after.get(site.name)
        if path is not None:
            output = weights.output
            after = read_norm(model.get_submodule(path), path, output.shape[1], output.dtype)
    except UnsupportedError as error:
        if fold_norm:
            raise UnsupportedError(f"{error}; give fold_norm=False") from None
        return {}, None, f"none folded: {error}"
    return before, after, _describe(before, after)


def _describe(before: dict[str, Norm], after: Norm | None) -> str:
    parts = []
    by_norm: dict[str, list[str]] = {}
    for name, norm in before.items():
        action = "gamma and centring" if norm.centred else "gamma"
        by_norm.setdefault(f"{action} of {norm}", []).append(f"W_{name[0].upper()}")
    parts += [f"{norm} folded into {', '.join(readers)}" for norm, readers in by_norm.items()]
    if after is not None:
        parts.append(f"{'gamma and centring' if after.centred else 'gamma'} of {after} folded into W_O")
    return "; ".join(parts) or "none between the residual stream and the layer's projections"
