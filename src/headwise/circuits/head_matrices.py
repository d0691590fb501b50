"""`headwise.head_matrices`: W_OV and W_QK of one head as low-rank factors, and what OV does to tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ..errors import HeadwiseError, UnsupportedError
from ..models.structure.heads import head_numbers
from ..models.structure.sites import Key, Site, find_site, require_sites
from .embeddings import Vocabulary, vocabulary
from .layer_factors import LayerFactors, layer_factors
from .low_rank import LowRank
from .norms import Norm
from .stream_norms import stream_norms
from .tokens import Copying, Token, TokenEffect, TokenPair, copying, effects_of, strongest_pairs, token_id, token_name


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """The OV and QK matrices of one head, from its weights alone.

    A head that attends from token i to token j writes OV x_j into the stream of token i, and its score for the pair is
    x_i^T QK x_j, before biases and before the layer's scale.

    Attributes:
        kind: of attention, such as "self".
        layer: the model's own number.
        head: the query head.
        kv_head: the KV head that it reads.
        ov: (d, d) by factors (d, d_v) and (d_v, d): W_O^h and W_V^h.
        qk: (d, d) by factors (d, d_k) and (d_k, d): W_Q^h transposed and W_K^h.
        biases: the head's "query", "key" and "value" biases, as far as they exist.
        rotation: a description of the rotation of queries and keys that QK includes.
        norm: a description of the norms that are folded into the factors.
        notes: what else the layer does.

    Example:
        >>> head = headwise.head_matrices(model, 27, 3, tokenizer=tokenizer)
        >>> head.copying.score, head.token_effect(" Monday", 4).raised
    """

    kind: str
    layer: int
    head: int
    kv_head: int
    ov: LowRank
    qk: LowRank
    biases: dict[str, Tensor]
    rotation: str
    norm: str
    notes: tuple[str, ...]
    _norm: Norm | None = field(repr=False)
    _vocabulary: Vocabulary | UnsupportedError = field(repr=False)
    _tokenizer: Any = field(repr=False, default=None)

    @cached_property
    def copying(self) -> Copying:
        """Whether OV raises the tokens that it reads, compared with random heads.

        The sum of the eigenvalues of W_U W_O^h W_V^h W_E divided by the sum of their absolute values (Elhage et al.
        2021), computed from a d_v x d_v matrix. The final norm's gamma is folded into W_U.

        Raises:
            UnsupportedError: for a model without embedding or unembedding, and layers that are not between them.
        """
        return copying(self.ov, self._norm, self._known_vocabulary())

    def top_tokens(self, k: int = 10) -> tuple[TokenPair, ...]:
        """The k pairs of an input and an output token with the largest entries of W_U W_O^h W_V^h W_E.

        If the norm before the layer is folded in, each embedding is scaled as this norm would scale it; positions,
        norms of embeddings and biases are omitted. Scores are computed in blocks of 4 million; the matrix over all
        pairs of tokens is never stored.

        Args:
            k: how many pairs.

        Returns:
            The pairs, the strongest first; tokens are texts where there is a tokenizer, else ids.

        Raises:
            HeadwiseError: for a k below 1.
            UnsupportedError: as `copying`.

        Example:
            >>> for pair in head.top_tokens(3):
            ...     print(pair.input, "->", pair.output, pair.score)
        """
        _check_count(k)
        pairs = strongest_pairs(self.ov, self._norm, self._known_vocabulary(), k)
        names = self._tokenizer
        return tuple(TokenPair(token_name(a, names), token_name(b, names), score) for a, b, score in pairs)

    def token_effect(self, token: Token, k: int = 10) -> TokenEffect:
        """The tokens whose logits attending to a token raises and lowers most.

        Args:
            token: its id, or its text where there is a tokenizer.
            k: how many tokens of each.

        Returns:
            The pairs with the largest and the smallest scores, the strongest first.

        Raises:
            HeadwiseError: for a text that is not one token, or an id that is not in the vocabulary.
            UnsupportedError: as `copying`.

        Example:
            >>> head.token_effect(" Monday").raised[0].output
        """
        _check_count(k)
        known, number = self._known_vocabulary(), token_id(token, self._tokenizer)
        scores = effects_of(self.ov, self._norm, known, number)

        def pairs(largest: bool) -> tuple[TokenPair, ...]:
            values, places = scores.topk(min(k, len(scores)), largest=largest)
            return tuple(
                TokenPair(token_name(number, self._tokenizer), token_name(place, self._tokenizer), value)
                for place, value in zip(places.tolist(), values.tolist(), strict=True)
            )

        return TokenEffect(pairs(True), pairs(False))

    def _known_vocabulary(self) -> Vocabulary:
        if isinstance(self._vocabulary, UnsupportedError):
            raise UnsupportedError(str(self._vocabulary))
        return self._vocabulary

    def __repr__(self) -> str:
        rows, rank = self.ov.shape[0], self.ov.rank
        lines = [
            f"head {self.head} (KV head {self.kv_head}) of {self.kind} layer {self.layer}: width {rows}",
            f"  OV: rank {rank}, norm {self.ov.norm:.4g}",
            f"  QK: rank {self.qk.rank}, norm {self.qk.norm:.4g}; rotation: {self.rotation}",
            f"  norm: {self.norm}",
        ]
        if self.biases:
            lines.append(f"  biases: {', '.join(self.biases)}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def head_matrices(
    model: nn.Module,
    layer: Key,
    head: int,
    *,
    distance: int | None = None,
    fold_norm: bool | None = None,
    tokenizer: Any = None,
) -> HeadMatrices:
    """W_OV and W_QK of a head as low-rank factors; its copying score and its strongest tokens.

    Query head i reads KV head i // (query heads / KV heads). By default the norm before the layer is folded in: its
    gamma scales the columns of W_Q, W_K and W_V and, for a LayerNorm, the mean is subtracted (its beta is in the
    biases), so that the factors apply directly to the residual stream. What remains of the norm is one positive scale
    per token, which depends on the input. A norm of W_O's output (Gemma) is folded into W_O in the same way. The norms
    are found in one run of the model on random tokens; the result is cached.

    Args:
        model: any PyTorch model whose projections are known; it is not changed.
        layer: its number, (kind, number) or its module's path.
        head: the number of a query head.
        distance: with rotary positions, QK depends on how many tokens the query is after the key. Computes QK for that
            distance with the model's own rotary code; negative for a query before its key. None omits the rotation.
        fold_norm: None folds norms that are known; True also raises an error if they are not known; False folds none.
        tokenizer: for the texts of tokens in `top_tokens` and `token_effect`.

    Returns:
        A HeadMatrices.

    Raises:
        HeadwiseError: for a layer, head or distance that does not exist.
        UnsupportedError: if the matrices of the layer, its rotation or its norms are not known.

    Example:
        >>> model, tokenizer = headwise.load("smollm2"), headwise.tokenizer("smollm2")
        >>> head = headwise.head_matrices(model, 17, 4, distance=1, tokenizer=tokenizer)
        >>> head.qk.singular_values[:3], head.copying.score
        >>> head.top_tokens(5)
    """
    site = find_site(model, require_sites(model), layer)
    norms = stream_norms(model)
    factors = layer_factors(model, site, norms, distance=distance, fold_norm=fold_norm)
    number = _head_number(site, head, len(factors.query))
    ov, qk, kv = factors.ov(number), factors.qk(number), number // factors.group
    try:
        words: Vocabulary | UnsupportedError = vocabulary(model, site, ov.shape[0], ov.left.dtype, norms)
    except UnsupportedError as error:
        words = error
    notes = factors.notes if isinstance(words, UnsupportedError) else (*factors.notes, *words.notes)
    return HeadMatrices(
        site.kind, site.index, number, kv, ov, qk, _biases(factors, number),
        factors.rotation, factors.norm, notes, factors.value_norm, words, tokenizer,
    )  # fmt: skip


def _head_number(site: Site, head: Any, count: int) -> int:
    if not isinstance(head, int) or isinstance(head, bool):
        raise HeadwiseError(f"head must be the number of a query head of {site}, 0 to {count - 1}, got {head!r}")
    return head_numbers(site, head, count)[0]


def _biases(factors: LayerFactors, head: int) -> dict[str, Tensor]:
    return {name: bias[head if name == "query" else head // factors.group] for name, bias in factors.biases.items()}


def _check_count(k: Any) -> None:
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise HeadwiseError(f"k must be a number of tokens from 1 on, got {k!r}")
