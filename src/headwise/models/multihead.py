"""nn.MultiheadAttention, step by step: the same operations as PyTorch's, with hooks in between.

PyTorch gives all weights of nn.MultiheadAttention to one function, and in inference nn.TransformerEncoderLayer gives
them to one operator without calling the module at all. While hooks are set on such modules, they run the code here
instead. It computes a bit-identical output, calls an observer with the queries, keys and values of every head, and
calls the hooks before W_O; PyTorch's fast path is disabled. nn.TransformerEncoder then uses padded tensors instead of
nested ones, and still returns zeros for padding.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedError

HIDDEN = -1e4  # added to hide a key: next to any visible key, its weight is 0 in every precision


class MultiheadCall(NamedTuple):
    """One call of nn.MultiheadAttention after its projections."""

    q: Tensor  # (B, H, Tq, D)
    k: Tensor  # (B, H, Tk, D), with the keys that bias_k and add_zero_attn append
    v: Tensor
    key_padding: Tensor | None  # (B, keys), True or -inf hides a key; without the appended keys
    mask: Tensor | None  # (Tq, keys) or (B * H, Tq, keys), in the same polarity
    causal: bool  # whether a causal mask from the first key takes the place of the mask
    appended_keys: int  # by bias_k and add_zero_attn
    same_sequence: bool  # whether queries and keys are of one sequence
    dropout: float
    need_weights: bool


class Attended(NamedTuple):
    """The result of attention."""

    output: Tensor  # (B, H, Tq, D)
    weights: Tensor | None  # (B, H, Tq, Tk) after dropout, where they are needed


# what sees the calls of a module, and answers with their output; `answer` gives what PyTorch would
Observer = Callable[[nn.Module, MultiheadCall, Callable[[MultiheadCall], Attended]], Attended]
observers: dict[nn.Module, Observer] = {}

_lock = threading.RLock()
_opened_by: dict[int, set[nn.Module]] = {}  # by id of what opened them: modules that run step by step
_fastpath: list[bool] = []  # whether PyTorch's fast path was enabled before
_whole_forward = nn.MultiheadAttention.forward
_encoder_forward = nn.TransformerEncoder.forward


def open_modules(owner: object, modules: Iterable[nn.Module]) -> None:
    """Until close_modules(owner), the nn.MultiheadAttention among these modules run step by step."""
    known: set[nn.Module] = {module for module in modules if isinstance(module, nn.MultiheadAttention)}
    if not known:
        return
    with _lock:
        _opened_by[id(owner)] = known
        if not _fastpath:
            _fastpath.append(torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            nn.MultiheadAttention.forward = _forward  # type: ignore[method-assign]
            nn.TransformerEncoder.forward = _run_padded  # type: ignore[method-assign]


def close_modules(owner: object) -> None:
    """The modules that this owner opened run as PyTorch runs them, unless others opened them too."""
    with _lock:
        _opened_by.pop(id(owner), None)
        if not _opened_by and _fastpath:
            nn.MultiheadAttention.forward = _whole_forward  # type: ignore[method-assign]
            nn.TransformerEncoder.forward = _encoder_forward  # type: ignore[method-assign]
            torch.backends.mha.set_fastpath_enabled(_fastpath[0])
            _fastpath.clear()


@functools.wraps(_whole_forward)
def _forward(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    is_open = any(self in modules for modules in tuple(_opened_by.values()))  # other threads change it
    return run(self, *args, **kwargs) if is_open else _whole_forward(self, *args, **kwargs)


class PrunedMultiheadAttention(nn.MultiheadAttention):
    """An nn.MultiheadAttention with fewer heads than its width has room for; PyTorch's own code cannot run it."""

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
        """Like nn.MultiheadAttention.forward."""
        return run(self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)


def set_heads(module: nn.MultiheadAttention, heads: int, head_width: int) -> None:
    """Make a module whose parameters were cut to some heads run with them, in code that knows their width."""
    module.__class__ = PrunedMultiheadAttention
    module.num_heads, module.head_dim = heads, head_width
    module._qkv_same_embed_dim = False  # so that no fused code of PyTorch takes its parameters


