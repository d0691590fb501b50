"""The shape of a transformer stack as data: sizes and variants, the famous ones by name. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ShapeError, UnsupportedError
from .heads import Heads

Frozen = tuple[tuple[str, Any], ...]


def freeze(mapping: Mapping[str, Any] | Frozen) -> Frozen:
    """A dict as sorted pairs, with lists as tuples: equal data compares equal and has the same hash."""

    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value

    return tuple(sorted((key, frozen(value)) for key, value in dict(mapping).items()))


_KINDS: dict[str, tuple[str | None, ...]] = {
    "activation": ("relu", "gelu", "gelu_tanh", "swiglu"),
    "norm": ("layer", "rms"),
    "positions": ("sinusoidal", "learned", "rotary", None),
    "head": ("tied", "own", None),
    "qk_norm": ("rms", None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything needed to build a stack, or to count its parameters without building it.

    Args:
        layers: blocks of the stack; of the encoder, in an encoder-decoder.
        heads: how each layer divides its width.
        ffn: width of the feed-forward layer.
        vocab: number of tokens.
        decoder_layers: blocks of an encoder-decoder's decoder, which have cross-attention.
        activation: "relu", "gelu" (exact), "gelu_tanh" (GPT-2's approximation) or "swiglu".
        norm: "layer" or "rms".
        norm_eps: added to the variance.
        pre_norm: True for a norm before each sublayer and once at the end; False for a norm after each residual sum, as
            in the Transformer of 2017.
        embedding_norm: a norm after the embeddings.
        qkv_bias: biases of W_Q, W_K and W_V.
        out_bias: a bias of W_O.
        ffn_bias: biases of the feed-forward layer.
        qk_norm: "rms" normalises each head of Q and K.
        positions: "learned", "sinusoidal", "rotary" or None.
        max_length: rows of learned positions that tokens can have.
        position_offset: the first row in use; in RoBERTa one after the padding token's id.
        rope: for "rotary", Hugging Face's rope_parameters.
        token_types: number of token types (BERT's segments).
        embedding_width: the width of the embeddings, if it differs from the model width (ELECTRA).
        scale_embeddings: multiply embeddings by sqrt(width), as in the Transformer of 2017.
        window: visible keys per query, its own included; a tuple has one number per layer.
        head: the output layer, "tied" to the embeddings or "own"; None for none.
        pooler: BERT's dense layer over the first token.

    Raises:
        ShapeError: a size that is too small, or values that contradict each other.
        UnsupportedError: a window in an encoder-decoder.

    Example:
        >>> small = headwise.Shape(layers=2, heads=headwise.Heads.split(32, 4), ffn=128, vocab=100, head="tied")
        >>> decoder = headwise.Decoder(small)
    """

    layers: int
    heads: Heads
    ffn: int
    vocab: int
    decoder_layers: int = 0
    activation: str = "gelu"
    norm: str = "layer"
    norm_eps: float = 1e-5
    pre_norm: bool = True
    embedding_norm: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    ffn_bias: bool = True
    qk_norm: str | None = None
    positions: str | None = "learned"
    max_length: int | None = None
    position_offset: int = 0
    rope: Mapping[str, Any] | Frozen = ()
    token_types: int = 0
    embedding_width: int | None = None
    scale_embeddings: bool = False
    window: int | tuple[int | None, ...] | None = None
    head: str | None = None
    pooler: bool = False

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            check_known(name, getattr(self, name), kinds)
        for name in ("layers", "ffn", "vocab"):
            check_at_least(1, name, getattr(self, name))
        for name in ("decoder_layers", "position_offset", "token_types"):
            check_at_least(0, name, getattr(self, name))
        if self.positions == "learned":
            check_at_least(1, "max_length of learned positions", self.max_length)
        if not isinstance(self.norm_eps, float | int) or self.norm_eps < 0:
            raise ShapeError(f"norm_eps must be a small number of at least 0, got {self.norm_eps!r}")
        for window in self.window if isinstance(self.window, tuple) else (self.window,):
            if window is not None:
                check_at_least(1, "window", window)
        if isinstance(self.window, tuple) and len(self.window) != self.layers:
            raise ShapeError(f"window names {len(self.window)} layers and there are {self.layers}; give one per layer")
        if self.window is not None and self.decoder_layers:
            raise UnsupportedError("window is for a decoder alone; an encoder-decoder has none")
        if self.head == "tied" and self.embedding_width not in (None, self.width):
            raise ShapeError(f"a tied head needs embeddings of width {self.width}, got {self.embedding_width}")
        object.__setattr__(self, "rope", freeze(self.rope))

    @property
    def width(self) -> int:
        return self.heads.width

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer: keys that a query may attend to, its own included; None for all."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.layers

    def parameters(self) -> dict[str, int]:
        """Parameter counts: attention, ffn, embeddings, norms, other (output layer, pooler, ...) and total.

        The encoder and the decoder of an encoder-decoder share their embeddings, as in 2017.
        """
        width, inner = self.width, self.embedding_width or self.width
        per_channel = 2 if self.norm == "layer" else 1  # a gain, and a shift unless RMS
        attentions = self.layers + 2 * self.decoder_layers  # a decoder layer of an encoder-decoder attends twice
        stacks = 2 if self.decoder_layers else 1
        norms = attentions + self.layers + self.decoder_layers + (stacks if self.pre_norm else 0)
        counts = {
            "attention": attentions * self._attention(),
            "ffn": (self.layers + self.decoder_layers) * self._ffn(),
            "embeddings": (self.vocab + self.token_types + self.position_rows) * inner,
            "norms": per_channel * (norms * width + (inner if self.embedding_norm else 0))
            + (2 * attentions * self.heads.dim if self.qk_norm else 0),
            "other": (width * width + width if self.pooler else 0)
            + (self.vocab * width if self.head == "own" else 0)
            + (inner * width + width if inner != width else 0),
        }
        return counts | {"total": sum(counts.values())}

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions."""
        return (self.max_length or 0) + self.position_offset if self.positions == "learned" else 0

    def _attention(self) -> int:
        """W_Q, W_K, W_V, W_O of one layer."""
        heads = self.heads
        queries, keys, values = heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.value_dim
        concatenated = heads.query * heads.value_dim
        qkv = (queries + keys + values) * (self.width + (1 if self.qkv_bias else 0))
        return qkv + concatenated * self.width + (self.width if self.out_bias else 0)

    def _ffn(self) -> int:
        """Up and down, and the gate of SwiGLU."""
        ups = 2 if self.activation == "swiglu" else 1
        biases = ups * self.ffn + self.width if self.ffn_bias else 0
        return (ups + 1) * self.width * self.ffn + biases


def check_known(name: str, got: str | None, known: Collection[str | None]) -> None:
    """Refuse a value that is not among the known ones, and list them."""
    if got not in known:
        raise UnsupportedError(f"{name} {got!r} is not known; known are {', '.join(map(repr, known))}")


def check_at_least(least: int, name: str, got: Any) -> None:
    if isinstance(got, bool) or not isinstance(got, int) or got < least:
        raise ShapeError(f"{name} must be a whole number of at least {least}, got {got!r}")


@dataclass(frozen=True, slots=True)
class Preset:
    """A famous shape, who published it, and the parameter count they published."""

    shape: Shape
    source: str
    published: int
    rounded: bool = False  # the source gives a rounded figure; parameters() gives the exact one


def _transformer(width: int, heads: int) -> Shape:
    """The projections of the paper's formulas have no biases, its feed-forward layers do."""
    return Shape(
        layers=6,
        decoder_layers=6,
        heads=Heads.split(width, heads),
        ffn=4 * width,
        vocab=37_000,
        activation="relu",
        pre_norm=False,
        qkv_bias=False,
        out_bias=False,
        positions="sinusoidal",
        scale_embeddings=True,
        head="tied",
    )


