"""Stacks of blocks built from a Shape: an encoder, a decoder, and the encoder-decoder of 2017."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import CacheError, MaskError, ShapeError, UnsupportedError
from ...shapes import Shape
from ..stats import HeadStats
from ..validation import shown
from ..visibility_options import check_tensor
from .blocks import NORMS, Embedding, FeedForward, TransformerBlock
from .inputs import check_integers, key_mask, mask_of_cached_keys, positions_of, range_of
from .kv_cache import KVCache, MemoryCache, SlidingCache, StaticCache
from .module import FactoryOptions
from .positions import Rotary
from .sampling import Sampling, SamplingOptions
from .streamed_cache import StreamedCache
from .streamed_keys import SequenceStarts

__all__ = ["Caches", "Decoder", "Encoder", "FeedForward", "Transformer", "TransformerBlock"]


class StackOptions(FactoryOptions, total=False):
    """The options of a stack's constructor."""

    dropout: float


class StackInputs(TypedDict, total=False):
    """The inputs of a stack besides its ids and caches; types are an encoder's, the memory is a decoder's."""

    mask: Tensor | None
    lengths: Tensor | None
    types: Tensor | None
    positions: Tensor | None
    memory: Tensor | None
    memory_mask: Tensor | None


def _shape(shape: str | Shape) -> Shape:
    if isinstance(shape, Shape):
        return shape
    from ..checkpoints.famous import famous_shape

    return famous_shape(shape)


