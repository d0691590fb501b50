"""Settings of every test run. This folder is on the path, so tests import what they share from `helpers`."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

# Why a test may be skipped. Any other reason fails the run: a skip must not hide what nobody looks at.
SKIPS = (
    "the native kernel was not built",  # no C compiler: PyTorch computes the same, and the tests of that run
    "(cc|aarch64-linux-gnu-gcc|qemu-aarch64|qemu-x86_64) is not installed",
    "ziglang is not installed",  # the cross-compiler of make wheels
    "cc has no sanitizers here",
    "no fork here",
    "HEADWISE_KERNEL=off",  # a test of the native kernel itself; tests/matrix.py has such runs
    "triton is not installed",  # it exists for Linux on x86-64 only
    "(timm|diffusers|x_transformers|peft|sentence_transformers|llama_cpp) is not installed",  # make interop
    "(onnx|onnxruntime|openvino) is not installed",  # engines that the benchmark races; the extra bench-peers has them
    "JupyterLab is missing",  # a long test; the same widget runs in the browser tests without it
)

CHROMIUM_OPTIONS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync".split()
)

_unlisted: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Compiled code of this run's own: inductor's cache does not know which instructions ATen may use.

    Several workers share the cores, so their threads wait without spinning.
    """
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="headwise-inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
        config.add_cleanup(lambda: (os.environ.pop("TORCHINDUCTOR_CACHE_DIR"), folder.cleanup()))


@pytest.fixture
def in_float64() -> Iterator[None]:
    """New tensors and modules are in double precision, with the same random numbers in every test."""
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def float64() -> Iterator[None]:
    """Tensors and parameters are float64 by default, and random numbers the same in every run."""
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def own_role_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles that a test registers are forgotten after it."""
    from headwise.role_definitions import registry

    for name in ("_scores", "_roles", "_owners"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    monkeypatch.setattr(registry, "_plugins_loaded", True)


def pytest_runtest_logreport(report: Any) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not any(re.match(pattern, reason) for pattern in SKIPS):
            _unlisted.append(f"{report.nodeid}: {reason}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in _unlisted:
        terminalreporter.write_line(f"skipped for a reason that tests/conftest.py does not list: {line}", red=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _unlisted and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A real browser. One for all tests of a process: Playwright does not start twice in one."""
    from playwright.sync_api import sync_playwright

    from helpers.tools import load_tool

    executable = load_tool("chromium").find_chromium()
    if executable is None:
        pytest.fail("Chromium is missing; get it with: apt-get install -y chromium (or set CHROMIUM to its path)")
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=executable, args=CHROMIUM_OPTIONS)
        yield browser
        browser.close()
