"""Models with unusual weights or code of their own: pruned exactly or refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import headwise
from headwise import UnsupportedError
from headwise.models.surgery import offloading
from helpers.adapted_layers import Adapted
from helpers.prunable_models import CLOSE, build, error, inputs, masked_output

HEADS = {0: [1], 2: [0]}
CAUSAL = transformers.AutoModelForCausalLM


# --- offloaded weights ---


def in_host_memory(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)


def on_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, folder / "offloaded", torch.device("cpu"))


def in_part_on_disk(model: Any, folder: Path) -> Any:
    places = dict.fromkeys(("model.embed_tokens", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {"model.layers.0": "disk", "model.layers.2": "disk"}
    return accelerate.dispatch_model(model, places, offload_dir=folder / "offloaded")


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("offload", [in_host_memory, on_disk, in_part_on_disk])
def test_an_offloaded_model_is_pruned_into_a_plain_one(offload: Any, zero: bool, tmp_path: Path) -> None:
    model, arguments = build("llama", CAUSAL), inputs("llama")
    want = masked_output(model, HEADS, arguments)
    with torch.no_grad():
        full = model(**arguments).logits
        model = offload(model, tmp_path)
        pruned = headwise.prune_heads(model, HEADS, zero=zero)
        assert error(pruned(**arguments), want) < CLOSE[torch.float32]
        assert error(model(**arguments).logits, full) == 0, "the argument was changed"
    assert offloading.is_offloaded(model) and not offloading.is_offloaded(pruned)
    assert {x.device.type for x in (*pruned.parameters(), *pruned.buffers())} == {"cpu"}
    assert "forward" not in vars(pruned.model.layers[0].self_attn.q_proj) and not hasattr(pruned, "hf_device_map")
    assert pruned.to(torch.float64).dtype == torch.float64, "accelerate's own `to` acts on the first model"


def test_the_value_bias_of_an_offloaded_model_moves_into_the_output_bias(tmp_path: Path) -> None:
    arguments = inputs("llama")
    want = headwise.prune_heads(build("llama"), HEADS, compensate="bias")
    got = headwise.prune_heads(in_host_memory(build("llama"), tmp_path), HEADS, compensate="bias")
    with torch.no_grad():
        assert error(got(**arguments), want(**arguments)) == 0


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("offload", [in_host_memory, on_disk])
def test_offloaded_models_are_saved(offload: Any, tie: bool, tmp_path: Path) -> None:
    model, arguments = build("llama", CAUSAL, tie_word_embeddings=tie), inputs("llama")
    with torch.no_grad():
        want = model(**arguments).logits
        headwise.save(offload(model, tmp_path), tmp_path / "saved")
        assert error(headwise.load(tmp_path / "saved")(**arguments).logits, want) == 0
    assert offloading.is_offloaded(model)


def test_pruning_a_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    model.layers[1].mlp.to("meta")
    words = "3 of .* weights of LlamaModel are not in memory .meta device., such as layers.1.mlp.*; load the model"
    for act in (
        lambda: headwise.prune_heads(model, HEADS),
        lambda: headwise.prune_heads(model, HEADS, zero=True),
        lambda: headwise.save(model, tmp_path / "saved"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            act()
    assert list(tmp_path.iterdir()) == []


# --- wrapped, quantized and sharded weights ---


class Packed(Tensor):
    """Like torchao's: a subclass that says it is floating-point."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nn.Parameter(self.detach().clone().as_subclass(Packed))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def quantized(layer: nn.Linear) -> nn.Module:
    result: nn.Module = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear})[0]
    return result


def hooked(layer: nn.Linear) -> nn.Module:
    result: nn.Module = nn.utils.weight_norm(layer)
    with torch.no_grad():
        result(torch.zeros(1, layer.in_features))  # else its weight has a gradient, and PyTorch refuses to copy it
    return result


def packed(layer: nn.Linear) -> nn.Module:
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Packed))
    return layer


