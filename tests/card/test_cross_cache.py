"""The cache of encoder-decoders, byte by byte as transformers fills it: cross-attention keeps the encoder's length."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headwise
from helpers.meta_models import small

TOKENS, SOURCE, BATCH = 5, 13, 3  # of the decoder, of the encoder, sequences


def cached(past: Any) -> tuple[int, int]:
    """Bytes of self-attention and of cross-attention."""
    sides = (
        (past.self_attention_cache, past.cross_attention_cache) if isinstance(past, EncoderDecoderCache) else (past,)
    )
    tensors = [[x for layer in side.layers for x in (layer.keys, layer.values) if x is not None] for side in sides]
    sums = [sum(x.numel() * x.element_size() for x in side) for side in tensors]
    return sums[0], sum(sums[1:])


def plain(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))


def shares(config: Any, **options: Any) -> tuple[int, int]:
    """The same as the card says."""
    by_kind = headwise.card.read(plain(config)).cache(TOKENS, "fp32", BATCH, **options).by_kind
    return sum(size for kind, size in by_kind.items() if kind != "cross"), by_kind.get("cross", 0)


def decoded(model: Any, width: int, channels: tuple[int, ...] = ()) -> Any:
    """What the decoder keeps after some tokens over an encoder's output."""
    encoded = BaseModelOutput(last_hidden_state=torch.randn(BATCH, SOURCE, width))
    encoded.attention_mask = None  # which some models look for
    tokens = torch.randint(3, 20, (BATCH, TOKENS, *channels))
    with torch.no_grad():
        return model(encoder_outputs=encoded, decoder_input_ids=tokens, use_cache=True).past_key_values


@pytest.mark.parametrize(
    "model_type",
    ["t5", "mt5", "bart", "marian", "pegasus", "blenderbot", "prophetnet", "moonshine", "longt5", "m2m_100"],
)
def test_cross_attention_caches_the_given_encoder_length(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type](**small(model_type) | {"pad_token_id": 0, "decoder_start_token_id": 1})
    model = transformers.AutoModelForSeq2SeqLM if model_type != "moonshine" else transformers.AutoModelForSpeechSeq2Seq
    past = decoded(model.from_config(config).eval(), config.hidden_size)
    assert cached(past) == shares(config, source=SOURCE)
    assert min(cached(past)) > 0
    card = headwise.card.read(plain(config))
    assert card.cache(TOKENS).ideal == card.cache(TOKENS, source=TOKENS).ideal
    assert "assumed as long" in card.explain(TOKENS)