def _bert(layers: int, width: int, heads: int) -> Shape:
    return Shape(
        layers=layers,
        heads=Heads.split(width, heads),
        ffn=4 * width,
        vocab=30_522,
        norm_eps=1e-12,
        pre_norm=False,
        embedding_norm=True,
        max_length=512,
        token_types=2,
        pooler=True,
    )


def _gpt(layers: int, width: int, heads: int, max_length: int = 1024) -> Shape:
    return Shape(
        layers=layers,
        heads=Heads.split(width, heads),
        ffn=4 * width,
        vocab=50_257,
        activation="gelu_tanh",
        max_length=max_length,
        head="tied",
    )


def _llama2(layers: int, width: int, heads: int, ffn: int, kv_heads: int | None = None) -> Shape:
    return Shape(
        layers=layers,
        heads=Heads.split(width, heads, kv_heads),
        ffn=ffn,
        vocab=32_000,
        activation="swiglu",
        norm="rms",
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        positions="rotary",
        max_length=4096,
        head="own",
    )


_VASWANI = "Vaswani et al. 2017, Attention Is All You Need, table 3"
_DEVLIN = "Devlin et al. 2018; checkpoint {} with its pooler, without the pre-training heads"
_RADFORD = "Radford et al. 2019; checkpoint {}"
_TOUVRON = "Touvron et al. 2023, Llama 2; checkpoint {}"

