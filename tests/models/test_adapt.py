"""Classes declared by headwise.adapt: their heads are masked and pruned, and wrong declarations are refused."""

from __future__ import annotations

import copy
import importlib.metadata
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.models.structure import adapters
from helpers.known_modules import spread

torch.set_num_threads(1)
BATCH, TOKENS, WIDTH, HEADS = 3, 7, 24, 4


@pytest.fixture(autouse=True)
def _own_declarations(in_float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_adapters", dict(adapters._adapters))


class Tutorial(nn.Module):
    """As in most tutorials: three arguments, and d_model reshaped at the end."""

    def __init__(self, d_model: int = WIDTH, n_heads: int = HEADS) -> None:
        super().__init__()
        self.d_model, self.n_heads, self.d_k = d_model, n_heads, d_model // n_heads
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
        batch = Q.size(0)
        q, k, v = (
            layer(x).view(batch, -1, self.n_heads, self.d_k).transpose(1, 2)
            for layer, x in ((self.W_Q, Q), (self.W_K, K), (self.W_V, V))
        )
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        out = scores.softmax(-1) @ v
        return self.W_O(out.transpose(1, 2).contiguous().view(batch, -1, self.d_model))


class SelfAttention(Tutorial):
    """The same on one tensor."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (
            layer(x).view(*x.shape[:2], self.n_heads, self.d_k).transpose(1, 2)
            for layer in (self.W_Q, self.W_K, self.W_V)
        )
        weights = F.softmax(q @ k.transpose(-2, -1) / self.d_k**0.5, dim=-1)
        return self.W_O((weights @ v).transpose(1, 2).flatten(2))


class Grouped(nn.Module):
    """Fewer KV heads, counts in a config that all layers share, names that nobody guesses."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.size = config, WIDTH // config.n_head
        self.asks = nn.Linear(WIDTH, config.n_head * self.size)
        self.answers = nn.ModuleDict({name: nn.Linear(WIDTH, config.n_kv * self.size) for name in ("k", "v")})
        self.mix = nn.Linear(config.n_head * self.size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.asks(x).unflatten(-1, (self.config.n_head, self.size)).transpose(1, 2)
        k, v = (
            self.answers[name](x).unflatten(-1, (self.config.n_kv, self.size)).transpose(1, 2) for name in ("k", "v")
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.mix(out.transpose(1, 2).flatten(2))


class Config:
    n_head, n_kv = HEADS, 2


class Fused(nn.Module):
    """timm's layout: reshape(B, N, 3, heads, dim), and as many outputs as inputs."""

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.interleaved = HEADS, WIDTH // HEADS, interleaved
        self.to_all = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.interleaved:  # q, k, v of one head side by side
            q, k, v = self.to_all(x).unflatten(-1, (self.num_heads, 3, self.head_dim)).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = self.to_all(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.merge(out.transpose(1, 2).flatten(2))


def separate(cls: Any) -> None:
    headwise.adapt(cls, query="W_Q", key="W_K", value="W_V", output="W_O", heads="n_heads")


class Layers(nn.Module):
    """Two attention layers with residuals, in a list."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (layer(x, x, x) if type(layer).forward is Tutorial.forward else layer(x))
        return x


def build(name: str) -> nn.Module:
    if name == "tutorial":
        separate(Tutorial)
        return Layers(Tutorial(), Tutorial())
    if name == "grouped":
        headwise.adapt(
            Grouped, query="asks", key="answers.k", value="answers.v", output="mix",
            heads="config.n_head", kv_heads="config.n_kv",
        )  # fmt: skip
        config = Config()
        return Layers(Grouped(config), Grouped(config))
    layout: Any = "grouped" if name == "interleaved" else "qkv"
    headwise.adapt(Fused, qkv="to_all", layout=layout, output="merge", heads="num_heads")
    return Layers(Fused(name == "interleaved"), Fused(name == "interleaved"))


@pytest.mark.parametrize("name", ["tutorial", "grouped", "fused", "interleaved"])
def test_heads_of_a_declared_class_are_masked_and_pruned(name: str) -> None:
    model = spread(build(name)).eval()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    heads = {0: [2, 3], 1: [0]}
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        with headwise.mask_heads(model, heads):
            masked = model(x)
        assert not torch.allclose(masked, model(x))
        smaller = headwise.prune_heads(model, heads)
        torch.testing.assert_close(smaller(x), masked)
        torch.testing.assert_close(headwise.prune_heads(model, heads, zero=True)(x), masked)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())
    expected = {0: [0, 1], 1: [None, 1, 2, 3] if name == "grouped" else [1, 2, 3]}
    if name == "grouped":
        assert sorted(map(str, smaller.headwise_heads[1])) == sorted(map(str, expected[1]))
    else:
        assert smaller.headwise_heads == expected
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    scores = headwise.importance(model, [x], "output")
    assert scores["self"].shape == (2, HEADS)


def test_the_usual_names_need_no_declaration_to_be_masked() -> None:
    model = spread(Layers(SelfAttention(), SelfAttention())).eval()
    x = torch.randn(BATCH, TOKENS, WIDTH)
    with torch.no_grad(), headwise.mask_heads(model, {0: [1]}):
        masked = model(x)
    zeroed = headwise.prune_heads(model, {0: [1]}, zero=True)
    smaller = headwise.prune_heads(model, {0: [1]}, batches=[x])
    torch.testing.assert_close(zeroed(x), masked)
    torch.testing.assert_close(smaller(x), masked)


def test_other_names_are_asked_for() -> None:
    class CuriousAttention(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = self.W_O
            del self.W_O

    model = Layers(CuriousAttention())
    with pytest.raises(UnsupportedError, match="W_O of CuriousAttention .* was not found; .*headwise.adapt"):
        headwise.mask_heads(model, {0: [1]})


def test_a_subclass_is_declared_with_its_base() -> None:
    class Special(Tutorial):
        pass

    separate(Tutorial)
    model = Layers(Special())
    with headwise.mask_heads(model, {0: [1]}):
        model(torch.randn(BATCH, TOKENS, WIDTH))


def test_code_that_is_bound_to_the_number_of_heads_is_refused_and_can_be_zeroed() -> None:
    class Bound(Tutorial):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = (f(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.W_Q, self.W_K, self.W_V))
            out = (q @ k.transpose(-2, -1) / self.d_k**0.5).softmax(-1) @ v
            return self.W_O(out.transpose(1, 2).flatten(2))

    separate(Bound)
    model = spread(nn.ModuleList([Bound()]))
    with pytest.raises(UnsupportedError, match="its code (fails|computes something else).*zero=True zeroes them"):
        headwise.prune_heads(model, {0: [1]})
    x = torch.randn(BATCH, TOKENS, WIDTH)
    zeroed = headwise.prune_heads(model, {0: [1]}, zero=True)
    with headwise.mask_heads(model[0], {0: [1]}):
        expected = model[0](x)
    torch.testing.assert_close(zeroed[0](x), expected)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_a_layer_that_cannot_run_alone_is_compared_on_the_users_batches() -> None:
    class WithState(Tutorial):
        def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(x, x + state["shift"], x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = WithState()

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, {"shift": x.mean()})

    separate(Tutorial)
    model, x = spread(Model()), torch.randn(BATCH, TOKENS, WIDTH)
    with pytest.raises(UnsupportedError, match=r"give batches=\[inputs of the model\] to compare on, or zero=True"):
        headwise.prune_heads(model, {0: [1]})
    smaller = headwise.prune_heads(model, {0: [1]}, batches=[x])
    with headwise.mask_heads(model, {0: [1]}):
        expected = model(x)
    torch.testing.assert_close(smaller(x), expected)


def test_a_layer_that_is_given_a_bias_is_compared_on_the_users_batches() -> None:
    class Biased(Tutorial):
        def forward(self, x: Tensor, position_bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x, x, x)

    separate(Tutorial)
    model = Layers(Biased())
    with pytest.raises(UnsupportedError, match="its position_bias may have an entry per head, made elsewhere; give"):
        headwise.prune_heads(model, {0: [1]})


def test_wrong_declarations_are_refused_by_name() -> None:
    whole = {"query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_O", "heads": "n_heads"}
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (Tutorial(), whole, r"adapt takes a class of modules, got Tutorial\("),
        (int, whole, "adapt takes a class of modules"),
        (nn.MultiheadAttention, whole, "MultiheadAttention is a MultiheadAttention, whose structure is known"),
        (headwise.MultiHeadAttention, whole, "whose structure is known; it needs no adapter"),
        (Tutorial, {**whole, "key": None}, "give query=, key= and value=, or qkv="),
        (Tutorial, {**whole, "qkv": "all"}, "give query=, key= and value=, or qkv="),
        (Tutorial, {**whole, "output": 3}, "output must be the name of a linear layer"),
        (Tutorial, {**whole, "heads": 0}, "heads must be the name of an attribute or a number of heads, got 0"),
        (Tutorial, {"qkv": "a", "layout": "x", "output": "o", "heads": 2}, "layout must be one of qkv, grouped"),
    ]
    for cls, arguments, message in wrong:
        with pytest.raises(HeadwiseError, match=message):
            headwise.adapt(cls, **arguments)


def test_declarations_that_do_not_fit_a_model_are_refused_when_they_are_used() -> None:
    model = Layers(Tutorial())
    cases = [
        ({"output": "W_X"}, "W_O of Tutorial .* was declared as 'W_X', which is no linear layer"),
        ({"heads": "n_head"}, "heads='n_head', and that is None here"),
        ({"kv_heads": 2}, "W_V has 24 rows, and 4 query heads and 2 KV heads of 6 need 12"),
        ({"query": "W_X"}, "declared with a linear layer 'W_X', which it has not"),
    ]
    for change, message in cases:
        whole = {"query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_O", "heads": "n_heads"} | change
        headwise.adapt(Tutorial, **whole)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match=message):
            headwise.prune_heads(model, {0: [1]})


def test_libraries_declare_their_classes_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    class EntryPoint:
        def __init__(self, name: str, function: Any) -> None:
            self.name, self.value, self.function = name, f"library:{name}", function

        def load(self) -> Any:
            return self.function

    def fail() -> None:
        raise ZeroDivisionError("no such class")

    points = [EntryPoint("broken", fail), EntryPoint("tutorial", lambda: separate(Tutorial))]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: points if group == "headwise.adapters" else []
    )
    monkeypatch.setattr(adapters, "_pending", [True])
    model = Layers(Tutorial())
    with pytest.warns(UserWarning, match=r"the adapter 'broken' \(library:broken\) .* failed: no such class"):
        masked = headwise.mask_heads(model, {0: [1]})
    with masked:
        model(torch.randn(BATCH, TOKENS, WIDTH))
    headwise.mask_heads(model, {0: [1]})  # they are loaded once
