"""One pass of a vision model over an image, or of a model over an image and the text beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..errors import HeadwiseError, UnsupportedError
from ..inspection import clean_text, encode, encode_image
from ..inspection.images import attention_classes
from ..inspection.words import single_token_words
from ..models.loading.resolve import resolve_image_model
from ..models.structure import attention_sites
from ..models.structure.image_model import image_model
from ..models.text_inputs import device_of, is_encoder_decoder
from .capture import Pass, Text, decoder_inputs, encoded_text, record_pass, text_sides

IMAGE_TOKENS = ("image_token_id", "image_token_index")  # config keys of the token that stands for a patch


def run_image(
    image: Any,
    model: Any,
    *,
    processor: Any = None,
    tokenizer: Any = None,
    target: str | None = None,
    off: Any = None,
    name: str | None = None,
) -> Pass:
    """Run a vision model on an image and record what each head does.

    Args:
        image: a file, or an image of Pillow.
        model: a vision model or its name.
        processor: of the model, if it is not found by name.
        tokenizer: of the model, for `target`.
        target: the text beside the image, of a model whose text tokens attend to patches: the decoder's input of an
            encoder-decoder model, or what follows the image in one sequence.
        off: heads whose output is replaced by zeros, {layer: [heads]} as in `mask_heads`.
        name: of the model, as shown.
    """
    name, model, processor = resolve_image_model(model, processor, name)
    if target is None:
        return _run_patches(image, name, model, processor, off)
    target = clean_text(target)
    if tokenizer is None:
        raise HeadwiseError("the text beside an image needs the model's tokenizer; give tokenizer=")
    if is_encoder_decoder(model):
        return _run_cross_attention(image, target, name, model, processor, tokenizer, off)
    return _run_sequence(image, target, name, model, processor, tokenizer, off)


def _run_patches(image: Any, name: str, model: Any, processor: Any, off: Any) -> Pass:
    """The image alone."""
    body, notes = image_model(model, name=name)
    tokens, inputs, image_notes = encode_image(image, name, body, processor)
    patches = Text(tokens.names, tokens.words, image=tokens)
    recording = record_pass(body, inputs, attention_classes(body, _delimiter(patches)), off, None)
    texts = [patches]
    for record in recording["layers"]:
        queries = record.reading.q.shape[2]
        if queries != len(tokens.names):  # attention pooling, whose queries are learned
            record.source = len(texts)
            texts.append(_learned_queries(queries))
    return Pass(name=name, text=tokens.title, texts=tuple(texts), notes=(*notes, *image_notes), **recording)


def _learned_queries(count: int) -> Text:
    names = ("[POOL]",) if count == 1 else tuple(f"[POOL {n}]" for n in range(count))
    return Text(names, single_token_words(names, [True] * count))


def _delimiter(text: Text) -> torch.Tensor:
    return torch.tensor(text.delimiter[None])


def _run_cross_attention(
    image: Any, target: str, name: str, model: Any, processor: Any, tokenizer: Any, off: Any
) -> Pass:
    """An encoder that reads the image, and a decoder whose tokens attend to its patches."""
    encoder, _ = image_model(model, name=name)
    tokens, inputs, notes = encode_image(image, name, encoder, processor)
    encoded, text_notes = encode(target, name, getattr(model, "decoder", model), tokenizer, False, weights=False)
    written = encoded_text(target, decoder_inputs(encoded, model.config), tokenizer)
    inputs["decoder_input_ids"] = torch.tensor([written.ids], device=device_of(model))
    texts = (Text(tokens.names, tokens.words, image=tokens), written)
    kinds = {site.kind for site in attention_sites(model)}
    classes = {kind: {"delimiter": _delimiter(texts[text_sides(kind)[1]])} for kind in kinds}
    recording = record_pass(model, inputs, classes, off, None)
    for record in recording["layers"]:
        record.source, record.target = text_sides(record.kind)
    return Pass(
        name=name, text=tokens.title, texts=texts, notes=(*notes, *text_notes), target=target, encoder_decoder=True,
        **recording,
    )  # fmt: skip


def _run_sequence(image: Any, target: str, name: str, model: Any, processor: Any, tokenizer: Any, off: Any) -> Pass:
    """A language model that reads one token per patch among those of the text, such as LLaVA."""
    image_token = next((getattr(model.config, key) for key in IMAGE_TOKENS if hasattr(model.config, key)), None)
    tower, _ = image_model(model, name=name)
    if image_token is None or tower is model:
        raise UnsupportedError(f"no text token of {name} attends to patches of an image; leave the text out")
    tokens, inputs, notes = encode_image(image, name, tower, processor)
    encoded, text_notes = encode(target, name, model, tokenizer, False, weights=False)
    written = encoded_text(target, encoded, tokenizer)
    before, after = _around_image(written.ids, encoded["special_tokens_mask"], image_token, name)
    count = tokens.rows * tokens.columns
    ids = [*written.ids[:before], *[image_token] * count, *written.ids[after:]]
    joint = dataclasses.replace(tokens, special=written.pieces[:before], after=written.pieces[after:])
    special = [bool(mark) for mark in encoded["special_tokens_mask"]]
    marks = [*special[:before], *[False] * count, *special[after:]]
    texts = (
        Text(tokens.names, tokens.words, image=tokens),
        Text(joint.names, single_token_words(joint.names, marks), tuple(ids), image=joint),
    )
    inputs["input_ids"] = torch.tensor([ids], device=device_of(model))
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    in_tower = {id(module) for module in tower.modules()}
    sides = {site.kind: int(id(site.module) not in in_tower) for site in attention_sites(model)}
    classes = {kind: {"delimiter": _delimiter(texts[side])} for kind, side in sides.items()}
    try:
        recording = record_pass(model, inputs, classes, off, None)
    except ValueError as error:  # transformers compares the image's features with the tokens that stand for them
        reason = " ".join(str(error).split())
        raise UnsupportedError(f"{name} reads an image by other tokens than one per patch: {reason}") from error
    for record in recording["layers"]:
        record.source = record.target = sides[record.kind]
    return Pass(name=name, text=tokens.title, texts=texts, notes=(*notes, *text_notes), target=target, **recording)


def _around_image(ids: tuple[int, ...], special: list[int], image_token: int, name: str) -> tuple[int, int]:
    """Where the image is: the end of the text before it, and the start of the text behind it."""
    if ids.count(image_token) > 1:
        raise HeadwiseError(f"the text holds {ids.count(image_token)} images of {name}, and one is given; name it once")
    if image_token in ids:
        return ids.index(image_token), ids.index(image_token) + 1
    start = next((place for place, mark in enumerate(special) if not mark), 0)  # behind the token of the beginning
    return start, start
