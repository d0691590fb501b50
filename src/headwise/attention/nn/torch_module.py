"""nn.MultiheadAttention with headwise's attention inside: the class that `replace_attention` gives to modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ShapeError, UnsupportedError
from .. import functional
from ..call import build_call
from ..head_layout import join_heads, split_heads
from ..output_and_weights import attend_with_weights
from ..torch_modes import cast_inputs
from ..validation import shown
from .torch_masks import MaskSizes, visible_keys

# glibc maps larger blocks of memory again each time, and the system clears their pages: then three products are faster
FUSED_BYTES = 32 << 20
PYTORCHS_FORWARD = nn.MultiheadAttention.forward


class HeadwiseMultiheadAttention(nn.MultiheadAttention):
    """PyTorch's module, with its parameters, attributes and arguments, computed by headwise.

    Only the class of a module changes: parameters, hooks, mode and every reference to it stay. It differs from
    PyTorch's in two ways. A query with no visible keys gets zeros instead of NaN, and hooks on `out_proj` run.

    See `replace_attention`.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention.forward: True in a mask hides, a float mask is added.

        Args:
            query: (B, T, embed_dim), (T, B, embed_dim) with batch_first=False, or (T, embed_dim).
            key: (B, S, kdim), and so on.
            value: (B, S, vdim), and so on.
            key_padding_mask: (B, S), or (S,) beside a query of two dimensions.
            need_weights: also return the weights, after dropout.
            attn_mask: (T, S) or (B * num_heads, T, S).
            average_attn_weights: the mean over the heads instead of each head's weights.
            is_causal: a hint that attn_mask is the causal mask.

        Returns:
            The output, in the form of the query, and the weights or None: (B, T, S), or (B, num_heads, T, S) without
            average_attn_weights; without B beside a query of two dimensions.
        """
        if nn.MultiheadAttention.forward is not PYTORCHS_FORWARD:  # it is being watched or masked, by that function
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if query.is_nested or key.is_nested or value.is_nested:
            masks = attn_mask is not None or key_padding_mask is not None
            return self._attend_nested(query, query is key and key is value, masks, need_weights), None
        batched = self._check_inputs(query, key, value)
        q, k, v = self._project(query, key, value)
        if not batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        keys = k.shape[1]
        k, v = self._append_keys(k, v)
        size = MaskSizes(q.shape[0], self.num_heads, q.shape[1], keys, k.shape[1] - keys)
        options: Any = visible_keys(attn_mask, key_padding_mask, is_causal, need_weights, size, q.dtype)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            q, k, v = cast_inputs(*(split_heads(x, self.head_dim) for x in (q, k, v)))
            call = build_call(q, k, v, dropout=dropout, **options)
            out, weights = attend_with_weights(q, k, v, call, average_attn_weights)
            out = join_heads(out)
        elif not options or (options["mask"] is None and size.queries == size.keys):
            out = functional.attend_side_by_side(q, k, v, self.head_dim, causal=bool(options), dropout=dropout)
        else:
            q, k, v = (split_heads(x, self.head_dim) for x in (q, k, v))
            out = join_heads(functional.attend(q, k, v, dropout=dropout, **options))
        if not batched:
            out, weights = out.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1).contiguous()
        return self.out_proj(out), weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether the inputs are a batch; an error where they do not fit the module or each other."""
        batched = query.dim() == 3
        inputs = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, x, width in inputs:
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
                axes = "B, T, " if self.batch_first else "T, B, "
                form = f"({axes if batched else 'T, '}{width})" if query.dim() in (2, 3) else f"({axes}{width})"
                raise ShapeError(f"{name} must be {form}, got {shown(x.shape)}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(f"key is {shown(key.shape)} and value {shown(value.shape)}; each key needs a value")
        batch_axis = 0 if self.batch_first else 1
        if batched and query.shape[batch_axis] != key.shape[batch_axis]:
            counts = query.shape[batch_axis], key.shape[batch_axis]
            raise ShapeError(f"query has {counts[0]} sequences and key {counts[1]}; each query needs its keys")
        return batched

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """q, k and v with their heads side by side; inputs that are one tensor share one product."""
        biases: tuple[Tensor | None, ...]
        width, weight, bias = self.embed_dim, self.in_proj_weight, self.in_proj_bias
        if not self._qkv_same_embed_dim:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            inputs = query, key, value
            return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
        if query is key and key is value:
            if not query.is_cpu or 3 * query.numel() * query.element_size() <= FUSED_BYTES:
                return F.linear(query, weight, bias).chunk(3, -1)
            runs = [(query, 1), (key, 1), (value, 1)]
        elif key is value:
            runs = [(query, 1), (key, 2)]
        elif query is key:
            runs = [(query, 2), (value, 1)]
        else:
            runs = [(query, 1), (key, 1), (value, 1)]
        rows = [count * width for _, count in runs]
        biases = (None,) * len(runs) if bias is None else bias.split(rows)
        return tuple(
            projected
            for (x, count), w, b in zip(runs, weight.split(rows), biases, strict=True)
            for projected in F.linear(x, w, b).chunk(count, -1)
        )

    def _append_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, S, embed_dim) with those that add_bias_kv and add_zero_attn append."""
        form = (k.shape[0], 1, self.embed_dim)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(form).to(k.dtype)], 1)
            v = torch.cat([v, self.bias_v.expand(form).to(v.dtype)], 1)
        if self.add_zero_attn:
            k, v = torch.cat([k, k.new_zeros(form)], 1), torch.cat([v, v.new_zeros(form)], 1)
        return k, v

    def _attend_nested(self, query: Tensor, is_self: bool, masks: bool, need_weights: bool) -> Tensor:
        """Self-attention of a nested tensor, which nn.TransformerEncoder makes of a padded batch in inference."""
        appends = self.bias_k is not None or self.add_zero_attn
        plain = is_self and self.batch_first and self._qkv_same_embed_dim and not (masks or need_weights or appends)
        if not plain or query.layout is not torch.strided:
            raise UnsupportedError(
                "a nested tensor is taken in self-attention alone: batch first, in the strided layout, without masks, "
                "weights and appended keys; give a padded tensor and a key_padding_mask"
            )
        lengths = query._nested_tensor_size()[:, 0]
        projected = torch.nested.to_padded_tensor(F.linear(query, self.in_proj_weight, self.in_proj_bias), 0.0)
        q, k, v = (split_heads(x, self.head_dim) for x in projected.chunk(3, -1))
        out = join_heads(functional.attend(q, k, v, lengths=lengths, dropout=self.dropout if self.training else 0.0))
        exists = torch.arange(out.shape[1], device=out.device) < lengths.to(out.device)[:, None]
        return self.out_proj(torch._nested_tensor_from_mask(out, exists, mask_check=False))

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse torch.jit.script, which calls this."""
        raise UnsupportedError(
            "torch.jit.script compiles PyTorch's module, not headwise's; call headwise.restore_attention(model) first, "
            "or use torch.jit.trace or torch.export"
        )


def _keep_in_module(module: nn.Module, args: Any) -> None:
    """A hook that does nothing: nn.TransformerEncoderLayer uses its fast path only if the module has no hooks."""


def forbid_fast_path(module: nn.Module) -> None:
    """Let nn.TransformerEncoderLayer call a module, instead of computing everything itself from its parameters."""
    module.register_forward_pre_hook(_keep_in_module)


def allow_fast_path(module: nn.Module) -> None:
    """Undo forbid_fast_path."""
    hooks = module._forward_pre_hooks
    for number in [number for number, hook in hooks.items() if hook is _keep_in_module]:
        del hooks[number]