def test_whisper_caches_its_1500_frames() -> None:
    sizes = {"max_source_positions": 17, "num_mel_bins": 7, "d_model": 48, "pad_token_id": 0, "bos_token_id": 1}
    config = transformers.WhisperConfig(**small("whisper") | sizes | {"eos_token_id": 2, "decoder_start_token_id": 1})
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        past = model(
            input_features=torch.randn(BATCH, 7, 34), decoder_input_ids=torch.ones(BATCH, TOKENS, dtype=torch.long)
        ).past_key_values
    assert cached(past) == shares(config)
    large = {"model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32}
    large |= {"encoder_attention_heads": 20, "decoder_attention_heads": 20}
    card = headwise.card.read(large)
    assert card.kv_cache(448) == 2 * 2 * 32 * 1280 * (448 + 1500)  # 304 MiB
    words = "234.4 MiB of it is cross-attention's, over the 1,500 tokens that the encoder always outputs"
    assert words in card.explain(448)
    assert card.longest_context(card.kv_cache(448)) == 448
    assert card.flops(448).decode_attention - card.flops(448, source=1499).decode_attention == 32 * 2 * 20 * 2 * 64


@pytest.mark.parametrize("encoder", ["vit", "deit", "donut-swin"])
def test_vision_encoder_decoder_caches_the_patches(encoder: str) -> None:
    vision_sizes = {
        "image_size": [70, 91],
        "patch_size": 4,
        "depths": [1, 1, 1],
        "num_heads": [2, 2, 4],
        "embed_dim": 12,
    }
    vision_sizes |= {"window_size": 3}
    sizes = vision_sizes if encoder == "donut-swin" else {"image_size": 35, "patch_size": 7}
    vision = CONFIG_MAPPING[encoder](**small(encoder) | sizes)
    text = transformers.TrOCRConfig(**small("trocr") | {"pad_token_id": 0, "cross_attention_hidden_size": 48})
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    config.pad_token_id, config.decoder_start_token_id = 0, 1
    model = transformers.VisionEncoderDecoderModel(config).eval()
    height, width = vision_sizes["image_size"] if encoder == "donut-swin" else (35, 35)
    with torch.no_grad():
        past = model(
            pixel_values=torch.randn(BATCH, 3, height, width),
            decoder_input_ids=torch.ones(BATCH, TOKENS, dtype=torch.long),
        ).past_key_values
    assert cached(past) == shares(config)


def test_mllama_caches_all_tiles_of_an_image() -> None:
    text = small("mllama_text_model") | {"cross_attention_layers": [1, 3], "num_hidden_layers": 5, "pad_token_id": 0}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": None}
    vision = {"image_size": 28, "patch_size": 7, "max_num_tiles": 3, "hidden_size": 48, "attention_heads": 6}
    vision |= {
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "intermediate_layers_indices": [0],
        "intermediate_size": 37,
    }
    vision |= {"vision_output_dim": 96, "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3]]}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision)
    model = transformers.MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        past = model(
            input_ids=torch.ones(BATCH, TOKENS, dtype=torch.long),
            pixel_values=torch.randn(BATCH, 1, 3, 3, 28, 28),
            aspect_ratio_ids=torch.ones(BATCH, 1, dtype=torch.long),
            aspect_ratio_mask=torch.ones(BATCH, 1, 3, dtype=torch.long),
            cross_attention_mask=torch.ones(BATCH, TOKENS, 1, 3, dtype=torch.long),
            use_cache=True,
        ).past_key_values
    assert sum(cached(past)) == sum(shares(config))
    assert {layer.encoder_length for layer in headwise.card.read(plain(config)).attention.layers} == {None, 3 * 17}


def test_blip_caches_the_patches() -> None:
    text = small("blip_text_model") | {
        "encoder_hidden_size": 48,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = small("blip_vision_model") | {"image_size": 35, "patch_size": 7, "hidden_size": 48}
    config = transformers.BlipConfig(text_config=text, vision_config=vision)
    model = transformers.BlipForConditionalGeneration(config).eval()
    with torch.no_grad():
        seen = model.vision_model(pixel_values=torch.randn(BATCH, 3, 35, 35)).last_hidden_state
        past = model.text_decoder(
            input_ids=torch.ones(BATCH, TOKENS, dtype=torch.long), encoder_hidden_states=seen, use_cache=True
        ).past_key_values
    assert cached(past) == shares(config)


def dia() -> tuple[Any, int]:
    sizes = {
        "cross_num_attention_heads": 6,
        "cross_num_key_value_heads": 3,
        "cross_head_dim": 22,
        "cross_hidden_size": 48,
    }
    config = transformers.DiaConfig(
        encoder_config=small("dia_encoder"),
        decoder_config=small("dia_decoder") | sizes | {"num_channels": 2},
        delay_pattern=[0, 3],
    )
    return config, 48


def t5gemma() -> tuple[Any, int]:
    part = small("t5_gemma_module") | {"sliding_window": 29}
    return transformers.T5GemmaConfig(encoder=part, decoder=part, vocab_size=71), 48


def canary() -> tuple[Any, int]:
    config = transformers.CanaryConfig(
        encoder_config=small("parakeet_encoder"),
        decoder_config=small("canary_decoder") | {"pad_token_id": 0},
        vocab_size=71,
    )
    return config, 48


@pytest.mark.parametrize("made", [t5gemma, canary, dia], ids=lambda made: made.__name__)
def test_nested_decoders_cache_the_output_of_their_encoder(made: Callable[[], tuple[Any, int]]) -> None:
    config, width = made()
    names = {"t5gemma": "T5GemmaForConditionalGeneration", "canary": "CanaryForConditionalGeneration"}
    model = getattr(transformers, names.get(config.model_type, "DiaForConditionalGeneration"))(config).eval()
    channels = (2,) if config.model_type == "dia" else ()
    assert cached(decoded(model, width, channels)) == shares(config, source=SOURCE)


def test_a_model_that_generates_nothing_caches_nothing() -> None:
    assert headwise.card.read({"model_type": "detr"}).cache(100).ideal == 0
