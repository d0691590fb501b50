"""The page of a circuit in a real browser: its graph, its curve and its tables have the numbers of the circuit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwise.ui import capture, circuit_page
from headwise.ui.circuit_page import page_data, save_circuit_page
from helpers.circuit_examples import CIRCUIT, NASTY, edge, head_effects, head_node


@pytest.fixture(scope="module")
def saved(run: Callable[..., capture.Pass], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("circuit") / "circuit.html"
    save_circuit_page(run(), path, CIRCUIT, [head_effects("direct effect"), head_effects("patching", -1.0)])
    return path


def tip(shown: Any) -> str:
    shown.wait_for_selector(".hw-tip:not([hidden])")
    return str(shown.locator(".hw-tip").inner_text())


def test_the_graph_has_the_nodes_and_edges_of_the_circuit_in_layers(tab: Any, saved: Path) -> None:
    shown = tab().open(saved)
    assert shown.locator("[role=tab][aria-selected=true]").inner_text() == "Circuit"
    assert shown.locator(".hw-graph .edge").count() == 5
    heights = {
        node.get_attribute("data-node"): node.bounding_box()["y"] for node in shown.locator(".hw-graph .node").all()
    }
    order = ["output", "self.5.4", "feed-forward.3", "self.3.1", "self.0.2", "embedding"]
    assert sorted(heights, key=heights.__getitem__) == order  # from the top
    assert "self.3.11" not in heights  # no edge of it
    assert shown.locator(".hw-graph text.row").all_text_contents() == [
        "", "layer 0", "layer 3", "", "layer 5", "",
    ]  # fmt: skip
    widths = {
        (line.get_attribute("data-from"), line.get_attribute("data-to")): float(line.get_attribute("stroke-width"))
        for line in shown.locator(".hw-graph .edge").all()
    }
    assert sorted(widths, key=widths.__getitem__, reverse=True)[0] == ("self.5.4", "output")
    colours = {line.get_attribute("stroke") for line in shown.locator(".hw-graph .edge").all()}
    assert len(colours) == 2  # positive and negative
    assert (
        f"logit of {NASTY}: 3.13 on the clean prompts, −0.25 on the corrupted" in shown.locator(".hw-lead").inner_text()
    )


def test_fewer_edges_are_shown_on_request(tab: Any, run: Callable[..., capture.Pass], tmp_path: Path) -> None:
    heads = [head_node(layer, head) for layer in range(6) for head in range(12)]
    edges = [
        edge(source["id"], target["id"], 1 / (n + 1))
        for n, (source, target) in enumerate((a, b) for a in heads[:12] for b in heads[12:17])
    ]
    save_circuit_page(run(), tmp_path / "c.html", {**CIRCUIT, "nodes": heads, "edges": edges})
    shown = tab().open(tmp_path / "c.html")
    assert shown.locator(".hw-graph .edge").count() == 40
    shown.get_by_label("strongest edges").select_option("20")
    assert shown.locator(".hw-graph .edge").count() == 20 and "edges=20" in shown.url
    shown.get_by_label("strongest edges").select_option("all")
    assert shown.locator(".hw-graph .edge").count() == 60


def test_a_page_has_the_strongest_edges_of_a_large_circuit(
    run: Callable[..., capture.Pass], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_page, "MOST_EDGES", 2)
    shown = page_data(run(), CIRCUIT)["runs"][0]["circuit"]
    assert shown["edges"] == CIRCUIT["edges"][:2] and shown["size"] == 5
    assert {node["id"] for node in shown["nodes"]} == {"output", "self.5.4", "self.3.1"}


def test_a_click_on_a_head_shows_its_attention_on_the_clean_prompt(tab: Any, saved: Path) -> None:
    shown = tab().open(saved)
    node = shown.locator(".node[data-node='self.3.1']")
    node.hover()
    note = tip(shown)
    assert "head 3.1" in note and "direct effect\n−23.00" in note and "patching\n23.00" in note
    assert "3.1 → key of 5.4\n−0.375" in note and "0.2 → query of 3.1\n0.250" in note
    assert shown.locator(".edge.marked").count() == 2
    node.click()
    assert shown.locator("[role=tab][aria-selected=true]").inner_text() == "Head"
    assert shown.locator(".hw-chosen b").inner_text() == "head 3.1"
    shown.keyboard.press("1")
    assert "chosen" in shown.locator(".node[data-node='self.3.1']").get_attribute("class")
    shown.locator(".node[data-node='self.0.2']").focus()
    shown.keyboard.press("Enter")
    assert shown.locator(".hw-chosen b").inner_text() == "head 0.2"


def test_a_shared_key_opens_all_heads_that_read_it(tab: Any, run: Callable[..., capture.Pass], tmp_path: Path) -> None:
    shared = {"id": "self.4.kv1", "type": "kv", "kind": "self", "layer": 4, "heads": [2, 3], "order": 8}
    edges = [edge("self.3.1", "self.4.kv1", 0.5, "key"), edge("self.5.4", "output", 0.25)]
    save_circuit_page(run(), tmp_path / "c.html", {**CIRCUIT, "nodes": [*CIRCUIT["nodes"], shared], "edges": edges})
    shown = tab().open(tmp_path / "c.html")
    node = shown.locator(".node[data-node='self.4.kv1']")
    assert node.text_content() == "KV 4.1"
    node.click()
    assert shown.locator(".hw-chosen [aria-pressed=true]").all_inner_texts() == ["4.2", "4.3"]


def test_heads_are_coloured_by_the_chosen_effect(tab: Any, saved: Path) -> None:
    shown = tab().open(saved)
    fill = shown.locator(".node[data-node='self.5.4'] rect")
    patching = fill.get_attribute("fill")
    shown.get_by_label("heads coloured by").select_option("direct effect")
    assert fill.get_attribute("fill") != patching
    assert shown.locator(".node[data-node='output'] rect").get_attribute("fill") is None
    shown.keyboard.press("Escape")
    shown.get_by_role("tab", name="Map").click()
    assert shown.locator(".hw-map .cell[data-head='5.4']").inner_text() == "4.00"


def test_the_curve_and_the_tables_have_the_numbers(tab: Any, saved: Path) -> None:
    shown = tab().open(saved)
    rows = [row.split("\t") for row in shown.locator(".hw-card table").first.locator("tbody tr").all_inner_texts()]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["1", "0.25", "0.50", "0.00"], ["5", "0.88", "0.75", "−0.10"],
    ]  # fmt: skip
    assert shown.locator(".hw-curve .line").count() == 3 and shown.locator(".hw-curve .band").count() == 2
    path = shown.locator(".hw-curve [data-line=faithfulness]").get_attribute("d")
    heights = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert heights[0] > heights[1]  # more edges explain more
    table = shown.locator("table[data-effect='patching'] tbody tr")
    assert table.first.inner_text().split() == ["0.0", "60.00", "59.00", "to", "61.00"]
    shown.locator("table[data-effect='direct effect'] button").first.click()
    assert shown.locator(".hw-chosen b").inner_text() == "head 0.0"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_narrow_window_in_both_themes(tab: Any, saved: Path, scheme: str) -> None:
    shown = tab(viewport={"width": 420, "height": 800}, color_scheme=scheme).open(saved)
    assert shown.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    assert shown.locator(".hw-graph .node").count() == 6


def test_a_page_without_effects_or_curve_is_drawn(tab: Any, run: Callable[..., capture.Pass], tmp_path: Path) -> None:
    bare = {**CIRCUIT, "curve": [], "notes": [], "edges": []}
    save_circuit_page(run(), tmp_path / "bare.html", bare)
    shown = tab().open(tmp_path / "bare.html")
    assert shown.locator(".hw-graph .node").count() == 0 and shown.locator(".hw-curve").count() == 0


def test_other_pages_have_no_circuit(tab: Any, run: Callable[..., capture.Pass], tmp_path: Path) -> None:
    from headwise.ui import page, payload

    page.save(payload.data(run()), tmp_path / "page.html")
    shown = tab().open(tmp_path / "page.html")
    assert "Circuit" not in shown.locator("[role=tab]").all_inner_texts()


def test_the_strongest_head_of_the_last_effects_is_chosen(run: Callable[..., capture.Pass]) -> None:
    data = page_data(run(), CIRCUIT, [head_effects("direct effect")])
    assert data["runs"][0]["chosen"] == [[0, 0]]
    assert [row["head"] for row in data["runs"][0]["effects"][0]["heads"][:2]] == [0, 1]
