"""Output heads: the parameters that a class adds to the bare model, by the end of its name."""

from __future__ import annotations

from collections.abc import Callable

from .facts import Facts, Sizes, lin, ln

Output = Callable[[Sizes, Facts], int]

SUFFIXES = (
    "ForCausalLM", "LMHeadModel", "DoubleHeadsModel", "ForConditionalGeneration", "ForSequenceClassification",
    "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM", "WithLMHeadModel", "ForPreTraining",
    "ForMultipleChoice",
    "ForNextSentencePrediction", "ForImageClassification", "ForAudioClassification", "ModelWithProjection",
    "EncoderModel",
    "ForMaskedImageModeling", "ForImageClassificationWithTeacher", "TextModel", "VisionModel", "MTModel", "Model",
)  # fmt: skip


def labels(s: Sizes) -> int:
    """num_labels in the file, else the entries of id2label, else two, as in transformers."""
    names = s.node.raw.get("id2label")
    return s("num_labels") or (len(names) if isinstance(names, dict) and names else 2)


def tied(s: Sizes) -> bool:
    """Whether the output layer shares the embedding table, which is the default."""
    return s.node.value("tie_word_embeddings") is not False


def lm(s: Sizes, facts: Facts) -> int:
    """The output layer over the vocabulary; only its bias where it is tied to the embeddings."""
    table = 0 if tied(s) and facts.ties else s.V * facts.embedding_width(s)
    return table + s.V * s.is_on(facts.head_bias)


def pooler(s: Sizes) -> int:
    return lin(s.w, s.w)


def classes(s: Sizes) -> int:
    return lin(s.w, labels(s))


def _one_bias(s: Sizes, facts: Facts) -> int:
    """A dense layer and a norm before the vocabulary, and a bias over it."""
    inner = facts.embedding_width(s)
    return lin(s.w, inner) + ln(inner) + (0 if tied(s) else s.V * inner) + s.V


def _mlm(s: Sizes, facts: Facts) -> int:
    """BERT's head: without tying, its own bias and that of its last layer are separate."""
    return _one_bias(s, facts) + (0 if tied(s) else s.V)


OUTPUTS: dict[str, dict[str, Output]] = {
    "decoder": {
        "Model": lambda s, f: 0,
        "TextModel": lambda s, f: 0,
        "ForCausalLM": lm,
        "LMHeadModel": lm,
        "ForConditionalGeneration": lm,
        "ForSequenceClassification": lambda s, f: s.w * labels(s),
        "ForTokenClassification": lambda s, f: classes(s),
        "ForQuestionAnswering": lambda s, f: lin(s.w, 2),
    },
    "bert": {
        "Model": lambda s, f: pooler(s),
        "ForMaskedLM": _mlm,
        "LMHeadModel": _mlm,
        "ForCausalLM": _mlm,
        "ForPreTraining": lambda s, f: pooler(s) + _mlm(s, f) + lin(s.w, 2),
        "ForNextSentencePrediction": lambda s, f: pooler(s) + lin(s.w, 2),
        "ForSequenceClassification": lambda s, f: pooler(s) + classes(s),
        "ForMultipleChoice": lambda s, f: pooler(s) + lin(s.w, 1),
        "ForTokenClassification": lambda s, f: classes(s),
        "ForQuestionAnswering": lambda s, f: classes(s),
    },
    "roberta": {
        "Model": lambda s, f: pooler(s),
        "ForMaskedLM": _mlm,
        "ForCausalLM": _mlm,
        "ForSequenceClassification": lambda s, f: pooler(s) + classes(s),  # a dense layer of the same size
        "ForMultipleChoice": lambda s, f: pooler(s) + lin(s.w, 1),
        "ForTokenClassification": lambda s, f: classes(s),
        "ForQuestionAnswering": lambda s, f: classes(s),
    },
}
OUTPUTS["gpt2"] = OUTPUTS["decoder"] | {"DoubleHeadsModel": lambda s, f: lm(s, f) + lin(s.w, 1)}
OUTPUTS["opt"] = OUTPUTS["decoder"] | {
    "ForSequenceClassification": lambda s, f: f.embedding_width(s) * labels(s),
    "ForQuestionAnswering": lambda s, f: lin(f.embedding_width(s), 2),
}
BARE = OUTPUTS["bert"] | {"Model": lambda s, f: 0}
OUTPUTS["bert_bare"] = BARE
OUTPUTS["roberta"]["TextModel"] = OUTPUTS["roberta"]["Model"]
OUTPUTS["distilbert"] = BARE | {
    "ForMaskedLM": _one_bias,
    "ForSequenceClassification": lambda s, f: pooler(s) + classes(s),
    "ForMultipleChoice": lambda s, f: pooler(s) + lin(s.w, 1),
    "ForQuestionAnswering": lambda s, f: classes(s),
}
OUTPUTS["albert"] = OUTPUTS["bert"] | {"ForPreTraining": lambda s, f: pooler(s) + _mlm(s, f) + classes(s)}
OUTPUTS["electra"] = BARE | {
    "ForMaskedLM": _one_bias,
    "ForCausalLM": _one_bias,
    "ForPreTraining": lambda s, f: pooler(s) + lin(s.w, 1),
    "ForSequenceClassification": lambda s, f: pooler(s) + classes(s),
    "ForMultipleChoice": lambda s, f: (0 if s.node.value("summary_use_proj") is False else pooler(s)) + lin(s.w, 1),
}
OUTPUTS["deberta"] = BARE | {
    "ForSequenceClassification": lambda s, f: pooler(s) + classes(s),
    "ForMultipleChoice": lambda s, f: pooler(s) + lin(s.w, 1),
}


