"""What is printed cannot command a terminal: control characters of files, names and texts are shown as escapes."""

from __future__ import annotations

import ast
import io
import json
import struct
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from headwise import HeadwiseError
from headwise.card import diff, read
from headwise.card.sources.safetensors import DTYPES
from headwise.cli import main
from headwise.roles.atlas.bundled import bundled_atlas
from headwise.terminal import CONTROL, console, echo, escape_controls, one_line

PACKAGE = Path(__file__).parents[1] / "src" / "headwise"
# the clipboard by OSC 52, colours, C1's CSI, an overriding direction, a link, a cursor that goes back, DEL; and markup
HOSTILE = "a\x1b]52;c;ZXZpbA==\x07\x1b[8mb\x9b31mc\u202ed\u2066\u2069\r\x08\x7f\u2028\x85[red][link=http://x]e"
LLAMA = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40}


def printed(capsys: pytest.CaptureFixture[str], *args: str, code: int | None = 0) -> str:
    """All that a command printed, in which nothing commands a terminal."""
    got = main(args)
    out, err = capsys.readouterr()
    assert code is None or got == code, err
    assert not CONTROL.search(out + err), (out + err)[:300]
    assert "Traceback" not in err
    if got == 2:
        assert err.startswith("headwise: ") and err.count("\n") == 1
    return out + err


def test_control_characters_become_escapes() -> None:
    assert escape_controls("a\x1b[31m\x9b\u202e\udc80\tb\n") == "a\\u001b[31m\\u009b\\u202e\\udc80\tb\n"
    assert one_line("a\n\tb") == "a\\u000a\\u0009b"
    assert escape_controls("naïve 中文 é \u200d 👩‍💻") == "naïve 中文 é \u200d 👩‍💻"
    assert [chr(n) for n in range(256) if escape_controls(chr(n)) == chr(n) and n not in range(32, 127)] == [
        "\t",
        "\n",
        *map(chr, range(160, 256)),
    ]


def test_escaped_json_keeps_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    value = {HOSTILE: [HOSTILE, "\\u001b", "中"]}
    for ascii_only in (True, False):
        echo(json.dumps(value, ensure_ascii=ascii_only))
        out = capsys.readouterr().out
        assert json.loads(out) == value
        assert not CONTROL.search(out)


def test_an_error_escapes_what_it_quotes() -> None:
    assert str(HeadwiseError("no \x1b[31mfile\n")) == "no \\u001b[31mfile\n"


def test_a_console_applies_only_its_own_styles() -> None:
    out = io.StringIO()
    screen = console(file=out, force_terminal=True, color_system="standard", width=60)
    screen.print(Text.assemble(("ours\x1b[8m", "bold"), "x\x9b[bold]y"))
    assert out.getvalue() == "\x1b[1mours\\u001b[8m\x1b[0mx\\u009b[bold]y\n"


def test_a_table_shows_the_whole_of_a_hostile_cell() -> None:
    out = io.StringIO()
    table = Table("name", "\x1btitle", box=None)
    table.add_row("[red]plain\x1b[31m\x9b", Text("styled\x1b]0;t\x07", style="bold"))
    console(file=out, width=70).print(table)
    assert not CONTROL.search(out.getvalue())
    whole = "".join(out.getvalue().split())
    for words in ("[red]plain\\u001b[31m\\u009b", "\\u001btitle"):
        assert words in whole


# --- every command ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / HOSTILE.replace("/", "")
    path.mkdir()
    return path


