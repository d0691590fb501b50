"""Facts of the encoders of text, and of encoder-decoders: one row per model type."""

from __future__ import annotations

from typing import Any

from .facts import Facts, Sizes, lin, ln
from .output_heads import tied


def rows(s: Sizes) -> int:
    """Learned positions and token types, both tables of the embedding's width."""
    return s("max_position_embeddings") + s("type_vocab_size")


def widened(s: Sizes) -> int:
    """A linear layer from the embedding's width to the model's, where the two differ."""
    inner = s("embedding_size") or s.w
    return lin(inner, s.w) if inner != s.w else 0


BERT = Facts(
    gated=False, qkv_bias=True, out_bias=True, ffn_bias=True, norm="layer", final_norm=False, embedding_norm=True,
    positions=rows, heads="bert", cross="same",
)  # fmt: skip
ROBERTA = BERT.but(heads="roberta")
PRE_NORM = ROBERTA.but(final_norm=True)
DEBERTA = BERT.but(heads="deberta", cross="", embedding_width=lambda s: s("embedding_size") or s.w)


def relative(s: Sizes) -> int:
    """DeBERTa's table of relative positions: twice as many rows as it looks far."""
    if not s("relative_attention"):
        return 0
    far = s.node.value("max_relative_positions")
    far = far if isinstance(far, int) and far >= 1 else s("max_position_embeddings")
    buckets = s.node.value("position_buckets")
    return 2 * (buckets if isinstance(buckets, int) and buckets > 0 else far)


def deberta_rows(s: Sizes) -> int:
    absolute = s("max_position_embeddings") if s.node.value("position_biased_input") is not False else 0
    return absolute + s("type_vocab_size")


def deberta_attention(s: Sizes) -> int:
    """One matrix for q, k, v with biases for q and v; more for relative positions, by which pairs are requested."""
    size = s.w * 3 * s.q + 2 * s.q + lin(s.q, s.w)
    if s("relative_attention"):
        pairs = s.node.value("pos_att_type") or []
        size += (s.w * s.q if "c2p" in pairs else 0) + (lin(s.w, s.q) if "p2c" in pairs else 0)
    return size + (2 * s.h * s.h if s("talking_head") else 0)


def deberta2_attention(s: Sizes) -> int:
    size = 3 * lin(s.w, s.q) + lin(s.w, s.w)  # W_O is square, whatever attention_head_size says
    if s("relative_attention") and not s("share_att_key"):
        pairs = s.node.value("pos_att_type") or []
        size += (lin(s.w, s.q) if "c2p" in pairs else 0) + (lin(s.w, s.q) if "p2c" in pairs else 0)
    return size


def modernbert_norms(s: Sizes) -> int:
    """The first layer has no norm before its attention: the embeddings' stands there."""
    return 1 if s.index == 0 else 2


MODERNBERT = Facts(
    qkv_bias="attention_bias", out_bias="attention_bias", norms=0, final_norm=False, heads="modernbert",
    ffn=lambda s: lin(s.w, 2 * s.f, s("mlp_bias")) + lin(s.f, s.w, s("mlp_bias")),
    layer={"norms": lambda s: modernbert_norms(s) * s.w * (1 + s("norm_bias"))},
    once={"norms": lambda s: 2 * s.w * (1 + s("norm_bias"))},
)  # fmt: skip

ENCODERS: dict[str, Facts] = {
    "bert": BERT,
    "ernie": BERT.but(positions=lambda s: rows(s) + s("task_type_vocab_size") * s("use_task_id")),
    "megatron-bert": BERT.but(embedding_norm=False, final_norm=True),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "data2vec-text": ROBERTA,
    "roberta-prelayernorm": PRE_NORM,
    "xlm-roberta-xl": PRE_NORM.but(embedding_norm=False),
    "distilbert": BERT.but(
        positions=lambda s: s("max_position_embeddings"), ffn_width=lambda s: s("hidden_dim"), heads="distilbert",
        cross=""
    ),
    "albert": BERT.but(
        shared_layers=lambda s: min(s("num_hidden_groups") * s("inner_group_num"), s.L), heads="albert", cross="",
        embedding_width=lambda s: s("embedding_size") or s.w,
        once={"other": lambda s: lin(s("embedding_size") or s.w, s.w)},
    ),
    "electra": BERT.but(heads="electra", embedding_width=lambda s: s("embedding_size") or s.w, once={"other": widened}),
    "deberta": DEBERTA.but(
        attention=deberta_attention, positions=deberta_rows,
        once={"embeddings": lambda s: relative(s) * s.w,
              "other": lambda s: (s("embedding_size") or s.w) * s.w if (s("embedding_size") or s.w) != s.w else 0},
    ),
    "deberta-v2": DEBERTA.but(
        attention=deberta2_attention, positions=deberta_rows,
        once={"embeddings": lambda s: relative(s) * s.w,
              "norms": lambda s: ln(s.w) if "layer_norm" in s.text("norm_rel_ebd") and s("relative_attention") else 0,
              "other": lambda s: convolution(s) + (
                  (s("embedding_size") or s.w) * s.w if (s("embedding_size") or s.w) != s.w else 0)},
    ),
    "modernbert": MODERNBERT,
    "mpnet": BERT.but(
        positions=lambda s: s("max_position_embeddings"), cross="", heads="roberta",
        once={"attention": lambda s: s("relative_attention_num_buckets") * s.h},
    ),
    "nomic_bert": Facts(norm="layer", final_norm=False, embedding_norm=True,
    positions=lambda s: s("type_vocab_size"), heads="bert_bare"),
    "eurobert": Facts(qkv_bias="attention_bias", out_bias="attention_bias", ffn_bias="mlp_bias", heads="eurobert"),
}  # fmt: skip


