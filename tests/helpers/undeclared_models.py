"""Attention as people write it by hand: one class per form, each with the weights that it must give, by loops.

No layer has the name that transformers' models give to theirs, so that nothing is found by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, DIM = 15, 3, 5


class Form(nn.Module):
    """Self-attention of HEADS heads; a subclass writes `mix` in its own form."""

    causal = False
    interleaved = False  # whether a head's features are every HEADS-th one

    def __init__(self) -> None:
        super().__init__()
        self.asks, self.offers, self.says = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blends = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.blends(self.mix(x, self.asks(x), self.offers(x), self.says(x)))

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, T, WIDTH) from projections (B, T, WIDTH)."""
        raise NotImplementedError

    def features(self, head: int) -> list[int]:
        """The features of one head."""
        return list(range(head, WIDTH, HEADS) if self.interleaved else range(head * DIM, (head + 1) * DIM))

    def weights_by_hand(self, x: Tensor) -> Tensor:
        """(B, HEADS, T, T), row by row."""
        q, k = self.asks(x), self.offers(x)
        batch, length = x.shape[:2]
        weights = torch.zeros(batch, HEADS, length, length, dtype=x.dtype)
        for b in range(batch):
            for head in range(HEADS):
                of_head = self.features(head)
                for i in range(length):
                    keys = i + 1 if self.causal else length
                    scores = torch.stack([q[b, i, of_head] @ k[b, j, of_head] for j in range(keys)]) / math.sqrt(DIM)
                    weights[b, head, i, :keys] = scores.exp() / scores.exp().sum()
        return weights.detach()

    def outputs_by_hand(self, x: Tensor) -> Tensor:
        """(B, HEADS, T, DIM)."""
        v = torch.stack([self.says(x)[..., self.features(head)] for head in range(HEADS)], 1)
        return (self.weights_by_hand(x) @ v).detach()


def split(x: Tensor) -> Tensor:
    """(B, HEADS, T, DIM)."""
    return x.view(*x.shape[:2], HEADS, DIM).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B, T, WIDTH)."""
    return x.transpose(1, 2).contiguous().view(x.shape[0], x.shape[2], WIDTH)


def hidden(length: int) -> Tensor:
    """(T, T) bool: the keys that a causal query must not see."""
    return torch.ones(length, length).triu(1).bool()


class NanoGPTFlash(Form):
    causal = True

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return merge(F.scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True))


class NanoGPTManual(Form):
    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("past", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))
        self.past: Tensor

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = x.shape[1]
        scores = (split(q) @ split(k).transpose(-2, -1)) * (1.0 / math.sqrt(DIM))
        scores = scores.masked_fill(self.past[:, :, :length, :length] == 0, float("-inf"))
        return merge(self.drop(F.softmax(scores, dim=-1)) @ split(v))


class TutorialAddedMask(Form):
    """The mask is added, the softmax is a module, and the product with the values is in a helper function."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.normalise = nn.Softmax(dim=-1)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1]).masked_fill(hidden(x.shape[1]), float("-inf"))
        scores = torch.matmul(split(q), split(k).mT) / math.sqrt(DIM) + mask
        return merge(torch.matmul(self.normalise(scores), split(v)))


class Einsum(Form):
    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, DIM)) for y in (q, k, v))  # (B, T, HEADS, DIM)
        weights = torch.einsum("bihd,bjhd->bhij", q, k).div(math.sqrt(DIM)).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


class EinsumEllipsis(Form):
    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum("... i d, ... j d -> ... i j", split(q), split(k)) / math.sqrt(DIM), -1)
        return merge(torch.einsum("... i j, ... j d -> ... i d", weights, split(v)))


class HeadsFirst(Form):
    """(H, B, T, D)."""

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, DIM)).permute(2, 0, 1, 3) for y in (q, k, v))
        weights = (q @ k.mT / math.sqrt(DIM)).softmax(-1)
        return (weights @ v).permute(1, 2, 0, 3).flatten(2)


class HeadsFirstFused(Form):
    """(H, B, T, D) in PyTorch's own function, from one tensor."""

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = torch.stack((q, k, v), 2).unflatten(-1, (HEADS, DIM)).permute(2, 3, 0, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).permute(1, 2, 0, 3).flatten(2)


class BatchTimesHeads(Form):
    """(B * H, T, D), with bmm and baddbmm."""

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (split(y).reshape(-1, x.shape[1], DIM) for y in (q, k, v))
        empty = torch.empty(len(q), x.shape[1], x.shape[1])
        scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=1 / math.sqrt(DIM))
        return merge(torch.bmm(scores.softmax(dim=-1), v).view(x.shape[0], HEADS, -1, DIM))


class HeadsTimesBatch(Form):
    """(H * B, T, D), as heads joined along the batch give it."""

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (torch.cat(y.split(DIM, dim=2), dim=0) for y in (q, k, v))
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(DIM), dim=-1)
        return torch.cat(torch.bmm(weights, v).chunk(HEADS, dim=0), dim=2)


class Interleaved(Form):
    """The features of a head are every third one."""

    interleaved = True

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (DIM, HEADS)).permute(0, 3, 1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).flatten(2)


class InPlace(Form):
    """Scores and weights are overwritten, the weights by dropout."""

    causal = True

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = split(q).detach() @ split(k).detach().mT
        scores /= math.sqrt(DIM)
        scores[:, :, hidden(x.shape[1])] = -torch.inf
        return merge(F.dropout(scores.softmax(-1), 0.5, True, True) @ split(v))


FORMS: list[type[Form]] = [
    NanoGPTFlash, NanoGPTManual, TutorialAddedMask, Einsum, EinsumEllipsis, HeadsFirst, HeadsFirstFused,
    BatchTimesHeads, HeadsTimesBatch, Interleaved, InPlace,
]  # fmt: skip


class Stack(nn.Module):
    """Layers of a form, with residual connections, and a classifier that ends in a softmax."""

    def __init__(self, form: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.steps = nn.ModuleList(form() for _ in range(layers))
        self.classes = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = x + step(x)
        return self.classes(x).softmax(-1)


def inputs_of_layers(model: nn.Module, modules: list[Any], *inputs: Any) -> list[Tensor]:
    """What each of some modules of a model is given as its first argument."""
    calls: dict[nn.Module, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, args: calls.__setitem__(m, args[0].detach())) for module in modules
    ]
    model(*inputs)
    for handle in handles:
        handle.remove()
    return [calls[module] for module in modules]
