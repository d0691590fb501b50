"""prune_heads: a smaller copy of a model, without some of its heads, with the outputs of the masked model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor, nn

from ...errors import HeadwiseError, UnsupportedError
from ...plans import Plan
from .. import multihead
from ..batches import as_batches
from ..hooks import has_hooks
from ..structure.adapters import find_adapter
from ..structure.discovery import ModuleClass
from ..structure.heads import head_numbers, input_width, query_heads, w_o
from ..structure.linear_layers import row_dim
from ..structure.observed import copy_layers, forget_layers
from ..structure.partition import check_whole
from ..structure.projections import Projections, check_zeroable, layer_shapes, projections, refusal
from ..structure.sites import ByLayer, Site, attention_sites, find_sites, first_per_module, require_sites
from ..structure.wrappers import is_sharded
from .compensation import COMPENSATE, Compensation, add_to_output_bias, removed_outputs
from .dummy_inputs import close, difference, dummy_inputs, failure, first_line, random_input
from .kept_heads import KeptHeads, kept_heads, set_head_numbers, set_kept_heads
from .offloading import in_memory
from .reshape import Slots, head_slots, reshape_heads, select_heads_of, zero_padding
from .save_pretrained import attach
from .shared_biases import share_biases

Model = TypeVar("Model", bound=nn.Module)
GIVE_BATCHES = "give batches=[inputs of the model] to compare on, or "  # at the end of a refusal


def prune_heads(
    model: Model,
    heads: ByLayer[int | Iterable[int]] | Plan,
    *,
    zero: bool = False,
    compensate: Compensation | None = None,
    batches: Iterable[Any] | None = None,
    allow_empty: bool = False,
) -> Model:
    """A copy of a model without some heads; its outputs are those of the model with these heads masked.

    The rows of W_Q, W_K, W_V and the columns of W_O are removed. A KV head is removed together with its last query
    head; uneven groups are padded with zeroed heads. `copy.headwise_heads` maps the heads of the copy to the heads of
    the original.

    Args:
        model: any PyTorch model whose projections are known; it is not changed.
        heads: {layer: [heads]}, where a layer is its number, (kind, number) or its module's path; or a Plan.
        zero: keep all shapes, and set the heads' columns of W_O to zero instead.
        compensate: "bias" moves the constant part of a removed head, its value bias, into the output bias; "mean"
            moves its mean output over the batches there.
        batches: model inputs, for compensate="mean", and to compare the result with the masked model if neither the
            code nor the inputs of the model are known.
        allow_empty: let a layer lose all of its heads; one zeroed head then remains.

    Returns:
        The pruned copy, a model of the same class.

    Raises:
        HeadwiseError: for layers and heads that the model does not have, or a plan for another model.
        UnsupportedError: if removing heads would not be exact, for example with quantized weights.

    Example:
        >>> smaller = headwise.prune_heads(model, {0: [1, 3], 2: [0]})
        >>> headwise.save(smaller, "smaller")
    """
    if compensate is not None and compensate not in COMPENSATE:
        raise HeadwiseError(f'compensate must be "bias", "mean" or None, got {compensate!r}')
    if compensate == "mean" and batches is None:
        raise HeadwiseError('compensate="mean" needs batches=, model inputs to take the mean over')
    if isinstance(heads, Plan):
        check_plan(heads, model)
        heads = heads.heads
    batches = None if batches is None else as_batches(batches)
    removed = heads_by_module(model, heads, allow_empty)
    pruned = copy_for_surgery(model)
    constants = removed_outputs(pruned, removed, compensate, batches)
    foreign = _remove_heads(pruned, removed, constants, zero)
    if not zero:
        for path in removed:
            forget_layers(pruned.get_submodule(path))
        _check_result(model, pruned, foreign, removed, constants, batches)
    pruned.train(model.training)
    return pruned


def check_plan(plan: Plan, model: nn.Module) -> None:
    """Refuse a plan that was made for a model of other layers and heads."""
    plan.check_layers(layer_shapes(model), type(model).__name__)


def heads_by_module(model: nn.Module, heads: ByLayer[Any], allow_empty: bool = True) -> dict[str, list[int]]:
    """The heads that a user named, {module path: heads}; all layers that one module serves must lose the same."""
    if not isinstance(heads, Mapping):
        raise HeadwiseError(f"heads must be {{layer: [heads]}} or a Plan, got {type(heads).__name__}")
    sites = require_sites(model)
    by_layer: dict[tuple[str, int], list[int]] = {}
    for site, requested in zip(find_sites(model, sites, heads), heads.values(), strict=True):
        count = query_heads(model, site)
        numbers = sorted(set(head_numbers(site, requested, count)))
        if len(numbers) == count and not allow_empty:
            raise HeadwiseError(
                f"all {count} heads of {site} would go; keep one, or say allow_empty=True to leave the layer empty"
            )
        by_layer[site.key] = numbers
    by_module: dict[str, list[int]] = {}
    for site in sites:
        served = [other for other in sites if other.module is site.module]
        numbers = by_layer.get(site.key, [])
        odd = next((other for other in served if by_layer.get(other.key, []) != numbers), None)
        if odd is not None:
            raise HeadwiseError(
                f"{site} and {odd} are one module used {len(served)} times: remove the same heads from all of its "
                "layers"
            )
        if numbers:
            by_module[site.name] = numbers
    return by_module


def _remove_heads(model: Any, removed: dict[str, list[int]], constants: dict[str, Tensor], zero: bool) -> list[Site]:
    """Cut or zero heads in place; the layers whose code is not known."""
    sites = attention_sites(model)
    pruned_sites = first_per_module(site for site in sites if site.name in removed)
    cuts = []
    for site in pruned_sites:
        path, out = w_o(model, site)
        linears = {path: out}
        check_zeroable(site, out)
        if not zero:
            layer = projections(model, site)
            linears |= {part.path: part.linear for part in layer.parts}
            cuts.append(layer)
        check_not_shared(model, site, linears, sites)
    for site in pruned_sites:
        if site.name in constants:
            add_to_output_bias(w_o(model, site)[1], constants[site.name], removed[site.name])
        if zero:
            _zero_heads(model, site, removed[site.name])
    for layer in cuts:
        # padding of an earlier removal goes too: it is made again where it is still needed
        reshape_heads(layer, *head_slots(layer, {*removed[layer.site.name], *zero_padding(layer)}))
    share_biases(sites)
    multihead.keep_padded(model)
    set_head_numbers(model)
    attach(model)
    return [site for site in pruned_sites if _is_foreign(site)]


def _is_foreign(site: Site) -> bool:
    """Whether the code that computes a layer's attention is not transformers', PyTorch's or ours, which tests cover."""
    if site.source == "module":
        return False
    forward = inspect.unwrap(type(site.module).forward)
    return not (getattr(forward, "__module__", None) or "").startswith("transformers.")