def convolution(s: Sizes) -> int:
    """DeBERTa-v2's convolution beside the first layer, where a kernel size is given."""
    size, groups = s("conv_kernel_size"), s("conv_groups") or 1
    return s.w * (s.w // groups) * size + s.w + ln(s.w) if size else 0


BART = Facts(gated=False, qkv_bias=True, out_bias=True, ffn_bias=True, norm="layer", heads="seq2seq", cross="same")


def shared_once(s: Sizes) -> int:
    """Rows that encoder and decoder each have; the words they share are counted with the encoder."""
    return s("max_position_embeddings")


def bart(*, offset: int, embedding_norm: bool, final_norm: bool) -> tuple[Facts, Facts]:
    """A BART-like pair; the decoder's words are the encoder's. Untied, the class makes a third table of words."""
    side = BART.but(embedding_norm=embedding_norm, final_norm=final_norm, positions=lambda s: shared_once(s) + offset)
    return side, side.but(once={"embeddings": lambda s: (-1 if tied(s) else 1) * s.V * s.w})


def marian_words(s: Sizes) -> int:
    """Marian may have words of its own for each side."""
    if s.node.value("share_encoder_decoder_embeddings") is not False:
        return (-1 if tied(s) else 1) * s.V * s.w
    return ((s("decoder_vocab_size") or s.V) - s.V) * s.w


def t5_ffn(s: Sizes) -> int:
    flag = s.node.raw.get("is_gated_act")
    gated = flag if isinstance(flag, bool) else s.text("feed_forward_proj").startswith("gated")
    return (3 if gated else 2) * s.w * s.f


T5 = Facts(
    ffn=t5_ffn, heads="seq2seq", cross="same", once={"attention": lambda s: s("relative_attention_num_buckets") * s.h}
)
UMT5 = T5.but(once={}, layer={"attention": lambda s: s("relative_attention_num_buckets") * s.h})
WHISPER = BART.but(key_bias=False, embedding_width=lambda s: s.w)
WHISPER_ENCODER = WHISPER.but(
    once={
        "embeddings": lambda s: s("max_source_positions") * s.w - s.V * s.w,
        "other": lambda s: lin(3 * s("num_mel_bins"), s.w) + lin(3 * s.w, s.w),
    }
)


def _change_pair(pair: tuple[Facts, Facts], **changes: Any) -> tuple[Facts, Facts]:
    return pair[0].but(**changes), pair[1].but(**changes)


def _pairs() -> dict[str, Facts]:
    """Encoder rows under the model type, decoder rows under "type:decoder"."""
    kinds = {
        "bart": bart(offset=2, embedding_norm=True, final_norm=False),
        "mbart": bart(offset=2, embedding_norm=True, final_norm=True),
        "plbart": bart(offset=2, embedding_norm=True, final_norm=False),
        "blenderbot": bart(offset=0, embedding_norm=False, final_norm=True),
        "blenderbot-small": bart(offset=0, embedding_norm=True, final_norm=False),
        "marian": bart(offset=0, embedding_norm=False, final_norm=False),
        "pegasus": bart(offset=0, embedding_norm=False, final_norm=True),
        "t5": (
            T5,
            T5.but(
                once={
                    "attention": lambda s: s("relative_attention_num_buckets") * s.h,
                    "embeddings": lambda s: -s.V * s.w,
                }
            ),
        ),
        "umt5": (UMT5, UMT5.but(once={"embeddings": lambda s: -s.V * s.w})),
        "whisper": (WHISPER_ENCODER, WHISPER.but(positions=lambda s: s("max_target_positions"))),
    }
    kinds["mt5"] = kinds["t5"]
    kinds["m2m_100"] = _change_pair(bart(offset=0, embedding_norm=False, final_norm=True), positions=lambda s: 0)
    post_norm = bart(offset=0, embedding_norm=False, final_norm=False)
    kinds["transformer-2017"] = _change_pair(post_norm, positions=lambda s: 0, qkv_bias=False, out_bias=False)
    marian = kinds["marian"]
    kinds["marian"] = marian[0], marian[1].but(once={"embeddings": marian_words})
    return {name: encoder.but(decoder=decoder) for name, (encoder, decoder) in kinds.items()}


FACTS: dict[str, Facts] = {**ENCODERS, **_pairs()}