def _dense_norm(s: Sizes) -> int:
    """ModernBERT's prediction head: a dense layer and a norm, each with a bias only if the config says so."""
    return lin(s.w, s.w, s("classifier_bias")) + s.w * (1 + s("norm_bias"))


OUTPUTS["modernbert"] = {
    "Model": lambda s, f: 0,
    "ForMaskedLM": lambda s, f: _dense_norm(s) + (0 if tied(s) else s.V * s.w) + s.V * s("decoder_bias"),
    "ForSequenceClassification": lambda s, f: _dense_norm(s) + classes(s),
    "ForTokenClassification": lambda s, f: _dense_norm(s) + classes(s),
    "ForQuestionAnswering": lambda s, f: _dense_norm(s) + classes(s),
    "ForMultipleChoice": lambda s, f: _dense_norm(s) + lin(s.w, 1),
}
OUTPUTS["eurobert"] = {
    "Model": lambda s, f: 0,
    "ForMaskedLM": lambda s, f: lm(s, f) + (s.V if s("mlp_bias") else 0),
    "ForSequenceClassification": lambda s, f: lin(s.w, s.w) + classes(s),
    "ForTokenClassification": lambda s, f: classes(s),
}
OUTPUTS["seq2seq"] = {
    "Model": lambda s, f: 0,
    "ForConditionalGeneration": lm,
    "MTModel": lm,
    "ForQuestionAnswering": lambda s, f: classes(s),
    "ForSequenceClassification": lambda s, f: pooler(s) + classes(s),
}
# classes of an encoder-decoder that have its encoder alone
ENCODER_ALONE: dict[str, Output] = {"EncoderModel": lambda s, f: 0, "ForTokenClassification": lambda s, f: classes(s)}
OUTPUTS["vit_bare"] = {"Model": lambda s, f: 0, "ForImageClassification": lambda s, f: classes(s)}
OUTPUTS["vit"] = OUTPUTS["vit_bare"] | {"Model": lambda s, f: lin(s.w, s("pooler_output_size") or s.w)}
OUTPUTS["deit"] = OUTPUTS["vit"] | {"ForImageClassificationWithTeacher": lambda s, f: 2 * classes(s)}
OUTPUTS["dino"] = {"Model": lambda s, f: 0, "ForImageClassification": lambda s, f: lin(2 * s.w, labels(s))}
OUTPUTS["tower"] = {"Model": lambda s, f: 0, "VisionModel": lambda s, f: 0, "TextModel": lambda s, f: 0}
OUTPUTS["clip_vision"] = OUTPUTS["tower"] | {"ModelWithProjection": lambda s, f: s.w * s("projection_dim")}
OUTPUTS["clip_text"] = OUTPUTS["clip_vision"]


def _probe(s: Sizes) -> int:
    """SigLIP's pooling: a learned query attends to all patches, then an FFN."""
    if s.node.value("vision_use_head") is False:
        return 0
    return s.w + 4 * lin(s.w, s.w) + ln(s.w) + lin(s.w, s.f) + lin(s.f, s.w)


OUTPUTS["siglip_vision"] = dict.fromkeys(("Model", "VisionModel"), lambda s, f: _probe(s))
OUTPUTS["siglip_text"] = dict.fromkeys(("Model", "TextModel"), lambda s, f: lin(s.w, s("projection_size") or s.w))


def _over_text(s: Sizes, f: Facts) -> int:
    """The output layer over the text tower's words."""
    text = s.below["text"]
    return 0 if tied(s) else text.V * text.w


OUTPUTS["joint"] = {
    "Model": lambda s, f: 0,
    "ForConditionalGeneration": _over_text,
    "ForSequenceClassification": lambda s, f: s.below["text"].w * labels(s),
    "ForTokenClassification": lambda s, f: lin(s.below["text"].w, labels(s)),
}
OUTPUTS["joint_by_text"] = OUTPUTS["joint"] | {  # the text's own config says whether it ties
    "ForConditionalGeneration": lambda s, f: 0 if tied(s.below["text"]) else s.below["text"].V * s.below["text"].w
}
OUTPUTS["dual"] = {"Model": lambda s, f: 0}
