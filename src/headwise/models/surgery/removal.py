"""prune_heads: a smaller copy of a model, without some of its heads, with the outputs of the masked one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import validation
from ...errors import HeadwiseError, UnsupportedError
from ..hooks import idle
from ..structure import projections
from ..structure import sites as anatomy
from ..structure.projections import Block, Projections
from ..structure.sites import Key, Site
from .dummy_inputs import close, difference, failure, first_line, probe
from .offloading import in_memory
from .save_pretrained import attach
from .shared_biases import TABLE, pick_shared, shared_table

Slots = list[int | None]  # for each new head the old one that it is, or None: zeros

QUERY_COUNTS = (*anatomy.QUERY_HEADS, "num_attn_heads", "num_local_heads")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads")
GROUPS = ("num_key_value_groups", "num_groups", "n_rep")
QUERY_WIDTHS = ("all_head_size", "inner_dim", "split_size", "embed_dim", "hidden_size", "dim", "d_model")
KV_WIDTHS = ("kv_dim",)
COMPENSATE = ("bias", "mean")


@dataclass(frozen=True)
class Kept:
    """What became of the heads of one attention layer; numbers are those of the model before any pruning."""

    query: tuple[int | None, ...]  # for each head that there is, the one it was; None: zeros that even out the groups
    kv: tuple[int | None, ...]
    query_of: int  # heads there were
    kv_of: int
    zeroed: bool = False  # the removed ones are still there, as zeros in W_O

    @property
    def removed(self) -> list[int]:
        return [i for i in range(self.query_of) if i not in self.query]


def prune_heads(
    model: nn.Module,
    heads: Any,
    *,
    zero: bool = False,
    compensate: str | None = None,
    batches: Iterable[Any] | None = None,
    allow_empty: bool = False,
) -> Any:
    """A copy of a model without some heads: {layer: [heads]} or a Plan. Its outputs are those of the masked model.

    The rows of W_Q, W_K, W_V and the columns of W_O are gone; a KV head goes with its last query head, and groups left
    uneven are evened out with zeroed heads. zero=True keeps all shapes and zeroes the columns of W_O instead.
    compensate="bias" moves the constant part of a removed head, its value bias, into the output bias; "mean" moves its
    mean output over batches there. Every head of a layer goes only with allow_empty=True; one of zeros stays then.
    `copy.headwise_heads` says which heads of the first model the copy's are.
    """
    if compensate is not None and compensate not in COMPENSATE:
        raise HeadwiseError(f'compensate must be "bias", "mean" or None, got {compensate!r}')
    if compensate == "mean" and batches is None:
        raise HeadwiseError('compensate="mean" needs batches=, model inputs to take the mean over')
    if hasattr(heads, "check"):
        heads.check(model)
    chosen = which(model, getattr(heads, "heads", heads), allow_empty)
    made = _copied(model)
    constant = _constants(made, chosen, compensate, batches)
    foreign = _remove(made, chosen, constant, zero)
    if not zero:
        _check_result(model, made, foreign, chosen, constant)
    return made.train(model.training)


def _remove(made: Any, chosen: dict[str, list[int]], constant: dict[str, Tensor], zero: bool) -> Site | None:
    """Cut or zero heads in place; the first layer, if any, whose code is not transformers'."""
    sites = anatomy.sites(made)
    touched = list({id(site.module): site for site in sites if site.name in chosen}.values())
    cuts = []
    for site in touched:
        path, out = anatomy.w_o(made, site)
        linears = {path: out}
        projections.check_zeroable(site, out)
        if not zero:
            found = projections.projections(made, site)
            linears |= {part.path: part.linear for part in found.parts}
            cuts.append(found)
        _check_own(made, site, linears, sites)
    for site in touched:
        if site.name in constant:
            _add_bias(anatomy.w_o(made, site)[1], constant[site.name], chosen[site.name])
        if zero:
            _zero(made, site, chosen[site.name])
    for found in cuts:
        reshape(found, *slots(found, _with_padding(found.site, chosen[found.site.name])))
    pick_shared(sites)
    made.headwise_heads = originals(made)
    attach(made)
    return next((site for site in touched if _is_foreign(site)), None)


def _is_foreign(site: Site) -> bool:
    """Whether the code that computes a layer's attention is not transformers' own, which the tests know."""
    forward = inspect.unwrap(type(site.module).forward)
    return not (getattr(forward, "__module__", None) or "").startswith("transformers.")