# Two sources print rounded totals that do not quite follow from their own sizes:
# - 2017 prints 65M and 213M with a vocabulary of "about 37000" tokens. With 37,000 it is 63.0M and 214.2M. No single
#   vocabulary gives both (65M wants about 40,800 tokens, 213M about 35,900), so the paper's vocabulary is used.
# - GPT-3's table prints 175.0B; its layers, width and vocabulary give 174.6B. Every other of its layers attends
#   sparsely, which changes no count; here all are dense.
PRESETS: dict[str, Preset] = {
    "transformer-base": Preset(_transformer(512, 8), _VASWANI, 65_000_000, rounded=True),
    "transformer-big": Preset(_transformer(1024, 16), _VASWANI, 213_000_000, rounded=True),
    "bert-base": Preset(_bert(12, 768, 12), _DEVLIN.format("bert-base-uncased"), 109_482_240),
    "bert-large": Preset(_bert(24, 1024, 16), _DEVLIN.format("bert-large-uncased"), 335_141_888),
    "gpt2": Preset(_gpt(12, 768, 12), _RADFORD.format("gpt2"), 124_439_808),
    "gpt2-medium": Preset(_gpt(24, 1024, 16), _RADFORD.format("gpt2-medium"), 354_823_168),
    "gpt2-large": Preset(_gpt(36, 1280, 20), _RADFORD.format("gpt2-large"), 774_030_080),
    "gpt2-xl": Preset(_gpt(48, 1600, 25), _RADFORD.format("gpt2-xl"), 1_557_611_200),
    "gpt3": Preset(_gpt(96, 12_288, 96, 2048), "Brown et al. 2020, table 2.1", 175_000_000_000, rounded=True),
    "llama2-7b": Preset(_llama2(32, 4096, 32, 11_008), _TOUVRON.format("Llama-2-7b-hf"), 6_738_415_616),
    "llama2-13b": Preset(_llama2(40, 5120, 40, 13_824), _TOUVRON.format("Llama-2-13b-hf"), 13_015_864_320),
    "llama2-70b": Preset(_llama2(80, 8192, 64, 28_672, 8), _TOUVRON.format("Llama-2-70b-hf"), 68_976_648_192),
}


def shape(name: str) -> Shape:
    """A well-known shape by its name, such as "bert-base" or "llama2-7b".

    Args:
        name: the name of the shape.

    Returns:
        The shape, from which `Encoder`, `Decoder` and `Transformer` build a model.

    Raises:
        UnsupportedError: for an unknown name; the message lists the known names.

    Example:
        >>> headwise.shape("gpt2").parameters()["total"]
        124439808
    """
    if name not in PRESETS:
        raise UnsupportedError(f"no shape is called {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name].shape
