"""headwise.view: a widget where anywidget is, a page where it is not; the command's pages and pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.cli import main
from headwise.html import embedded_json
from headwise.models.loading import resolve
from headwise.ui import bundle, capture, widget

ANIMAL = "The animal didn't cross the street because it was too tired."


@pytest.fixture(autouse=True)
def _loaded_once(minilm: tuple[Any, Any], bart: tuple[Any, Any]) -> Iterator[None]:
    loaded = {"minilm": minilm, "bart": bart}
    load, load_tokenizer = resolve.load, resolve.tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "load", lambda name: loaded[name][0] if name in loaded else load(name))
        patch.setattr(resolve, "tokenizer", lambda name: loaded[name][1] if name in loaded else load_tokenizer(name))
        yield


@pytest.fixture
def _without_anywidget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widget, "_widget_class", lambda: None)


def test_view_is_a_widget_with_anywidget() -> None:
    shown = headwise.view(ANIMAL, heads="3.1")
    assert shown._esm == bundle.module() and shown._css == bundle.style()
    assert shown.data["runs"][0]["chosen"] == [[3, 1]] and shown.data["live"]["models"] == ["minilm"]
    json.dumps(shown.get_state(["data", "state"])["data"])
    sent: list[Any] = []
    shown.send = sent.append
    shown._on_message(
        shown, {"number": 7, "request": {"ask": "steps", "text": ANIMAL, "model": "minilm", "head": "5.11"}}, []
    )
    shown._on_message(shown, {"number": 8, "request": {"ask": "run", "text": ""}}, [])
    shown._on_message(shown, "nonsense", [])
    assert [message["number"] for message in sent] == [7, 8]
    assert sent[0]["answer"]["steps"]["heads"] == [11]
    assert sent[1]["answer"] == {"error": "the text is empty; give a sentence"}


@pytest.mark.usefixtures("_without_anywidget")
def test_view_is_a_page_without_anywidget(tab: Any, tmp_path: Path) -> None:
    shown = headwise.view(ANIMAL, off={3: [1]})
    assert [run["off"] for run in shown.data["runs"]] == [[[3, 1]], []] and shown.data["live"] is None
    assert shown.path.exists() and str(shown.path) in repr(shown)
    inside = shown._repr_html_()
    assert inside.startswith('<iframe sandbox="allow-scripts" srcdoc="')
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>{inside}</body>")
    browser_tab = tab()
    browser_tab.page.goto((tmp_path / "notebook.html").as_uri())
    frame = browser_tab.page.frame_locator("iframe")
    frame.locator(".hw-compare .hw-grid").first.wait_for()
    assert "minilm without 3.1" in frame.locator(".hw-compare").inner_text()


def test_module_fulfils_the_contract_of_anywidget(tab: Any, tmp_path: Path) -> None:
    """As anywidget calls it: render({model, el}), traits by get, questions by send, and an end."""
    shown = headwise.view(ANIMAL)
    service = shown._service
    host = """
      const listeners = {};
      window.model = {
        values: { data: DATA, state: "" },
        get(name) { return this.values[name]; },
        set(name, value) { this.values[name] = value; },
        save_changes() {},
        on(name, act) { (listeners[name] ??= []).push(act); },
        off() {},
        async send({ number, request }) {
          const answer = await window.answer(request);
          listeners["msg:custom"].forEach((act) => act({ number, answer }));
        },
      };
      window.tell = (name, value) => {
        window.model.values[name] = value;
        listeners[`change:${name}`].forEach((act) => act());
      };
      window.end = view.render({ model: window.model, el: document.getElementById("out") });
    """
    module = bundle.module().replace("export default ", "const view = ")
    script = module + host.replace("DATA", embedded_json(shown.data))
    (tmp_path / "a.html").write_text(
        f'<!doctype html><meta charset="utf-8"><style>{bundle.style()}</style>'
        f'<div id="out"></div><script type="module">{script}</script>'
    )
    browser_tab = tab()
    browser_tab.page.expose_function("answer", lambda request: service.answer(request))
    view = browser_tab.open(tmp_path / "a.html")
    assert "heads=3.1" in view.evaluate("window.model.values.state")
    view.evaluate("window.tell('state', 'view=head&heads=5.11')")
    assert view.locator(".hw-chosen b").inner_text() == "head 5.11"
    view.get_by_role("button", name="switch off").click()
    view.wait_for_selector("[data-effect]")
    view.evaluate("document.activeElement.blur()")
    view.keyboard.press("x")  # a notebook's own keys are left alone
    assert view.locator("[data-effect]").count() == 1
    view.evaluate("window.end()")
    assert view.locator(".headwise").count() == 0


def test_view_takes_recorded_passes(run: Callable[..., capture.Pass]) -> None:
    shown = headwise.view(run())
    assert shown.data["live"] is None
    assert repr(shown) == "View(...): .save(path) writes it as a page"
    for wrong in (3, ["a", "b"], None):
        with pytest.raises(
            headwise.HeadwiseError, match="a view is of a text or of passes of .*, got (int|str|NoneType)"
        ):
            headwise.view(wrong)
    with pytest.raises(headwise.HeadwiseError, match="one pass or two beside each other, got 3"):
        headwise.view([run(), run(), run()])


# --- the command ---


def test_command_writes_html(tab: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.html"
    assert main(["inspect", ANIMAL, "--html", str(path), "--head", "5.11"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(rf"wrote {path} \(\d\.\d+ MiB\); open it in a browser\n", err)
    shown = tab().open(path)
    assert shown.title() == ANIMAL
    assert shown.locator(".hw-chosen b").inner_text() == "head 5.11"


def test_command_takes_target_and_scores(tab: Any, tmp_path: Path) -> None:
    (tmp_path / "importance.json").write_text(json.dumps({"importance": {"cross": [[1.5, 2.5, 3.5, 5.5, 7.5]]}}))
    path = tmp_path / "a.html"
    options = ["--target", "It was too wide.", "--scores", str(tmp_path / "importance.json"), "--html", str(path)]
    assert main(["inspect", "The animal was tired.", "--model", "bart", *options]) == 0
    shown = tab().open(path, "stat=importance")
    cross = shown.get_by_role("grid", name="heads by importance, cross attention")
    assert cross.locator(".cell").all_inner_texts() == ["1.50", "2.50", "3.50", "5.50", "7.50"]
    assert shown.get_by_role("grid", name="encoder attention").locator(".cell.none").count() == 6


def test_command_takes_a_second_model_and_heads_off(tab: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "a.html")
    assert main(["inspect", ANIMAL, "--html", path, "--off", "3.1,5.11"]) == 0
    shown = tab().open(Path(path))
    assert "minilm without 3.1, 5.11" in shown.locator(".hw-compare").inner_text()
    assert main(["inspect", ANIMAL, "--html", path, "--compare", "bart"]) == 0
    shown = tab().open(Path(path), "x")
    assert "second: bart" in shown.locator(".hw-compare").inner_text()


@pytest.mark.parametrize("head", [None, "3.1"])
def test_command_writes_pictures(head: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--head", head] if head else []
    assert main(["inspect", ANIMAL, "--svg", str(tmp_path / "a.svg"), "--png", str(tmp_path / "a.png"), *options]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()[:2000]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--svg a.png", "--svg writes .svg, got 'a.png'"),
        ("--html none/a.html", "'none/a.html' cannot be written: No such file or directory"),
        ("--html a.html --head 9.9", "there is no layer 9"),
        ("--target x", "--target is for the page; give --html FILE too"),
        ("other --html a.html --compare bart", "a second text or a second model can stand beside the first, not both"),
        ("--html a.html --off 3", "a head is written layer.head, such as 3.1, got '3'"),
        ("--html a.html --target x", "minilm has no decoder beside its encoder; leave the target out"),
        ("--html a.html --scores none.json", "'none.json' cannot be read: No such file or directory"),
    ],
)
def test_view_names_wrong_arguments(
    args: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", ANIMAL, *args.split()]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_serve_names_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert "'--port'" in capsys.readouterr().err
    assert main(["serve", "--model", "/nowhere/at/all"]) == 2
    assert capsys.readouterr().err.startswith("headwise: ")