def eight_bits(layer: nn.Linear) -> nn.Module:
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return layer


KINDS = {
    "it carries an adapter.; merge that first, with merge_and_unload": Adapted,
    "its weight is parametrized.; call .*remove_parametrizations first": nn.utils.parametrizations.weight_norm,
    "its weight is computed by a hook.; call remove_weight_norm": hooked,
    "quantized or wrapped weights.; prune and save the model before it is quantized": packed,
    "quantized or wrapped weights.; prune and save .*, or load it unquantized": quantized,
}


@pytest.mark.filterwarnings("ignore")  # weight_norm and quantize_dynamic are deprecated
@pytest.mark.parametrize("words", KINDS)
def test_wrapped_weights_are_refused_with_advice_that_works(words: str, tmp_path: Path) -> None:
    arguments, wrap = inputs("llama"), KINDS[words]
    model = build("llama")
    for layer in model.layers:
        layer.self_attn.q_proj = wrap(layer.self_attn.q_proj)
    with pytest.raises(UnsupportedError, match=f"cannot be cut out: .* not a plain .*{words}.*; or zero=True zeroes"):
        headwise.prune_heads(model, HEADS)
    with torch.no_grad():
        want = masked_output(model, HEADS, arguments)
        assert error(headwise.prune_heads(model, HEADS, zero=True)(**arguments), want) == 0
    for act in (headwise.save, lambda *args: headwise.save(headwise.prune_heads(model, HEADS, zero=True), args[1])):
        with pytest.raises(UnsupportedError, match=f"LlamaModel cannot be saved: layers.0.self_attn.q_proj .*{words}"):
            act(model, tmp_path / "saved")
    for layer in model.layers:
        layer.self_attn.o_proj = wrap(layer.self_attn.o_proj)
    for zero in (False, True):
        with pytest.raises(UnsupportedError, match=f"can neither be cut out nor zeroed: its W_O, .*{words}"):
            headwise.prune_heads(model, HEADS, zero=zero)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
def test_models_that_pytorch_cannot_copy_are_refused() -> None:
    model = build("llama")
    nn.utils.weight_norm(model.layers[0].self_attn.o_proj)
    with pytest.raises(UnsupportedError, match="LlamaModel cannot be copied .*; give the plain model inside of it"):
        headwise.prune_heads(model, HEADS)


@pytest.mark.parametrize("wrap", [eight_bits, lambda layer: setattr(layer, "__class__", Doubled) or layer])
def test_linear_layers_with_other_code_are_not_cut(wrap: Any) -> None:
    model = build("llama")
    wrap(model.layers[0].self_attn.v_proj)
    with pytest.raises(UnsupportedError, match="cannot be cut out: .* is not a plain linear layer"):
        headwise.prune_heads(model, HEADS)


def test_sharded_weights_are_refused() -> None:
    from torch import distributed
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    model = build("llama")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        out = model.layers[0].self_attn.o_proj
        out.weight = nn.Parameter(distribute_tensor(out.weight.detach(), mesh))
        for zero in (False, True):
            with pytest.raises(UnsupportedError, match="has weights that are DTensors; change the model before it is"):
                headwise.prune_heads(model, HEADS, zero=zero)
    finally:
        distributed.destroy_process_group()


# --- weights and modules that layers share ---


@pytest.mark.parametrize("zero", [False, True])
def test_weights_tied_between_layers_are_cut_for_each_layer_alone(zero: bool, tmp_path: Path) -> None:
    model, arguments = build("llama"), inputs("llama")
    first = model.layers[0].self_attn
    for layer in model.layers[1:]:
        layer.self_attn.o_proj.weight, layer.self_attn.q_proj.weight = first.o_proj.weight, first.q_proj.weight
    want = masked_output(model, HEADS, arguments)
    pruned = headwise.prune_heads(model, HEADS, zero=zero)
    for form in (None, "compact"):
        headwise.save(pruned, tmp_path / "saved", form=form, overwrite=True)
        for candidate in (pruned, headwise.load(tmp_path / "saved")):
            with torch.no_grad():
                assert error(candidate(**arguments), want) < CLOSE[torch.float32]


