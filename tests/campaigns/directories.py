"""Model directories with broken, odd or hostile files, given to headwise.load and headwise.tokenizer.

Each try changes one or more files of a small model's directory. The model or tokenizer must load, or give a
HeadwiseError of one line; no code from the directory may run, and no try may take longer than LONGEST.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headwise
from campaigns import Report
from headwise.errors import HeadwiseError

SHORT, LONG = 25, 3_000
LONGEST = 60  # seconds

KINDS = ("bert", "gpt2", "llama")
CODE = "import pathlib\npathlib.Path(__file__).with_name('CODE-RAN').touch()\nclass Evil: pass\n"
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 7.5, -1e308, float("nan"), float("inf"), 10**30, 10**6, 10**9, 60_000, "",
    "x", "\x1b]52;c;x\x07", "../../etc/passwd", "/dev/zero", "a" * 5_000, [], [0], [[]], {}, {"a": 1},
    {"model_type": "bert"}, "float8_e4m3fn", "torch.float32", "eval(1)", "evil.Evil", "nope/nope--evil.Evil",
    ["evil.Evil", None],
)  # fmt: skip
KEYS = (
    "model_type", "architectures", "auto_map", "quantization_config", "torch_dtype", "dtype", "hidden_size", "n_embd",
    "vocab_size", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rope_parameters", "rope_scaling", "tie_word_embeddings", "attn_implementation",
    "_attn_implementation", "pad_token_id", "hidden_act", "activation_function", "layer_types", "sliding_window",
    "tokenizer_class", "text_config", "vision_config", "is_encoder_decoder", "add_cross_attention", "id2label",
    "num_labels", "transformers_version", "_name_or_path", "base_model_name_or_path", "unk_token", "chat_template",
    "added_tokens_decoder", "extra_special_tokens", "model_max_length", "form", "layers", "headwise", "arguments",
)  # fmt: skip
EXTRA_FILES = (
    "adapter_config.json", "added_tokens.json", "special_tokens_map.json", "generation_config.json", "headwise.json",
    "model.safetensors.index.json", "chat_template.json", "chat_template.jinja", "vocab.txt", "vocab.json",
    "merges.txt", "tokenizer.model", "preprocessor_config.json", "quantize_config.json",
)  # fmt: skip


class SlowError(BaseException):
    """No Exception, so that nothing takes it for an error of the directory."""


def campaign(tries: int, seed: int) -> Report:
    from helpers import small_checkpoints

    report = Report()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sources = {kind: small_checkpoints.save_small_model(kind, Path(place, kind)) for kind in KINDS}
        pruned = headwise.prune_heads(headwise.load(sources["bert"]), {0: [1]})
        headwise.save(pruned, Path(place, "pruned"))
        sources["pruned"] = Path(place, "pruned")
        for number in range(tries):
            _try(report, sources, Path(place, "tried"), f"{seed}-{number}")
    return report


def _try(report: Report, sources: dict[str, Path], folder: Path, seed: str) -> None:
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sources[rng.choice(list(sources))], folder)
    (folder / "evil.py").write_text(CODE)
    changes = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        act = rng.choice(CHANGES)
        changes.append(f"{act.__name__} {act(folder, rng)}")
    for reader in (headwise.load, headwise.tokenizer):
        report.tries += 1
        outcome, words = _outcome(reader, folder)
        report.count(outcome)
        if words is not None or (folder / "CODE-RAN").exists():
            report.failures.append(f"seed {seed}, {reader.__name__}, {'; '.join(changes)[:300]}: {words or 'code ran'}")


def _outcome(reader: Callable[[Path], Any], folder: Path) -> tuple[str, str | None]:
    def stop(*_: Any) -> None:
        raise SlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST)
    try:
        reader(folder)
    except HeadwiseError as error:
        return "refused", f"several lines: {error}" if len(str(error).splitlines()) > 1 else None
    except SlowError:
        return "slow", f"longer than {LONGEST} s"
    except BaseException as error:  # PanicException of Rust libraries is none of Exception's
        return "traceback", f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return "loaded", None


# --- changes; each tells what it did ---


def _file(folder: Path, rng: random.Random, suffix: str = "") -> Path:
    files = sorted(x for x in folder.iterdir() if x.is_file() and x.name.endswith(suffix) and x.name != "evil.py")
    return rng.choice(files) if files else folder / "config.json"


def truncate(folder: Path, rng: random.Random) -> str:
    file = _file(folder, rng)
    content = file.read_bytes() if file.is_file() else b""
    file.write_bytes(content[: rng.randrange(len(content) + 1)])
    return file.name


def flip(folder: Path, rng: random.Random) -> str:
    file = _file(folder, rng)
    content = bytearray(file.read_bytes() if file.is_file() else b"")
    for _ in range(rng.choice((1, 7, 50))):
        if content:
            content[rng.randrange(min(len(content), rng.choice((20, 2_000, 10**9))))] = rng.randrange(256)
    file.write_bytes(content)
    return file.name


def insert(folder: Path, rng: random.Random) -> str:
    file = _file(folder, rng, ".json")
    content = file.read_bytes() if file.is_file() else b""
    position = rng.randrange(len(content) + 1)
    junk = rng.choice((b"\0", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"9" * 6_000, b"\x1b[31m", b'"\\ud800"'))
    file.write_bytes(content[:position] + junk + content[position:])
    return f"{file.name} {junk[:5]!r}"


def remove(folder: Path, rng: random.Random) -> str:
    file = _file(folder, rng)
    file.unlink(missing_ok=True)
    return file.name


def replace_by_something_else(folder: Path, rng: random.Random) -> str:
    file = _file(folder, rng)
    file.unlink(missing_ok=True)
    kind = rng.choice(("directory", "pipe", "loop", "zeros"))
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "loop":
        file.symlink_to(file)
    else:
        file.write_bytes(bytes(rng.choice((0, 8, 100_000))))
    return f"{file.name} {kind}"


def change_value(folder: Path, rng: random.Random) -> str:
    """Another value at a random place of a JSON file."""
    file = _file(folder, rng, ".json")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return "nothing"
    path, node = [], content
    while isinstance(node, (dict, list)) and node and rng.random() < 0.9:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not isinstance(node[key], (dict, list)) or rng.random() < 0.2:
            value = rng.choice(VALUES)
            if rng.random() < 0.1:
                del node[key]
            else:
                node[key] = value
            path.append(f"{key} = {value!r}"[:60])
            break
        path.append(str(key))
        node = node[key]
    file.write_text(json.dumps(content), encoding="utf-8")
    return f"{file.name} {' '.join(path)}"


def set_key(folder: Path, rng: random.Random) -> str:
    """A key that means something to a loader, with a value that it does not expect."""
    file = folder / rng.choice(("config.json", "config.json", "tokenizer_config.json", "headwise.json"))
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content = content if isinstance(content, dict) else {}
    except (OSError, ValueError, RecursionError):
        content = {}
    key, value = rng.choice(KEYS), rng.choice(VALUES)
    if key == "auto_map":
        value = {name: rng.choice(("evil.Evil", ["evil.Evil", "evil.Evil"])) for name in AUTO}
    content[key] = value
    if not file.is_dir():
        file.unlink(missing_ok=True)
        file.write_text(json.dumps(content), encoding="utf-8")
    return f"{file.name} {key} = {value!r}"[:120]


AUTO = ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoTokenizer")


def set_root(folder: Path, rng: random.Random) -> str:
    file = _file(folder, rng, ".json")
    value = rng.choice(VALUES)
    file.write_text(json.dumps(value), encoding="utf-8")
    return f"{file.name} = {value!r}"[:60]


def add_file(folder: Path, rng: random.Random) -> str:
    name = rng.choice(EXTRA_FILES)
    if not (folder / name).exists():
        value = {rng.choice(KEYS): rng.choice(VALUES) for _ in range(3)} if rng.random() < 0.7 else rng.choice(VALUES)
        if name == "adapter_config.json" and isinstance(value, dict):
            value = {"peft_type": "LORA", "base_model_name_or_path": "nope/nope", **value}
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return name


def only_a_pickle(folder: Path, rng: random.Random) -> str:
    file = folder / "model.safetensors"
    if file.is_file():
        file.rename(folder / rng.choice(("pytorch_model.bin", "model.pt", "model.ckpt")))
    return ""


CHANGES = (
    truncate, flip, insert, remove, replace_by_something_else, change_value, change_value, change_value, set_key,
    set_key, set_key, set_root, add_file, only_a_pickle,
)  # fmt: skip
