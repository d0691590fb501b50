"""What depends most on the versions of Python, PyTorch and transformers. `make compat` runs it with many of them.

It needs an installed headwise with the extra `models`, and nothing of the repository.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import headwise

torch.set_num_threads(1)
EXTRAS = {"view"}  # names that need other packages than the extra `models`
OPTIONS = [
    {},
    {"causal": True},
    {"window": (3, 0)},
    {"softcap": 2.0},
    {"causal": True, "keep_first": 2, "window": (2, 0)},
]
HIDDEN, VOCABULARY, TOKENS = 24, 29, 7


def random_qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, 6, 11, 8, dtype=dtype)
    k, v = torch.randn(2, 2, 3, 11, 8, dtype=dtype)
    return q, k, v


def test_every_public_name_is_there():
    for name in set(headwise.__all__) - EXTRAS:
        assert getattr(headwise, name) is not None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attend_equals_the_specification(options):
    q, k, v = random_qkv()
    specified = torch.from_numpy(headwise.reference.attend(q.numpy(), k.numpy(), v.numpy(), **options))
    torch.testing.assert_close(headwise.attend(q, k, v, **options), specified)
    for _ in range(3):  # the third call of a kind takes a short way
        single = headwise.attend(q.float(), k.float(), v.float(), **options)
    # q, k and v are rounded, then sums of 8 products and 11 weights; errors in scores move weights by as much
    bound = 64 * torch.finfo(torch.float32).eps * v.abs().max() * (1 + (q @ k.mT.repeat_interleave(2, 1)).abs().max())
    assert (single - specified).abs().max() < bound


def test_attend_has_the_derivatives_of_its_specification():
    q, k, v = (x[:1].requires_grad_() for x in random_qkv())
    assert torch.autograd.gradcheck(lambda *xs: headwise.attend(*xs, causal=True), (q, k, v))


def test_transforms_of_torch_func_see_through_attend():
    q, k, v = random_qkv()

    def total(x: Tensor) -> Tensor:
        return headwise.attend(x, k[:1], v[:1]).square().sum()

    each = torch.stack([torch.func.grad(total)(x[None])[0] for x in q])
    torch.testing.assert_close(torch.func.vmap(lambda x: torch.func.grad(total)(x[None])[0])(q), each)
    value, tangent = torch.func.jvp(total, (q[:1],), (torch.ones_like(q[:1]),))
    torch.testing.assert_close(tangent, torch.func.grad(total)(q[:1]).sum())
    torch.testing.assert_close(value, total(q[:1]))


def test_a_flop_counter_counts_the_native_kernel():
    q, k, v = (x[:, :3] for x in random_qkv(torch.float32))
    with FlopCounterMode(display=False) as counter:
        headwise.attend(q, k, v)
    assert counter.get_total_flops() == 2 * 2 * q.numel() * k.shape[2]


def make_model(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY}
    large = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=32, **sizes)
        model = transformers.GPT2LMHeadModel(config)
    elif name == "llama":
        config = transformers.LlamaConfig(num_key_value_heads=2, **sizes, **large)
        model = transformers.LlamaForCausalLM(config)
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **large))
    return model.eval().double()


MODELS = ("gpt2", "llama", "bert")


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_watch_sees_the_weights_of_eager_attention(name):
    model = make_model(name)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    expected = eager(tokens(), output_attentions=True)
    with headwise.watch(model, weights=True) as seen:
        out = model(tokens())
    torch.testing.assert_close(out.logits, expected.logits)
    assert len(seen.layers) == 2
    for layer, weights in zip(seen.layers, expected.attentions, strict=True):
        torch.testing.assert_close(layer.weights.double(), weights, rtol=1e-5, atol=1e-6)  # they are kept in float32
        entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1).mean((0, 2))
        torch.testing.assert_close(layer.stats.entropy.double(), entropy, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_pruned_models_equal_masked_ones_also_after_saving(name, tmp_path):
    model = make_model(name)
    heads = {0: [0, 1], 1: [2, 3]}  # whole KV heads of the Llama
    with headwise.mask_heads(model, heads):
        expected = model(tokens()).logits
    assert not torch.equal(expected, model(tokens()).logits)
    pruned = headwise.prune_heads(model, heads)
    torch.testing.assert_close(pruned(tokens()).logits, expected)
    headwise.save(pruned, tmp_path / "pruned")
    again = headwise.load(tmp_path / "pruned").double()
    torch.testing.assert_close(again(tokens()).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_with_headwise_attention_gives_the_same_tokens(name):
    headwise.register()
    model = make_model(name)
    expected = model.generate(tokens(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    model.set_attn_implementation("headwise")
    assert torch.equal(model.generate(tokens(), max_new_tokens=5, do_sample=False, pad_token_id=0), expected)


class OwnAttention(nn.Module):
    """Attention that no class declares."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@torch.no_grad()
@pytest.mark.parametrize("attention", [OwnAttention, lambda: nn.TransformerEncoderLayer(HIDDEN, 4, batch_first=True)])
def test_attention_of_torch_and_of_own_code_is_watched(attention):
    torch.manual_seed(0)
    model = attention().double().eval()
    x = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64)
    expected = model(x)
    with headwise.watch(model, weights=True) as seen:
        torch.testing.assert_close(model(x), expected)
    assert [tuple(layer.weights.shape) for layer in seen.layers] == [(2, 4, TOKENS, TOKENS)]