def _check_result(
    model: nn.Module, made: Any, foreign: Site | None, chosen: dict[str, list[int]], constant: dict[str, Tensor]
) -> None:
    """A pruned model runs; where the code is not transformers', it gives what the model with zeroed heads gives."""
    inputs = probe(made)
    if foreign is not None:
        if inputs is None:
            raise projections.refused(
                foreign, "its code is not transformers', and no inputs to try the result on are known"
            )
        zeroed = _copied(model)
        _remove(zeroed, chosen, constant, zero=True)
        try:
            far = difference(zeroed, made, inputs)
        except Exception as error:  # a model's code fails in any way on sizes that it does not expect
            raise projections.refused(foreign, f"without them its code fails ({first_line(error)})") from error
        if not far <= close(made):
            raise projections.refused(foreign, f"without them its code computes something else (off by {far:.2g})")
    elif inputs is not None and (why := failure(made, inputs)) and not failure(model, inputs):
        raise projections.refused(anatomy.sites(made)[0], f"without them its code fails ({why})")


def _check_own(model: nn.Module, site: Site, linears: dict[str, nn.Module], sites: list[Site]) -> None:
    """Refuse to change a linear layer that another attention layer uses too."""
    for other in sites:
        inside = set(map(id, other.module.modules()))
        if id(site.module) in inside:
            continue
        with suppress(UnsupportedError):
            inside.add(id(anatomy.w_o(model, other)[1]))
        shared = next((path for path, linear in linears.items() if id(linear) in inside), None)
        if shared is not None:
            raise UnsupportedError(
                f"{site} and {other} use one module together, {shared}, so that a head of one of them alone cannot go; "
                "give each a copy of its own first"
            )


def which(model: nn.Module, heads: Mapping[Key, Any], allow_empty: bool = True) -> dict[str, list[int]]:
    """The heads meant, by the path of their module; all layers that one module serves must lose the same."""
    if not isinstance(heads, Mapping):
        raise HeadwiseError(f"heads must be {{layer: [heads]}} or a Plan, got {type(heads).__name__}")
    sites = anatomy.sites(model)
    if not sites:
        raise HeadwiseError(f"no attention layer was found in {type(model).__name__}")
    wanted: dict[tuple[str, int], list[int]] = {}
    for key, numbers in heads.items():
        site = anatomy.find(model, sites, key)
        count = head_count(model, site)
        numbers = [numbers] if isinstance(numbers, int) and not isinstance(numbers, bool) else numbers
        if isinstance(numbers, (str, bytes)) or not isinstance(numbers, Iterable):
            raise HeadwiseError(f"the heads of {site} must be a list of numbers, got {numbers!r}")
        try:
            gone = sorted(set(validation.pick("head", list(numbers), count)))
        except HeadwiseError as error:
            raise HeadwiseError(f"{site}: {error}") from None
        if len(gone) == count and not allow_empty:
            raise HeadwiseError(
                f"all {count} heads of {site} would go; keep one, or say allow_empty=True to leave the layer empty"
            )
        wanted[site.key] = gone
    chosen: dict[str, list[int]] = {}
    for site in sites:
        same = [other for other in sites if other.module is site.module]
        gone = wanted.get(site.key, [])
        odd = next((other for other in same if wanted.get(other.key, []) != gone), None)
        if odd is not None:
            raise HeadwiseError(
                f"{site} and {odd} are one module used {len(same)} times: remove the same heads from all of its layers"
            )
        if gone:
            chosen[site.name] = gone
    return chosen


def head_count(model: nn.Module, site: Site) -> int:
    _, out = anatomy.w_o(model, site)
    return anatomy.query_heads(model, site, anatomy.input_width(out) or 0)


def originals(model: nn.Module) -> dict[Key, list[int | None]]:
    """For each layer that was pruned, the first model's number of every head that it has; None: a head of zeros."""
    sites = anatomy.sites(model)
    many = len({site.kind for site in sites}) > 1
    return {
        (site.key if many else site.index): list(kept.query)
        for site in sites
        if (kept := getattr(site.module, "headwise_kept", None)) is not None
    }


def slots(found: Projections, gone: Iterable[int]) -> tuple[Slots, Slots]:
    """Which old head each new one is: groups without heads left out, the others as large as the largest."""
    size, removed = found.query // found.kv, set(gone)
    groups = {
        group: [i for i in range(group * size, (group + 1) * size) if i not in removed] for group in range(found.kv)
    }
    left = {group: kept for group, kept in groups.items() if kept} or {0: []}
    largest = max(1, *map(len, left.values()))
    query: Slots = []
    for kept in left.values():
        query += [*kept, *[None] * (largest - len(kept))]
    more: Slots = [None] * (-len(query) % found.multiple)  # only where every head has keys and values of its own
    return query + more, [*left, *more]


