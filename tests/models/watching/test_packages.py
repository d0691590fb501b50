"""Models of other packages that declare nothing to us: timm, diffusers and x-transformers, at small random sizes.

`make interop` installs the packages into a folder of their own and runs these tests.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.attention.stats import stats_from_weights
from helpers.known_modules import ROUNDING
from helpers.undeclared_models import WIDTH, NanoGPTFlash, Stack, inputs_of_layers, merge


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; make interop installs it")


class _Name(type):
    """A class whose attributes are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Torchvision:
    """Gives torchvision, which timm imports for its data pipeline, as a module of empty classes."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__version__, module.__path__ = "0.0", []


@pytest.fixture
def timm() -> Iterator[Any]:
    finder = _Torchvision()
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        import timm

        yield timm
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            if isinstance(sys.modules[name], _Stub):
                del sys.modules[name]


pytestmark = pytest.mark.usefixtures("float64")


def watch_twice(model: nn.Module, fused: Any, *inputs: Any, **options: Any) -> list[Any]:
    """The layers of a model, seen alike in PyTorch's fused function and in the package's own softmax."""
    layers = []
    for is_fused in (True, False):
        fused(is_fused)
        with torch.no_grad():
            expected = model(*inputs, **options)
            with headwise.watch(model, weights=True, outputs=True) as seen:
                output = model(*inputs, **options)
        first, second = (x[0] if isinstance(x, tuple) else x for x in (output, expected))
        assert torch.equal(first, second) and not seen.rejected
        layers.append(seen.layers)
    for by_function, by_softmax in zip(*layers, strict=True):
        assert by_function.key == by_softmax.key
        # rounded as the package computes its softmax, from scores of a few units
        close = 64 * max(ROUNDING, torch.finfo(by_softmax.weights.dtype).eps)
        weights = by_softmax.weights.double()
        torch.testing.assert_close(by_function.weights, weights, rtol=0, atol=close)
        torch.testing.assert_close(by_function.outputs, by_softmax.outputs, rtol=0, atol=close)
        expected = stats_from_weights(weights).entropy
        torch.testing.assert_close(by_function.stats.entropy, expected, rtol=0, atol=100 * close)
    return layers[0]


def assert_masked(model: nn.Module, layer: Any, w_o: str, *inputs: Any, **options: Any) -> None:
    """Masking the first head gives the output with the head's columns of W_O at zero."""
    linear: Any = model.get_submodule(w_o)
    width = linear.in_features // layer.heads.query
    with torch.no_grad():
        with headwise.mask_heads(model, {layer.key: [0]}):
            masked = model(*inputs, **options)
        columns = linear.weight[:, :width].clone()
        linear.weight[:, :width] = 0
        expected = model(*inputs, **options)
        linear.weight[:, :width] = columns
    first, second = (x[0] if isinstance(x, tuple) else x for x in (masked, expected))
    # two orders of one sum, then the rest of a small network
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


@needs("timm")
def test_timm_vision_transformers_are_watched_and_masked(timm: Any) -> None:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=15, depth=2, num_heads=3, num_classes=5).eval()

    def fused(on: bool) -> None:
        for block in model.blocks:
            block.attn.fused_attn = on

    images = torch.randn(2, 3, 32, 32)
    layers = watch_twice(model, fused, images)
    assert [layer.key for layer in layers] == [("self", 0), ("self", 1)]
    assert layers[0].weights.shape == (2, 3, 17, 17)
    assert_masked(model, layers[1], "blocks.1.attn.proj", images)