@pytest.mark.parametrize("zero", [False, True])
def test_a_linear_layer_that_two_layers_share_is_not_cut_for_one_of_them(zero: bool) -> None:
    model = build("llama")
    model.layers[2].self_attn.o_proj = model.layers[0].self_attn.o_proj
    words = "self layer 0 and self layer 2 use one module together, layers.0.self_attn.o_proj, .*; give each a copy"
    with pytest.raises(UnsupportedError, match=words):
        headwise.prune_heads(model, {0: [1]}, zero=zero)


@pytest.mark.parametrize("zero", [False, True])
def test_one_attention_module_under_two_names_is_cut_once(zero: bool) -> None:
    model, arguments = build("llama"), inputs("llama") | {"use_cache": False}
    model.layers[2].self_attn = model.layers[0].self_attn
    heads = {0: [1, 2, 3], 2: [1, 2, 3]}
    with torch.no_grad():
        assert (
            error(headwise.prune_heads(model, heads, zero=zero)(**arguments), masked_output(model, heads, arguments))
            < CLOSE[torch.float32]
        )


# --- code that is not transformers' ---


class FusedAttention(nn.Module):
    """Like timm's: one qkv layer, and a forward that takes the output's width from its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, self.output_width(width)))

    def output_width(self, width: int) -> int:
        return width


class RightAttention(FusedAttention):
    def output_width(self, width: int) -> int:
        return self.num_heads * self.head_dim


class WrongAttention(RightAttention):
    """Runs with any number of heads, but the scale depends on that number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.num_heads


def test_fused_models_of_unknown_code_are_refused_but_can_be_zeroed() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList(FusedAttention(35, 5) for _ in range(2))})
    with pytest.raises(
        UnsupportedError, match="cannot be cut out: its code is not transformers', .*; give batches=.*zero=True"
    ):
        headwise.prune_heads(model, {0: [1]})
    x = torch.randn(2, 7, 35)
    with headwise.mask_heads(model, {0: [1]}):
        want = model["blocks"][0](x)
    assert error(headwise.prune_heads(model, {0: [1]}, zero=True)["blocks"][0](x), want) == 0


class OwnModel(transformers.PreTrainedModel):
    config_class = transformers.BertConfig
    main_input_name = "input_ids"

    def __init__(self, config: Any, attention: type[nn.Module] = RightAttention) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(attention(config.hidden_size, config.num_attention_heads) for _ in range(2))
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (RightAttention, None),
        (FusedAttention, "without them its code fails .shape .* is invalid.*; zero=True zeroes them instead"),
        (WrongAttention, "without them its code computes something else .off by .*; zero=True zeroes them instead"),
    ],
)
@pytest.mark.parametrize("compensate", [None, "bias"])
def test_unknown_code_is_cut_only_where_its_output_is_exact(
    attention: type[nn.Module], words: str | None, compensate: str | None
) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=89, hidden_size=35, num_attention_heads=5)
    model = OwnModel(config, attention).eval()
    if words is not None:
        with pytest.raises(UnsupportedError, match=words):
            headwise.prune_heads(model, {0: [1]}, compensate=compensate)
        return
    ids = torch.randint(89, (2, 7))
    with torch.no_grad():
        want = headwise.prune_heads(model, {0: [1]}, zero=True, compensate=compensate)(ids)
        assert error(headwise.prune_heads(model, {0: [1]}, compensate=compensate)(ids), want) < CLOSE[torch.float32]


def test_a_pruned_model_that_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.models.surgery import reshape

    # as if a family kept its numbers of heads under other names
    monkeypatch.setattr(reshape, "_update_counts", lambda *args: None)
    with pytest.raises(UnsupportedError, match="cannot be cut out: without them its code fails .*; zero=True zeroes"):
        headwise.prune_heads(build("gpt2"), {0: [1]})