def reshape(found: Projections, query: Slots, kv: Slots) -> None:
    """Rebuild a site in place from some of its heads, in the order of the slots; None gives a head of zeros."""
    from_slot = {"q": query, "k": kv, "v": kv}
    for part in found.parts:
        old, new = part.layout(found.query, found.kv), part.layout(len(query), len(kv))
        _take_rows(part.linear, _order(old, new, from_slot), len(old))
    _take_columns(found.out, query, found.query)
    for name, (dim, whose) in found.headed.items():
        owner, _, attribute = name.rpartition(".")
        holder = found.site.module.get_submodule(owner)
        if owner == TABLE and shared_table(found.site.module):
            continue  # cut by pick_shared, since layer 0's serves other layers too
        count = found.query if whose == "q" else found.kv
        _replace(holder, attribute, dim, _expanded(from_slot[whose], holder, attribute, dim, count))
        if isinstance(holder, nn.Embedding):
            holder.embedding_dim = len(query)
    _recount(found, len(query), len(kv))
    _remember(found, query, kv)


def _order(old: list[Block], new: list[Block], from_slot: dict[str, Slots]) -> Slots:
    """For each new block the old one's place, or None."""
    place = {block: i for i, block in enumerate(old)}
    sources = [(role, from_slot[role][i]) for role, i in new]
    return [None if number is None else place[role, number] for role, number in sources]


def _index(order: Slots, size: int, device: torch.device) -> Tensor:
    """Blocks -> entries; -1 where zeros are wanted."""
    blocks = torch.tensor([-1 if block is None else block for block in order], device=device)
    entries = blocks[:, None] * size + torch.arange(size, device=device)
    return entries.where(blocks[:, None] >= 0, -1).flatten()


def _replace(module: nn.Module, name: str, dim: int, index: Tensor) -> None:
    old = module._parameters[name]
    assert old is not None
    with torch.no_grad():
        new = old.index_select(dim, index.clamp(min=0).to(old.device))
        shape = [1] * old.dim()
        shape[dim] = -1
        new.masked_fill_((index < 0).view(shape).to(old.device), 0)
    setattr(module, name, nn.Parameter(new.contiguous(), requires_grad=old.requires_grad))


