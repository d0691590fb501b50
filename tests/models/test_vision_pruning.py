"""Pruning of vision models with one linear layer for queries, keys and values: exact, or refused."""

import copy

import pytest
import torch
from torch import nn

import headwise
from headwise.errors import UnsupportedError
from headwise.models.structure.image_input import image_input
from headwise.models.structure.sites import attention_sites

WIDTH, HEADS, DIM, DEPTH, SIDE, PATCH, CLASSES = 20, 5, 4, 3, 12, 4, 7
F64 = torch.float64


class Attention(nn.Module):
    """As in today's timm: rows are (3, heads, dim), and every width is read from the module."""

    def __init__(self, qk_norm=False):
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim, self.scale = HEADS, DIM, HEADS * DIM, DIM**-0.5
        self.qkv = nn.Linear(WIDTH, 3 * self.attn_dim)
        self.q_norm = nn.LayerNorm(DIM) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(DIM) if qk_norm else nn.Identity()
        self.proj = nn.Linear(self.attn_dim, WIDTH)

    def split(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    def join(self, x):
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], self.attn_dim)

    def forward(self, x):
        q, k, v = self.split(x)
        q, k = self.q_norm(q), self.k_norm(k)
        x = nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.proj(self.join(x))


class OldAttention(Attention):
    """As in older timm: the width of the heads' output is that of the input."""

    def join(self, x):
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], WIDTH)