@pytest.mark.parametrize("options", [(), ("--layers",), ("--json",), ("--json", "--layers")], ids=" ".join)
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"model_type": HOSTILE},
        {"architectures": [HOSTILE]},
        {"layer_types": [HOSTILE] * 3, "num_hidden_layers": 3},
        {"hidden_size": HOSTILE},
        {HOSTILE: HOSTILE, "text_config": {"model_type": HOSTILE, HOSTILE: 3}},
        {"dtype": HOSTILE, "torch_dtype": HOSTILE, "rope_scaling": {"type": HOSTILE}},
        {"vision_config": {"model_type": "x\n\nheadwise: all is well\x1b[0m"}},
    ],
    ids=lambda extra: " ".join(key for key in extra if key.isidentifier()),
)
def test_card_escapes_a_hostile_config(
    extra: dict, options: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / f"{folder.name}.json"
    path.write_text(json.dumps(LLAMA | extra))
    out = printed(capsys, "card", str(path), *options, code=None)
    if out.startswith("{"):
        assert json.loads(out)["name"] == path.name
    out = printed(capsys, "diff", str(path), "gpt2", *options[:1] * ("--layers" not in options), code=None)
    assert "\nheadwise: all is well" not in out
    printed(capsys, "scale", str(path), code=None)
    if not extra:
        assert not CONTROL.search(read(path).explain() + str(diff(path, "gpt2")))


def test_a_name_cannot_imitate_another_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json\n\nAll is well.json"
    path.write_text(json.dumps(LLAMA | {"model_type": "a\nb"}))
    for args in (("card", str(path)), ("diff", str(path), "gpt2"), ("card", str(path) + "?")):
        assert "\nAll" not in printed(capsys, *args, code=None)


def gguf_text(text: str) -> bytes:
    data = text.encode("utf-8", errors="surrogatepass")
    return struct.pack("<Q", len(data)) + data


def gguf_file(arch: str) -> bytes:
    pairs = [
        gguf_text("general.architecture") + struct.pack("<I", 8) + gguf_text(arch),
        gguf_text("general.name") + struct.pack("<I", 8) + gguf_text(HOSTILE),
    ]
    for name, number in (("block_count", 3), ("attention.head_count", 5), ("embedding_length", 35)):
        pairs.append(gguf_text(f"{arch}.{name}") + struct.pack("<II", 4, number))
    tensor = gguf_text(HOSTILE) + struct.pack("<IQIQ", 1, 7, 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs) + tensor + bytes(64)


@pytest.mark.parametrize("options", [(), ("--layers",), ("--json",)], ids=" ".join)
def test_card_escapes_a_hostile_gguf(
    options: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "model.gguf"
    path.write_bytes(gguf_file("llama" + HOSTILE))
    assert "llamaa\\u001b]52" in "".join(printed(capsys, "card", str(path), *options).split())
    path.write_bytes(gguf_file("llama" + HOSTILE)[:90])
    assert "cut short" in printed(capsys, "card", str(path), *options, code=2)


@pytest.mark.parametrize("beside", [False, True])
def test_card_escapes_hostile_tensor_names(beside: bool, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"dtype": "F32", "shape": [11, 13], "data_offsets": [0, 4 * 143]}
    names = (f"layers.0.{HOSTILE}.q_proj.weight", f"{HOSTILE}embed_tokens.weight", f"{HOSTILE}lm_head.weight")
    header = json.dumps(dict.fromkeys(names, entry) | {"__metadata__": {HOSTILE: HOSTILE}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * 143))
    if beside:
        (folder / "config.json").write_text(json.dumps(LLAMA))
    printed(capsys, "card", str(folder))
    printed(capsys, "diff", str(folder), "gpt2")
    bad = json.dumps({HOSTILE: {**entry, "dtype": HOSTILE}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(bad)) + bad)
    assert ", ".join(DTYPES) in printed(capsys, "card", str(folder), code=2)


@pytest.mark.parametrize(
    "args",
    [
        ("card", HOSTILE), ("card", f"--{HOSTILE}"), ("card", "gpt2", f"--context={HOSTILE}"), (HOSTILE,),
        ("card", "gpt2", "--dtype", HOSTILE), ("card", "gpt2", "--memory", HOSTILE), ("diff", HOSTILE, "gpt2"),
        ("diff", "gpt2", f"-{HOSTILE}"), ("card", "gpt2", "--context", HOSTILE), ("card", f"owner{HOSTILE}/name"),
        ("inspect", "x", "--model", HOSTILE), ("inspect", "x", f"--{HOSTILE}", "y"),
        ("inspect", "x", "--stat", HOSTILE),
        ("inspect", "x", "--head", HOSTILE), ("inspect", "x", "--token", HOSTILE), ("inspect", "--example", HOSTILE),
        ("inspect", "x", "--png", f"/nowhere/{HOSTILE}.png"), ("inspect", "x", "--html", f"/nowhere/{HOSTILE}.html"),
        ("inspect", "x", "--html", "x.html", "--scores", HOSTILE), ("inspect", "x", "--svg", HOSTILE),
        ("atlas", "--texts", HOSTILE), ("atlas", "--model", HOSTILE), ("atlas", "merge", HOSTILE, HOSTILE),
        ("atlas", "diff", HOSTILE, "minilm"), ("atlas", "show", HOSTILE), ("atlas", "--head", HOSTILE),
        ("atlas", "--texts", "x", "--part", HOSTILE),
        ("atlas", "ablate", HOSTILE, "--texts", "x"), ("atlas", "relations", "--conllu", HOSTILE),
        ("prune", "--texts", HOSTILE, "--out", "y"), ("prune", "--texts", "x", "--out", "y", "--keep", HOSTILE),
        ("prune", "--texts", __file__, "--out", "y", "--plan", HOSTILE),
        ("prune", "--texts", "x", "--out", "y", "--score", HOSTILE),
        ("lab", HOSTILE), ("lab", "1", "--device", HOSTILE), ("lab", "1", "--over", HOSTILE),
        ("scale", HOSTILE), ("scale", "gpt2", "--dtype", HOSTILE),
        ("serve", "--model", HOSTILE), ("serve", "--scores", HOSTILE), ("serve", "--port", HOSTILE),
        ("bench", "--cases", HOSTILE), ("trace", "--heads", HOSTILE),
    ],
    ids=lambda args: " ".join(args).replace(HOSTILE, "HOSTILE").replace(__file__, "FILE"),
)  # fmt: skip
def test_a_hostile_argument_is_escaped(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = printed(capsys, *args, code=None)
    assert out.startswith(("headwise: ", "written again"))


@pytest.mark.parametrize(
    "options",
    [(), ("--token", "HOSTILE"), ("--head", "3.1"), ("--pieces",), ("--json",), ("second\x1b[8m text\u202e",)],
    ids=" ".join,
)
def test_inspect_escapes_a_hostile_text(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    text = f"The cat {HOSTILE} sat\x1b]0;title\x07 [bold]because[/bold] it\x9b was HOSTILE"
    out = printed(capsys, "inspect", text, *options)
    if "--json" in options:
        assert json.loads(out)["text"].startswith("The cat a")


def test_warnings_about_a_picture_of_a_hostile_text_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """matplotlib warns of characters that its font has not, and quotes them."""
    words = printed(capsys, "inspect", "a \x1b[8m\x9b b", "--png", str(tmp_path / "a.png"))
    assert "Glyph 27 (\\u001b) missing" in words


def test_hostile_names_of_output_files_are_escaped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, ending in (("--html", ".html"), ("--png", ".png"), ("--svg", ".svg")):
        assert "wrote" in printed(capsys, "inspect", "a b", option, str(folder / f"{HOSTILE[:40]}{ending}"))


@pytest.mark.parametrize("options", [(), ("--json",), ("--head", "3.1"), ("--head", "3.1", "--json")], ids=" ".join)
def test_atlas_escapes_a_hostile_model_name(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    atlas = bundled_atlas("minilm")
    assert atlas is not None
    named = dataclasses.replace(atlas, about={**atlas.about, "model": HOSTILE})
    named.save(tmp_path / "atlas.json")
    monkeypatch.setattr("headwise.roles.atlas.bundled.bundled_atlas", lambda model: named)
    printed(capsys, "atlas", *options)
    printed(capsys, "atlas", "diff", str(tmp_path / "atlas.json"), "minilm")


# --- nothing goes another way ---


def direct_prints(source: str) -> list[str]:
    """Calls that would print past `terminal`."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("print", "typer.echo", "typer.secho", "Console", "rich.print", "click.echo") or name.endswith(
                ("stdout.write", "stderr.write")
            ):
                calls.append(f"{name} in line {node.lineno}")
    return calls


# numbers of a child process for its parent, which reads them as JSON
CHILDREN = ("bench/memory.py", "bench/models.py")


@pytest.mark.parametrize(
    "path",
    [str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "terminal.py"],
)
def test_modules_print_only_through_terminal(path: str) -> None:
    if path not in CHILDREN:
        assert direct_prints((PACKAGE / path).read_text(encoding="utf-8")) == []


def test_the_check_finds_a_direct_print() -> None:
    for line in ("print(1)", "typer.echo('x')", "sys.stderr.write('x')", "Console(stderr=True).print('x')"):
        assert direct_prints(line)
