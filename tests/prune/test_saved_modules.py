"""Models that are not transformers': headwise.load gives what headwise.save wrote, whole or pruned, or refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise import Heads, MultiHeadAttention, Shape
from headwise.cli import main
from headwise.errors import CheckpointError, HeadwiseError, UnsupportedError
from helpers.known_modules import spread
from helpers.small_checkpoints import CORPUS, save_small_model

torch.set_num_threads(1)
BATCH, TOKENS, WIDTH, HEADS, VOCAB = 3, 7, 24, 4, 31


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def shape(**options: Any) -> Shape:
    sizes: dict[str, Any] = {"layers": 2, "heads": Heads.split(WIDTH, HEADS, 2), "ffn": 17, "vocab": VOCAB}
    return Shape(**{**sizes, "max_length": 19, **options})


STACKS: dict[str, Any] = {
    "encoder": lambda: headwise.Encoder(shape(pooler=True, token_types=2), dropout=0.1),
    "decoder": lambda: headwise.Decoder(
        shape(head="own", positions="rotary", window=(3, None), rope={"rope_type": "default", "rope_theta": 500.0})
    ),
    "tied": lambda: headwise.Decoder(shape(head="tied", norm="rms", activation="swiglu", qk_norm="rms")),
    "transformer": lambda: headwise.Transformer(
        shape(positions="sinusoidal", max_length=None, decoder_layers=2, head="tied")
    ),
}


def run(model: Any) -> Tensor:
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) % VOCAB
    with torch.no_grad():
        return model(ids, ids[:, :3]) if isinstance(model, headwise.Transformer) else model(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_loaded_as_it_was_saved_whole_and_pruned(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = spread(STACKS[name]()).to(dtype).eval()
    kinds = name == "transformer"
    pruned = headwise.prune_heads(model, {("encoder", 0): [0, 1], ("cross", 1): [3]} if kinds else {0: [0, 1], 1: [3]})
    twice = headwise.prune_heads(pruned, {("encoder", 0): [0]} if kinds else {0: [0]})
    for number, saved in enumerate((model, pruned, twice)):
        folder = tmp_path / str(number)
        result = headwise.save(saved, folder)
        assert result.form == "compact" and result.load == f"headwise.load({str(folder)!r})"
        assert result.difference == 0
        again = headwise.load(folder)
        assert type(again) is type(saved) and again.shape == saved.shape and not again.training
        assert torch.equal(run(again), run(saved))
        assert getattr(again, "headwise_heads", {}) == getattr(saved, "headwise_heads", {})
        assert {p.dtype for p in again.parameters()} == {dtype}
    further = {("cross", 0): [0]} if kinds else {1: [1]}
    assert torch.equal(run(headwise.prune_heads(again, further)), run(headwise.prune_heads(twice, further)))


def test_shared_embeddings_are_written_once_and_stay_shared(tmp_path: Path) -> None:
    model = spread(STACKS["transformer"]())
    headwise.save(model, tmp_path / "m")
    again = headwise.load(tmp_path / "m")
    assert again.encoder.embed is again.decoder.embed
    assert (tmp_path / "m" / "model.safetensors").stat().st_size < 4 * sum(p.numel() for p in model.parameters()) + 9000


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 10, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool = MultiHeadAttention(WIDTH, 2, bias=False)
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self.embed(ids)) * self.scale
        return self.out(self.pool(x[:, :1], x))


def test_a_users_model_is_loaded_into_a_whole_one(tmp_path: Path) -> None:
    model = spread(Classifier()).eval()
    pruned = headwise.prune_heads(model, {("body", 0): [0, 2], ("body", 1): [3], ("pool", 0): [1]})
    result = headwise.save(pruned, tmp_path / "m")
    assert result.load == f"headwise.load({str(tmp_path / 'm')!r}, into=Classifier(...))" and result.difference is None
    with pytest.raises(
        HeadwiseError, match=r"holds a Classifier, whose class headwise cannot build; .*into=Classifier"
    ):
        headwise.load(tmp_path / "m")
    whole = Classifier()
    before = {name: x.clone() for name, x in whole.state_dict().items()}
    again = headwise.load(tmp_path / "m", into=whole)
    assert torch.equal(run(again), run(pruned)) and again.headwise_heads == pruned.headwise_heads
    assert again.out.weight is again.embed.weight
    assert all(torch.equal(x, before[name]) for name, x in whole.state_dict().items())
    with pytest.raises(HeadwiseError, match="holds a Classifier, got into= a Linear"):
        headwise.load(tmp_path / "m", into=nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_pruned_encoder_of_pytorch_is_loaded_into_a_whole_one(tmp_path: Path) -> None:
    def build() -> nn.TransformerEncoder:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 10, batch_first=True), 2)

    pruned = headwise.prune_heads(spread(build()).eval(), {0: [1], 1: [0, 2]})
    headwise.save(pruned, tmp_path / "m")
    again = headwise.load(tmp_path / "m", into=build())
    x, padding = torch.randn(BATCH, TOKENS, WIDTH), torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        out = again(x, src_key_padding_mask=padding)
        assert torch.equal(out, pruned(x, src_key_padding_mask=padding))
    assert not out[1, 4:].any() and again.headwise_heads == pruned.headwise_heads


def test_biases_that_hold_removed_heads_are_loaded_too(tmp_path: Path) -> None:
    model = spread(Classifier()).eval()
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) % VOCAB
    pruned = headwise.prune_heads(model, {("pool", 0): [1]}, compensate="mean", batches=[ids])
    assert pruned.pool.W_O.bias is not None
    headwise.save(pruned, tmp_path / "m")
    assert torch.equal(run(headwise.load(tmp_path / "m", into=Classifier())), run(pruned))


def test_a_directory_that_does_not_fit_is_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    pruned = headwise.prune_heads(spread(Classifier()), {("body", 0): [0]})
    headwise.save(pruned, folder)

    class Other(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(2, 2)

    Other.__name__ = "Classifier"
    with pytest.raises(CheckpointError, match=r"lacks 'extra.bias'; is this the model that was saved\?"):
        headwise.load(folder, into=Other())
    with pytest.raises(HeadwiseError, match="attn_implementation is for transformers models"):
        headwise.load(folder, into=Classifier(), attn_implementation="sdpa")
    with pytest.raises(HeadwiseError, match="is not empty; give another directory"):
        headwise.save(pruned, folder)
    with pytest.raises(HeadwiseError, match="no transformers model, so it has no zeroed form"):
        headwise.save(pruned, tmp_path / "z", form="zeroed")
    with pytest.raises(HeadwiseError, match="no attention layer was found in Linear"):
        headwise.save(nn.Linear(2, 2), tmp_path / "z")
    quantized = Classifier()
    nn.utils.parametrizations.weight_norm(quantized.out)
    with pytest.raises(UnsupportedError, match="Classifier cannot be saved: out .*its weight is parametrized"):
        headwise.save(quantized, tmp_path / "z")
    assert not (tmp_path / "z").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 10**9}, "1000000000 layers, but the file has"),
        ({"layers": "two"}, "does not describe a stack"),
        ({"unknown": 1}, "does not describe a stack"),
        ({"ffn": 18}, "tensor 'blocks.0.ffn.*is this the model that was saved"),
    ],
)
def test_a_changed_description_of_a_stack_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    headwise.save(spread(STACKS["tied"]()), folder)
    record = json.loads((folder / "headwise.json").read_text())
    record["shape"] |= change
    (folder / "headwise.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=message):
        headwise.load(folder)


def test_the_command_prunes_a_saved_stack(tmp_path: Path) -> None:
    source = save_small_model("llama", tmp_path / "llama")
    stack, out = tmp_path / "stack", tmp_path / "pruned"
    headwise.save(headwise.Decoder.from_pretrained(source), stack)
    headwise.tokenizer(source).save_pretrained(stack)
    (tmp_path / "texts").write_text("\n".join(CORPUS * 2))
    arguments = {"--model": stack, "--texts": tmp_path / "texts", "--out": out, "--keep": 0.5, "--score": "output"}
    assert main(["prune", *(str(word) for pair in arguments.items() for word in pair)]) == 0
    pruned = headwise.load(out)
    assert isinstance(pruned, headwise.Decoder)
    assert sum(number is not None for heads in pruned.headwise_heads.values() for number in heads) < 12
    report = json.loads((out / "pruning.json").read_text())
    assert report["after"]["parameters"] < report["before"]["parameters"]
    assert report["before"]["cache"] == 2 * 2 * 2 * 4 * 4  # layers, keys and values, heads, their width, bytes


def test_into_is_refused_where_nothing_needs_it(tmp_path: Path) -> None:
    headwise.save(spread(STACKS["tied"]()), tmp_path / "m")
    with pytest.raises(HeadwiseError, match="has all that its Decoder is built from; leave into= out"):
        headwise.load(tmp_path / "m", into=STACKS["tied"]())
    assert {p.dtype for p in headwise.load(tmp_path / "m", dtype="bfloat16").parameters()} == {torch.bfloat16}


class HubModel(nn.Module):
    """A model of another package that has its own save_pretrained, as those of diffusers and huggingface_hub have."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, HEADS, 17, dropout=0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out

    def save_pretrained(self, save_directory: Any) -> None:
        raise AssertionError("its config would say the old number of heads")


@pytest.mark.parametrize("write", ["save_pretrained", "headwise.save"])
def test_a_pruned_model_of_another_package_is_saved(write: str, tmp_path: Path) -> None:
    model, x = HubModel().double().eval(), torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    pruned = headwise.prune_heads(model, {0: [1]})
    if write == "headwise.save":
        headwise.save(pruned, tmp_path / "model")
    else:
        pruned.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        again = headwise.load(tmp_path / "model", into=model)
        torch.testing.assert_close(again(x), pruned(x), rtol=0, atol=1e-12)
