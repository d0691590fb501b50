"""The architectures whose checkpoints our stacks load: how their configs and tensor names map to ours.

An architecture is a row of tables: which config key holds which field, which of its modules is which of ours, and
which config values are supported. Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointError, HeadwiseError, UnsupportedError
from ...heads import Heads
from ...shapes import Shape
from ..nn.positions import Rotary

Config = Mapping[str, Any]
Computed = Callable[[Config], dict[str, Any]]
Read = dict[str, str | tuple[str, Any]]  # our field -> the config's key, or (key, default)

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu"}
WITH_OUTPUT_LAYER = ("ForCausalLM", "LMHeadModel")  # endings of class names in the config's architectures


@dataclass(frozen=True)
class Architecture:
    """One model_type: kind "encoder" or "decoder", its config and its modules in our terms.

    prefix precedes the names of the body's tensors in checkpoints with a head. modules maps our names to theirs: "{}"
    is the layer, and "name/1" the second third of a fused tensor.
    """

    kind: str
    prefix: str
    read: Read
    modules: dict[str, str]
    fixed: dict[str, Any]  # fields of the shape that all models of this type share
    activations: dict[str, str] = field(default_factory=lambda: ACTIVATIONS)
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # config keys and the values that are supported
    computed: Computed = lambda config: {}  # fields that take more than a look-up
    tied: bool = False  # whether the output layer is tied where the config does not say
    transposed: bool = False  # the blocks' matrices are stored (in, out)

    def shape(self, config: Config, tensors: Collection[str]) -> Shape:
        """The shape that a config and the names of its checkpoint's tensors (without prefix) describe."""
        try:
            return self._shape(config, tensors)
        except HeadwiseError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"config.json has an invalid value: {error}") from error

    def _shape(self, config: Config, tensors: Collection[str]) -> Shape:
        for key, allowed in {**_EVERYWHERE, **self.only}.items():
            if key in config and config[key] not in allowed:
                raise UnsupportedError(f"config.json says {key} = {config[key]!r}; only {allowed[0]!r} is known here")
        values = {ours: _look_up(config, where) for ours, where in self.read.items()}
        heads = Heads.split(*(values.pop(name, None) for name in ("width", "query", "kv", "dim")))
        values["activation"] = self._activation(values["activation"])
        if self.kind == "decoder":
            values["head"] = self._head(config, tensors)
        else:
            values["pooler"] = self.modules.get("pooler", "") + ".weight" in tensors
        return Shape(heads=heads, **{**values, **self.fixed, **self.computed(config)})

    def _activation(self, name: str) -> str:
        if name not in self.activations:
            key, known = self.read["activation"][0], ", ".join(self.activations)
            raise UnsupportedError(f"config.json says {key} = {name!r}; known here are {known}")
        return self.activations[name]

    def _head(self, config: Config, tensors: Collection[str]) -> str | None:
        if config.get("tie_word_embeddings", self.tied):
            return "tied"
        classes = config.get("architectures") or ()
        has_output_layer = any(str(name).endswith(WITH_OUTPUT_LAYER) for name in classes)
        return "own" if has_output_layer or "lm_head.weight" in tensors else None


def _look_up(config: Config, where: str | tuple[str, Any]) -> Any:
    key, *default = (where,) if isinstance(where, str) else where
    if key not in config and not default:
        raise CheckpointError(f"config.json has no {key!r}; it must say what the weights do not")
    return config.get(key, *default)


def _roberta(config: Config) -> dict[str, Any]:
    """Positions are counted from the row after the padding token's."""
    offset = config.get("pad_token_id", 1) + 1
    return {"position_offset": offset, "max_length": config["max_position_embeddings"] - offset}


def _electra(config: Config) -> dict[str, Any]:
    return {"embedding_width": config.get("embedding_size", 128)}


def _gpt2(config: Config) -> dict[str, Any]:
    return {"ffn": config.get("n_inner") or 4 * config["n_embd"]}


def _llama(config: Config) -> dict[str, Any]:
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary = Rotary.from_config(config, dim)
    if rotary.dim is not None:
        raise UnsupportedError(f"config.json turns {rotary.dim} of {dim} head dimensions; known here is to turn all")
    return {"rope": {"rope_theta": rotary.base, **dict(rotary.scaling or {})}}


def _mistral(config: Config) -> dict[str, Any]:
    return {**_llama(config), "window": config.get("sliding_window", 4096)}