def _check_result(
    model: nn.Module,
    pruned: Any,
    foreign: list[Site],
    removed: dict[str, list[int]],
    constants: dict[str, Tensor],
    batches: list[Any] | None,
) -> None:
    """Check that a pruned model runs; if its code is not known, also that it equals the model with zeroed heads."""
    inputs = dummy_inputs(pruned)
    if foreign:
        zeroed_model = copy_for_surgery(model)
        _remove_heads(zeroed_model, removed, constants, zero=True)
        if batches and (inputs is None or failure(zeroed_model, inputs)):
            inputs = batches[0]
        if inputs is not None:
            _compare(zeroed_model, pruned, foreign[0], inputs)
        else:
            for site in foreign:
                zeroed, layer = zeroed_model.get_submodule(site.name), projections(pruned, site)
                _compare(zeroed, site.module, site, _layer_inputs(zeroed, layer))
        return
    inputs = batches[0] if inputs is None and batches else inputs
    if inputs is not None and (reason := failure(pruned, inputs)) and not failure(model, inputs):
        raise refusal(attention_sites(pruned)[0], f"without them its code fails ({reason})")


def _compare(zeroed: nn.Module, pruned: nn.Module, site: Site, inputs: Any) -> None:
    """Refuse to have cut a layer whose code then fails or computes something else."""
    try:
        distance = difference(zeroed, pruned, inputs)
    except Exception as error:  # a model's code fails in any way on sizes that it does not expect
        if reason := failure(zeroed, inputs):
            name = type(zeroed).__name__
            reason = f"{name} itself, with all of its heads, fails on the inputs that the result is tried on ({reason})"
            raise refusal(site, reason, GIVE_BATCHES) from error
        raise refusal(site, f"without them its code fails ({first_line(error)})") from error
    if not distance <= close(pruned):
        raise refusal(site, f"without them its code computes something else (off by {distance:.2g})")