@needs("timm")
def test_timm_windows_are_sequences_and_covariance_is_rejected(timm: Any) -> None:
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=12, depths=(2, 1), num_heads=(2, 3), window_size=7
    ).eval()
    with torch.no_grad(), headwise.watch(swin, weights=True) as seen:
        swin(torch.randn(2, 3, 56, 56))
    assert [tuple(layer.weights.shape) for layer in seen.layers] == [(8, 2, 49, 49)] * 2 + [(2, 3, 49, 49)]
    assert [layer.index for layer in seen.layers] == [0, 1, 2]
    xcit = timm.create_model("xcit_nano_12_p16_224", img_size=32, embed_dim=24, depth=1, num_heads=3).eval()
    with torch.no_grad(), headwise.watch(xcit) as seen:
        xcit(torch.randn(2, 3, 32, 32))
    assert [str(rejection) for rejection in seen.rejected] == [
        "XCA (at blocks.0.attn): the rows of its axes (2, 3, 8, 4) are features and not tokens"
    ]
    assert [layer.name for layer in seen.layers] == ["cls_attn_blocks.0.attn", "cls_attn_blocks.1.attn"]


@needs("x_transformers")
@pytest.mark.parametrize(
    "options", [{}, {"rotary_pos_emb": True}, {"attn_kv_heads": 1}, {"attn_qk_norm": True}], ids=str
)
def test_x_transformers_decoders_are_watched_and_masked(options: dict[str, Any]) -> None:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=20, depth=2, heads=4, attn_dim_head=6, attn_flash=True, **options)
    model = TransformerWrapper(num_tokens=11, max_seq_len=16, attn_layers=layers).eval()

    def fused(on: bool) -> None:
        for module in model.modules():
            if type(module).__name__ == "Attend":
                module.flash = on

    ids = torch.randint(0, 11, (2, 7))
    seen = watch_twice(model, fused, ids)
    assert [layer.index for layer in seen] == [0, 2]  # the feed-forward layers are in the same list
    assert seen[0].heads.query == 4 and bool((seen[0].weights.triu(1) == 0).all())
    assert_masked(model, seen[0], "attn_layers.layers.0.1.to_out", ids)


@needs("diffusers")
def test_diffusers_unets_are_watched_and_masked() -> None:
    from diffusers import UNet2DConditionModel
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=6, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=4,
    ).eval()  # fmt: skip

    def fused(on: bool) -> None:
        model.set_attn_processor(AttnProcessor2_0() if on else AttnProcessor())

    inputs = (torch.randn(2, 4, 8, 8), torch.tensor(3), torch.randn(2, 5, 6))
    layers = watch_twice(model, fused, *inputs, return_dict=False)
    text = [layer for layer in layers if layer.name.endswith("attn2")]
    assert len(layers) == 8 and len(text) == 4
    for layer in text:
        assert layer.weights.shape[3] == 5 and "distance" not in layer.stats
    assert_masked(model, layers[0], f"{layers[0].name}.to_out.0", *inputs, return_dict=False)


@needs("diffusers")
def test_one_head_over_an_image_in_a_diffusers_autoencoder_is_watched() -> None:
    from diffusers import AutoencoderKL

    model, image = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad(), headwise.watch(model, weights=True) as seen:
        model(image)
    weights: list[Tensor] = [layer.weights for layer in seen.layers]
    assert [tuple(x.shape) for x in weights] == [(2, 1, 64, 64)] * 2


