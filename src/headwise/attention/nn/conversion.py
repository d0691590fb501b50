"""Conversion of MultiHeadAttention from and to nn.MultiheadAttention, and removal of heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from ...errors import ShapeError, UnsupportedError
from ...heads import Heads
from ..validation import as_index
from .positions import Alibi, Rotary
from .torch_module import HeadwiseMultiheadAttention

if TYPE_CHECKING:
    from .module import MultiHeadAttention

    Module = TypeVar("Module", bound=MultiHeadAttention)


def from_torch(cls: type[Module], module: nn.MultiheadAttention, batch_first: bool | None = None) -> Module:
    """The same attention with the same weights, dtype, device, mode and frozen parameters."""
    if not isinstance(module, nn.MultiheadAttention):
        raise UnsupportedError(f"from_torch takes an nn.MultiheadAttention, got {type(module).__name__}")
    known_code = type(module).forward in (nn.MultiheadAttention.forward, HeadwiseMultiheadAttention.forward)
    if not known_code or "forward" in vars(module):
        raise UnsupportedError(
            f"this {type(module).__name__} has a forward of its own, which from_torch would lose; load its weights "
            "into an nn.MultiheadAttention if that computes the same"
        )
    if module.bias_k is not None:
        raise UnsupportedError(
            "add_bias_kv=True appends a learned key and value to every sequence, which MultiHeadAttention cannot do; "
            "train without it"
        )
    if batch_first not in (None, True) or not (module.batch_first or batch_first):
        raise UnsupportedError(
            "this nn.MultiheadAttention takes (T, B, d_model), batch_first=False, and headwise (B, T, d_model): "
            "transpose the inputs and say so with from_torch(module, batch_first=True), or keep the module's own "
            "arguments with headwise.replace_attention(model)"
            if not module.batch_first
            else f"from_torch makes a module that takes (B, T, d_model), got batch_first={batch_first!r}; leave it out"
        )
    like = module.out_proj.weight
    # A key and value of zeros scores 0, so it adds exp(0) to the denominator and nothing else: a sink of 0.
    new = cls(
        module.embed_dim, module.num_heads, kdim=module.kdim, vdim=module.vdim, bias=module.in_proj_bias is not None,
        out_bias=module.out_proj.bias is not None, dropout=module.dropout, sinks=module.add_zero_attn,
        device=like.device, dtype=like.dtype,
    )  # fmt: skip
    if new.sinks is not None:
        new.sinks.requires_grad_(False)
    packed = module.in_proj_weight
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weights = separate if packed is None else packed.chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    linears = (new.W_Q, new.W_K, new.W_V)
    for linear, weight, bias in zip(linears, weights, biases, strict=True):
        fill(linear.weight, weight, (weight if packed is None else packed).requires_grad)
        if bias is not None:
            fill(linear.bias, bias, module.in_proj_bias.requires_grad)
    fill(new.W_O.weight, like, like.requires_grad)
    if module.out_proj.bias is not None:
        fill(new.W_O.bias, module.out_proj.bias, module.out_proj.bias.requires_grad)
    return new.train(module.training)


def to_torch(module: MultiHeadAttention) -> nn.MultiheadAttention:
    """An nn.MultiheadAttention with the same outputs; grouped KV heads are repeated for their query heads."""
    _check_projections("to_torch", module)
    heads = module.heads
    frozen = None if module.sinks is None or module.sinks.requires_grad or module.sinks.is_meta else module.sinks
    zero_sinks = frozen is not None and not bool(frozen.any())
    reasons = {
        "rotary or ALiBi positions": module.position is not None,
        "normed queries and keys": module.qk_norm is not None,
        "softcap": module.softcap is not None,
        "learned sinks": module.sinks is not None and not zero_sinks,
        f"{heads.query} heads x {heads.dim} in a width of {heads.width}": heads.query * heads.dim != heads.width,
    }
    for feature, present in reasons.items():
        if present:
            raise UnsupportedError(f"nn.MultiheadAttention has no {feature}; this module stays as it is")
    like = module.W_O.weight
    bias: dict[str, Tensor | None] = {name: getattr(module, name).bias for name in ("W_Q", "W_K", "W_V", "W_O")}
    has_bias = any(b is not None for b in bias.values())
    new = nn.MultiheadAttention(
        heads.width, heads.query, module.dropout, has_bias, add_zero_attn=zero_sinks,
        kdim=module.kdim, vdim=module.vdim, batch_first=True, device=like.device, dtype=like.dtype,
    )  # fmt: skip

    def repeat_for_group(x: Tensor) -> Tensor:
        """Rows of KV heads, each repeated for the query heads that read it."""
        return x.unflatten(0, (heads.kv, heads.dim)).repeat_interleave(heads.group, 0).flatten(0, 1)

    linears = module.W_Q, module.W_K, module.W_V
    trainable = [linear.weight.requires_grad for linear in linears]
    weights = module.W_Q.weight, repeat_for_group(module.W_K.weight), repeat_for_group(module.W_V.weight)
    if not new._qkv_same_embed_dim:
        targets = new.q_proj_weight, new.k_proj_weight, new.v_proj_weight
        for target, weight, is_trainable in zip(targets, weights, trainable, strict=True):
            fill(target, weight, is_trainable)
    else:
        fill(new.in_proj_weight, torch.cat(weights), any(trainable))
    fill(new.out_proj.weight, like, like.requires_grad)
    if has_bias:  # PyTorch has biases everywhere or nowhere; zeros stand for a missing one
        zero = like.new_zeros(heads.width)
        own = (bias["W_Q"], *(None if b is None else repeat_for_group(b) for b in (bias["W_K"], bias["W_V"])))
        in_trainable = any(b is None or b.requires_grad for b in (bias["W_Q"], bias["W_K"], bias["W_V"]))
        fill(new.in_proj_bias, torch.cat([zero if b is None else b for b in own]), in_trainable)
        out_bias = bias["W_O"]
        fill(new.out_proj.bias, zero if out_bias is None else out_bias, out_bias is None or out_bias.requires_grad)
    return new.train(module.training)


def pruned(module: MultiHeadAttention, heads: Iterable[int]) -> MultiHeadAttention:
    """A module without these query heads: rows of W_Q, W_K and W_V and columns of W_O are removed."""
    _check_projections("prune_heads", module)
    retained = retained_heads(module, heads)
    size = max(len(group) for group in retained.values())
    query: list[int | None] = [h for group in retained.values() for h in (*group, *[None] * (size - len(group)))]
    position = _position_of(module, query)
    like = module.W_O.weight
    new = type(module)(
        module.heads.width, len(query), len(retained), head_dim=module.heads.dim, kdim=module.kdim, vdim=module.vdim,
        bias=module.W_Q.bias is not None, out_bias=module.W_O.bias is not None, dropout=module.dropout,
        position=position, qk_norm=module.qk_norm, softcap=module.softcap, sinks=module.sinks is not None,
        device=like.device, dtype=like.dtype,
    )  # fmt: skip
    kv: list[int | None] = [*retained]
    for name, numbers in (("W_Q", query), ("W_K", kv), ("W_V", kv)):
        old, smaller = getattr(module, name), getattr(new, name)
        fill(smaller.weight, _blocks(old.weight, numbers, module.heads.dim), old.weight.requires_grad)
        if old.bias is not None:
            fill(smaller.bias, _blocks(old.bias, numbers, module.heads.dim), old.bias.requires_grad)
    fill(new.W_O.weight, _blocks(like.T, query, module.heads.dim).T, like.requires_grad)
    if module.W_O.bias is not None:
        fill(new.W_O.bias, module.W_O.bias, module.W_O.bias.requires_grad)
    if module.sinks is not None and new.sinks is not None:
        fill(new.sinks, _blocks(module.sinks, query, 1), module.sinks.requires_grad)
    for old_norm, norm in ((module.q_norm, new.q_norm), (module.k_norm, new.k_norm)):
        if old_norm is not None and norm is not None:
            for parameter, old in zip(norm.parameters(), old_norm.parameters(), strict=True):
                fill(parameter, old, old.requires_grad)
            norm.eps = old_norm.eps
    new.head_numbers = tuple(None if h is None else module.head_numbers[h] for h in query)
    return new.train(module.training)


def _check_projections(function: str, module: MultiHeadAttention) -> None:
    """Refuse layers in place of the projections whose output is not that of a weight and a bias."""
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        kind = type(getattr(module, name))
        if not issubclass(kind, nn.Linear) or kind.forward is not nn.Linear.forward:
            raise UnsupportedError(
                f"{function} reads the weights of nn.Linear layers, and {name} is a {kind.__module__}."
                f"{kind.__qualname__}; call {function} before it is put there, or put an nn.Linear back"
            )


def set_heads(module: MultiHeadAttention, query: list[int | None], kv_count: int) -> None:
    """Note in a module that its projections now hold these of its query heads, None for a head of zeros."""
    heads = module.heads
    module.position = _position_of(module, query)
    module.head_numbers = tuple(None if h is None else module.head_numbers[h] for h in query)
    module.heads = Heads(heads.width, len(query), kv_count, heads.dim, heads.value_dim)


def _position_of(module: MultiHeadAttention, query: list[int | None]) -> Rotary | Alibi | None:
    """The positions of these of a module's query heads: ALiBi has a slope per head."""
    position = module.position
    if not isinstance(position, Alibi):
        return position
    slopes = position.for_heads(module.heads.query)
    return Alibi(tuple(0.0 if h is None else slopes[h] for h in query))


