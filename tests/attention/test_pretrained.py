"""Checkpoints run in our stacks as they do in transformers: random ones of every type, and two real ones."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from headwise import Decoder, Encoder
from headwise.errors import HeadwiseError
from helpers.real_weights import minilm, smollm2

TOLERANCE = 1e-4
VOCAB, TOKENS, BATCH = 29, 11, 3
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 19,
    "type_vocab_size": 2,
}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 12,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 17,
    "max_position_embeddings": 19,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 23}
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 17,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 3}

ENCODERS = [
    ("BertModel", BERT),
    (
        "BertModel",
        {**BERT, "num_attention_heads": 1, "hidden_act": "relu", "layer_norm_eps": 0.01, "type_vocab_size": 1},
    ),
    ("BertForMaskedLM", {**BERT, "hidden_act": "gelu_new"}),
    ("BertForSequenceClassification", {**BERT, "num_hidden_layers": 1}),
    ("RobertaModel", BERT),
    ("RobertaForMaskedLM", {**BERT, "pad_token_id": 4}),
    ("XLMRobertaModel", BERT),
    ("CamembertForTokenClassification", BERT),
    ("DistilBertModel", DISTILBERT),
    ("DistilBertForMaskedLM", {**DISTILBERT, "activation": "relu", "sinusoidal_pos_embds": True}),
    ("ElectraModel", {**BERT, "embedding_size": 5}),
    ("ElectraForPreTraining", {**BERT, "embedding_size": 12}),
]
DECODERS = [
    ("GPT2LMHeadModel", GPT2),
    ("GPT2LMHeadModel", {**GPT2, "n_inner": 17, "tie_word_embeddings": False, "activation_function": "relu"}),
    ("LlamaForCausalLM", LLAMA),
    (
        "LlamaForCausalLM",
        {**LLAMA, "head_dim": None, "num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True},
    ),
    ("LlamaForCausalLM", {**LLAMA, "head_dim": 10, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("LlamaForCausalLM", {**LLAMA, "rope_parameters": LLAMA3}),
    ("LlamaForCausalLM", {**LLAMA, "rope_parameters": YARN, "rms_norm_eps": 0.01}),
    ("MistralForCausalLM", {**LLAMA, "sliding_window": 3}),
    ("MistralForCausalLM", {**LLAMA, "sliding_window": None}),
    ("Qwen2ForCausalLM", LLAMA),
    ("Qwen2ForCausalLM", {**LLAMA, **SLIDING, "max_window_layers": 1, "tie_word_embeddings": True}),
    (
        "Qwen2ForCausalLM",
        {**LLAMA, **SLIDING, "layer_types": [f"{k}_attention" for k in ("sliding", "full", "sliding")]},
    ),
    ("Qwen3ForCausalLM", {**LLAMA, "rms_norm_eps": 0.01}),
    ("Qwen3ForCausalLM", {**LLAMA, **SLIDING, "max_window_layers": 0, "attention_bias": True, "head_dim": 10}),
]


def named(cases: list) -> dict:
    return {"argvalues": cases, "ids": [f"{name}-{i}" for i, (name, _) in enumerate(cases)]}


def random_model(name: str, settings: dict) -> nn.Module:
    """A transformers model with every parameter random, biases and norms too."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**copy.deepcopy(settings))).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def saved(folder: Path, name: str, settings: dict, **options) -> tuple[nn.Module, Path]:
    model = random_model(name, settings)
    model.save_pretrained(folder, **options)
    return model, folder