class _Stack(nn.Module):
    """Embeddings, blocks, and a final norm where blocks have pre-norms."""

    def __init__(
        self,
        shape: Shape,
        windows: Sequence[int | None],
        cross: bool,
        dropout: float,
        **factory: Unpack[FactoryOptions],
    ) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Embedding(shape, dropout, **factory)
        heads, position = shape.heads, None
        if shape.positions == "rotary":
            config = {"rope_parameters": shape.rope, "max_position_embeddings": shape.max_length}
            position = Rotary.from_config(config, heads.dim)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                heads.width,
                heads.query,
                heads.kv,
                head_dim=heads.dim,
                ffn=shape.ffn,
                activation=shape.activation,
                norm=shape.norm,
                norm_eps=shape.norm_eps,
                pre_norm=shape.pre_norm,
                cross=cross,
                bias=shape.qkv_bias,
                out_bias=shape.out_bias,
                ffn_bias=shape.ffn_bias,
                qk_norm=shape.qk_norm,
                position=position,
                window=window,
                dropout=dropout,
                **factory,
            )
            for window in windows
        )
        self.norm = NORMS[shape.norm](heads.width, eps=shape.norm_eps, **factory) if shape.pre_norm else None

    @classmethod
    def from_shape(cls, shape: str | Shape, **options: Unpack[StackOptions]) -> Self:
        """Build from a Shape or the name of a famous one ("bert-base", "llama3-8b"); device="meta" allocates no memory.

        Options are dropout, device and dtype.
        """
        return cls(_shape(shape), **options)  # type: ignore[call-arg]  # Encoder's and Decoder's constructors take these

    def stats(
        self,
        ids: Tensor,
        *,
        queries: Tensor | None = None,
        classes: dict[str, Tensor] | None = None,
        **inputs: Unpack[StackInputs],
    ) -> list[HeadStats]:
        """Statistics of every head of each layer's self-attention on ids (B, T); inputs as in forward, but no cache.

        queries (B, T) are the tokens that count: by default those that a mask (B, T) marks as real.

        Example:
            >>> [layer.entropy for layer in decoder.stats(ids)]  # (H,) per layer
        """
        mask = inputs.get("mask")
        if queries is None and mask is not None and mask.dim() == 2:
            queries = mask.bool()
        per_layer: list[HeadStats] = []

        def observe(block: TransformerBlock, arguments: tuple[Tensor, ...], of_block: dict[str, Any]) -> None:
            visible = {name: of_block.get(name) for name in ("mask", "lengths", "positions")}
            causal = of_block.get("causal", False)
            per_layer.append(block.stats(arguments[0], causal=causal, queries=queries, classes=classes, **visible))

        hooks = [block.register_forward_pre_hook(observe, with_kwargs=True) for block in self.blocks]
        try:
            with torch.no_grad():
                self(ids, **inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return per_layer

    def _check_ids(self, ids: Tensor) -> None:
        check_tensor("ids", ids)
        check_integers("ids", ids, "(B, T)", ids.dim() == 2)
        low, high = range_of(ids)
        if low < 0 or high >= self.shape.vocab:
            wrong = low if low < 0 else high
            raise ShapeError(f"id {wrong} is not in the vocabulary of {self.shape.vocab} tokens; ids count from 0")

    def _check_positions(self, positions: Tensor, ids: Tensor) -> None:
        fits = tuple(positions.shape) in (tuple(ids.shape), tuple(ids.shape[1:]))
        check_integers("positions", positions, "(T,) or (B, T)", fits, ids.shape)
        if self.shape.positions != "learned":
            return
        low, high = range_of(positions, unknown=ids.shape[1] - 1)
        length = self.shape.max_length or 0
        if high >= length or low < -self.shape.position_offset:
            raise ShapeError(f"positions {low} to {high} do not fit the model's 0 to {length - 1}; give fewer tokens")


class Encoder(_Stack):
    """A stack in which every token sees every other: BERT-like models, or the encoder of an encoder-decoder.

    Args:
        shape: sizes and variants of the stack; `from_shape` also takes the name of a famous one.
        dropout: in embeddings, attention weights and sublayers, while training.
        **factory: `device` and `dtype` of the parameters.

    Raises:
        UnsupportedError: the shape is a decoder's: it has an output layer or a sliding window.

    Example:
        >>> encoder = headwise.Encoder.from_pretrained("path/to/all-MiniLM-L6-v2")
        >>> encoder(ids, mask=attention_mask).shape  # (B, T, d)
    """

    def __init__(self, shape: Shape, *, dropout: float = 0.0, **factory: Unpack[FactoryOptions]) -> None:
        if not shape.decoder_layers and (shape.head or shape.window):
            raise UnsupportedError("an Encoder has no output layer and no sliding window; this is a Decoder's shape")
        super().__init__(shape, (None,) * shape.layers, False, dropout, **factory)
        self.pooler = nn.Linear(shape.width, shape.width, **factory) if shape.pooler else None

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Load a directory with config.json and safetensors of a BERT-like model; dtype None keeps the file's."""
        from ..checkpoints.pretrained import load

        return load(cls, path, dtype, device)

    def forward(
        self,
        ids: Tensor,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        types: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """ids (B, T) -> hidden states (B, T, d).

        Args:
            mask: (B, T), True or 1 for a real token, as tokenizers give it; or (B, H, T, T) as in attend.
            lengths: (B,), tokens at or past it do not exist.
            types: (B, T) token types; all 0 by default.
            positions: (T,) or (B, T); counted from the first token by default.
        """
        self._check_ids(ids)
        positions = self._positions(ids) if positions is None else positions
        self._check_positions(positions, ids)
        self._check_types(types, ids)
        key_visible = key_mask(mask, "mask", ids.shape)
        x = self.embed(ids, positions, types)
        for block in self.blocks:
            x = block(x, mask=key_visible, lengths=lengths, positions=positions)
        return x if self.norm is None else self.norm(x)

    def pool(self, hidden: Tensor) -> Tensor:
        """BERT's pooled output: tanh of a dense layer over the first token, (B, T, d) -> (B, d)."""
        if self.pooler is None:
            raise UnsupportedError("this encoder has no pooler; take hidden[:, 0] or a mean over the tokens")
        return torch.tanh(self.pooler(hidden[:, 0]))

    def _check_types(self, types: Tensor | None, ids: Tensor) -> None:
        if types is None:
            return
        check_integers("types", types, "(B, T)", types.shape == ids.shape, ids.shape)
        low, high = range_of(types)
        if low < 0 or high >= self.shape.token_types:
            raise ShapeError(f"types {low} to {high} do not fit the model, which has {self.shape.token_types} of them")

    def _positions(self, ids: Tensor) -> Tensor:
        if not self.shape.position_offset:
            return torch.arange(ids.shape[1], device=ids.device)
        real = (ids != self.shape.position_offset - 1).long()  # RoBERTa counts over the tokens that are not padding
        return real.cumsum(1) * real - 1


@dataclass
class Caches:
    """The caches of a decoder: one per layer, and one per layer for the memory of cross-attention."""

    layers: list[KVCache]
    memory: list[MemoryCache | None]

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return self.layers[0].length

    def reorder(self, indices: Tensor) -> None:
        """Replace sequence i by sequence indices[i] in every layer, for beam search or several continuations."""
        starts: dict[int, SequenceStarts] = {}
        for cache in self._all():
            if isinstance(cache, StreamedCache):
                cache.reorder_keys(indices)
                starts[id(cache.sequences)] = cache.sequences  # layers share them
            else:
                cache.reorder(indices)
        for sequences in starts.values():
            sequences.change(lambda rows: rows[indices.to(rows.device)])

    def crop(self, length: int) -> None:
        """Drop the tokens at and after `length` in every layer, as after rejected draft tokens."""
        for cache in self._all():
            cache.check_crop(length)  # all or none
        for cache in self._all():
            cache.crop(length)

    def _all(self) -> list[KVCache]:
        return [*self.layers, *(cache for cache in self.memory if cache is not None)]


class DecoderOptions(TypedDict, total=False):
    """The options of `Decoder.forward` and `Decoder.hidden`."""

    memory: Tensor | None
    mask: Tensor | None
    lengths: Tensor | None
    memory_mask: Tensor | None
    cache: Caches | None
    positions: Tensor | None


class Decoder(_Stack):
    """A causal stack: GPT-2, Llama and similar models, or the decoder of an encoder-decoder.

    Args:
        shape: sizes and variants of the stack; `from_shape` also takes the name of a famous one.
        dropout: in embeddings, attention weights and sublayers, while training.
        **factory: `device` and `dtype` of the parameters.

    Raises:
        UnsupportedError: the shape is an encoder's: it has a pooler.

    Example:
        >>> decoder = headwise.Decoder.from_pretrained("path/to/SmolLM2-135M")
        >>> decoder.generate(ids, max_new_tokens=20, eos=2)  # (B, T + at most 20)
    """

    # wraps the steps of `generate`; replaced if the heads are split over processes
    decoding_context: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, shape: Shape, *, dropout: float = 0.0, **factory: Unpack[FactoryOptions]) -> None:
        if shape.pooler and not shape.decoder_layers:
            raise UnsupportedError("a Decoder has no pooler; this is an Encoder's shape")
        cross = shape.decoder_layers > 0
        super().__init__(shape, (None,) * shape.decoder_layers or shape.windows, cross, dropout, **factory)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False, **factory) if shape.head == "own" else None

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Load a directory with config.json and safetensors of a GPT-2- or Llama-like model; dtype None: the file's."""
        from ..checkpoints.pretrained import load

        return load(cls, path, dtype, device)

    def forward(self, ids: Tensor, **options: Unpack[DecoderOptions]) -> Tensor:
        """ids (B, T) -> logits (B, T, vocab), or hidden states if there is no output layer. Options as in hidden."""
        return self.logits(self.hidden(ids, **options))

    def hidden(
        self,
        ids: Tensor,
        *,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: Caches | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """ids (B, T) -> hidden states (B, T, d); with a cache, ids are the tokens that follow the cached ones.

        Args:
            memory: (B, S, d), the input of cross-attention.
            mask: (B, all tokens so far), True or 1 for a real token; positions then count from the first real one.
            lengths: (B,), tokens at or past it do not exist.
            memory_mask: (B, S), the real tokens of the memory.
            cache: the result of `Decoder.cache()`; it is updated.
            positions: (T,) or (B, T); by default they continue after the cache.
        """
        self._check_ids(ids)
        if lengths is not None and cache is not None and any(isinstance(layer, SlidingCache) for layer in cache.layers):
            raise CacheError("layers with a window keep one length for all sequences; give a mask in place of lengths")
        cached = 0 if cache is None else cache.length
        key_visible = key_mask(mask, "mask", (ids.shape[0], cached + ids.shape[1]))
        positions = positions_of(ids, mask, cache) if positions is None else positions
        self._check_positions(positions, ids)
        if memory is not None:
            memory_mask = key_mask(memory_mask, "memory_mask", memory.shape[:2])
        x = self.embed(ids, positions)
        for i, block in enumerate(self.blocks):
            caches = {} if cache is None else {"cache": cache.layers[i], "memory_cache": cache.memory[i]}
            x = block(
                x,
                memory,
                mask=mask_of_cached_keys(key_visible, caches.get("cache"), ids.shape[1]),
                causal=True,
                lengths=lengths,
                memory_mask=memory_mask,
                positions=positions,
                **caches,
            )
        return x if self.norm is None else self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, vocab); unchanged if there is no output layer."""
        if self.shape.head == "tied":
            return self.embed.logits(hidden)
        return hidden if self.head is None else self.head(hidden)

    def cache(self, max_length: int | None = None) -> Caches:
        """Empty caches: they grow, or hold max_length tokens; layers with a window retain only what they see.

        Inside `headwise.streaming`, streaming heads also retain only what they see; the other heads of their layers
        have a growing cache.
        """
        sequences = SequenceStarts()

        def new(block: TransformerBlock) -> KVCache:
            if block.streams is not None:
                return StreamedCache(block.streams, sequences)
            if block.window is not None:
                return SlidingCache(block.window[0] + 1)
            return KVCache() if max_length is None else StaticCache(max_length)

        blocks = [block for block in self.blocks if isinstance(block, TransformerBlock)]
        return Caches([new(b) for b in blocks], [None if b.cross is None else MemoryCache() for b in blocks])

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        mask: Tensor | None = None,
        eos: int | Sequence[int] | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Tensor:
        """Decoding, greedy or sampled: ids (B, T) -> (B, T + at most max_new_tokens).

        Args:
            ids: (B, T), the prompt.
            max_new_tokens: an upper bound.
            mask: (B, T), True or 1 for a real token; padding must be on the left.
            eos: one or more ids that end a sequence, which is then padded with the first of them.
            memory: (B, S, d), the input of cross-attention; memory_mask (B, S) marks its real tokens.
            sampling: temperature, top_k, top_p and seed, as in `Sampling`; without any of them, decoding is greedy.

        Example:
            >>> decoder.generate(ids, 20, temperature=0.8, top_p=0.95, seed=0)
        """
        self._check_generate(ids, max_new_tokens, mask)
        choice = Sampling(**sampling)
        generator = choice.generator(ids.device)
        ends = torch.tensor([] if eos is None else [eos] if isinstance(eos, int) else list(eos), device=ids.device)
        cache = self.cache()
        step, done = ids, torch.zeros_like(ids[:, :1], dtype=torch.bool)  # (B, 1)
        with self.decoding_context():
            for _ in range(max_new_tokens):
                x = self.hidden(step, memory=memory, mask=mask, memory_mask=memory_mask, cache=cache)
                step = choice.choose(self.logits(x[:, -1:])[:, 0], generator).to(ids.dtype)  # (B, 1)
                if len(ends):
                    step = torch.where(done, ends[0].to(ids.dtype), step)
                    done = done | torch.isin(step, ends)
                ids = torch.cat((ids, step), 1)
                mask = None if mask is None else F.pad(mask, (0, 1), value=1)
                if len(ends) and done.all():
                    break
        return ids

    def _check_generate(self, ids: Tensor, max_new_tokens: int, mask: Tensor | None) -> None:
        if self.shape.head is None:
            raise UnsupportedError("this decoder has no output layer to generate with; load a checkpoint with its head")
        self._check_ids(ids)
        if not isinstance(max_new_tokens, int) or max_new_tokens < 0 or not ids.numel():
            raise ShapeError(
                f"generate needs a first token and a count, got ids {shown(ids.shape)} and {max_new_tokens}"
            )
        if mask is not None:
            key_mask(mask, "mask", ids.shape, flat=True)
            if not mask[:, -1].all():
                raise MaskError(
                    "generate continues from the last column, so padding must be on the left; mask ends in 0"
                )
        start, length = int(positions_of(ids, mask, None).max()) + 1, self.shape.max_length
        if self.shape.positions == "learned" and length is not None and start + max_new_tokens - 1 > length:
            raise ShapeError(
                f"{start} tokens and {max_new_tokens} new ones do not fit the model's {length} positions; "
                f"{length + 1 - start} new ones would"
            )


class Transformer(nn.Module):
    """The encoder-decoder of 2017, with one embedding table for source, target and output.

    Args:
        shape: sizes and variants of the stack; `from_shape` also takes the name of a famous one.
        dropout: in embeddings, attention weights and sublayers, while training.
        **factory: `device` and `dtype` of the parameters.

    Raises:
        UnsupportedError: the shape has no decoder_layers.

    Example:
        >>> model = headwise.Transformer.from_shape("transformer-base")
        >>> model(source_ids, target_ids).shape  # (B, T, vocab)
    """

    def __init__(self, shape: Shape, *, dropout: float = 0.0, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        if not shape.decoder_layers:
            raise UnsupportedError("a Transformer needs decoder_layers; for this shape use Encoder or Decoder")
        self.shape = shape
        self.encoder = Encoder(shape, dropout=dropout, **factory)
        self.decoder = Decoder(shape, dropout=dropout, **factory)
        self.decoder.embed = self.encoder.embed

    @classmethod
    def from_shape(cls, shape: str | Shape, **options: Unpack[StackOptions]) -> Self:
        """Build from a Shape or the name of a famous one ("transformer-base"); device="meta" allocates no memory."""
        return cls(_shape(shape), **options)

    def forward(
        self,
        source_ids: Tensor,
        target_ids: Tensor,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """source (B, S), target (B, T) -> logits (B, T, vocab) of each next token. Masks: True or 1 is a real token."""
        memory = self.encoder(source_ids, mask=source_mask)  # (B, S, d)
        return self.decoder(target_ids, memory=memory, mask=target_mask, memory_mask=source_mask)

    def generate(
        self,
        source_ids: Tensor,
        max_new_tokens: int,
        *,
        bos: int,
        eos: int | Sequence[int] | None = None,
        source_mask: Tensor | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Tensor:
        """Decoding of the target, starting with bos: (B, S) -> (B, 1 + at most max_new_tokens).

        Greedy, or with the sampling options of `Decoder.generate`.
        """
        with torch.no_grad():
            memory = self.encoder(source_ids, mask=source_mask)
        start = source_ids.new_full((source_ids.shape[0], 1), bos)
        return self.decoder.generate(start, max_new_tokens, eos=eos, memory=memory, memory_mask=source_mask, **sampling)