def _expanded(order: Slots, holder: nn.Module, name: str, dim: int, count: int) -> Tensor:
    parameter = holder._parameters[name]
    assert parameter is not None
    return _index(order, parameter.shape[dim] // count, parameter.device)


def _take_rows(linear: nn.Module, order: Slots, blocks: int) -> None:
    size = projections.output_width(linear) // blocks
    weight = linear.get_parameter("weight")
    index = _index(order, size, weight.device)
    _replace(linear, "weight", projections.row_dim(linear), index)
    if linear._parameters.get("bias") is not None:
        _replace(linear, "bias", 0, index)
    setattr(linear, "out_features" if hasattr(linear, "out_features") else "nf", len(index))


def _take_columns(linear: nn.Module, order: Slots, heads: int) -> None:
    width = anatomy.input_width(linear) or 0
    index = _index(order, width // heads, linear.get_parameter("weight").device)
    _replace(linear, "weight", 1 - projections.row_dim(linear), index)
    setattr(linear, "in_features" if hasattr(linear, "in_features") else "nx", len(index))


def _recount(found: Projections, query: int, kv: int) -> None:
    """The numbers that the module keeps about itself, made right."""
    module: Any = found.site.module
    old = projections.attributes(module)
    rows = (
        (QUERY_COUNTS, found.query, query),
        (KV_COUNTS, found.kv, kv),
        (GROUPS, found.query // found.kv, query // kv),
        (QUERY_WIDTHS, found.query * found.value_dim, query * found.value_dim),
        (KV_WIDTHS, found.kv * found.value_dim, kv * found.value_dim),
    )
    for names, before, after in rows:
        for name in names:
            if old.get(name) == before:
                setattr(module, name, after)
    if not any(name in old for name in anatomy.QUERY_HEADS):
        module.num_attention_heads = query
    kind: Any = type(module)
    if _asks_config(kind):
        module.config = OwnConfig(module.config, num_attention_heads=query, num_key_value_heads=kv)


@functools.cache
def _asks_config(kind: Any) -> bool:
    """Whether a module's forward asks its config, which all layers share, for the number of heads."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False
    return "self.config.num_attention_heads" in source or "self.config.num_key_value_heads" in source


class OwnConfig:
    """A model's config as one layer sees it: its own numbers of heads, and all else as the model's is at that time."""

    def __init__(self, config: Any, **own: Any) -> None:
        while isinstance(config, OwnConfig):
            config = config.__dict__["whole"]
        self.__dict__.update(own, whole=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "whole" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["whole"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["whole"], name, value)


def _remember(found: Projections, query: Slots, kv: Slots) -> None:
    before = kept_of(found)
    module: Any = found.site.module
    module.headwise_kept = Kept(
        tuple(None if i is None else before.query[i] for i in query),
        tuple(None if i is None else before.kv[i] for i in kv),
        before.query_of,
        before.kv_of,
    )


def kept_of(found: Projections) -> Kept:
    """What a site still has of the first model: all, unless it was pruned."""
    kept: Kept | None = getattr(found.site.module, "headwise_kept", None)
    if kept is None or kept.zeroed:
        return Kept(tuple(range(found.query)), tuple(range(found.kv)), found.query, found.kv)
    return kept


def _with_padding(site: Site, gone: list[int]) -> list[int]:
    """Heads of zeros go too: they are made anew where they are still needed."""
    kept: Kept | None = getattr(site.module, "headwise_kept", None)
    zeros = [] if kept is None else [i for i, original in enumerate(kept.query) if original is None]
    return sorted({*gone, *zeros})


def _zero(model: nn.Module, site: Site, gone: list[int]) -> None:
    count = head_count(model, site)
    _, out = anatomy.w_o(model, site)
    # a new parameter: another layer may use the old one too
    order: Slots = [None if i in gone else i for i in range(count)]
    dim = 1 - projections.row_dim(out)
    _replace(out, "weight", dim, _expanded(order, out, "weight", dim, count))
    module: Any = site.module
    kept = getattr(module, "headwise_kept", None) or Kept(tuple(range(count)), (), count, 0)
    query = tuple(None if i in gone else number for i, number in enumerate(kept.query))
    module.headwise_kept = Kept(query, kept.kv, kept.query_of, kept.kv_of, zeroed=not kept.kv)


def _copied(model: nn.Module) -> Any:
    """A copy to cut, with all weights in memory."""
    for module in model.modules():
        hooks = [hook for hook in module._forward_pre_hooks.values() if hook is not idle]  # a copy has idle ones
        if any("headwise" in (getattr(hook, "__module__", "") or "") for hook in hooks):
            raise HeadwiseError("the model is being watched or masked; prune it outside of that `with`")
    try:
        return in_memory(model)
    except (TypeError, NotImplementedError, RuntimeError) as error:  # process groups, handles and the like
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied ({first_line(error)}); give the plain model inside of it"
        ) from error


def _constants(
    model: nn.Module, chosen: dict[str, list[int]], how: str | None, batches: Iterable[Any] | None
) -> dict[str, Tensor]:
    """(removed heads, value_dim) a site: what its removed heads always give, or give on average."""
    if how is None:
        return {}
    sites = {site.name: site for site in anatomy.sites(model)}
    if how == "bias":
        constant = {}
        for name, gone in chosen.items():
            found = projections.projections(model, sites[name])
            bias = projections.value_bias(found)
            if bias is not None:
                constant[name] = bias[torch.tensor(gone) // (found.query // found.kv)]
        return constant
    from ..intervene.head_outputs import means

    every = means(model, batches or [])
    return {name: every[name][gone] for name, gone in chosen.items()}


def _add_bias(out: nn.Module, constant: Tensor, gone: list[int]) -> None:
    """W_O^h c_h, for the heads that go, added to W_O's bias; made where there is none."""
    weight = out.get_parameter("weight").detach()
    weight = weight.T if projections.row_dim(out) else weight  # (width, heads * value_dim)
    size = constant.shape[1]
    columns = torch.cat([torch.arange(head * size, (head + 1) * size) for head in gone]).to(weight.device)
    more = weight[:, columns].double() @ constant.flatten().double().to(weight.device)
    bias = out._parameters.get("bias")
    total = more if bias is None else more + bias.detach().double()
    out.bias = nn.Parameter(
        total.to(weight.dtype), requires_grad=weight.requires_grad if bias is None else bias.requires_grad
    )
