"""Gradients of the specification in float64, and bounds of the error of a backward pass in single precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.attention import dispatch, dropout
from headwise.attention.call import AttentionCall, build_call

from .attention_cases import AttentionCase, forced

UNIT = 2.0**-24  # the largest relative error of rounding to float32
ROUNDING = {torch.float32: UNIT, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # of storing a result
SMALLEST = {torch.float32: 1e-36, torch.float16: 2.0**-24, torch.bfloat16: 1e-36}  # absolute, where numbers underflow
EXP = 16  # the error of exp, and of a few single operations, in units of rounding


def _sum_error(count: int) -> float:
    """The error of a sum of so many products, relative to the sum of their magnitudes.

    At most `count` units of rounding; with probability 1 - 2 count exp(-18), at most 6 sqrt(count) of them, if rounding
    errors are independent with mean 0 (Higham and Mary 2019, A new approach to probabilistic rounding error analysis).
    """
    return UNIT * (min(count, 6 * count**0.5) + 4)


def compute_gradients(
    case: AttentionCase, grad_out: Tensor, names: tuple[str, ...] = ("q", "k", "v")
) -> dict[str, Tensor]:
    """The gradients of tensors and of the options of these names; options may contain ALiBi's slopes."""
    tensors = {"q": case.q, "k": case.k, "v": case.v, **case.options}
    learned = {name: tensors[name].detach().requires_grad_() for name in names}
    q, k, v = (learned.get(name, tensors[name]) for name in "qkv")
    options = {name: learned.get(name, x) for name, x in case.options.items()}
    out = dispatch.attend(q, k, v, _call(q, k, v, options))
    return dict(zip(names, torch.autograd.grad(out, list(learned.values()), grad_out), strict=True))


