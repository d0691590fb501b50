"""MultiHeadAttention from and to nn.MultiheadAttention, and made smaller by removing heads."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from ...errors import ShapeError, UnsupportedError
from .positions import Alibi

if TYPE_CHECKING:
    from .module import MultiHeadAttention

    Module = TypeVar("Module", bound=MultiHeadAttention)


def from_torch(cls: type[Module], given: nn.MultiheadAttention, batch_first: bool | None = None) -> Module:
    """The same attention with the same weights, dtype, device, mode and frozen parameters."""
    if not isinstance(given, nn.MultiheadAttention):
        raise UnsupportedError(f"from_torch takes an nn.MultiheadAttention, got {type(given).__name__}")
    if given.bias_k is not None:
        raise UnsupportedError(
            "add_bias_kv=True appends a learned key and value to every sequence, which MultiHeadAttention cannot do; "
            "train without it"
        )
    if batch_first not in (None, True) or not (given.batch_first or batch_first):
        raise UnsupportedError(
            "this nn.MultiheadAttention takes (T, B, d_model), batch_first=False, and headwise (B, T, d_model): "
            "transpose the inputs, and say so with from_torch(module, batch_first=True)"
            if not given.batch_first
            else f"from_torch makes a module that takes (B, T, d_model), got batch_first={batch_first!r}; leave it out"
        )
    like = given.out_proj.weight
    # A key of zeros with a value of zeros scores 0, so it adds exp(0) to the denominator and nothing else: a sink of 0.
    new = cls(
        given.embed_dim, given.num_heads, kdim=given.kdim, vdim=given.vdim, bias=given.in_proj_bias is not None,
        out_bias=given.out_proj.bias is not None, dropout=given.dropout, sinks=given.add_zero_attn,
        device=like.device, dtype=like.dtype,
    )  # fmt: skip
    if new.sinks is not None:
        new.sinks.requires_grad_(False)
    packed = given.in_proj_weight
    apart = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight) if packed is None else packed.chunk(3)
    biases = [None] * 3 if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
    linears = (new.W_Q, new.W_K, new.W_V)
    for linear, weight, bias in zip(linears, apart, biases, strict=True):
        fill(linear.weight, weight, (weight if packed is None else packed).requires_grad)
        if bias is not None:
            fill(linear.bias, bias, given.in_proj_bias.requires_grad)
    fill(new.W_O.weight, like, like.requires_grad)
    if given.out_proj.bias is not None:
        fill(new.W_O.bias, given.out_proj.bias, given.out_proj.bias.requires_grad)
    return new.train(given.training)


def to_torch(given: MultiHeadAttention) -> nn.MultiheadAttention:
    """PyTorch's module with the same outputs; grouped KV heads are written out in full."""
    heads = given.heads
    zero_sinks = given.sinks is not None and not given.sinks.requires_grad and not bool(given.sinks.any())
    reasons = {
        "rotary or ALiBi positions": given.position is not None,
        "normed queries and keys": given.qk_norm is not None,
        "softcap": given.softcap is not None,
        "learned sinks": given.sinks is not None and not zero_sinks,
        f"{heads.query} heads x {heads.dim} in a width of {heads.width}": heads.query * heads.dim != heads.width,
    }
    for what, is_so in reasons.items():
        if is_so:
            raise UnsupportedError(f"nn.MultiheadAttention has no {what}; this module stays as it is")
    like = given.W_O.weight
    bias: dict[str, Tensor | None] = {name: getattr(given, name).bias for name in ("W_Q", "W_K", "W_V", "W_O")}
    has_bias = any(b is not None for b in bias.values())
    new = nn.MultiheadAttention(
        heads.width, heads.query, given.dropout, has_bias, add_zero_attn=zero_sinks, kdim=given.kdim, vdim=given.vdim,
        batch_first=True, device=like.device, dtype=like.dtype,
    )  # fmt: skip

    def written_out(x: Tensor) -> Tensor:
        """Rows of KV heads, each repeated for the query heads that read it."""
        return x.unflatten(0, (heads.kv, heads.dim)).repeat_interleave(heads.group, 0).flatten(0, 1)

    linears = given.W_Q, given.W_K, given.W_V
    learns = [linear.weight.requires_grad for linear in linears]
    weights = given.W_Q.weight, written_out(given.W_K.weight), written_out(given.W_V.weight)
    if not new._qkv_same_embed_dim:
        theirs = new.q_proj_weight, new.k_proj_weight, new.v_proj_weight
        for their, weight, learned in zip(theirs, weights, learns, strict=True):
            fill(their, weight, learned)
    else:
        fill(new.in_proj_weight, torch.cat(weights), any(learns))
    fill(new.out_proj.weight, like, like.requires_grad)
    if has_bias:  # PyTorch has biases everywhere or nowhere; one of zeros is none
        zero = like.new_zeros(heads.width)
        own = (bias["W_Q"], *(None if b is None else written_out(b) for b in (bias["W_K"], bias["W_V"])))
        learned = any(b is None or b.requires_grad for b in (bias["W_Q"], bias["W_K"], bias["W_V"]))
        fill(new.in_proj_bias, torch.cat([zero if b is None else b for b in own]), learned)
        last = bias["W_O"]
        fill(new.out_proj.bias, zero if last is None else last, last is None or last.requires_grad)
    return new.train(given.training)