def _layer_inputs(module: nn.Module, layer: Projections) -> tuple[Tensor, ...]:
    """Random inputs that a declared layer runs on by itself: one tensor for all, or queries, keys and values."""
    cls: ModuleClass = type(module)
    if find_adapter(cls) is None:
        reason = "its code is not transformers', and no inputs to try the result on are known"
        raise refusal(layer.site, reason, GIVE_BATCHES)
    biases = [name for name in inspect.signature(cls.forward).parameters if "bias" in name or "alibi" in name]
    if biases:
        raise refusal(layer.site, f"its {biases[0]} may have an entry per head, made elsewhere", GIVE_BATCHES)
    widths = {
        role: input_width(part.linear) or 0
        for part in layer.parts
        for role in {role for role, _ in part.layout(layer.query, layer.kv)}
    }
    like = layer.out.get_parameter("weight")
    query, key, value = (random_input(widths[role], like) for role in "qkv")
    for inputs in ((query,), (query, query, query), (query, key, value), (query, key)):
        if failure(module, inputs) is None:
            return inputs
    reason = "its code is not known, and it runs neither on one tensor nor on queries, keys and values alone"
    raise refusal(layer.site, reason, GIVE_BATCHES)


def check_not_shared(model: nn.Module, site: Site, linears: dict[str, nn.Module], sites: list[Site]) -> None:
    """Refuse to change a linear layer that another attention layer uses too."""
    for other in sites:
        inside = set(other.module.modules())
        if site.module in inside:
            continue
        with suppress(UnsupportedError):
            inside.add(w_o(model, other)[1])
        shared_path = next((path for path, linear in linears.items() if linear in inside), None)
        if shared_path is not None:
            raise UnsupportedError(
                f"{site} and {other} use one module together, {shared_path}, so that a head of one of them alone "
                "cannot go; give each a copy of its own first"
            )


def _zero_heads(model: nn.Module, site: Site, heads: list[int]) -> None:
    """Set the columns of W_O of some heads to zero, and record that."""
    count, out = query_heads(model, site), w_o(model, site)[1]
    slots: Slots = [None if i in heads else i for i in range(count)]
    select_heads_of(out, "weight", 1 - row_dim(out), slots, count)
    record = kept_heads(site.module) or KeptHeads(tuple(range(count)), (), count, 0)
    query = tuple(None if i in heads else number for i, number in enumerate(record.query))
    set_kept_heads(site.module, KeptHeads(query, record.kv, record.query_of, record.kv_of, zeroed=not record.kv))


def copy_for_surgery(model: Model) -> Model:
    """A copy to cut, with all weights in memory."""
    if has_hooks(model):
        raise HeadwiseError("the model is being watched or masked; change it outside of that `with`")
    if is_sharded(model):
        raise UnsupportedError(
            f"{type(model).__name__} is sharded by FSDP, so that no rank has all weights of a head; change the model "
            "before it is sharded"
        )
    check_whole(model, attention_sites(model), "change")
    if any(hasattr(x, "device_mesh") for x in model.parameters()):
        raise UnsupportedError(
            f"{type(model).__name__} has weights that are DTensors; change the model before it is distributed"
        )
    try:
        duplicate: Model = in_memory(model)
    except (TypeError, NotImplementedError, RuntimeError) as error:  # process groups, handles and the like
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied ({first_line(error)}); give the plain model inside of it"
        ) from error
    copy_layers(model, duplicate)
    return duplicate
