"""nn.TransformerEncoderLayer around headwise's attention; it uses PyTorch's fused code where that is faster."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..torch_modes import in_forward_mode, in_transform

SHORT = 256  # tokens up to which PyTorch's fused layer gains more than our attention does; benchmarks/replace_attention


class HeadwiseTransformerEncoderLayer(nn.TransformerEncoderLayer):
    """PyTorch's layer, whose `self_attn` is headwise's: what `replace_attention` makes of it.

    In inference PyTorch computes the whole layer in one function, which skips `self_attn`. For short sequences without
    masks that is the fastest way, and stays. Masks can hide all keys of a query, for which it gives NaN.
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As nn.TransformerEncoderLayer.forward."""
        if src_mask is None and src_key_padding_mask is None and _is_short(src):
            return super().forward(src, is_causal=is_causal)
        if self.norm_first:
            x = src + self._sa_block(self.norm1(src), src_mask, src_key_padding_mask, is_causal=is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(src + self._sa_block(src, src_mask, src_key_padding_mask, is_causal=is_causal))
        return self.norm2(x + self._ff_block(x))


def _is_short(x: Tensor) -> bool:
    """Whether x has few tokens; not where lengths are recorded, nor in transforms that fused code does not have.

    The second axis is taken for the tokens: where it is not, PyTorch's layer does not run its fused code.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    return not (in_transform() or in_forward_mode() or x.is_nested) and x.dim() == 3 and x.shape[1] <= SHORT