@needs("peft")
def test_a_model_under_lora_is_watched_and_masked() -> None:
    from peft import LoraConfig, get_peft_model

    model = Stack(NanoGPTFlash).double().eval()
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["asks", "says", "blends"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    x = torch.randn(2, 7, WIDTH)
    with torch.no_grad():
        expected = wrapped(x)
        with headwise.watch(wrapped, weights=True) as seen:
            assert torch.equal(wrapped(x), expected)
        step: Any = model.steps[0]
        torch.testing.assert_close(seen.layers[0].weights, step.weights_by_hand(x), rtol=0, atol=ROUNDING)
        outputs = step.outputs_by_hand(x)
        outputs[:, 1] = 0
        with headwise.mask_heads(wrapped, {0: [1]}):
            (masked,) = inputs_of_layers(model, [model.steps[1]], x)
    torch.testing.assert_close(masked, x + step.blends(merge(outputs)).detach(), rtol=0, atol=64 * ROUNDING)


FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}  # Llama's norms compute in it, whatever the model's dtype


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=17, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def with_lora(model: Any, targets: list[str]) -> Any:
    """A model with random adapters on these layers."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=targets)).double().eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return wrapped


@needs("peft")
@pytest.mark.parametrize("heads", [{0: [1], 1: [0, 1, 2]}, {0: [0, 1, 2], 1: [3, 4, 5]}])
def test_adapters_on_a_pruned_model_are_saved_merged_and_pruned_further(heads: Any, tmp_path: Any) -> None:
    from peft import PeftModel

    ids = torch.arange(14).view(2, 7)
    headwise.save(headwise.prune_heads(small_llama(), heads), tmp_path / "base")
    wrapped = with_lora(headwise.load(tmp_path / "base"), ["q_proj", "k_proj", "v_proj", "o_proj"])
    with torch.no_grad():
        want = wrapped(ids).logits
        wrapped.save_pretrained(tmp_path / "adapter")
        again = PeftModel.from_pretrained(headwise.load(tmp_path / "base"), tmp_path / "adapter").double()
        torch.testing.assert_close(again(ids).logits, want, **FLOAT32)
        merged = wrapped.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, want, **FLOAT32)
        headwise.save(merged, tmp_path / "merged")
        torch.testing.assert_close(headwise.load(tmp_path / "merged")(ids).logits, want, **FLOAT32)
        with headwise.mask_heads(merged, {0: [0]}):
            masked = merged(ids).logits
        torch.testing.assert_close(headwise.prune_heads(merged, {0: [0]})(ids).logits, masked, **FLOAT32)


@needs("peft")
def test_a_pruned_model_with_adapters_elsewhere_saves_its_adapters(tmp_path: Any) -> None:
    from peft import PeftModel

    ids, heads = torch.arange(14).view(2, 7), {0: [1], 1: [0, 1, 2]}
    wrapped = with_lora(small_llama(), ["gate_proj", "down_proj"])
    with torch.no_grad():
        with headwise.mask_heads(wrapped, heads):
            want = wrapped(ids).logits
        pruned = headwise.prune_heads(wrapped, heads)
        torch.testing.assert_close(pruned(ids).logits, want, **FLOAT32)
        pruned.save_pretrained(tmp_path / "adapter")
        base = headwise.prune_heads(small_llama(), heads)
        again = PeftModel.from_pretrained(base, tmp_path / "adapter").double()
        torch.testing.assert_close(again(ids).logits, want, **FLOAT32)


@needs("peft")
def test_adapters_that_transformers_added_to_a_pruned_model_are_saved_alone(tmp_path: Any) -> None:
    from peft import LoraConfig

    ids = torch.arange(14).view(2, 7)
    pruned, again = (headwise.prune_heads(small_llama(), {0: [1]}) for _ in range(2))
    pruned.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    pruned.double().save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists() and not (tmp_path / "model.safetensors").exists()
    again.load_adapter(tmp_path)
    with torch.no_grad():
        want = pruned(ids).logits
        assert not torch.allclose(headwise.prune_heads(small_llama(), {0: [1]})(ids).logits, want)
        torch.testing.assert_close(again.double()(ids).logits, want, **FLOAT32)


@needs("sentence_transformers")
def test_a_sentence_transformer_is_watched_and_masked(tmp_path: Any) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    torch.set_default_dtype(torch.float32)
    headwise.load("minilm").save_pretrained(tmp_path)
    headwise.tokenizer("minilm").save_pretrained(tmp_path)
    body = Transformer(str(tmp_path))
    model = SentenceTransformer(modules=[body, Pooling(384)], device="cpu")
    plain = model.encode("The cat sat on the mat.")
    with headwise.watch(model) as seen:
        assert (model.encode("The cat sat on the mat.") == plain).all()
    assert [layer.key for layer in seen.layers] == [("self", i) for i in range(6)]
    with headwise.mask_heads(model, {0: list(range(12))}):
        assert (model.encode("The cat sat on the mat.") != plain).any()
