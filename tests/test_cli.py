"""The command line: what starts without torch, what trace shows, and how mistakes read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from rich.console import Group
from rich.text import Text

import headwise
import headwise.attention.trace
from headwise import plans
from headwise.card import cost
from headwise.cli import main
from headwise.cli.app import app
from headwise.cli.wording import name_options, name_options_in
from headwise.files import lock_output
from headwise.models.surgery import compensation
from headwise.prune import attention_layers, grouping
from headwise.scale import train
from headwise.terminal import LOOK_ALIKES
from headwise.timing import machine

HEAVY = ("torch", "transformers", "numpy")
HEADWISE = (sys.executable, "-m", "headwise")


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(args, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def traced(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main(["trace", "--json", *args]) == 0
    return json.loads(capsys.readouterr().out)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "start",
    [
        "import headwise",
        "import headwise; dir(headwise); headwise.Heads(6, 3, 3, 2); headwise.ShapeError",
        "from headwise.cli import main; main(['--help'])",
        "from headwise.cli import main; main(['trace', '--help'])",
        "from headwise.cli import main; main(['bench', '--help'])",
        "from headwise.cli import main; main(['inspect', '--help'])",
        "from headwise.cli import main; main(['inspect', '--examples'])",
        "from headwise.cli import main; main(['serve', '--help'])",
        "from headwise.cli import main; main(['atlas', '--help'])",
        "from headwise.cli import main; main(['atlas', 'ablate', '--help'])",
        "from headwise.cli import main; main(['prune', '--help'])",
        "from headwise.cli import main; main(['lab', '--help'])",
        "from headwise.cli import main; main(['record', '--help'])",
        "from headwise.cli import main; main(['circuit', '--help'])",
        "from headwise.cli import main; main(['--completion', 'zsh'])",
        "from headwise.cli import main; main(['--version'])",
    ],
)
def test_help_and_imports_load_no_heavy_package(start: str) -> None:
    heavy = f"', '.join(sorted(set({HEAVY}) & sys.modules.keys()))"
    process = run(sys.executable, "-c", f"{start}\nimport sys\nsys.exit({heavy} or 0)")
    assert (process.returncode, process.stderr) == (0, "")


def test_version_is_printed() -> None:
    process = run(*HEADWISE, "--version")
    assert (process.returncode, process.stdout, process.stderr) == (0, f"headwise {headwise.__version__}\n", "")


def test_help_is_printed_without_arguments() -> None:
    process = run(*HEADWISE)
    assert process.returncode == 0
    assert "trace" in process.stdout
    assert "bench" in process.stdout


# --- trace ---


def test_trace_counts_weights_and_biases_separately(capsys: pytest.CaptureFixture[str]) -> None:
    document = traced(capsys, "--d-model", "768", "--heads", "12", "--context", "3")
    assert document["parameters"] == {"weights": 2_359_296, "biases": 3_072, "total": 2_362_368}
    assert {
        step["name"]: (step["weights"], step["biases"]) for step in document["steps"] if step["weights"]
    } == dict.fromkeys("QKVY", (589_824, 768))


def test_trace_shapes_with_grouped_heads(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--d-model 35 --heads 6 --kv-heads 2 --head-dim 11 --context 7 --batch 3 --no-bias --causal".split()
    document = traced(capsys, *sizes)
    assert {step["name"]: tuple(step["shape"]) for step in document["steps"]} == {
        "X": (3, 7, 35),
        "Q": (3, 7, 66),
        "K": (3, 7, 22),
        "V": (3, 7, 22),
        "Q_i": (3, 6, 7, 11),
        "K_i, V_i": (3, 2, 7, 11),
        "S_i": (3, 6, 7, 7),
        "A_i": (3, 6, 7, 7),
        "O_i": (3, 6, 7, 11),
        "C": (3, 7, 66),
        "Y": (3, 7, 35),
    }
    assert document["parameters"] == {"weights": 2 * 35 * 66 + 2 * 35 * 22, "biases": 0, "total": 6_160}
    assert all(len(step["axes"]) == len(step["shape"]) for step in document["steps"])
    assert 0 <= document["difference"] < 1e-5


def test_trace_numbers_are_those_of_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    document = traced(capsys, "--d-model", "15", "--heads", "5", "--context", "2", "--seed", "11")
    sample = {step["name"]: step["sample"] for step in document["steps"]}
    torch.manual_seed(11)
    attn = headwise.MultiHeadAttention(15, 5)
    x = torch.randn(1, 2, 15)
    with torch.no_grad():
        out, weights = attn(x, need_weights=True)
    assert sample["X"] == pytest.approx(x[0, -1, :4].tolist())
    assert sample["Q"] == pytest.approx(attn.W_Q(x)[0, -1, :4].tolist(), abs=1e-6)
    assert sample["A_i"] == pytest.approx(weights[0, 0, -1].tolist(), abs=1e-6)
    assert sample["Y"] == pytest.approx(out[0, -1, :4].tolist(), abs=1e-6)


def test_trace_says_when_the_steps_and_the_module_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = headwise.MultiHeadAttention.forward
    monkeypatch.setattr(
        headwise.MultiHeadAttention, "forward", lambda self, x, **options: forward(self, x, **options) + 0.5
    )
    assert main(["trace", "--d-model", "6", "--heads", "2"]) == 1
    assert "✗ the steps and the module's own forward differ by at most 5.0e-01" in capsys.readouterr().out


def test_trace_does_not_change_the_random_state() -> None:
    before = torch.get_rng_state()
    headwise.attention.trace.trace(headwise.Heads.split(6, 2), seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("columns", [80, 120])
def test_trace_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main("trace --d-model 512 --heads 8 --context 10 --causal".split()) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= columns
    for words in (
        "d_model 512, 8 heads of 64 (MHA); batch 1, 10 tokens, causal, seed 0",
        "Q = X W_Q + b_Q",
        "262,144 + 512",
        "S_i = Q_i K_iᵀ / √64",
        "(1, 8, 10, 10)",
        "1,048,576 weights + 2,048 biases = 1,050,624 parameters",
        "✓ the steps and the module's own forward differ by at most",
    ):
        assert words in out
    assert ("batch, tokens, d_model" in out) == (columns == 120)


def test_trace_on_an_ascii_terminal() -> None:
    process = run(*HEADWISE, "trace", "--d-model", "6", "--heads", "2", PYTHONIOENCODING="ascii")
    assert (process.returncode, process.stderr) == (0, "")
    assert "S_i = Q_i K_i^T / sqrt 3" in process.stdout


# --- mistakes ---


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("trace --d-model 768 --heads 10", "10 heads do not divide d_model 768 (768 / 10 = 76.8)"),
        ("trace --kv-heads 3", "3 key/value heads do not divide 8 query heads"),
        (
            "trace --context 100000",
            "8 heads x 100,000 x 100,000 tokens take 298.0 GiB, more than the 1 GiB allowed here; up to 5,792",
        ),
        ("trace --batch 1000000000000", "take a smaller batch"),
        ("trace --d-model 65536 --context 1", "parameters for d_model 65,536 with 8 heads of 8,192 take 64.0 GiB"),
        (
            "trace --d-model 8192 --heads 1 --batch 40000 --context 1",
            "values of batch 40,000 x 1 tokens x 8,192 take 1.2 GiB",
        ),
        ("trace --d-model 999999999999 --heads 7", "65,536; see headwise trace --help"),
        ("trace --context 0", "'--context'"),
        ("trace --seed -1", "'--seed'"),
        (f"trace --seed {2**64}", "'--seed'"),
        ("trace --d-model ²", "'--d-model'"),
        (f"trace --context {'9' * 5000}", "'--context'"),
        (f"trace --kv-heads {'9' * 30}", "'--kv-heads'"),
        ("trace --heads eight", "see headwise trace --help"),
        ("trace --nonsense", "--nonsense"),
        ("nonsense", "No such command 'nonsense'; see headwise --help"),
        ("bench --cases nonsense", "'nonsense' is not one of 'dense', 'causal', 'decode'"),
        ("bench --rounds 0", "'--rounds'"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(args: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args.split()) == 2
    assert words in one_line(capsys)


def test_the_process_exits_with_code_2_after_a_user_error() -> None:
    process = run(*HEADWISE, "trace", "--heads", "7")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("headwise: 7 heads do not divide d_model 512")
    assert process.stderr.count("\n") == 1


def test_an_error_message_of_several_lines_is_printed_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise headwise.ShapeError("first\n   second")

    monkeypatch.setattr(headwise.attention.trace, "trace", fail)
    assert main(["trace"]) == 2
    assert one_line(capsys) == "headwise: first second\n"


def test_an_interrupt_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(headwise.attention.trace, "trace", interrupt)
    assert main(["trace"]) == 130
    assert one_line(capsys) == "headwise: interrupted\n"


@pytest.mark.parametrize("args", [("trace", "--context", "3"), ("trace", "--context", "3", "--json"), ("--help",)])
def test_a_closed_pipe_is_no_error(args: tuple[str, ...]) -> None:
    process = subprocess.Popen((*HEADWISE, *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()  # before anything can have been written
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("args", [("trace", "--context", "3"), ("card", "gpt2"), ("card", "gpt2", "--json")])
def test_a_full_disk_behind_stdout_is_one_line(args: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run((*HEADWISE, *args), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    words = "headwise: the output cannot be written: No space left on device\n"
    assert (process.returncode, process.stderr) == (2, words)


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell closes the streams")
@pytest.mark.parametrize(
    ("closed", "args", "code"), [(">&-", "card gpt2", 0), ("2>&-", "nope", 2), (">&- 2>&-", "", 0)]
)
def test_closed_streams_are_no_error(closed: str, args: str, code: int) -> None:
    process = run("sh", "-c", f'"$0" -m headwise {args} {closed}', sys.executable)
    assert (process.returncode, process.stdout, process.stderr) == (code, "", "")


def test_a_stream_without_unicode_gets_ascii_look_alikes() -> None:
    drawn = run(*HEADWISE, "card", "llama3-8b", PYTHONIOENCODING="ascii").stdout
    assert "queries  oooo oooo" in drawn
    assert "+--+" in drawn
    assert "?" not in drawn


def test_look_alikes_replace_only_what_a_stream_cannot_encode() -> None:
    assert "“it” → 5 ≥ 3 █▌ é 字".encode("ascii", LOOK_ALIKES) == b'"it" -> 5 >= 3 ## ? ?'
    assert "“é” →".encode("cp1252", LOOK_ALIKES) == "“é” ->".encode("cp1252")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["inspct"], "No such command 'inspct'. Did you mean inspect? See headwise --help"),
        (["atlas", "shoow"], "No such command 'shoow'. Did you mean show? See headwise atlas --help"),
        (["zzz"], "No such command 'zzz'; see headwise --help"),
    ],
)
def test_a_misspelt_command_is_corrected(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert one_line(capsys) == f"headwise: {words}\n"


# --- wording ---


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("cut it by truncate=True", "cut it by --truncate"),
        ("the nearest is keep=0.2000, or say allow_empty=True", "the nearest is --keep 0.2000, or say --allow-empty"),
        ('token="bank:2" is the second', "--token bank:2 is the second"),
        ("choose another host= or port=", "choose another --host or --port"),
        ("give more texts or a smaller length=", "give more texts or a smaller --context"),
        ("to_json() lists all", "--json lists all"),
        ("1 and 7 do, or give head_dim", "1 and 7 do, or give --head-dim"),
        ("head_dim 3 is odd", "head_dim 3 is odd"),
        ("keepsake=7, mytoken=3", "keepsake=7, mytoken=3"),
    ],
)
def test_messages_name_options_instead_of_python_arguments(message: str, words: str) -> None:
    assert name_options(message) == words


def test_a_renamed_argument_in_a_drawing_keeps_its_style() -> None:
    text = Text("it ").append("(token= follows)", "dim").append(" end")
    reworded = name_options_in(Group(text, "plain"))
    assert isinstance(reworded, Group)
    first, second = reworded.renderables
    assert isinstance(first, Text) and second == "plain"
    assert first.plain == "it (--token follows) end"
    assert {str(span.style) for span in first.spans if span.start < 12 <= span.end} == {"dim"}


# --- completion and choices ---


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("headwise at", {"atlas"}),
        ("headwise atlas m", {"measure", "merge"}),
        ("headwise prune --budget ", {"heads", "parameters", "cache", "latency"}),
        ("headwise card --dtype fp", {"fp32", "fp16", "fp8", "fp4"}),
        ("headwise lab --over ", {"ddp", "fsdp"}),
        ("headwise inspect --stat co", {"confidence"}),
        ("headwise record --stat en", {"entropy"}),
        ("headwise atlas ablate in", {"induction"}),
        ("headwise prune --score mi", {"michel", "michel-token"}),
    ],
)
def test_shells_complete_commands_and_choices(line: str, expected: set[str]) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    process = run(*HEADWISE, _HEADWISE_COMPLETE="bash_complete", **words)
    assert {item.partition(",")[2] for item in process.stdout.split()} == expected


def test_the_completion_script_is_printed() -> None:
    process = run(*HEADWISE, "--completion", "zsh")
    assert process.returncode == 0 and "#compdef headwise" in process.stdout


def choices(command: str, option: str) -> tuple[str, ...]:
    """The values that an option offers."""
    group = app.get_command(click.Context(app), command)
    assert group is not None
    [param] = [param for param in group.params if param.name == option]
    assert isinstance(param.type, click.Choice)
    return tuple(param.type.choices)


def test_choices_are_those_of_the_library() -> None:
    assert choices("prune", "budget") == plans.BUDGETS
    assert choices("prune", "unit") == attention_layers.UNITS
    assert choices("prune", "compensate") == compensation.COMPENSATE
    assert choices("group", "grouping") == grouping.GROUPINGS
    assert choices("prune", "over") == choices("lab", "over") == train.STRATEGIES
    assert set(choices("card", "dtype")) == set(choices("diff", "dtype")) <= cost.BITS.keys()
    assert set(choices("scale", "dtype")) <= cost.BITS.keys()
    assert choices("bench", "isa") == tuple(machine.RESTRICTIONS)


def test_every_command_but_serve_has_json() -> None:
    without = {"serve"}  # it answers a browser
    for name in app.list_commands(click.Context(app)):
        command = app.get_command(click.Context(app), name)
        assert command is not None
        if not isinstance(command, click.Group):
            assert ("--json" in {opt for param in command.params for opt in param.opts}) == (name not in without), name


@pytest.mark.parametrize(
    ("command", "reserved"),
    [
        (("atlas", "--texts", "{texts}", "--out", "{out}"), "{out}"),
        (("prune", "--texts", "{texts}", "--out", "{out}"), "{out}"),
        (("group", "--model", "smollm2", "--kv-heads", "1", "--texts", "{texts}", "--out", "{out}"), "{out}"),
        (("stream", "--model", "smollm2", "--texts", "{texts}", "--out", "{out}"), "{out}"),
        (("lab", "1", "--out", "{out}", "--work", "{out}/work"), "{out}/claim01"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_second_run_on_the_same_output_is_refused_in_one_line(
    command: tuple[str, ...], reserved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"texts": tmp_path / "texts.txt", "out": tmp_path / "out"}
    places["texts"].write_text("one text\nanother text\n")
    with lock_output(reserved.format(**places)):
        assert main([part.format(**places) for part in command]) == 2
    assert re.search(r"'.*' is in use by another run \(process \d+ on .*\); wait for its end", one_line(capsys))
    assert not list(places["out"].glob("*.*"))


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--max-seconds"),
        ("group", "--model", "m", "--kv-heads", "1", "--texts", "t", "--out", "o", "--rate"),
        ("stream", "--out", "o", "--max-loss"),
        ("stream", "--out", "o", "--share"),
    ],
    ids=lambda command: f"{command[0]} {command[-1]}",
)
def test_numbers_that_are_not_finite_are_refused(
    command: tuple[str, ...], number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, number]) == 2
    assert command[-1] in (message := one_line(capsys)) and number in message


def test_more_threads_than_torch_can_count_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--cases", "decode", "--threads", "3000000000"]) == 2
    assert "'--threads': 3000000000 is not in the range 1 to 4,096" in one_line(capsys)
