"""Random command lines, of every command: each ends with a code, at most one line of error and no traceback.

What would take long is left out: the server does not listen, the lab and the benchmarks do not measure, nothing is
fetched.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import huggingface_hub.constants
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from headwise.cli import main
from headwise.cli.app import app
from headwise.errors import HeadwiseError
from headwise.roles.relations.probe_set.sentences import probe_sentences

from . import Report
from .documents import CONLLU, relations

SHORT, LONG = 12, 10_000
SENTENCES = probe_sentences()[::40]  # of the bundled probe set
SECONDS = 20  # after which a command hangs

WORDS = "a the cat dog bird sat ran on by old new red house tree river hill . ,".split()
# never an absolute path or "..": commands write, and --overwrite replaces
FILES = [
    "model", "texts.txt", "texts.jsonl", "gold.conllu", "relations.json", "noise.bin", "folder", "nowhere", "nowhere/x",
    "texts.txt/x", "model/config.json", "model/model.safetensors", "empty", "nested.json", "out", "out/deep/er", ".",
]  # fmt: skip
VALUES = [
    "", " ", "-", "-1", "0", "1", "2", "7", "0.5", "-0.5", "1e9", "1e400", "nan", "inf", "²", "٣", "½", "9" * 30,
    "9" * 5000, "x" * 5000, "é", "\x1b[31m", "a\nb", "\ud800", "0/2", "1/2", "²/3", "2/1", "0/0", "3.1", "0.0", "².1",
    "9.9", "cpu", "meta", "cuda", "cuda:99", "previous", "nosy", "entropy", "michel", "random", "head", "bf16", "fp9",
    "16G", "7B", "nope/nope", "bert-base", "llama3-8b", "the cat sat", "encoder=0.5", "=", "a=b,c", "None", "true",
    "127.0.0.1", "65537", "[", "{}", "%s", "*",
]  # fmt: skip

SANE = {  # by option: values that mean something, so that commands also get somewhere
    "model": ["model"], "texts": ["texts.txt", "texts.jsonl"], "out": ["out"], "limit": ["3"],
    "part": ["0/2"], "head": ["0.0", "1.2"], "seed": ["5"], "conllu": ["gold.conllu"], "role": ["previous"],
    "field": ["text"], "keep": ["0.5"], "score": ["magnitude", "random"], "stat": ["entropy"], "d_model": ["12"],
    "heads": ["3"], "kv_heads": ["1"], "context": ["4", "512"], "batch": ["2"], "dtype": ["fp16"],
    "token": ["cat"], "html": ["a.html"], "png": ["a.png"], "svg": ["a.svg"], "budget": ["parameters"],
    "compare": ["model"], "steps": ["1"],
}  # fmt: skip


def master(folder: Path) -> None:
    """The files that commands are given: a small model, texts, and what is none of these."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *WORDS])}
    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    fast_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_level, unk_token="[UNK]", pad_token="[UNK]"
    )
    sizes = {"vocab_size": len(vocabulary), "n_positions": 31, "n_embd": 15, "n_layer": 2, "n_head": 3}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
    fast_tokenizer.save_pretrained(folder / "model")
    chance = random.Random(0)
    lines = [" ".join(chance.choices(WORDS, k=7)) for _ in range(5)]
    (folder / "texts.txt").write_text("\n".join(lines))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder / "gold.conllu").write_text(CONLLU)
    (folder / "relations.json").write_text(json.dumps(relations().to_json()))
    (folder / "noise.bin").write_bytes(chance.randbytes(300))
    (folder / "nested.json").write_text("[" * 100_000)
    (folder / "empty").touch()
    (folder / "folder").mkdir()


def all_commands() -> dict[str, click.Command]:
    """Every command by its name, the commands of groups as "atlas merge"."""
    context = click.Context(app)
    commands: dict[str, click.Command] = {}
    for name in app.list_commands(context):
        command = app.get_command(context, name)
        if isinstance(command, click.Group):
            commands |= {
                f"{name} {inner}": command.get_command(context, inner) for inner in command.list_commands(context)
            }
        commands[name] = command
    return commands


