"""The checks of built wheels, without building them: `make wheels` does."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

from headwise.attention.backends.native import library
from helpers.tools import load_tool

wheels = load_tool("wheels")
KERNEL = "headwise/attention/backends/native"
METADATA = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path, **files: str) -> Path:
    path = folder / "headwise-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


GOOD = {"headwise.dist-info/WHEEL": METADATA, f"{KERNEL}/kernel.txt": "for any platform"}


def test_a_wheel_without_the_kernel_passes_its_check(tmp_path):
    assert wheels.check_wheel("any", write_wheel(tmp_path, **GOOD))["kernel"] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"headwise.dist-info/WHEEL": METADATA.replace("any", "linux_x86_64")},
        {"headwise.dist-info/WHEEL": METADATA.replace("true", "false")},
        {f"{KERNEL}/kernel.so": "binary"},
        {"headwise/module.py": f"PATH = {str(wheels.ROOT)!r} + '/src'\nFILE = '{wheels.ROOT}/src'"},
    ],
    ids=["tag", "purelib", "a kernel for one platform", "a path of this machine"],
)
def test_a_wrong_wheel_fails_its_check(tmp_path, change):
    with pytest.raises(AssertionError):
        wheels.check_wheel("any", write_wheel(tmp_path, **GOOD | change))


@pytest.mark.skipif(isinstance(library.library(), str), reason="the native kernel was not built")
def test_names_that_a_wheel_must_export_are_those_of_the_library():
    names, loaded = wheels.exported_names(), library.library()
    assert {"headwise_run", "headwise_backward", "headwise_layout"} <= names
    assert all(hasattr(loaded.code, name) for name in names)


def test_every_platform_has_a_row_on_the_page():
    text = wheels.PAGE.read_text(encoding="utf-8")
    for name in [*wheels.PLATFORMS, "any"]:
        assert f"| `py3-none-{name}` |" in text, name


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed")
@pytest.mark.parametrize("name", wheels.PLATFORMS)
@pytest.mark.parametrize("source", ["kernel.c", "threads.c", "../../../../../../tests/kernel/driver.c"])
def test_what_depends_on_the_operating_system_compiles_for_each(name, source, tmp_path):
    folder = wheels.hatch_build.KERNEL
    flags = [
        "-O0",
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{folder}",
        "-c",
        source,
        "-o",
        str(tmp_path / "x.o"),
    ]
    subprocess.run([*wheels.compiler(wheels.PLATFORMS[name]), *flags], check=True, cwd=folder)