class OldestAttention(Attention):
    """The width of a head is derived from the input's."""

    def split(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, width // self.num_heads)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)


class InterleavedAttention(Attention):
    """Rows are (heads, 3, dim), under the name of the other layout."""

    def split(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, self.num_heads, 3, self.head_dim)
        return qkv.permute(3, 0, 2, 1, 4).unbind(0)


class GroupedAttention(nn.Module):
    """As timm's AttentionRope without a fused layer: fewer KV heads, and their number in the module."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.num_kv_groups, self.head_dim = 6, 2, 3, DIM
        self.attn_dim, self.kv_dim = 6 * DIM, 2 * DIM
        self.qkv = None
        self.q_proj = nn.Linear(WIDTH, self.attn_dim)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, self.kv_dim), nn.Linear(WIDTH, self.kv_dim)
        self.proj = nn.Linear(self.attn_dim, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q = self.q_proj(x).reshape(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).reshape(batch, tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).reshape(batch, tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (x.repeat_interleave(self.num_kv_groups, 1) for x in (k, v))
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, self.attn_dim))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), attention
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(x)


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.img_size = (SIDE, SIDE)
        self.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """Blocks in a Sequential, and no config."""

    def __init__(self, attention):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.blocks = nn.Sequential(*(Block(attention()) for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit(attention, dtype=F64) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(attention).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model.eval()


def qk_norm_attention() -> Attention:
    return Attention(qk_norm=True)


REMOVED = {0: [1, 3], 2: [4]}


@pytest.mark.parametrize("attention", [Attention, qk_norm_attention])
def test_a_pruned_vision_transformer_gives_the_masked_models_output(attention):
    model = vit(attention)
    before = copy.deepcopy(model.state_dict())
    smaller = headwise.prune_heads(model, REMOVED)
    images = torch.randn(2, 3, SIDE, SIDE, dtype=F64)
    with torch.no_grad(), headwise.mask_heads(model, REMOVED):
        want = model(images)
    torch.testing.assert_close(smaller(images), want, rtol=0, atol=1e-12)
    attn = smaller.blocks[0].attn
    assert (attn.num_heads, attn.head_dim, attn.attn_dim) == (3, DIM, 3 * DIM)
    assert attn.qkv.weight.shape == (3 * 3 * DIM, WIDTH)
    assert smaller.blocks[1].attn.num_heads == HEADS
    assert smaller.headwise_heads == {0: [0, 2, 4], 2: [0, 1, 2, 3]}
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    # and once more, by the numbers that the smaller model has now
    smallest = headwise.prune_heads(smaller, {0: [0]})
    with torch.no_grad(), headwise.mask_heads(model, {0: [0, 1, 3], 2: [4]}):
        want = model(images)
    torch.testing.assert_close(smallest(images), want, rtol=0, atol=1e-12)


def test_grouped_heads_without_a_fused_layer_are_pruned_exactly():
    model = vit(GroupedAttention)
    removed = {1: [0, 1, 2], 2: [1, 5]}  # a whole group, and one of each
    smaller = headwise.prune_heads(model, removed)
    images = torch.randn(2, 3, SIDE, SIDE, dtype=F64)
    with torch.no_grad(), headwise.mask_heads(model, removed):
        want = model(images)
    torch.testing.assert_close(smaller(images), want, rtol=0, atol=1e-12)
    first, second = smaller.blocks[1].attn, smaller.blocks[2].attn
    assert (first.num_heads, first.num_kv_heads, first.num_kv_groups, first.kv_dim) == (3, 1, 3, DIM)
    assert (second.num_heads, second.num_kv_heads, second.num_kv_groups) == (4, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_in_other_dtypes_are_compared_in_their_precision(dtype):
    model = vit(Attention, dtype)
    smaller = headwise.prune_heads(model, REMOVED)
    assert next(smaller.parameters()).dtype == dtype


@pytest.mark.parametrize("attention", [OldAttention, OldestAttention])
def test_code_that_takes_the_inputs_width_for_the_heads_is_refused(attention):
    model = vit(attention)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        UnsupportedError, match=r"Attention \(at blocks.0.attn\) cannot be cut out: without them its code"
    ):
        headwise.prune_heads(model, REMOVED)
    assert model.blocks[0].attn.num_heads == HEADS
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    zeroed = headwise.prune_heads(model, REMOVED, zero=True)
    images = torch.randn(2, 3, SIDE, SIDE, dtype=F64)
    with torch.no_grad(), headwise.mask_heads(model, REMOVED):
        torch.testing.assert_close(zeroed(images), model(images), rtol=0, atol=1e-12)


@pytest.mark.parametrize("new_head", [True, False])
def test_another_layout_under_the_same_name_is_refused(new_head):
    model = vit(InterleavedAttention)
    if new_head:  # it makes zeros of everything
        nn.init.zeros_(model.head.weight)
    with pytest.raises(UnsupportedError, match="without them its code computes something else"):
        headwise.prune_heads(model, REMOVED)


class TwoScales(VisionTransformer):
    """Its patches are of another size than that of the whole image, as those of CrossViT's branches."""

    def forward(self, x):
        if x.shape[-1] != 2 * SIDE:
            raise AssertionError(f"Input image size ({x.shape[-1]}) doesn't match model ({2 * SIDE}).")
        return super().forward(x[..., ::2, ::2])


def test_a_model_that_fails_on_the_made_up_image_is_not_said_to_fail_without_heads():
    torch.manual_seed(0)
    model = TwoScales(Attention).to(F64).eval()
    with pytest.raises(
        UnsupportedError,
        match=r"TwoScales itself, with all of its heads, fails on the inputs that the result is tried on \(Input image "
        r"size \(12\) doesn't match model \(24\).\); give batches=\[inputs of the model\] to compare on, or zero=True",
    ):
        headwise.prune_heads(model, REMOVED)
    images = torch.randn(2, 3, 2 * SIDE, 2 * SIDE, dtype=F64)
    smaller = headwise.prune_heads(model, REMOVED, batches=[{"x": images}])
    with torch.no_grad(), headwise.mask_heads(model, REMOVED):
        torch.testing.assert_close(smaller(images), model(images), rtol=0, atol=1e-12)
    with pytest.raises(UnsupportedError, match="TwoScales itself, with all of its heads, fails"):
        headwise.prune_heads(model, REMOVED, batches=[{"x": images[..., :SIDE, :SIDE]}])


def test_layers_of_a_sequential_are_numbered_and_of_one_kind():
    model = vit(Attention)
    assert [site.key for site in attention_sites(model)] == [("self", i) for i in range(DEPTH)]
    assert [site.key for site in attention_sites(model.blocks)] == [("self", i) for i in range(DEPTH)]
    assert [site.key for site in attention_sites(nn.Sequential(*model.blocks))] == [("self", i) for i in range(DEPTH)]
    pipeline = nn.Sequential(vit(Attention), nn.Sequential(*vit(Attention).blocks))
    assert {site.kind for site in attention_sites(pipeline)} == {"0", "1"}


def test_blocks_of_stages_are_counted_through():
    stages = nn.Sequential(*(nn.ModuleDict({"blocks": nn.ModuleList(vit(Attention).blocks)}) for _ in range(2)))
    model = nn.ModuleDict({"stages": stages})
    assert [site.key for site in attention_sites(model)] == [("self", i) for i in range(2 * DEPTH)]


def test_a_model_that_does_not_say_its_image_size_gets_no_image():
    model = vit(Attention)
    image = image_input(model)
    assert image["x"].shape == (1, 3, SIDE, SIDE)
    assert image["x"].dtype == F64
    del model.patch_embed.img_size
    assert image_input(model) is None
    model.pretrained_cfg = {"input_size": (3, SIDE, 2 * SIDE)}
    assert image_input(model)["x"].shape == (1, 3, SIDE, 2 * SIDE)
    assert image_input(nn.Linear(2, 2)) is None


def test_a_model_that_takes_more_than_an_image_gets_none():
    class TwoTowers(VisionTransformer):
        def forward(self, image, text, *, temperature=1.0):
            return super().forward(image) @ text.T / temperature

    assert image_input(TwoTowers(Attention)) is None


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"gated": True}, {"attn_head_dim": 8}])
def test_timms_own_attention_is_pruned_exactly(options):
    """Where timm is installed; it needs torchvision."""
    attention = pytest.importorskip("timm.layers.attention", reason="timm is not installed", exc_type=ImportError)
    make = lambda: attention.Attention(WIDTH, HEADS, norm_layer=nn.LayerNorm, **options)  # noqa: E731
    model = vit(make)
    smaller = headwise.prune_heads(model, REMOVED)
    images = torch.randn(2, 3, SIDE, SIDE, dtype=F64)
    with torch.no_grad(), headwise.mask_heads(model, REMOVED):
        want = model(images)
    torch.testing.assert_close(smaller(images), want, rtol=0, atol=1e-12)
