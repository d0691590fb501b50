"""The lab's small decoder, built from a recipe: everything that determines its trained weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attention.nn.blocks import TransformerBlock
from ..attention.nn.module import MultiHeadAttention
from ..attention.nn.stack import Decoder
from ..errors import HeadwiseError
from ..heads import Heads
from ..shapes import Shape
from .tasks import Relations, Text

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Two equal recipes give the same weights on the same machine."""

    task: str  # "text" or "relations"
    heads: int
    seed: int
    kv_heads: int | None = None  # fewer than heads: grouped-query attention
    width: int = 64
    layers: int = 2
    steps: int = 1000
    batch: int = 32
    rate: float = 3e-3
    relations: int = 4  # of the task "relations"
    scale: bool = True  # divide scores by sqrt(d_k)
    look: bool = True  # False: every head attends equally to all earlier tokens
    mix: bool = True  # with W_O
    dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


# shared by the claims, so that they share models; a claim adds the number of heads and the seed
RELATIONS_RECIPE: dict[str, Any] = {"task": "relations", "layers": 1, "batch": 64, "steps": 600}
TEXT_RECIPE: dict[str, Any] = {"task": "text", "layers": 2, "batch": 8, "steps": 1000, "rate": 5e-3}
TEXT_HEADS = 8  # of the text models that several claims analyse


def task_of(recipe: Recipe) -> Relations | Text:
    """The task that a recipe trains on."""
    if recipe.task == "relations":
        return Relations(relations=recipe.relations)
    if recipe.task == "text":
        return Text()
    raise HeadwiseError(f"there is no task {recipe.task!r}; there are relations and text")


def build(recipe: Recipe) -> Decoder:
    """A decoder like GPT-2 (learned positions, pre-norm, GELU), initialised with the recipe's seed."""
    task = task_of(recipe)
    shape = Shape(
        layers=recipe.layers,
        heads=Heads.split(recipe.width, recipe.heads, recipe.kv_heads),
        ffn=4 * recipe.width,
        vocab=task.vocab,
        activation="gelu_tanh",
        max_length=task.length,
        head="own",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Decoder(shape, dropout=recipe.dropout)
    for attention in attentions(model):
        if not recipe.mix:
            attention.W_O = nn.Identity()  # type: ignore[assignment]  # the heads' outputs, side by side, go straight to the residual stream
        if not recipe.scale:
            attention.W_Q.register_forward_hook(_times(recipe.head_dim**0.5))  # undoes the division by sqrt(d_k)
        if not recipe.look:
            attention.W_Q.register_forward_hook(_times(0.0))
    return model


def attentions(model: Decoder) -> list[MultiHeadAttention]:
    """The attention of every layer."""
    return [block.attention for block in model.blocks if isinstance(block, TransformerBlock)]


def _times(factor: float) -> Any:
    def hook(linear: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * factor

    return hook


def as_gpt2(model: Decoder) -> GPT2LMHeadModel:
    """The same model as a GPT-2 of transformers, for functions of headwise that take transformers models."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = model.shape
    config = GPT2Config(
        vocab_size=shape.vocab, n_positions=shape.max_length, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads.query, n_inner=shape.ffn, layer_norm_epsilon=shape.norm_eps, tie_word_embeddings=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    gpt2 = GPT2LMHeadModel(config)
    gpt2.load_state_dict(_gpt2_weights(model))
    return gpt2.eval()


def _gpt2_weights(model: Decoder) -> dict[str, Tensor]:
    """The state under transformers' names: linear weights transposed, W_Q, W_K and W_V in one matrix."""
    state = {name: x.detach() for name, x in model.state_dict().items()}
    renamed = {
        "transformer.wte.weight": state["embed.tokens.weight"],
        "transformer.wpe.weight": state["embed.positions.weight"],
        "lm_head.weight": state["head.weight"],
    }
    for kind in ("weight", "bias"):
        renamed[f"transformer.ln_f.{kind}"] = state[f"norm.{kind}"]
        for i in range(len(model.blocks)):
            ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
            qkv = torch.cat([state[f"{ours}.attention.{name}.{kind}"] for name in ("W_Q", "W_K", "W_V")])
            linear = {
                "attn.c_attn": qkv,
                "attn.c_proj": state[f"{ours}.attention.W_O.{kind}"],
                "mlp.c_fc": state[f"{ours}.ffn.up.{kind}"],
                "mlp.c_proj": state[f"{ours}.ffn.down.{kind}"],
            }
            renamed |= {f"{theirs}.{name}.{kind}": x.T if kind == "weight" else x for name, x in linear.items()}
            renamed[f"{theirs}.ln_1.{kind}"] = state[f"{ours}.attention_norm.{kind}"]
            renamed[f"{theirs}.ln_2.{kind}"] = state[f"{ours}.ffn_norm.{kind}"]
    return renamed