def run(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """nn.MultiheadAttention.forward, step by step."""
    if query.is_nested or key.is_nested or value.is_nested:
        raise UnsupportedError(
            "nn.MultiheadAttention is given nested tensors, which only PyTorch's fused code takes; give padded tensors "
            "with a key_padding_mask while its heads are watched, masked or pruned"
        )
    _check_arguments(module, query, key, value, key_padding_mask, attn_mask, is_causal)
    batched = query.dim() == 3
    observer = observers.get(module)
    same_sequence = query is key
    if observer is not None and key_padding_mask is not None and query.shape == key.shape:
        same_sequence = same_sequence or torch.equal(query, key)
    if not batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif module.batch_first:
        query, key, value = _time_first(query, key, value)
    queries, batch = query.shape[:2]
    heads = module.num_heads
    q, k, v = _append_keys(module, *_project(module, query, key, value))  # (T, B, H * D) each
    causal = is_causal and key_padding_mask is None and not need_weights
    by_head = [x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v)]
    call = MultiheadCall(
        by_head[0], by_head[1], by_head[2], key_padding_mask, None if causal else attn_mask,
        causal, len(k) - len(key), same_sequence, module.dropout if module.training else 0.0, need_weights,
    )  # fmt: skip
    attended = _attend(call) if observer is None else observer(module, call, _attend)
    x = attended.output.permute(2, 0, 1, 3).reshape(queries * batch, -1)  # (Tq * B, H * D)
    x = _change_heads(module.out_proj, x, queries, batch)
    out = F.linear(x, module.out_proj.weight, module.out_proj.bias).view(queries, batch, -1)
    weights = attended.weights
    if weights is not None and average_attn_weights:
        weights = weights.mean(dim=1)
    if not batched:
        return out.squeeze(1), None if weights is None else weights.squeeze(0)
    return out.transpose(1, 0) if module.batch_first else out, weights


def _time_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, d) -> (T, B, d); tensors that are one stay one, since they are then projected together."""
    transposed: dict[int, Tensor] = {}
    for x in (query, key, value):
        transposed.setdefault(id(x), x.transpose(1, 0))
    return transposed[id(query)], transposed[id(key)], transposed[id(value)]


def _project(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads side by side, (T, B, H * D) each, by as few products as PyTorch takes."""
    packed: Tensor | None = module.in_proj_weight
    bias: Tensor | None = module.in_proj_bias
    if packed is not None and key is value:
        count, width = 3 if query is key else 2, packed.shape[0] // 3
        first = 3 * width - count * width
        together = F.linear(key, packed[first:], None if bias is None else bias[first:])
        parts = list(together.unflatten(-1, (count, width)).unbind(-2))
        if count == 2:
            parts.insert(0, F.linear(query, packed[:width], None if bias is None else bias[:width]))
        return parts[0], parts[1], parts[2]
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weights = separate if packed is None else packed.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    return q, k, v


def _append_keys(module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, module.bias_k.repeat(1, k.shape[1], 1)])
        v = torch.cat([v, module.bias_v.repeat(1, v.shape[1], 1)])
    if module.add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (k, v))
    return q, k, v


def _attend(call: MultiheadCall) -> Attended:
    """The computation of F.multi_head_attention_forward."""
    q, k, v = (_side_by_side(x) for x in (call.q, call.k, call.v))
    mask = _added_mask(call)  # (1 or B * H, 1 or Tq, Tk)
    shape = call.q.shape[:2]
    if call.need_weights:
        q = q.flatten(0, 1) * math.sqrt(1.0 / float(q.shape[-1]))
        k, v = k.flatten(0, 1).transpose(-2, -1), v.flatten(0, 1)
        weights = torch.bmm(q, k) if mask is None else torch.baddbmm(mask, q, k)
        weights = F.softmax(weights, dim=-1)
        if call.dropout:
            weights = F.dropout(weights, p=call.dropout)
        return Attended(torch.bmm(weights, v).unflatten(0, shape), weights.unflatten(0, shape))
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.shape[0] == 1 else mask.unflatten(0, shape)
    return Attended(F.scaled_dot_product_attention(q, k, v, mask, call.dropout, call.causal), None)


def _side_by_side(x: Tensor) -> Tensor:
    """(B, H, T, D) in the memory that PyTorch has it in: (T, B, H * D)."""
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def _added_mask(call: MultiheadCall) -> Tensor | None:
    """Both masks as one that is added to the scores, (1 or B * H, 1 or Tq, Tk)."""
    batch, heads, keys = *call.q.shape[:2], call.k.shape[2]
    mask = None if call.mask is None else F.pad(_as_floats(call.mask, call.q), (0, call.appended_keys))
    mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 2 else mask
    if call.key_padding is not None:
        padding = F.pad(_as_floats(call.key_padding, call.q), (0, call.appended_keys))
        padding = padding.view(batch, 1, 1, keys).expand(-1, heads, -1, -1).reshape(batch * heads, 1, keys)
        mask = padding if mask is None else mask + padding
    return mask


def _as_floats(mask: Tensor, like: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))


