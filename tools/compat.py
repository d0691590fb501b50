"""Run a few tests with the lowest and highest versions of Python, PyTorch and transformers (make compat).

    python tools/compat.py run [NUMBER...]   the environments of that number, or all; results go to build/compat.json
    python tools/compat.py page              the results into docs/compatibility.md

Each environment is a folder that pip fills, with the wheel of dist/ (make wheels), and that is removed afterwards.
PyTorch is installed without its dependencies: NVIDIA's libraries, gigabytes that its builds for CUDA need to be
imported, are taken from the folder COMPAT_NVIDIA. Interpreters are searched in pyenv and on the path (python3.13).
Only wheels are installed. PyYAML has none for Python 3.15: build one first (python3.15 -m pip wheel --no-deps pyyaml)
and name its folder in PIP_FIND_LINKS, or UV_FIND_LINKS with uv.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "build/compat.json", ROOT / "docs/compatibility.md"
TESTS = ("tests/test_compatibility.py",)
TORCH_NEEDS = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")
PACKAGES = ("numpy", "safetensors", "click", "rich", "gguf", "accelerate", "pytest", "hypothesis", "psutil")


@dataclass(frozen=True)
class Environment:
    """Versions to be tested together."""

    python: str
    torch: str
    transformers: str

    def interpreter(self) -> str | None:
        """The Python, or None where there is none."""
        folders = sorted((Path.home() / ".pyenv/versions").glob(f"{self.python}.*/bin"))
        # pyenv's own folders come first: its shims are on the path for versions that are not selected, too, and fail
        path_here = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
        return shutil.which(f"python{self.python}", path=path_here)


# the ends of the ranges of pyproject.toml, what constraints.txt pins, and the newest that can be had
ENVIRONMENTS = (
    Environment("3.11", "2.13.0", "5.15.0"),
    Environment("3.11", "2.13.0", "5.22.2"),
    Environment("3.11", "2.14.1", "5.23.0"),
    Environment("3.12", "2.13.0", "5.22.2"),
    Environment("3.13", "2.15.0", "5.23.0"),
    Environment("3.14", "2.15.0", "5.23.0"),
    Environment("3.15", "2.15.0", "5.23.0"),
)


def wheel() -> Path:
    """The wheel in dist/ for Linux on this machine."""
    paths = sorted((ROOT / "dist").glob(f"headwise-*-manylinux_*_{platform.machine()}.whl"))
    if not paths:
        sys.exit("dist/ has no wheels: make wheels")
    return paths[-1]


def run_environment(environment: Environment) -> str:
    """Install an environment and run TESTS in it. Returns the last line of pytest, or why it was not possible."""
    interpreter = environment.interpreter()
    if interpreter is None:
        return f"not run: no Python {environment.python} here"
    with tempfile.TemporaryDirectory() as folder:
        site = f"{folder}/site"
        paths = [site, f"{folder}/tests", *filter(None, [os.environ.get("COMPAT_NVIDIA")])]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        torch, transformers = f"torch=={environment.torch}", f"transformers=={environment.transformers}"
        for packages in (
            [torch, "--no-deps"],
            [*TORCH_NEEDS, *PACKAGES, transformers],
            [str(wheel())],
        ):
            extra = ["--no-deps"] if packages[0].endswith(".whl") else []
            problem = install(interpreter, site, [*packages, *extra])
            if problem:
                return f"not run: pip has no {packages[0]} for it ({problem})"
        shutil.copytree(ROOT / "tests", f"{folder}/tests", ignore=shutil.ignore_patterns("__pycache__"))
        probe = [interpreter, "-c", "import torch"]
        process = subprocess.run(probe, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        if process.returncode:
            return f"not run: {process.stderr.strip().splitlines()[-1]}"
        command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        process = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.stdout.write(process.stdout[-20000:] + process.stderr[-2000:])
    return re.sub(r"^=+ | =+$| in [\d.]+s.*", "", process.stdout.strip().splitlines()[-1])


def install(interpreter: str, site: str, packages: list[str]) -> str | None:
    """Fill a folder with wheels, by uv where it is installed, else by pip. Returns None, or an error's last line."""
    uv = shutil.which("uv")
    if uv:
        command = [uv, "pip", "install", "-q", "--python", interpreter, "--index-strategy", "unsafe-best-match"]
    else:
        command = [interpreter, "-m", "pip", "install", "-q", "--upgrade"]
    command += ["--target", site, "--only-binary=:all:", *packages]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.stderr.strip().splitlines()[-1] if process.returncode else None


def run(numbers: list[str]) -> None:
    """Run environments, numbered from 0, and keep the results."""
    for number in map(int, numbers or range(len(ENVIRONMENTS))):
        environment = ENVIRONMENTS[number]
        result = run_environment(environment)
        results = load_results()
        results[key(environment)] = result
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        sys.stdout.write(f"{key(environment)}: {result}\n")


def key(environment: Environment) -> str:
    return f"Python {environment.python}, torch {environment.torch}, transformers {environment.transformers}"


def load_results() -> dict[str, str]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table(results: dict[str, str]) -> str:
    """The results as a Markdown table."""
    lines = ["| Python | torch | transformers | result |", "|---|---|---|---|"]
    for environment in ENVIRONMENTS:
        cells = (environment.python, environment.torch, environment.transformers)
        lines.append(f"| {' | '.join(cells)} | {results.get(key(environment), 'not run')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:])
    elif sys.argv[1:] == ["page"]:
        from markdown_sections import write_section

        write_section(PAGE, "compatibility", table(load_results()))
    else:
        sys.exit(__doc__)