def retained_heads(module: MultiHeadAttention, heads: Iterable[int]) -> dict[int, list[int]]:
    """KV head -> the query heads that remain when these are removed; a KV head without any is left out."""
    count, group = module.heads.query, module.heads.group
    if not isinstance(heads, Iterable):
        raise ShapeError(f"heads must be a list of numbers, got {heads!r}; give [{heads!r}]")
    removed = set()
    for h in heads:
        number = as_index(h)
        if number is None or not 0 <= number < count:
            raise ShapeError(f"head {h!r} does not exist; there are {count}, 0 to {count - 1}")
        removed.add(number)
    if len(removed) == count:
        raise ShapeError(f"all {count} heads would be removed; leave at least one")
    retained: dict[int, list[int]] = {}
    for h in range(count):
        if h not in removed:
            retained.setdefault(h // group, []).append(h)
    return retained


def _blocks(x: Tensor, numbers: list[int | None], dim: int) -> Tensor:
    """The blocks of `dim` rows with these numbers, zeros for None."""
    blocks = x.detach().unflatten(0, (-1, dim))
    zero = torch.zeros_like(blocks[0])
    return torch.stack([zero if n is None else blocks[n] for n in numbers]).flatten(0, 1)


def fill(parameter: Tensor, values: Tensor, requires_grad: bool = True) -> None:
    """Copy values into a parameter, and set whether it is trainable."""
    with torch.no_grad():
        parameter.copy_(values)
    parameter.requires_grad_(requires_grad)