def batch(side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Three texts of 11, 7 and 2 tokens, the shorter ones padded with token 1."""
    ids = torch.randint(5, VOCAB, (BATCH, TOKENS))
    mask = (torch.arange(TOKENS) < torch.tensor([[11], [7], [2]])).long()
    mask = mask if side == "right" else mask.flip(1)
    return torch.where(mask.bool(), ids, 1), mask


def greedy(model: nn.Module, ids: torch.Tensor, count: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize(("name", "settings"), **named(ENCODERS))
def test_encoders_equal_transformers(tmp_path, name, settings):
    theirs, folder = saved(tmp_path, name, settings)
    ours = Encoder.from_pretrained(folder)
    assert not ours.training
    assert all(p.requires_grad for p in ours.parameters())
    for side in ("right", "left"):
        ids, mask = batch(side)
        want = theirs.base_model(ids, attention_mask=mask)
        hidden = ours(ids, mask=mask)
        close(hidden, want.last_hidden_state)
        if ours.pooler is not None:
            close(ours.pool(hidden), want.pooler_output)
    if ours.shape.token_types > 1:
        types = torch.randint(0, 2, ids.shape)
        close(ours(ids, types=types), theirs.base_model(ids, token_type_ids=types).last_hidden_state)
    close(ours(ids), theirs.base_model(ids).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize(("name", "settings"), **named(DECODERS))
def test_decoders_equal_transformers(tmp_path, name, settings):
    theirs, folder = saved(tmp_path, name, settings)
    ours = Decoder.from_pretrained(folder)
    ids, mask = batch()
    close(ours(ids), theirs(ids).logits)
    close(ours(ids, mask=mask)[mask.bool()], theirs(ids, attention_mask=mask).logits[mask.bool()])
    assert torch.equal(ours.generate(ids, 9), greedy(theirs, ids, 9))
    ids, mask = batch("left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    want = theirs(ids, attention_mask=mask, position_ids=positions).logits
    close(ours(ids, mask=mask)[mask.bool()], want[mask.bool()])
    assert torch.equal(ours.generate(ids, 9, mask=mask), greedy(theirs, ids, 9, mask))


@torch.no_grad()
def test_a_decoder_checkpoint_without_a_head_gives_hidden_states(tmp_path):
    theirs, folder = saved(tmp_path / "llama", "LlamaModel", LLAMA)
    ids, _ = batch()
    close(Decoder.from_pretrained(folder)(ids), theirs(ids).last_hidden_state)
    theirs, folder = saved(tmp_path / "gpt2", "GPT2Model", GPT2)  # tied: the embeddings are its head
    close(Decoder.from_pretrained(folder)(ids), theirs(ids).last_hidden_state @ theirs.wte.weight.T)


@torch.no_grad()
def test_sharded_checkpoints_load(tmp_path):
    theirs, folder = saved(tmp_path, "LlamaForCausalLM", LLAMA, max_shard_size="3KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ids, _ = batch()
    close(Decoder.from_pretrained(str(folder))(ids), theirs(ids).logits)
    next(folder.glob("*-of-*.safetensors")).unlink()
    with pytest.raises(HeadwiseError, match="of-.*safetensors' cannot be read as safetensors"):
        Decoder.from_pretrained(folder)


@torch.no_grad()
@pytest.mark.parametrize(
    ("stack", "name", "settings"), [(Encoder, *ENCODERS[0]), (Decoder, *DECODERS[0]), (Decoder, *DECODERS[2])]
)
def test_checkpoints_load_in_the_files_or_a_given_dtype(tmp_path, stack, name, settings):
    model, folder = random_model(name, settings).bfloat16(), tmp_path
    model.save_pretrained(folder)
    theirs = type(model).from_pretrained(folder, dtype=torch.float64)
    ids, mask = batch()
    kept, cast = stack.from_pretrained(folder), stack.from_pretrained(folder, dtype=torch.float64)
    assert {p.dtype for p in kept.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in cast.parameters()} == {torch.float64}
    want = theirs(ids, attention_mask=mask)[0][mask.bool()]
    close(cast(ids, mask=mask)[mask.bool()], want)
    torch.testing.assert_close(kept(ids, mask=mask)[mask.bool()].double(), want, rtol=0.1, atol=0.3)
    tensors = load_file(folder / "model.safetensors")
    first = next(iter(tensors))
    save_file({**tensors, first: tensors[first].float()}, folder / "model.safetensors")
    with pytest.raises(HeadwiseError, match="tensors are torch.bfloat16, torch.float32; give a dtype"):
        stack.from_pretrained(folder)
    assert {p.dtype for p in stack.from_pretrained(folder, dtype=torch.float32).parameters()} == {torch.float32}


def change_config(folder: Path, **changes) -> None:
    """Set keys of config.json; a key with ... goes away."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


@torch.no_grad()
def test_configs_of_older_versions_load(tmp_path):
    _, folder = saved(tmp_path, "LlamaForCausalLM", {**LLAMA, "rope_parameters": LLAMA3})
    ids, _ = batch()
    want = Decoder.from_pretrained(folder)(ids)
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    gone = dict.fromkeys(("rope_parameters", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings"), ...)
    change_config(folder, **gone, rope_theta=5e5, rope_scaling=scaling, hidden_act="silu")
    with pytest.raises(HeadwiseError, match=r"q_proj.weight' is \(24, 12\); config.json says \(12, 12\)"):
        Decoder.from_pretrained(folder)
    change_config(folder, head_dim=4)
    close(Decoder.from_pretrained(folder)(ids), want)


@torch.no_grad()
def test_tensor_names_of_older_versions_load(tmp_path):
    """TensorFlow's names of the norms, buffers that are no parameters, and a tied head that is saved as well."""
    theirs, folder = saved(tmp_path / "bert", "BertForMaskedLM", BERT)

    def old(tensors):
        names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        tensors = {name.replace(new, names[new]): t for name, t in tensors.items() for new in names if new in name} | {
            name: t for name, t in tensors.items() if "LayerNorm" not in name
        }
        return {**tensors, "bert.embeddings.position_ids": torch.arange(19)[None]}

    change_tensors(folder, old)
    ids, _ = batch()
    close(Encoder.from_pretrained(folder)(ids), theirs.base_model(ids).last_hidden_state)

    theirs, folder = saved(tmp_path / "gpt2", "GPT2LMHeadModel", GPT2)
    buffers = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 23, 23),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    head = theirs.lm_head.weight.detach().clone()
    change_tensors(folder, lambda tensors: {**tensors, **buffers, "lm_head.weight": head})
    ours = Decoder.from_pretrained(folder)
    assert ours.head is None
    close(ours(ids), theirs(ids).logits)
    change_tensors(
        folder, lambda tensors: {**tensors, "lm_head.weight": head + 1}
    )  # not tied, whatever the config says
    ours = Decoder.from_pretrained(folder)
    close(ours(ids), transformers.GPT2LMHeadModel.from_pretrained(folder)(ids).logits)
    close(ours.head.weight, head + 1)


def test_loading_needs_neither_transformers_nor_twice_the_memory():
    """The peak of a process that loads 91 MB and looks at all of them stays under twice as much."""
    code = (
        "import sys, resource, headwise; from headwise.attention.checkpoints import pretrained\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "model = headwise.Encoder.from_pretrained(sys.argv[1])\n"
        "sum(float(p.detach().sum()) for p in model.parameters())\n"
        "print(sum(p.numel() for p in model.parameters()), model.shape.parameters()['total'])\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, 'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, minilm()], capture_output=True, text=True, check=True)
    built, counted, megabytes, transformers_too = run.stdout.split()
    assert built == counted == "22713216"
    assert int(megabytes) < 150
    assert transformers_too == "False"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    cases = {"bert": ("BertModel", BERT), "gpt2": DECODERS[0], "llama": DECODERS[2], "mistral": DECODERS[7]}
    cases |= {"qwen2": DECODERS[10], "bert-mlm": ("BertForMaskedLM", BERT), "roberta": ("RobertaModel", BERT)}
    for name, (kind, settings) in cases.items():
        random_model(kind, settings).save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bert", {"model_type": "t5"}, "model_type 't5' is not known here; known are bert, roberta, .*, qwen3"),
        ("bert", {"model_type": ...}, "model_type None is not known here"),
        ("bert", {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu'; known here are gelu, gelu_python"),
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type = 'relative_key'; only 'absolute'",
        ),
        ("bert", {"is_decoder": True}, "is_decoder = True; only False is known here"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention = True; only False"),
        ("bert", {"quantization_config": {"bits": 4}}, "quantization_config = .* only None"),
        ("bert", {"hidden_size": ...}, "config.json has no 'hidden_size'"),
        ("bert", {"hidden_size": "12"}, "d_model must be a whole number of at least 1, got '12'"),
        ("bert", {"num_attention_heads": 5}, "5 heads do not divide d_model 12"),
        ("bert", {"num_hidden_layers": 3}, r"no tensor 'encoder.layer.2.attention.*' \(12"),
        ("bert-mlm", {"num_hidden_layers": 3}, r"no tensor 'bert.encoder.layer.2.attention.*' \(12"),
        ("bert", {"num_hidden_layers": 1}, "a tensor 'encoder.layer.1.* that config.json has not"),
        ("bert", {"vocab_size": 31}, r"'embeddings.word_embeddings.weight' is \(29, 12\); config.json says \(31, 12\)"),
        ("gpt2", {"n_inner": 13}, r"'transformer.h.0.mlp.c_fc.weight' is \(48, 12\); config.json says \(13, 12\)"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False; only True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True; only False"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = True; only False"),
        ("gpt2", {"n_inner": 10**30}, "config.json has a size that no tensor can have: "),
        ("gpt2", {"n_layer": 10**400}, "layers, but the file has [0-9]+ tensors in all"),
        ("llama", {"num_hidden_layers": 10**9}, "config.json says 1000000000 layers, but the file has [0-9]+ tensors"),
        ("roberta", {"pad_token_id": None}, "config.json has an invalid value: "),
        ("llama", {"rope_parameters": {"rope_theta": "many"}}, "invalid value: could not convert string to float"),
        ("llama", {"rms_norm_eps": None}, "norm_eps must be a small number"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; known here are silu, swish"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rotary scaling 'dynamic' is not known",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "turns 2 of 4 head dimensions"),
        ("llama", {"attention_bias": True}, "no tensor 'model.layers.0.self_attn.q_proj.bias'"),
        ("llama", {"sliding_window": 3}, "sliding_window = 3; only None"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types = .* only None"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "type 'chunked_attention'",
        ),
        ("qwen2", {"use_sliding_window": False}, "layer_types with a window, and use_sliding_window = false"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path, originals, name, changes, words):
    folder = shutil.copytree(originals / name, tmp_path / name)
    change_config(folder, **changes)
    refused(Encoder if "bert" in name else Decoder, folder, words)


def refused(stack: type, folder: Path, words: str) -> None:
    with pytest.raises(HeadwiseError, match=words) as caught:
        stack.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def without(name: str):
    return lambda tensors: {key: t for key, t in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "bert",
            without("encoder.layer.1.output.dense.bias"),
            r"no tensor 'encoder.layer.1.output.dense.bias' \(12,\)",
        ),
        (
            "bert",
            without("embeddings.word_embeddings.weight"),
            r"no tensor 'embeddings.word_embeddings.weight' \(29, 12\)",
        ),
        ("llama", without("lm_head.weight"), r"no tensor 'lm_head.weight' \(29, 12\)"),
        ("llama", lambda t: {**t, "lm_head.bias": torch.zeros(29)}, "a tensor 'lm_head.bias' that config.json has not"),
        (
            "llama",
            lambda t: {**t, "model.layers.0.self_attn.q_proj.bias": torch.zeros(24)},
            "a tensor 'model.layers.0.self_attn.q_proj.bias' that config.json has not",
        ),
    ],
)
def test_invalid_tensors_are_refused(tmp_path, originals, name, change, words):
    folder = shutil.copytree(originals / name, tmp_path / name)
    change_tensors(folder, change)
    refused(Encoder if name == "bert" else Decoder, folder, words)


def test_invalid_directories_are_refused(tmp_path, originals):
    refused(Encoder, tmp_path / "nowhere", "nowhere' is not a directory; give one with config.json")
    refused(Encoder, originals / "bert" / "config.json", "is not a directory")
    refused(Encoder, Path("x" * 5000), "is not a directory")
    refused(Decoder, originals / "bert", "bert checkpoints are encoders; use Encoder.from_pretrained")
    refused(Encoder, originals / "gpt2", "gpt2 checkpoints are decoders; use Decoder.from_pretrained")
    folder = shutil.copytree(originals / "bert", tmp_path / "bert")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 64):
        weights.write_bytes(broken)
        refused(Encoder, folder, "model.safetensors' cannot be read as safetensors: ")
    weights.unlink()
    refused(Encoder, folder, "has no model.safetensors and no model.safetensors.index.json")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    refused(Encoder, folder, "model.safetensors.index.json has no weight_map from tensors to files beside it")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    refused(Encoder, folder, "only as a pickle .* which can run code when read; save them as model.safetensors")
    deep = '{"a":' * 100_000
    for text, words in (("{", "is not JSON"), ("[]", "must hold an object, got list"), (deep, "is nested too deeply")):
        (folder / "config.json").write_text(text)
        refused(Encoder, folder, words)
    (folder / "config.json").unlink()
    refused(Encoder, folder, "config.json' cannot be read: No such file")


TEXTS = ["The animal didn't cross the street because it was too tired.", "Hello", "One head looks back; another ahead."]


@torch.no_grad()
def test_minilm_equals_transformers():
    folder = minilm()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs, ours = transformers.AutoModel.from_pretrained(folder), Encoder.from_pretrained(folder)
    for texts in (TEXTS[:1], TEXTS):
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        want = theirs(**inputs)
        hidden = ours(inputs.input_ids, mask=inputs.attention_mask, types=inputs.token_type_ids)
        close(hidden, want.last_hidden_state)
        close(ours.pool(hidden), want.pooler_output)


@torch.no_grad()
def test_smollm2_equals_transformers():
    folder = smollm2()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(folder), Decoder.from_pretrained(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    close(ours(prompt), theirs(prompt).logits)
    generated = ours.generate(prompt, 20)
    assert tokenizer.decode(generated[0, prompt.shape[1]]) == " Paris"
    assert torch.equal(generated, greedy(theirs, prompt, 20))
    inputs = tokenizer(["The capital of France is", "Once upon a time, there was a"], return_tensors="pt", padding=True)
    ids, mask = inputs.input_ids, inputs.attention_mask
    assert torch.equal(ours.generate(ids, 7, mask=mask), greedy(theirs, ids, 7, mask))
    cache = ours.cache()
    steps = [ours(part, cache=cache) for part in prompt.split(2, 1)]
    close(torch.cat(steps, 1), ours(prompt))
