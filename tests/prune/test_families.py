"""Every family of the model tests is pruned exactly or refused with a reason; none fails later."""

from __future__ import annotations

import pytest
import torch

import headwise
from headwise import UnsupportedError
from helpers.model_families import FAMILIES, OFF, build
from helpers.model_inputs import inputs
from helpers.prunable_models import CLOSE, error, even_heads, masked_output, to_dtype, uneven_heads

# Families whose heads are not cut out, by the reason in the error.
REFUSED = {
    "over all heads at once": ("olmo2", "olmo3", "olmoe", "minimax_m2", "bitnet"),
    "in a way that is bound to their number": (
        "diffllama", "blip-2", "fsmt", "led", "longformer", "longt5", "pegasus_x",
    ),
    "is not known": ("nystromformer", "lilt", "convbert"),
    "not a plain linear layer": ("ibert",),
    "was not found": ("xlnet",),
    "multi_head_attention_forward": ("wavlm",),
}  # fmt: skip
# their own code fills a mask with a number outside of float32 (gemma2: NaN), or computes parts in float32
SINGLE_ONLY = ("xglm", "gemma2", "axk2")
REASONS = {name: words for words, names in REFUSED.items() for name in names}


@pytest.mark.parametrize("family", [*FAMILIES, *OFF], ids=lambda family: family.name)
def test_every_family_is_pruned_exactly_or_refused(family: object) -> None:
    model, batch = build(family), inputs(family)
    for choose_heads in (even_heads, uneven_heads):
        if family.name in REASONS:
            with pytest.raises(UnsupportedError, match=REASONS[family.name]):
                headwise.prune_heads(model, choose_heads(model))
            continue
        heads = {key: numbers for key, numbers in choose_heads(model).items() if numbers}
        for dtype, close in CLOSE.items():
            if dtype is torch.float64 and family.name in SINGLE_ONLY:
                continue
            model, batch = to_dtype(dtype, model, batch)
            want = masked_output(model, heads, batch)
            with torch.no_grad():
                assert error(headwise.prune_heads(model, heads)(**batch), want) < close
                if dtype is torch.float64:  # Zamba's heads have little effect; all others are far above
                    assert error(model(**batch), want) > 3e-5, "these heads do nothing, so the test shows nothing"
