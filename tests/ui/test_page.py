"""The page as a file: one module, safe with any token, no address in it, saved whole or not at all."""

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
from headwise import html as html_shell
from headwise.roles.atlas.bundled import bundled_atlas
from headwise.ui import bundle, capture, page, payload
from headwise.ui.atlas import save_page

JS = Path(page.__file__).parent / "js"
TESTS = Path(__file__).parent / "js"


def node(*args: str) -> subprocess.CompletedProcess[str]:
    path = shutil.which("node")
    if path is None:
        pytest.fail("node is missing; get it with: apt-get install -y nodejs")
    return subprocess.run([path, *args], capture_output=True, text=True, check=False)


def test_javascript_tests_pass() -> None:
    process = node("--test", "--test-reporter=tap", *map(str, sorted(TESTS.glob("*.test.js"))))
    assert process.returncode == 0, process.stdout + process.stderr
    assert int(re.search(r"# pass (\d+)", process.stdout)[1]) >= 10  # type: ignore[index]


def test_bundle_is_one_module_that_node_loads(tmp_path: Path) -> None:
    """A name that is not defined, or an import that stayed, is an error here."""
    (tmp_path / "view.mjs").write_text(bundle.module())
    process = node(
        "--input-type=module", "-e", f"import v from '{tmp_path}/view.mjs'; console.log(Object.keys(v).join())"
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "render\n", "")
    assert not re.search(r"^(import|export (?!default))", bundle.module(), re.MULTILINE)


@pytest.mark.parametrize("entry", ["atlas.js", "hosts/page.js", "hosts/server.js"])
def test_script_of_a_page_parses(entry: str, tmp_path: Path) -> None:
    (tmp_path / "page.mjs").write_text(bundle.script(entry))
    process = node("--check", str(tmp_path / "page.mjs"))
    assert (process.returncode, process.stderr) == (0, "")


def test_every_javascript_file_is_part_of_a_page() -> None:
    names = {path.relative_to(JS).as_posix() for path in JS.rglob("*.js")}
    scripts = [bundle.script(entry) for entry in ("hosts/page.js", "hosts/server.js", "atlas.js", "recorder.js")]
    assert names == {name for script in scripts for name in re.findall(r"^// (\S+\.js)$", script, re.MULTILINE)}


def test_modules_stand_after_what_they_import() -> None:
    names = re.findall(r"^// (\S+\.js)$", bundle.module(), re.MULTILINE)
    assert len(names) == len(set(names))
    for place, name in enumerate(names):
        assert set(bundle._imports(name)) <= set(names[:place])


def test_new_view_is_found_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file under views/ is enough: it registers itself, and may have a style sheet beside it."""
    shutil.copytree(JS, tmp_path / "js")
    source = """import { h } from "../lib/dom.js";
import { registerView } from "../lib/registry.js";

const LABEL = "Extra"; // other files have constants of this name too

registerView({ name: "extra", label: LABEL, order: 9, create: () => ({ el: h("div"), update: () => undefined }) });
"""
    (tmp_path / "js/views/extra.js").write_text(source)
    (tmp_path / "js/views/extra.css").write_text(".hw-extra { color: teal; }\n")
    monkeypatch.setattr(bundle, "files", lambda package: tmp_path)
    for function in (bundle.module, bundle.script, bundle.style):
        function.cache_clear()
    try:
        assert "views/extra.js" in bundle.views() and 'name: "extra"' in bundle.script("hosts/page.js")
        assert bundle.style().count(".hw-extra") == 1
        (tmp_path / "view.mjs").write_text(bundle.module())
        assert node(str(tmp_path / "view.mjs")).stderr == ""
    finally:
        for function in (bundle.module, bundle.script, bundle.style):
            function.cache_clear()


def test_files_that_import_each_other_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "js").mkdir()
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"js/{name}.js").write_text(f'import {{ x }} from "./{other}.js";\n')
    monkeypatch.setattr(bundle, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=r"these files import each other: a\.js -> b\.js -> a\.js"):
        bundle._in_order(("a.js",))


@pytest.mark.parametrize("path", sorted(JS.rglob("*.js")), ids=lambda path: path.relative_to(JS).as_posix())
def test_no_file_turns_text_into_markup(path: Path) -> None:
    source = path.read_text().replace("http://www.w3.org/2000/svg", "")  # the name of SVG, which nobody fetches
    for name in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "http:",
        "https:",
    ):
        assert name not in source


def test_embedded_json_cannot_close_its_script_element() -> None:
    value = {"a": "</script><!--<script>", "b": "\u2028\u2029&", "c": "\ud800", "d": "é日"}
    text = html_shell.embedded_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


def test_policy_allows_only_the_script_of_the_page() -> None:
    whole, policy = page.page({"headwise": 1}, title="</title><script>alert(1)</script>")
    script = re.search(r'<script type="module">(.*?)</script>', whole, re.DOTALL)[1]  # type: ignore[index]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy and "unsafe" not in policy
    assert html.escape(policy) in whole
    assert "<script>alert" not in whole


def test_every_page_begins_with_its_content_policy(tmp_path: Path) -> None:
    atlas = bundled_atlas("minilm")
    assert atlas is not None
    name = "half \ud800</title><script>alert(1)</script>"
    save_page(dataclasses.replace(atlas, model=name), tmp_path / "atlas.html")
    page.save({"headwise": 1}, tmp_path / "view.html", title=name)
    for path in tmp_path.iterdir():
        whole = path.read_text(encoding="utf-8")
        policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', whole)
        assert policy is not None and "default-src &#x27;none&#x27;" in policy[1] and "unsafe" not in policy[1]
        assert policy.start() < min(whole.index(tag) for tag in ("<title", "<style", "<script", "<body"))
        assert "<script>alert" not in whole and "half ?&lt;/title&gt;" in whole


@pytest.mark.parametrize("path", ["a directory", "none/x.html", "/proc/x.html", "x" * 300])
def test_path_that_cannot_be_written_is_named_in_one_line(path: str, tmp_path: Path) -> None:
    (tmp_path / "a directory").mkdir()
    with pytest.raises(headwise.HeadwiseError, match="cannot be written|is a directory|name") as caught:
        page.save({"headwise": 1}, tmp_path / path)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a directory"]


def test_page_is_saved_whole_or_not_at_all(tmp_path: Path, run: Callable[..., capture.Pass]) -> None:
    value = payload.data(run())
    page.save(value, tmp_path / "a.html")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    with pytest.raises(headwise.HeadwiseError, match=r"'.*none/a.html' cannot be written: No such file"):
        page.save(value, tmp_path / "none" / "a.html")
    with pytest.raises(ValueError, match="JSON"):
        page.save({"a": float("nan")}, tmp_path / "b.html")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