def _qwen(config: Config) -> dict[str, Any]:
    """The layers from max_window_layers on have a window, or those that layer_types names."""
    if not config.get("use_sliding_window", False):
        if set(config.get("layer_types") or ()) - {"full_attention"}:
            raise UnsupportedError("config.json has layer_types with a window, and use_sliding_window = false")
        return _llama(config)
    full_until, window = config.get("max_window_layers", 28), config.get("sliding_window", 4096)
    kinds = config.get("layer_types") or [
        "full_attention" if i < full_until else "sliding_attention" for i in range(config["num_hidden_layers"])
    ]
    reach = {"full_attention": None, "sliding_attention": window}
    for kind in set(kinds) - set(reach):
        raise UnsupportedError(f"config.json has a layer of type {kind!r}; known here are {', '.join(reach)}")
    return {**_llama(config), "window": tuple(reach[kind] for kind in kinds)}


_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "add_cross_attention": (False,),
}
_ONLY_ENCODERS: dict[str, tuple[Any, ...]] = {"is_decoder": (False,), "position_embedding_type": ("absolute", None)}

_BERT_CONFIG: Read = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "query": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_length": "max_position_embeddings",
    "token_types": ("type_vocab_size", 2),
    "activation": ("hidden_act", "gelu"),
    "norm_eps": ("layer_norm_eps", 1e-12),
}
_BERT_MODULES = {
    "embed.tokens": "embeddings.word_embeddings",
    "embed.positions": "embeddings.position_embeddings",
    "embed.types": "embeddings.token_type_embeddings",
    "embed.norm": "embeddings.LayerNorm",
    "embed.project": "embeddings_project",
    "blocks.{}.attention.W_Q": "encoder.layer.{}.attention.self.query",
    "blocks.{}.attention.W_K": "encoder.layer.{}.attention.self.key",
    "blocks.{}.attention.W_V": "encoder.layer.{}.attention.self.value",
    "blocks.{}.attention.W_O": "encoder.layer.{}.attention.output.dense",
    "blocks.{}.attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "blocks.{}.ffn.up": "encoder.layer.{}.intermediate.dense",
    "blocks.{}.ffn.down": "encoder.layer.{}.output.dense",
    "blocks.{}.ffn_norm": "encoder.layer.{}.output.LayerNorm",
    "pooler": "pooler.dense",
}
_BERT_FIXED: dict[str, Any] = {"pre_norm": False, "embedding_norm": True}

_DISTILBERT_CONFIG: Read = {
    "layers": "n_layers",
    "width": "dim",
    "query": "n_heads",
    "ffn": "hidden_dim",
    "vocab": "vocab_size",
    "max_length": "max_position_embeddings",
    "activation": ("activation", "gelu"),
}
_DISTILBERT_MODULES = {
    "embed.tokens": "embeddings.word_embeddings",
    "embed.positions": "embeddings.position_embeddings",
    "embed.norm": "embeddings.LayerNorm",
    "blocks.{}.attention.W_Q": "transformer.layer.{}.attention.q_lin",
    "blocks.{}.attention.W_K": "transformer.layer.{}.attention.k_lin",
    "blocks.{}.attention.W_V": "transformer.layer.{}.attention.v_lin",
    "blocks.{}.attention.W_O": "transformer.layer.{}.attention.out_lin",
    "blocks.{}.attention_norm": "transformer.layer.{}.sa_layer_norm",
    "blocks.{}.ffn.up": "transformer.layer.{}.ffn.lin1",
    "blocks.{}.ffn.down": "transformer.layer.{}.ffn.lin2",
    "blocks.{}.ffn_norm": "transformer.layer.{}.output_layer_norm",
}

_GPT2_CONFIG: Read = {
    "layers": "n_layer",
    "width": "n_embd",
    "query": "n_head",
    "vocab": "vocab_size",
    "max_length": "n_positions",
    "activation": ("activation_function", "gelu_new"),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
}
_GPT2_MODULES = {
    "embed.tokens": "wte",
    "embed.positions": "wpe",
    "blocks.{}.attention_norm": "h.{}.ln_1",
    "blocks.{}.attention.W_Q": "h.{}.attn.c_attn/0",
    "blocks.{}.attention.W_K": "h.{}.attn.c_attn/1",
    "blocks.{}.attention.W_V": "h.{}.attn.c_attn/2",
    "blocks.{}.attention.W_O": "h.{}.attn.c_proj",
    "blocks.{}.ffn_norm": "h.{}.ln_2",
    "blocks.{}.ffn.up": "h.{}.mlp.c_fc",
    "blocks.{}.ffn.down": "h.{}.mlp.c_proj",
    "norm": "ln_f",
    "head": "lm_head",
}
_ONLY_DECODERS: dict[str, tuple[Any, ...]] = {"is_causal": (True, None)}
_GPT2_ONLY: dict[str, tuple[Any, ...]] = {
    **_ONLY_DECODERS,
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
}

