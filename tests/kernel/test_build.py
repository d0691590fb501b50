"""The native kernel's build: what C and Python must agree on is asserted, and every source is part of its hash."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from campaigns.sanitizers import ROOT, VARIANTS
from headwise.attention.backends.native import library

SOURCES = sorted(library.FOLDER.glob("*.[ch]"))
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="cc is not installed")
needs_kernel = pytest.mark.skipif(isinstance(library.library(), str), reason="the native kernel was not built")


@pytest.fixture(scope="module")
def hatch_build():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sources(tmp_path):
    """A copy of the C sources."""
    for path in SOURCES:
        shutil.copy(path, tmp_path)
    return tmp_path


def errors_of(folder: Path, source: str) -> str:
    """What the compiler says about one source, without writing anything."""
    command = ["cc", "-std=gnu11", "-fsyntax-only", str(folder / source)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_source_hash_covers_every_source_and_header(hatch_build, sources):
    assert {path.suffix for path in SOURCES} == {".c", ".h"}
    before = hatch_build.source_hash(sources)
    assert before == library._source_hash()
    for path in SOURCES:
        text = (sources / path.name).read_bytes()
        (sources / path.name).write_bytes(text + b"\n")
        assert hatch_build.source_hash(sources) != before, path.name
        (sources / path.name).write_bytes(text)


def test_warnings_are_errors_in_test_builds_and_not_for_users(hatch_build):
    """The drivers of these variants are compiled, for all instruction sets, in tests/attention/test_native.py."""
    assert not any(flag.startswith("-W") for flag in hatch_build.FLAGS)
    for name in ("as it is", "NEON"):
        assert VARIANTS[name].flags.startswith("-Wall -Wextra -Werror"), name


@needs_compiler
@pytest.mark.parametrize(
    ("header", "old", "new", "message"),
    [
        ("call.h", "int64_t batch, heads, kv_heads,", "int64_t heads, batch, kv_heads,", "Call.batch has moved"),
        (
            "call.h",
            "causal, offset, start, keep_start, end;",
            "causal, offset; int32_t start, keep_start, end;",
            "Call.end has moved",
        ),
        (
            "call.h",
            "    int64_t threads;\n} Call;",
            "    int64_t threads, x;\n} Call;",
            "a field of Call is missing above",
        ),
        ("gradients.h", "*out, *grad_out;", "*grad_out, *out;", "Gradients.out has moved"),
        ("gradients.h", "} Gradients;", "    int64_t x;\n} Gradients;", "a field of Gradients is missing above"),
    ],
    ids=["order", "width", "count", "order of gradients", "count of gradients"],
)
def test_structs_that_python_would_pack_differently_do_not_compile(sources, header, old, new, message):
    assert errors_of(sources, "kernel.c") == ""
    replace_in(sources / header, old, new)
    assert message in errors_of(sources, "kernel.c")


@needs_compiler
def test_scratch_buffers_that_vectors_would_overrun_do_not_compile(sources):
    assert errors_of(sources, "attention.c") == ""
    replace_in(sources / "plan.h", "SCRATCH_ALIGN = 64", "SCRATCH_ALIGN = 8")
    assert "reads end within the buffer" in errors_of(sources, "attention.c")


@needs_kernel
@pytest.mark.parametrize(
    ("name", "value"),
    [("COLUMNS", library.COLUMNS[::-1]), ("MAX_CLASSES", 9), ("POINTERS", library.FORM), ("GRADIENTS", library.FORM)],
)
def test_library_whose_layout_differs_from_python_is_not_loaded(monkeypatch, name, value):
    monkeypatch.setattr(library, name, value)
    with pytest.raises(AssertionError):
        library.library.__wrapped__()


@needs_kernel
def test_binary_needs_no_symbols_of_the_compilers_runtime_to_detect_the_processor():
    binary = (library.FOLDER / library.BINARY).read_bytes()
    assert b"headwise_run" in binary and b"__cpu_model" not in binary and b"__cpu_indicator_init" not in binary


@needs_kernel
def test_binary_does_not_name_the_folder_in_which_it_was_built():
    assert str(ROOT).encode() not in (library.FOLDER / library.BINARY).read_bytes()


@needs_kernel
def test_explain_names_the_instruction_sets_of_the_build():
    loaded = library.library()
    assert set(loaded.paths) <= set(loaded.build) and loaded.build[-1] == "plain"
    words = ", ".join(library.WORDS[name] for name in loaded.build)
    assert library.explain(None).endswith(f"(this build has {words})")


@pytest.mark.parametrize(
    ("platform", "name"),
    [
        ("manylinux_2_17_aarch64", "kernel.so"),
        ("linux-x86_64", "kernel.so"),
        ("freebsd-14.1-amd64", "kernel.so"),
        ("macosx_11_0_arm64", "kernel.dylib"),
        ("macosx-14.0-arm64", "kernel.dylib"),
        ("win_amd64", "kernel.dll"),
        ("win-amd64", "kernel.dll"),
        ("win32", "kernel.dll"),
    ],
)
def test_binary_has_the_file_name_that_its_platform_expects(hatch_build, platform, name):
    assert hatch_build.binary_name(platform) == name


def test_binary_name_of_this_platform_is_the_one_that_python_loads(hatch_build):
    assert hatch_build.binary_name(sysconfig.get_platform()) == library.BINARY


@pytest.mark.parametrize(
    ("compiler", "reason"), [("", "no C compiler was found"), ("false", "false failed"), ("/no/such/cc", "/no/such/cc")]
)
def test_explain_says_why_the_kernel_could_not_be_built(hatch_build, monkeypatch, tmp_path, compiler, reason):
    monkeypatch.setenv("PATH", str(tmp_path) if not compiler else os.environ["PATH"])
    monkeypatch.setenv("CC", compiler)
    (tmp_path / library.BINARY).write_text("of an earlier build")
    problem = hatch_build.try_build(tmp_path / library.BINARY)
    assert problem is not None and reason in problem
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert library.library.__wrapped__() == f"the native kernel was not built: {problem}"


def test_wheel_for_any_platform_has_a_note_in_the_place_of_the_kernel(hatch_build, monkeypatch, tmp_path):
    hook, build_data = hatch_build.NativeKernel(), {"force_include": {}}
    hook.folder = tmp_path
    note = hook.include_kernel("any", "kernel.so", build_data)
    ((source, place),) = build_data["force_include"].items()
    assert place == "headwise/attention/backends/native/kernel.txt" and Path(source).read_text() == note
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert "install one for yours" in library.library.__wrapped__()