def pruned(given: MultiHeadAttention, heads: Iterable[int]) -> MultiHeadAttention:
    """Without these query heads: rows of W_Q, W_K and W_V and columns of W_O are gone."""
    kept = keep(given, heads)  # a list a KV head that stays
    size = max(len(group) for group in kept.values())
    query: list[int | None] = [h for group in kept.values() for h in (*group, *[None] * (size - len(group)))]
    position = given.position
    if isinstance(position, Alibi):
        slopes = position.for_heads(given.heads.query)
        position = Alibi(tuple(0.0 if h is None else slopes[h] for h in query))
    like = given.W_O.weight
    new = type(given)(
        given.heads.width, len(query), len(kept), head_dim=given.heads.dim, kdim=given.kdim, vdim=given.vdim,
        bias=given.W_Q.bias is not None, out_bias=given.W_O.bias is not None, dropout=given.dropout, position=position,
        qk_norm=given.qk_norm, softcap=given.softcap, sinks=given.sinks is not None,
        device=like.device, dtype=like.dtype,
    )  # fmt: skip
    kv: list[int | None] = [*kept]
    for name, numbers in (("W_Q", query), ("W_K", kv), ("W_V", kv)):
        old, mine = getattr(given, name), getattr(new, name)
        fill(mine.weight, _blocks(old.weight, numbers, given.heads.dim), old.weight.requires_grad)
        if old.bias is not None:
            fill(mine.bias, _blocks(old.bias, numbers, given.heads.dim), old.bias.requires_grad)
    fill(new.W_O.weight, _blocks(like.T, query, given.heads.dim).T, like.requires_grad)
    if given.W_O.bias is not None:
        fill(new.W_O.bias, given.W_O.bias, given.W_O.bias.requires_grad)
    if given.sinks is not None and new.sinks is not None:
        fill(new.sinks, _blocks(given.sinks, query, 1), given.sinks.requires_grad)
    for old_norm, norm in ((given.q_norm, new.q_norm), (given.k_norm, new.k_norm)):
        if old_norm is not None and norm is not None:
            for mine, old in zip(norm.parameters(), old_norm.parameters(), strict=True):
                fill(mine, old, old.requires_grad)
            norm.eps = old_norm.eps
    new.head_numbers = tuple(None if h is None else given.head_numbers[h] for h in query)
    return new.train(given.training)


def keep(given: MultiHeadAttention, heads: Iterable[int]) -> dict[int, list[int]]:
    """KV head -> the query heads that stay; a KV head without any is gone."""
    count, group = given.heads.query, given.heads.group
    if not isinstance(heads, Iterable):
        raise ShapeError(f"heads must be a list of numbers, got {heads!r}; give [{heads!r}]")
    gone = set()
    for h in heads:
        number = operator.index(h) if hasattr(h, "__index__") and not isinstance(h, bool) else -1
        if not 0 <= number < count:
            raise ShapeError(f"head {h!r} does not exist; there are {count}, 0 to {count - 1}")
        gone.add(number)
    if len(gone) == count:
        raise ShapeError(f"all {count} heads would go; leave at least one")
    kept: dict[int, list[int]] = {}
    for h in range(count):
        if h not in gone:
            kept.setdefault(h // group, []).append(h)
    return kept


def _blocks(x: Tensor, numbers: list[int | None], dim: int) -> Tensor:
    """The blocks of `dim` rows with these numbers, zeros for None."""
    blocks = x.detach().unflatten(0, (-1, dim))
    zero = torch.zeros_like(blocks[0])
    return torch.stack([zero if n is None else blocks[n] for n in numbers]).flatten(0, 1)


def fill(parameter: Tensor, values: Tensor, requires_grad: bool = True) -> None:
    with torch.no_grad():
        parameter.copy_(values)
    parameter.requires_grad_(requires_grad)