def line(chance: random.Random) -> list[str]:
    """A command with some of its options, most of them wrong."""
    commands = all_commands()
    if chance.random() < 0.02:
        return [chance.choice(VALUES + FILES) for _ in range(chance.randrange(3))]
    name = chance.choice(sorted(commands))
    params = commands[name].params
    options = [param for param in params if param.param_type_name == "option"]
    selected = chance.sample(options, min(len(options), chance.choice((0, 1, 1, 2, 2, 3, 4))))
    selected += [
        option for option in options if option.name == "model" and option not in selected
    ]  # the usual one loads slowly
    args = [chance.choice(VALUES + FILES) for _ in range(chance.choice((0, 0, 1, 1, 2, 3)))]
    for option in selected:
        args += [chance.choice(option.opts)] + ([] if option.is_flag else [value(option.name, chance)])
    if chance.random() < 0.05:
        args.insert(chance.randrange(len(args) + 1), chance.choice(["--help", "--nosy", "--", "-x", "--json=7"]))
    return [*name.split(), *args]


def value(name: str, chance: random.Random) -> str:
    if name in SANE and chance.random() < 0.6:
        return chance.choice(SANE[name])
    return chance.choice(FILES if chance.random() < 0.4 else VALUES)


class Hang(BaseException):
    """A command took too long. Not an Exception, so that nothing takes it for a failure of its own."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def without_long_work() -> Iterator[None]:
    def refuse(*args: Any, **options: Any) -> Any:
        raise HeadwiseError("this was left out")

    places = ("headwise.ui.server.serve", "headwise.bench.suite.run", "headwise.lab.session.measure")
    environment = {"XDG_CACHE_HOME": os.path.join(os.getcwd(), "cache")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for place in (*places, "headwise.timing.machine.restrict_instructions"):
            stack.enter_context(mock.patch(place, refuse))
        stack.enter_context(mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True))
        stack.enter_context(
            mock.patch("headwise.roles.relations.probe_set.sentences.probe_sentences", return_value=SENTENCES)
        )
        yield


def wrong(args: list[str]) -> tuple[str, str]:
    """What happened, and what is wrong with it, or an empty text."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with alarm(SECONDS), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(args)
    except Hang:
        return "hung", f"it took more than {SECONDS} s"
    except BaseException as error:  # what a campaign looks for
        return "failed", f"{type(error).__name__} {str(error)[:200]!r}"
    messages = [line for line in err.getvalue().splitlines() if line.startswith("headwise: ")]
    errors = [line for line in messages if "the machine is busy" not in line]  # which is a warning
    happened = f"code {code}"
    if code not in (0, 1, 2):
        return happened, f"it ended with {code}"
    if "Traceback" in err.getvalue() or "Traceback" in out.getvalue():
        return happened, "a traceback was printed"
    if (code == 2) != (len(errors) == 1) and code != 1:
        return happened, f"it ended with {code} and {len(errors)} lines of error"
    return happened, ""


def campaign(tries: int, seed: int) -> Report:
    report = Report()
    threads, home = torch.get_num_threads(), os.getcwd()
    with tempfile.TemporaryDirectory() as place:
        originals, work = Path(place) / "kept", Path(place) / "work"
        originals.mkdir()
        master(originals)
        try:
            for number in range(tries):
                shutil.copytree(originals, work)
                os.chdir(work)
                args = line(random.Random(f"{seed}/{number}"))
                with without_long_work():
                    happened, problem = wrong(args)
                report.tries += 1
                report.count(happened)
                if problem:
                    command_line = " ".join(arg if len(arg) < 60 else f"{arg[:20]}...({len(arg)})" for arg in args)
                    report.failures.append(f"try {number} of seed {seed}: headwise {command_line!r}: {problem}")
                os.chdir(home)
                shutil.rmtree(work)
        finally:
            os.chdir(home)
            torch.set_num_threads(threads)
    return report
