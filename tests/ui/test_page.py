"""The page as a file: one module, safe with any token, no address in it, whole or not there."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import headwise
from headwise.roles.atlas.bundled import bundled_atlas
from headwise.ui import capture, page, payload
from headwise.ui.atlas import save_page

JS = Path(page.__file__).parent / "js"
TESTS = Path(__file__).parent / "js"


def node(*args: str, **how: object) -> subprocess.CompletedProcess[str]:
    found = shutil.which("node")
    if found is None:
        pytest.fail("node is missing; get it with: apt-get install -y nodejs")
    return subprocess.run([found, *args], capture_output=True, text=True, check=False, **how)  # type: ignore[call-overload,no-any-return]


def test_the_javascript_s_own_tests() -> None:
    done = node("--test", "--test-reporter=tap", *map(str, sorted(TESTS.glob("*.test.js"))))
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"# pass (\d+)", done.stdout)[1]) >= 10  # type: ignore[index]


def test_the_parts_make_one_module(tmp_path: Path) -> None:
    """Two parts that define the same name, or an import that stayed, are errors here."""
    (tmp_path / "view.mjs").write_text(page.module())
    done = node("--input-type=module", "-e", f"import v from '{tmp_path}/view.mjs'; console.log(Object.keys(v).join())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "render\n", "")
    assert not re.search(r"^(import|export (?!default))", page.module(), re.MULTILINE)


def test_every_part_is_in_the_module() -> None:
    assert {path.stem for path in JS.glob("*.js")} == {*page.MODULES, "page", "client", "atlas"}


@pytest.mark.parametrize("path", sorted(JS.glob("*.js")), ids=lambda path: path.name)
def test_nothing_in_it_makes_markup_of_text(path: Path) -> None:
    source = path.read_text().replace("http://www.w3.org/2000/svg", "")  # the name of SVG, which nobody asks
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "http:",
        "https:",
    ):
        assert way not in source


def test_data_inside_a_script_element() -> None:
    value = {"a": "</script><!--<script>", "b": "\u2028\u2029&", "c": "\ud800", "d": "é日"}
    text = page.embedded(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


def test_the_policy_allows_the_page_s_own_script_alone() -> None:
    whole, policy = page.page({"headwise": 1}, title="</title><script>alert(1)</script>")
    script = re.search(r'<script type="module">(.*?)</script>', whole, re.DOTALL)[1]  # type: ignore[index]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy and "unsafe" not in policy
    assert html.escape(policy) in whole
    assert "<script>alert" not in whole


def test_every_page_begins_with_its_policy(tmp_path: Path) -> None:
    found = bundled_atlas("minilm")
    assert found is not None
    name = "half \ud800</title><script>alert(1)</script>"
    save_page(dataclasses.replace(found, model=name), tmp_path / "atlas.html")
    page.save({"headwise": 1}, tmp_path / "view.html", title=name)
    for path in tmp_path.iterdir():
        whole = path.read_text(encoding="utf-8")
        policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', whole)
        assert policy is not None and "default-src &#x27;none&#x27;" in policy[1] and "unsafe" not in policy[1]
        assert policy.start() < min(whole.index(tag) for tag in ("<title", "<style", "<script", "<body"))
        assert "<script>alert" not in whole and "half ?&lt;/title&gt;" in whole


@pytest.mark.parametrize("place", ["a directory", "none/x.html", "/proc/x.html", "x" * 300])
def test_a_place_that_cannot_be_written_is_one_line(place: str, tmp_path: Path) -> None:
    (tmp_path / "a directory").mkdir()
    with pytest.raises(headwise.HeadwiseError, match="cannot be written|is a directory|name") as caught:
        page.save({"headwise": 1}, tmp_path / place)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a directory"]


def test_saved_whole_or_not_at_all(tmp_path: Path, run: Callable[..., capture.Pass]) -> None:
    value = payload.data(run())
    page.save(value, tmp_path / "a.html")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    with pytest.raises(headwise.HeadwiseError, match=r"'.*none/a.html' cannot be written: No such file"):
        page.save(value, tmp_path / "none" / "a.html")
    with pytest.raises(ValueError, match="JSON"):
        page.save({"a": float("nan")}, tmp_path / "b.html")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_the_parts_are_in_the_package() -> None:
    for name in (*page.MODULES, "page", "client"):
        assert (JS / f"{name}.js").stat().st_size > 0
    assert (JS / "view.css").stat().st_size > 0