def _call(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> AttentionCall:
    """A validated call; options may contain the seed of dropout."""
    options = dict(options)
    seed = options.pop("seed", None)
    return replace(build_call(q, k, v, **options), seed=seed)


def specified_gradients(case: AttentionCase, grad_out: np.ndarray, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The same by float64 autograd of the blockwise backend, for a case of arrays."""
    with forced("one block of rows"):
        return compute_gradients(case.tensors(), torch.from_numpy(grad_out), names)


@dataclass(frozen=True)
class _Forward:
    """What a backward pass computes again, and how far off it may be. (B, H, Tq, Tk) unless it says otherwise."""

    weights: Tensor
    relative: Tensor  # (B, H, Tq, 1): error of a row's weights, relative to them
    slope_of_cap: Tensor  # 1 - tanh^2, or 1
    error_of_slope: Tensor
    keys: Tensor  # (B, H, Tk, D), for every query head
    values: Tensor  # (B, H, Tk, Dv)
    retained: Tensor  # what dropout multiplies the weights by


def _forward(case: AttentionCase) -> _Forward:
    tensors = case.tensors()
    q, options = tensors.q, tensors.options
    group = q.shape[1] // tensors.k.shape[1]
    keys, values = (x.nan_to_num(0.0, 0.0, 0.0).repeat_interleave(group, 1) for x in (tensors.k, tensors.v))
    call = _call(q, tensors.k, tensors.v, options)
    with forced("one block of rows"):
        weights = dispatch.weights(q, tensors.k, call)
    visible = weights > 0
    scores = q @ keys.transpose(-1, -2) * call.scale
    products = q.abs() @ keys.abs().transpose(-1, -2) * abs(call.scale)
    slope, error_of_slope = torch.ones_like(scores), torch.zeros_like(scores)
    error = _sum_error(q.shape[3]) * products
    if call.softcap is not None:
        tanh = torch.tanh(scores / call.softcap)
        slope, scores = 1 - tanh**2, call.softcap * tanh
        error_of_slope = 2 * tanh.abs() * (error / call.softcap + 8 * UNIT) + 4 * UNIT
    size = scores.abs()
    if call.visibility.slopes is not None or call.visibility.mask is not None:
        bias = call.visibility.bias(slice(0, q.shape[2]), 0, keys.shape[2])
        if bias is not None:
            size = size + bias.expand_as(scores).masked_fill(~visible, 0).abs()
    if call.sinks is not None:
        size = size + call.sinks.abs().view(1, -1, 1, 1)
    error = torch.where(visible, error + UNIT * 8 * (size + np.log(keys.shape[2] + 2)), 0)
    largest = error.amax(-1, keepdim=True) if keys.shape[2] else error.sum(-1, keepdim=True)
    relative = 2 * largest + _sum_error(keys.shape[2]) + UNIT * EXP  # of the score and of the log-sum-exp
    retained = torch.ones_like(weights)
    if call.dropout:
        drawn = torch.from_numpy(dropout.retained(call.seed, call.dropout, *weights.shape))
        retained = drawn * torch.full_like(weights, dropout.factor(call.dropout))
    return _Forward(weights, relative, slope, error_of_slope, keys, values, retained)


def gradient_bounds(
    case: AttentionCase, grad_out: np.ndarray, dtype: torch.dtype, rounds_weights: bool = False
) -> dict[str, Tensor]:
    """Bounds of the errors of all gradients, element by element, before they are rounded to dtype.

    rounds_weights: weights and the gradients of scores are rounded to dtype before they are multiplied.
    """
    x, q, g = _forward(case), torch.from_numpy(case.q), torch.from_numpy(grad_out)
    p, scale = x.weights, q.shape[3] ** -0.5 if case.options.get("scale") is None else abs(case.options["scale"])
    (heads, queries), (kv_heads, key_count, width) = q.shape[1:3], case.v.shape[1:]
    rows = queries * heads // kv_heads

    def per_kv_head(y: Tensor) -> Tensor:
        return y.unflatten(1, (kv_heads, -1)).sum(2)

    applied = p * x.retained
    out, spread = applied @ x.values, applied @ x.values.abs()
    rounding, smallest = (ROUNDING[dtype], SMALLEST[dtype]) if rounds_weights else (0.0, 0.0)
    tiny = smallest * (p > 0).double()  # what underflows
    error_of_out = (x.relative + _sum_error(key_count) + rounding) * spread + ROUNDING[dtype] * out.abs()
    error_of_out = error_of_out + tiny @ x.values.abs()
    delta, size_of_delta = ((y * z).sum(-1, keepdim=True) for y, z in ((g, out), (g.abs(), out.abs())))
    error_of_delta = (g.abs() * error_of_out).sum(-1, keepdim=True) + _sum_error(width) * size_of_delta
    dp, size_of_dp = (x.retained * (a @ b.transpose(-1, -2)) for a, b in ((g, x.values), (g.abs(), x.values.abs())))
    ds = p * (dp - delta)
    error = (
        p * ((_sum_error(width) + 4 * UNIT) * size_of_dp + error_of_delta + 4 * UNIT * delta.abs())
        + x.relative * ds.abs()
    )
    of_scores = error, ds.abs()  # after softcap: what a mask is added to
    error = error * (x.slope_of_cap + x.error_of_slope) + ds.abs() * x.error_of_slope
    ds = (ds * x.slope_of_cap).abs()
    of_q = scale * (error + (_sum_error(key_count) + rounding) * ds + tiny) @ x.keys.abs()
    of_k = scale * (error + (_sum_error(rows) + rounding) * ds + tiny).transpose(-1, -2) @ q.nan_to_num(0.0).abs()
    of_v = ((x.relative + _sum_error(rows) + rounding) * applied + tiny * x.retained).transpose(-1, -2) @ g.abs()
    sink = 1 - p.sum(-1, keepdim=True)
    of_sinks = sink * (error_of_delta + (x.relative + _sum_error(rows) + EXP * UNIT) * delta.abs())
    bounds = {"q": of_q, "k": per_kv_head(of_k), "v": per_kv_head(of_v), "sinks": of_sinks.sum((0, 2, 3))}
    mask = case.options.get("mask")
    if mask is not None:
        summed = p.numel() // max(1, mask.size)
        bounds["mask"] = (of_scores[0] + _sum_error(summed) * of_scores[1]).sum_to_size(mask.shape)
    return {name: 1.1 * bound + SMALLEST[dtype] for name, bound in bounds.items()}


def check_gradients(
    case: AttentionCase,
    got: dict[str, Tensor],
    grad_out: np.ndarray,
    dtype: torch.dtype,
    specified: AttentionCase,
    rounds_weights: bool = False,
) -> None:
    """Gradients `got` of a case are those of float64 within the bounds. specified: the case that has no NaN."""
    want = specified_gradients(specified, grad_out, tuple(got))
    bounds = gradient_bounds(case, grad_out, dtype, rounds_weights)
    for name, exact in want.items():
        assert got[name].dtype == dtype and got[name].shape == exact.shape
        bound = bounds[name] + ROUNDING[dtype] * (exact.abs() + bounds[name])
        excess = ((got[name].double() - exact).abs() - bound).flatten()
        assert not excess.numel() or float(excess.max()) <= 0, (name, float(excess.max()))