def _change_heads(out_proj: nn.Module, x: Tensor, queries: int, batch: int) -> Tensor:
    """W_O's input (Tq * B, H * D) after our own hooks on it, which take (B, Tq, H * D)."""
    for hook in list(out_proj._forward_pre_hooks.values()):
        if getattr(hook, "is_headwise", False):  # PyTorch calls no others here
            changed = hook(out_proj, (x.view(queries, batch, -1).transpose(0, 1),))
            if changed is not None:
                x = changed[0].transpose(0, 1).reshape(queries * batch, -1)
    return x


def _check_arguments(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """The checks of F.multi_head_attention_forward, by its own function and on shapes alone."""
    heads = module.num_heads
    F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, heads)  # type: ignore[attr-defined]
    batch_dim = 0 if module.batch_first and query.dim() == 3 else 1
    batch = query.shape[batch_dim] if query.dim() == 3 else 1
    queries, keys = (x.shape[1 - batch_dim] if x.dim() == 3 else x.shape[0] for x in (query, key))
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    if key.shape[:-1] != value.shape[:-1]:
        raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
    shapes = ((queries, keys), (batch * heads, queries, keys))
    if attn_mask is not None and tuple(attn_mask.shape) not in shapes:
        raise RuntimeError(
            f"The shape of attn_mask is {tuple(attn_mask.shape)}, but should be {shapes[0]} or {shapes[1]}."
        )
    if key_padding_mask is not None and key_padding_mask.shape[-1] != keys:
        raise AssertionError(f"key_padding_mask has {key_padding_mask.shape[-1]} keys, expected {keys}")
    for mask in (attn_mask, key_padding_mask):
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise AssertionError(f"only bool and floating types of masks are supported, got {mask.dtype}")


def readable_mask(mask: Tensor) -> Tensor:
    """PyTorch's mask (True or -inf hides) as attend takes it: bool where it only hides keys, else floats to add."""
    if mask.dtype == torch.bool:
        return ~mask
    low = mask <= HIDDEN
    hidden = (mask == -torch.inf) | (low & ~low.all(-1, keepdim=True))
    if not bool((mask.masked_fill(hidden, 0) != 0).any()):
        return ~hidden
    return mask.masked_fill(hidden, -torch.inf)


def visible_keys(mask: Tensor) -> Tensor:
    """Where PyTorch's mask shows a key, bool."""
    readable = readable_mask(mask)
    return readable if readable.dtype == torch.bool else readable != -torch.inf


# ---- nn.TransformerEncoder


class PaddedTransformerEncoder(nn.TransformerEncoder):
    """An nn.TransformerEncoder with pruned layers, which take no nested tensors; its output is the same."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return _run_padded(self, *args, **kwargs)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before heads were cut out of it."""
    plain = {PrunedMultiheadAttention: nn.MultiheadAttention, PaddedTransformerEncoder: nn.TransformerEncoder}
    return plain.get(type(module), type(module))


def keep_padded(model: nn.Module) -> None:
    """Stop nn.TransformerEncoder from making nested tensors for layers with fewer heads."""
    for encoder in model.modules():
        nests = isinstance(encoder, nn.TransformerEncoder) and encoder.use_nested_tensor
        if nests and any(isinstance(module, PrunedMultiheadAttention) for module in encoder.modules()):
            if type(encoder) is nn.TransformerEncoder:
                encoder.__class__ = PaddedTransformerEncoder
            encoder.use_nested_tensor = False  # type: ignore[assignment]


@functools.wraps(_encoder_forward)
def _run_padded(
    self: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """The output of an encoder; at padding it is that of nested tensors where PyTorch would make them."""
    out = _encoder_forward(self, src, mask, src_key_padding_mask, is_causal)
    if src_key_padding_mask is None or not _makes_nested(self, src, mask, src_key_padding_mask):
        return out
    padding = _as_floats(src_key_padding_mask, src) != 0
    empty = out.new_zeros(1, 1, out.shape[-1])
    return torch.where(padding[..., None], empty if self.norm is None else self.norm(empty), out)


def _makes_nested(encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None, padding: Tensor) -> bool:
    """Whether PyTorch's code, with its fast path, makes nested tensors of these inputs."""
    first: Any = encoder.layers[0]
    enabled = _fastpath[0] if _fastpath else torch.backends.mha.get_fastpath_enabled()
    nests = encoder.use_nested_tensor or isinstance(encoder, PaddedTransformerEncoder)
    if not (enabled and nests) or first.training or src.dim() != 3 or mask is not None or torch.is_autocast_enabled():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (src, *first.parameters())):
        return False
    real = _as_floats(padding, src) == 0
    return not encoder.mask_check or torch._nested_tensor_from_mask_left_aligned(src, real)