_LLAMA_CONFIG: Read = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "query": "num_attention_heads",
    "kv": ("num_key_value_heads", None),
    "dim": ("head_dim", None),
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_length": "max_position_embeddings",
    "activation": ("hidden_act", "silu"),
    "norm_eps": ("rms_norm_eps", 1e-6),
}
_LLAMA_MODULES = {
    "embed.tokens": "embed_tokens",
    "blocks.{}.attention_norm": "layers.{}.input_layernorm",
    "blocks.{}.attention.W_Q": "layers.{}.self_attn.q_proj",
    "blocks.{}.attention.W_K": "layers.{}.self_attn.k_proj",
    "blocks.{}.attention.W_V": "layers.{}.self_attn.v_proj",
    "blocks.{}.attention.W_O": "layers.{}.self_attn.o_proj",
    "blocks.{}.attention.q_norm": "layers.{}.self_attn.q_norm",
    "blocks.{}.attention.k_norm": "layers.{}.self_attn.k_norm",
    "blocks.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    "blocks.{}.ffn.gate": "layers.{}.mlp.gate_proj",
    "blocks.{}.ffn.up": "layers.{}.mlp.up_proj",
    "blocks.{}.ffn.down": "layers.{}.mlp.down_proj",
    "norm": "norm",
    "head": "lm_head",
}
_ATTENTION_BIAS: Read = {"qkv_bias": ("attention_bias", False), "out_bias": ("attention_bias", False)}
_LLAMA_FIXED: dict[str, Any] = {"norm": "rms", "positions": "rotary"}
_NO_BIAS: dict[str, Any] = {"qkv_bias": False, "out_bias": False, "ffn_bias": False}


def _bert_like(prefix: str, **options: Any) -> Architecture:
    return Architecture("encoder", prefix, _BERT_CONFIG, _BERT_MODULES, _BERT_FIXED, only=_ONLY_ENCODERS, **options)


def _llama_like(read: Read, fixed: dict[str, Any], computed: Computed, **only: Any) -> Architecture:
    return Architecture(
        "decoder",
        "model.",
        {**_LLAMA_CONFIG, **read},
        _LLAMA_MODULES,
        {**_LLAMA_FIXED, **fixed},
        activations=GATED_ACTIVATIONS,
        only={**_ONLY_DECODERS, **only},
        computed=computed,
    )


ARCHITECTURES: dict[str, Architecture] = {
    "bert": _bert_like("bert."),
    "roberta": _bert_like("roberta.", computed=_roberta),
    "xlm-roberta": _bert_like("roberta.", computed=_roberta),
    "camembert": _bert_like("roberta.", computed=_roberta),
    "electra": _bert_like("electra.", computed=_electra),
    "distilbert": Architecture(
        "encoder",
        "distilbert.",
        _DISTILBERT_CONFIG,
        _DISTILBERT_MODULES,
        {**_BERT_FIXED, "norm_eps": 1e-12},
        only=_ONLY_ENCODERS,
    ),
    "gpt2": Architecture(
        "decoder",
        "transformer.",
        _GPT2_CONFIG,
        _GPT2_MODULES,
        {},
        only=_GPT2_ONLY,
        computed=_gpt2,
        tied=True,
        transposed=True,
    ),
    "llama": _llama_like({**_ATTENTION_BIAS, "ffn_bias": ("mlp_bias", False)}, {}, _llama, sliding_window=(None,)),
    "mistral": _llama_like({"kv": ("num_key_value_heads", 8)}, _NO_BIAS, _mistral, layer_types=(None,)),
    "qwen2": _llama_like({"kv": ("num_key_value_heads", 32)}, {**_NO_BIAS, "qkv_bias": True}, _qwen),
    "qwen3": _llama_like(
        {**_ATTENTION_BIAS, "kv": ("num_key_value_heads", 32), "dim": ("head_dim", 128)},
        {"qk_norm": "rms", "ffn_bias": False},
        _qwen,
    ),
}
