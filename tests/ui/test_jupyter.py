"""The view in a real JupyterLab: the widget is drawn, answers clicks and asks its kernel."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CODE = "import headwise\nshown = headwise.view('The animal was too tired to cross the street.', heads='3.1')\nshown"
pytestmark = pytest.mark.full


def notebook(*cells: str) -> dict[str, Any]:
    cells = [
        {"cell_type": "code", "id": f"c{n}", "execution_count": None, "metadata": {}, "outputs": [], "source": code}
        for n, code in enumerate(cells)
    ]
    kernel = {"display_name": "headwise", "language": "python", "name": "headwise"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a notebook in a JupyterLab of its own, whose kernel is this Python."""
    jupyter = os.environ.get("JUPYTER") or shutil.which("jupyter-lab")
    if jupyter is None:
        pytest.skip("JupyterLab is missing; get it with: pip install jupyterlab (or set JUPYTER to its jupyter-lab)")
    spec = tmp_path / "share" / "kernels" / "headwise"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    source = str(Path(__file__).parents[2] / "src")
    kernel = {"argv": argv, "display_name": "headwise", "language": "python", "env": {"PYTHONPATH": source}}
    (spec / "kernel.json").write_text(json.dumps(kernel))
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook(CODE, "shown.state")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folders = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "RUNTIME", "DATA")}
    share = os.pathsep.join([str(tmp_path / "share"), str(Path(sys.prefix) / "share" / "jupyter")])
    command = [
        jupyter, "--no-browser", "--allow-root", f"--ServerApp.root_dir={tmp_path}", f"--port={port}",
        "--ServerApp.port_retries=0", "--IdentityProvider.token=x", "--LabApp.news_url=None",
    ]  # fmt: skip
    with subprocess.Popen(
        command, env={**os.environ, **folders, "JUPYTER_PATH": share}, stderr=subprocess.DEVNULL
    ) as process:
        try:
            _until_served(f"http://127.0.0.1:{port}/api?token=x", process)
            yield f"http://127.0.0.1:{port}/lab/tree/a.ipynb?token=x"
        finally:
            process.terminate()


def _until_served(url: str, process: Any) -> None:
    for _ in range(600):
        assert process.poll() is None, "JupyterLab ended"
        try:
            urllib.request.urlopen(url, timeout=1).read()
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("JupyterLab did not answer")


def test_widget_runs_in_jupyterlab(lab: str, chromium: Any) -> None:
    tab = chromium.new_page(viewport={"width": 1500, "height": 1000})
    tab.set_default_timeout(90_000)
    tab.goto(lab)
    tab.locator(".jp-Notebook .jp-Cell .cm-content").first.click()
    tab.get_by_text("headwise | Idle").wait_for()  # its kernel is there
    tab.keyboard.press("Control+Enter")
    view = tab.locator(".headwise")
    view.locator(".hw-heat").wait_for()
    assert view.locator(".hw-chosen b").inner_text() == "head 3.1"
    view.locator(".hw-nav .cell[data-head='5.11']").click()
    view.get_by_role("button", name="switch off").click()
    view.locator("[data-effect]").wait_for()
    view.get_by_role("tab", name="Steps").click()
    view.locator(".hw-entries").first.wait_for()
    tab.locator(".jp-Cell .cm-content").nth(1).click()
    tab.keyboard.press("Control+Enter")
    tab.get_by_text("view=steps&heads=5.11").wait_for()  # what Python knows about it
    tab.close()
