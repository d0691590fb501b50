"""The page in a real browser: each view, hover, click and keys; the numbers on the screen are Python's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

import headwise
from headwise.ui import capture, pack, page, payload
from helpers import small_checkpoints

ANIMAL = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."
NASTY = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "x" * 10_000,
    "👩‍👩‍👧🏽",
    "שלום",
    "\u202eevil\u202c",
    "\u2028",
    "\x00\x07",
    " \t\n",
    "日本語",
    "${alert(3)}",
    "&lt;b&gt;",
    """" onmouseover="alert(6)" style='color: red; background: url(//evil)'><style>* { color: red }</style><!--""",
]


@pytest.fixture(scope="module")
def inspected(minilm: tuple[Any, Any]) -> Any:
    return headwise.inspect(ANIMAL, minilm[0], tokenizer=minilm[1])


@pytest.fixture(scope="module")
def sentence(run: Callable[..., capture.Pass], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "sentence.html"
    page.save(payload.data(run()), path)
    return path


def tip(shown: Any) -> str:
    shown.wait_for_selector(".hw-tip:not([hidden])")
    return str(shown.locator(".hw-tip").inner_text())


def cell(shown: Any, i: int, j: int) -> tuple[float, float]:
    """Where a cell of the matrix is on the screen."""
    point = shown.evaluate(
        """([i, j]) => {
          const canvas = document.querySelector(".hw-heat");
          const heat = canvas.heatmap, box = canvas.getBoundingClientRect();
          const { left, top } = heat.space, { x, y, size } = heat.view;
          return [box.left + left + (j - x + 0.5) * size, box.top + top + (i - y + 0.5) * size];
        }""",
        [i, j],
    )
    return point[0], point[1]


def hover(shown: Any, i: int, j: int) -> str:
    shown.locator(".hw-heat").first.scroll_into_view_if_needed()
    shown.mouse.move(*cell(shown, i, j))
    return tip(shown)


# --- the map ---


def test_map_shows_every_statistic_of_every_head(tab: Any, sentence: Path, inspected: Any) -> None:
    shown = tab().open(sentence)
    assert shown.locator("h1").inner_text() == ANIMAL
    shown.get_by_role("radio", name="statistic").click()
    for name in inspected.stats:
        shown.get_by_label("statistic", exact=True).select_option(name)
        numbers = [float(text) for text in shown.locator(".hw-map .cell").all_inner_texts()]
        assert numbers == pytest.approx(inspected.table(name).flatten(), abs=0.0051), name
    shown.locator(".cell[data-head='0.2']").hover()
    note = tip(shown)
    assert "head 0.2" in note and f"previous\n{inspected.table('previous')[0, 2]:.4f}" in note
    assert "previous token: ≥ 0.50" in note


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_head_with_a_value_near_zero_has_a_border(scheme: str, tab: Any, sentence: Path, inspected: Any) -> None:
    assert inspected.table("entropy")[0, 2] < 0.005
    shown = tab(color_scheme=scheme).open(sentence, "paint=value&heads=5.5")
    border, ground = shown.locator(".hw-map .cell[data-head='0.2']").evaluate(
        """(cell) => [
            getComputedStyle(cell).borderTopColor,
            getComputedStyle(cell.closest(".headwise")).backgroundColor,
          ].map((colour) => colour.match(/\\d+/g).slice(0, 3).map(Number))"""
    )
    assert max(abs(a - b) for a, b in zip(border, ground, strict=True)) > 40  # of 255


def test_map_can_be_sorted_and_drawn_by_kind_or_thumbnails(tab: Any, sentence: Path, inspected: Any) -> None:
    shown = tab().open(sentence)
    assert shown.get_by_role("radio", name="where it looks").is_checked()
    assert shown.locator(".hw-map .cell canvas").count() == 72
    shown.get_by_role("radio", name="statistic").click()
    shown.get_by_label("order", exact=True).select_option("ranked")
    ranked = shown.locator(".hw-map .cell").evaluate_all("cells => cells.map((c) => c.dataset.head)")
    best = (-inspected.table("entropy")).flatten().argsort(kind="stable")
    assert ranked == [f"{n // 12}.{n % 12}" for n in best]
    shown.get_by_label("order", exact=True).select_option("lowest")
    assert shown.locator(".hw-map .cell").first.get_attribute("data-head") == ranked[-1]
    shown.get_by_label("order", exact=True).select_option("value")
    first = shown.locator(".hw-map .row:not(.head)").first.locator(".cell")
    order = [int(name.split(".")[1]) for name in first.evaluate_all("cells => cells.map((c) => c.dataset.head)")]
    assert order == list((-inspected.table("entropy")[0]).argsort())
    shown.get_by_role("radio", name="kind").click()
    coloured = shown.locator(".hw-map .cell:not(.none)").evaluate_all("cells => cells.map((c) => c.dataset.head)")
    assert set(coloured) == {head.name for kind in inspected.kinds for head in inspected.standouts(kind)}


def test_clicking_a_head_opens_it_and_arrow_keys_move_on(tab: Any, sentence: Path) -> None:
    shown = tab().open(sentence)
    shown.locator(".hw-map .cell[data-head='4.5']").focus()
    shown.keyboard.press("ArrowDown")
    shown.keyboard.press("ArrowRight")
    assert shown.evaluate("document.activeElement.dataset.head") == "5.6"
    shown.keyboard.press("Enter")
    assert shown.locator(".hw-chosen b").inner_text() == "head 5.6"
    shown.locator("body").press("ArrowUp")
    shown.locator("body").press("ArrowLeft")
    assert shown.locator(".hw-chosen b").inner_text() == "head 4.5"
    assert "heads=4.5" in shown.url
    shown.keyboard.press("Control+z")
    assert shown.locator(".hw-chosen b").inner_text() == "head 4.6"
    shown.get_by_label("layer", exact=True).fill("0")
    assert shown.locator(".hw-chosen b").inner_text() == "head 0.6"


def test_map_begins_with_a_word_to_follow(tab: Any, sentence: Path, inspected: Any) -> None:
    shown = tab().open(sentence)
    lead = shown.locator(".hw-lead.first")
    weight = inspected.matrix("3.1")[inspected.find("it"), inspected.find("animal")]
    assert lead.inner_text().startswith(f"it looks at animal with weight {weight:.2f} in head 3.1.")
    lead.get_by_role("button", name="see how it is computed").click()
    assert shown.get_by_role("tab", selected=True).inner_text() == "Steps"
    assert shown.locator(".hw-lead").inner_text().startswith("How it comes to look at animal with weight")


def test_map_is_coloured_by_loaded_scores_and_roles(tab: Any, tmp_path: Path, run: Callable[..., capture.Pass]) -> None:
    table = [[100.0 * layer + head for head in range(12)] for layer in range(6)]
    role = {"kind": "self", "layer": 3, "head": 1, "role": "coreference", "score": 0.61, "baseline": 0.05}
    atlas = {
        "headwise": "atlas", "model": "minilm", "about": {"texts": 1234}, "roles": [{**role, "low": 0.5, "high": 0.7}],
        "scores": {"entropy": {"self": {"score": table, "baseline": [7.0] * 6}}},
    }  # fmt: skip
    page.save(payload.data(run(), scores=atlas), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html")
    assert shown.get_by_role("radio", name="role").is_checked()  # loaded scores are shown first
    shown.get_by_role("radio", name="statistic or score").click()
    assert "stat=entropy+%28atlas%29" in shown.url and "paint=value" in shown.url
    numbers = [float(text) for text in shown.locator(".hw-map .cell").all_inner_texts()]
    assert numbers == [x for row in table for x in row]
    assert "atlas of minilm over 1,234 texts" in shown.locator(".hw-side").inner_text()
    assert "equally would have 7.00" in shown.locator(".hw-side").inner_text()
    shown.get_by_role("radio", name="role").click()
    assert shown.locator(".hw-map .cell:not(.none)").all_inner_texts() == ["coreference\n0.61"]
    shown.locator(".cell[data-head='3.1']").hover()
    assert "role: coreference, 0.61 (0.50 to 0.70), uniform attention 0.05" in tip(shown)


# --- one head ---


def test_weights_on_hover_equal_those_of_inspect(
    tab: Any, sentence: Path, inspected: Any, minilm: tuple[Any, Any]
) -> None:
    browser_tab = tab()
    shown = browser_tab.open(sentence, "view=head&heads=3.1")
    browser_tab.frame()
    pronoun, animal = inspected.find("it"), inspected.find("animal")
    assert hover(shown, pronoun, animal) == f"it → animal\nhead 3.1\n{inspected.matrix('3.1')[pronoun, animal]:.4f}"
    assert hover(shown, 3, 0).endswith(f"{inspected.matrix('3.1')[3, 0]:.4f}")  # a word of three pieces
    shown.get_by_role("radio", name="pieces").click()
    browser_tab.frame()
    pieces = headwise.inspect(ANIMAL, minilm[0], tokenizer=minilm[1], pieces=True).matrix("3.1")
    assert hover(shown, 10, 2).endswith(f"{pieces[10, 2]:.4f}")


def test_tokens_can_be_hovered_and_clicked(tab: Any, sentence: Path, inspected: Any) -> None:
    shown = tab().open(sentence, "view=head&heads=3.1")
    shown.locator(".hw-tokens.from .hw-token", has_text="cross").hover()
    note = tip(shown)
    assert note.startswith("cross looks at\n→ street\n" + f"{inspected.matrix('3.1')[4, 6]:.4f}")
    shown.locator(".hw-tokens.to .hw-token", has_text="animal").hover()
    assert tip(shown).startswith("animal is looked at by\n← it\n" + f"{inspected.matrix('3.1')[8, 2]:.4f}")
    shown.locator(".hw-tokens.from .hw-token", has_text="cross").click()
    assert shown.locator(".hw-sentence .chosen").inner_text() == "cross"
    assert "token=6" in shown.url
    shown.locator("body").press("Escape")
    assert shown.locator(".hw-sentence .chosen").count() == 0


def test_several_heads_are_shown_in_their_colours(tab: Any, sentence: Path, inspected: Any) -> None:
    browser_tab = tab()
    shown = browser_tab.open(sentence, "view=head&heads=3.1")
    shown.locator(".hw-nav .cell[data-head='5.11']").click(modifiers=["Shift"])
    assert shown.locator(".hw-chosen b").all_inner_texts() == ["head 3.1", "head 5.11"]
    browser_tab.frame()
    note = hover(shown, 8, 2)
    assert f"head 3.1\n{inspected.matrix('3.1')[8, 2]:.4f}\nhead 5.11\n{inspected.matrix('5.11')[8, 2]:.4f}" in note
    shown.get_by_label("remove head 3.1").click()
    assert shown.locator(".hw-chosen b").all_inner_texts() == ["head 5.11"]


def test_all_heads_of_a_layer_are_laid_over_each_other(tab: Any, sentence: Path, inspected: Any) -> None:
    browser_tab = tab()
    shown = browser_tab.open(sentence, "view=head&heads=3.1")
    shown.get_by_role("button", name="all heads of layer 3").click()
    chips = shown.get_by_role("group", name="heads of layer 3").get_by_role("button")
    assert chips.all_inner_texts() == [f"3.{head}" for head in range(12)]
    colours = chips.evaluate_all("chips => chips.map((chip) => chip.style.getPropertyValue('--hw-dot'))")
    assert len(set(colours)) == 12
    rings = shown.locator(".hw-nav .cell.chosen").evaluate_all(
        "cells => cells.map((cell) => cell.style.getPropertyValue('--hw-ring'))"
    )
    assert rings == colours
    browser_tab.frame()
    weights = {f"3.{head}": inspected.matrix(f"3.{head}")[8, 2] for head in range(12)}
    strongest = max(weights, key=weights.__getitem__)
    assert hover(shown, 8, 2).startswith(f"it → animal\nhead {strongest}\n{weights[strongest]:.4f}")
    bars = shown.locator(".hw-tokens.to .hw-token", has_text="animal").locator(".bars")
    shown.locator(".hw-tokens.from .hw-token", has_text="it").first.hover()
    browser_tab.frame()
    stripes = re.findall(r"rgba\(.*?, ([0-9.]+)\)", bars.evaluate("(bars) => bars.style.backgroundImage"))[::2]
    assert [float(opacity) for opacity in stripes] == pytest.approx(list(weights.values()), abs=0.015)
    chips.nth(4).click()
    assert chips.nth(4).get_attribute("aria-pressed") == "false"
    assert chips.nth(5).evaluate("(chip) => chip.style.getPropertyValue('--hw-dot')") == colours[5]
    chips.nth(4).click()
    shown.locator("body").press("a")
    assert shown.locator(".hw-chosen b").inner_text() == "head 3.0"


def test_tooltips_leave_what_they_explain_in_sight(tab: Any, sentence: Path) -> None:
    for width in (1400, 400):
        browser_tab = tab(viewport={"width": width, "height": 900})
        shown = browser_tab.open(sentence)
        for head in ("0.0", "5.11", "3.5"):
            explained = shown.locator(f".hw-map .cell[data-head='{head}']")
            explained.hover()
            tip(shown)
            assert not overlap(explained.bounding_box(), shown.locator(".hw-tip").bounding_box()), (width, head)
        shown = browser_tab.open(sentence, "view=head&heads=3.1")
        for side, name in (("from", "cross"), ("to", "animal")):
            token = shown.locator(f".hw-tokens.{side} .hw-token", has_text=name)
            token.hover()
            tip(shown)
            assert not overlap(token.bounding_box(), shown.locator(".hw-tip").bounding_box()), (width, side)
        shown.locator(".hw-heat").scroll_into_view_if_needed()
        browser_tab.frame()
        hover(shown, 8, 2)
        cell_box = shown.locator(".hw-heat").evaluate(
            "(canvas) => (({ left, top, right, bottom }) => ({ x: left, y: top, width: right - left, "
            "height: bottom - top }))(canvas.heatmap.cellBox([8, 2]))"
        )
        assert not overlap(cell_box, shown.locator(".hw-tip").bounding_box()), width


def overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    across = a["x"] < b["x"] + b["width"] and b["x"] < a["x"] + a["width"]
    return across and a["y"] < b["y"] + b["height"] and b["y"] < a["y"] + a["height"]


def test_matrix_read_by_keys_is_announced(tab: Any, sentence: Path, inspected: Any) -> None:
    browser_tab = tab()
    shown = browser_tab.open(sentence, "view=head&heads=3.1")
    shown.locator(".hw-heat").focus()
    for key in ["ArrowDown"] + ["ArrowRight"] * 2:
        shown.keyboard.press(key)
    assert shown.locator(".hw-voice").inner_text().startswith("[CLS] → animal, head 3.1 ")
    shown.keyboard.press("ArrowDown")
    assert shown.locator(".hw-voice").inner_text() == f"The → animal, head 3.1 {inspected.matrix('3.1')[1, 2]:.4f}"
    before = shown.evaluate("document.querySelector('.hw-heat').heatmap.view.size")
    shown.keyboard.press("+")
    assert shown.evaluate("document.querySelector('.hw-heat').heatmap.view.size") > before
    shown.keyboard.press("0")
    browser_tab.frame()
    assert shown.evaluate("document.querySelector('.hw-heat').heatmap.view.size") == pytest.approx(before)


# --- steps ---


def test_steps_show_the_numbers_of_the_model(tab: Any, sentence: Path, run: Callable[..., capture.Pass]) -> None:
    record = run().layers[3]
    q, k = record.reading.q[0, 1, 10], record.reading.k[0, 1, 2]
    weights = record.rows([10], [1])[0, 0]
    shown = tab().open(sentence, "view=steps&heads=3.1&token=10&key=2")
    assert (
        shown.locator(".hw-lead")
        .inner_text()
        .startswith(f"How it comes to look at animal with weight {weights[2]:.3f}")
    )
    assert f"Σ = {float(q @ k):.2f}" in shown.locator("#hw-step-1").inner_text()
    assert f"= {float(q @ k) / 32**0.5:.3f}" in shown.locator("#hw-step-2").inner_text()
    assert shown.locator(".hw-weight").inner_text() == f"{weights[2]:.4f}"
    listed = [float(text) for text in shown.locator(".hw-table td.weight").all_inner_texts()]
    assert listed == pytest.approx(weights, abs=6e-5)
    assert f"‖o‖ = {(record.outputs[1, 10] ** 2).sum() ** 0.5:.3f}" in shown.locator("#hw-step-4").inner_text()
    matrix = record.w_o[0].numpy().reshape(12, 32, -1)
    norms = [((record.outputs[h, 10] @ matrix[h]) ** 2).sum() ** 0.5 for h in range(12)]
    bars = [float(bar) for bar in shown.locator(".hw-column").evaluate_all("all => all.map((b) => b.dataset.norm)")]
    assert bars == pytest.approx(norms, abs=6e-4)


def test_steps_show_entries_and_a_summary_line(tab: Any, sentence: Path, run: Callable[..., capture.Pass]) -> None:
    record = run().layers[3]
    q, k = record.reading.q[0, 1, 10], record.reading.k[0, 1, 2]
    shown = tab().open(sentence, "view=steps&heads=3.1&token=10&key=2")
    box = shown.locator(".hw-entries").nth(2).bounding_box()
    shown.mouse.move(box["x"] + box["width"] * 7.5 / 32, box["y"] + 9)
    note = tip(shown).replace("−", "-")
    assert f"entry 7\nq\n{q[7]:.4f}\nk\n{k[7]:.4f}\nq × k\n{q[7] * k[7]:.4f}" in note
    assert f"sum so far\n{float((q * k)[:8].sum()):.4f}" in note
    stations = shown.locator(".hw-thread button")
    assert stations.nth(2).inner_text() == f"3 softmax\n{record.rows([10], [1])[0, 0, 2]:.3f}"
    stations.nth(5).click()
    assert shown.locator("#hw-step-6").bounding_box()["y"] < 900
    shown.locator(".hw-steps .hw-sentence .token", has_text="tired").click()
    assert "token=13" in shown.url


def test_steps_follow_the_chosen_key_and_head(tab: Any, sentence: Path) -> None:
    shown = tab().open(sentence, "view=steps&heads=3.1&token=10&key=2")
    shown.locator(".hw-table button", has_text="street").click()
    assert "look at street" in shown.locator(".hw-lead").inner_text()
    shown.locator(".hw-column").nth(7).click()
    assert shown.locator(".hw-chosen b").inner_text() == "head 3.7"
    assert shown.locator(".hw-strip").count() > 5


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_causal_models_with_grouped_heads_are_shown(kind: str, tab: Any, tmp_path: Path) -> None:
    model, tokenizer = small_checkpoints.sharp(small_checkpoints.MODELS[kind]()), small_checkpoints.TOKENIZERS[kind]()
    pass_ = capture.run("The animal was too tired.", model, tokenizer=tokenizer)
    page.save(payload.data(pass_), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html", "heads=1.2")
    groups = shown.locator(".hw-map .cell.group").count()
    assert groups == (2 if kind == "llama" else 0)
    shown.locator("body").press("3")
    shown.get_by_label("looks", exact=True).select_option("2")
    keys = len(pass_.texts[0].pieces)
    assert f"hides {keys - 3} keys of {keys}" in shown.locator("#hw-step-2").inner_text()
    listed = [float(text.replace("−", "-")) for text in shown.locator(".hw-table td.weight").all_inner_texts()]
    assert listed[:keys] == pytest.approx(pass_.layers[1].rows([2], [2])[0, 0][: len(listed)], abs=6e-5)


def test_encoder_decoder_and_cross_attention_are_shown_separately(
    tab: Any, tmp_path: Path, bart: tuple[Any, Any]
) -> None:
    pass_ = capture.run("The animal was tired.", bart[0], tokenizer=bart[1], target="It was too wide and tired.")
    assert pass_.texts[1].ids[0] == bart[0].config.decoder_start_token_id  # the input of the decoder begins with it
    page.save(payload.data(pass_), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html")
    assert shown.locator(".hw-map .hw-kind h3").all_inner_texts() == [
        "encoder attention",
        "decoder attention",
        "cross attention",
    ]
    shown.locator(".hw-map .cell[data-head='cross 0.4']").click()
    assert shown.locator(".hw-tokens.from .hw-token").count() == len(pass_.texts[1].words.names)
    assert shown.locator(".hw-tokens.to .hw-token").count() == len(pass_.texts[0].words.names)
    assert shown.locator(".hw-two button.token").count() == len(pass_.texts[1].words.names)
    assert shown.locator(".hw-two span.token").count() == len(pass_.texts[0].words.names)
    shown.locator("body").press("3")
    assert shown.locator(".hw-table tbody tr").count() == len(pass_.texts[0].pieces)


def test_navigator_of_a_deep_model_scrolls_to_the_chosen_head(tab: Any, tmp_path: Path) -> None:
    config = small_checkpoints.bert(hidden_size=10, num_attention_heads=5, num_hidden_layers=53, intermediate_size=11)
    pass_ = capture.run(
        "animal", small_checkpoints.sharp(transformers.BertModel(config)), tokenizer=small_checkpoints.word_piece()
    )
    page.save(payload.data(pass_), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html", "view=head&heads=47.2")
    box = shown.locator(".hw-nav .hw-grids").bounding_box()
    for key in ("ArrowDown", "ArrowUp", "ArrowUp"):
        shown.locator("body").press(key)
        cell_box = shown.locator(".hw-nav .cell.chosen").bounding_box()
        assert box["y"] <= cell_box["y"] <= box["y"] + box["height"]
    assert shown.locator(".hw-chosen b").inner_text() == "head 46.2"


# --- two passes ---


def test_compare_opens_on_the_head_that_changed_most_and_says_so(
    tab: Any, tmp_path: Path, run: Callable[..., capture.Pass], minilm: tuple[Any, Any]
) -> None:
    page.save(payload.data([run(), run(WIDE)]), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html")
    assert shown.get_by_role("tab", selected=True).inner_text() == "Compare"
    assert shown.locator("h1 span").all_inner_texts() == [ANIMAL, WIDE]
    assert shown.locator("h1 mark").all_inner_texts() == ["tired.", "wide."]
    comparison = headwise.inspect(ANIMAL, minilm[0], tokenizer=minilm[1], against=WIDE)
    pronoun, animal = comparison.first.find("it"), comparison.first.find("animal")
    before, after = (each.matrix("3.1")[pronoun, animal] for each in (comparison.first, comparison.second))
    lead = shown.locator(".hw-findings")
    assert lead.inner_text() == f"it → animal {before:.2f} → {after:.2f} in head 3.1, more than in any other head."
    assert shown.locator(".hw-compare .cell.chosen").first.get_attribute("data-head") == "3.1"
    shown.get_by_role("grid", name="difference in entropy").locator(".cell[data-head='5.8']").click()
    assert "in head 5.8." in lead.inner_text() and f"→ {after:.2f} in head 3.1. see it" in lead.inner_text()
    lead.get_by_role("button", name="see it").click()
    assert "heads=3.1" in shown.url


def test_compare_shows_two_texts_and_their_difference(
    tab: Any, tmp_path: Path, run: Callable[..., capture.Pass], minilm: tuple[Any, Any]
) -> None:
    page.save(payload.data([run(), run(WIDE)], heads=["3.1"]), tmp_path / "a.html")
    browser_tab = tab()
    shown = browser_tab.open(tmp_path / "a.html")
    comparison = headwise.inspect(ANIMAL, minilm[0], tokenizer=minilm[1], against=WIDE)
    grid = shown.get_by_role("grid", name="difference in entropy").locator(".cell")
    numbers = [float(text.replace("−", "-")) for text in grid.all_inner_texts()]
    assert numbers == pytest.approx(comparison.difference("entropy").flatten(), abs=0.0051)
    moved = abs(comparison.first.matrix("3.1") - comparison.second.matrix("3.1")).sum() / 2 / 14
    assert f"{100 * moved:.1f} % of its weight moved" in shown.locator(".hw-compare-head").inner_text()
    browser_tab.frame()
    apart = shown.locator(".hw-heat").nth(2)
    apart.focus()
    shown.keyboard.press("ArrowDown")
    assert (
        "first" in shown.locator(".hw-voice").inner_text() and "difference" in shown.locator(".hw-voice").inner_text()
    )


def test_compare_of_long_texts_opens_on_the_head_whose_statistic_changed_most(
    tab: Any, tmp_path: Path, run: Callable[..., capture.Pass], monkeypatch: pytest.MonkeyPatch, minilm: tuple[Any, Any]
) -> None:
    monkeypatch.setattr(pack, "EXACT", 0)
    monkeypatch.setattr(pack, "BYTES", 0)
    page.save(payload.data([run(), run(WIDE)]), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html")
    comparison = headwise.inspect(ANIMAL, minilm[0], tokenizer=minilm[1], against=WIDE)
    layer, head = divmod(int(abs(comparison.difference("entropy")).argmax()), 12)
    before, after = (each.table("entropy")[layer, head] for each in (comparison.first, comparison.second))
    lead = f"entropy {before:.2f} → {after:.2f} in head {layer}.{head}, more than in any other head."
    assert shown.locator(".hw-findings").inner_text() == lead
    assert shown.locator(".hw-compare .cell.chosen").first.get_attribute("data-head") == f"{layer}.{head}"


def test_compare_shows_heads_off(tab: Any, tmp_path: Path, run: Callable[..., capture.Pass]) -> None:
    page.save(payload.data([run(off={3: [1]}), run()]), tmp_path / "off.html")
    shown = tab().open(tmp_path / "off.html")
    assert "minilm without 3.1" in shown.locator(".hw-compare").inner_text()


def test_models_of_different_shape_are_two_columns_with_heads_of_their_own(
    tab: Any, tmp_path: Path, run: Callable[..., capture.Pass]
) -> None:
    model = small_checkpoints.sharp(small_checkpoints.MODELS["gpt2"]())
    tiny = capture.run(ANIMAL, model, tokenizer=small_checkpoints.byte_level())
    page.save(payload.data([run(), tiny]), tmp_path / "two.html")
    browser_tab = tab()
    shown = browser_tab.open(tmp_path / "two.html")
    assert "Their layers and heads differ" in shown.locator(".hw-findings").inner_text()
    assert "minilm: it looks at animal with weight 0.68 in head 3.1." in shown.locator(".hw-findings").inner_text()
    grids = shown.get_by_role("grid")
    assert grids.count() == 2
    boxes = [section.bounding_box() for section in shown.locator(".hw-compare section.hw-panel:visible").all()]
    assert len(boxes) == 4 and sum(box["width"] for box in boxes[:2]) > 0.9 * 1400 - 120
    grids.nth(1).locator(".cell[data-head='1.2']").click()
    assert "head2=1.2" in shown.url and "heads=3.1" in shown.url
    browser_tab.frame()
    box = shown.locator(".hw-heat").nth(1)
    box.focus()
    shown.keyboard.press("ArrowDown")
    weight = tiny.layers[1].rows([0], [2])[0, 0][0]
    assert shown.locator(".hw-voice").inner_text().endswith(f"second {weight:.4f}")


# --- long texts ---


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch, run: Callable[..., capture.Pass]) -> capture.Pass:
    """A sentence stored as if it were long."""
    monkeypatch.setattr(pack, "EXACT", 0)
    monkeypatch.setattr(pack, "BYTES", 0)
    monkeypatch.setattr(pack, "SIDES", ((300, 4),))
    return run()


def test_long_texts_state_how_exact_weights_are(
    tab: Any, tmp_path: Path, long: capture.Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(payload.STEPS, "links", 10)
    page.save(payload.data(long, heads=["0.2"]), tmp_path / "a.html")
    browser_tab = tab()
    shown = browser_tab.open(tmp_path / "a.html", "view=head&heads=3.1")
    browser_tab.frame()
    row = long.layers[3].rows([10], [1])[0, 0]
    assert f"{row[2]:.4f}" in hover(shown, 10, 2)
    weakest = int(row.argmin())
    note = re.search(r"at most (\d\.\d+(?:e−\d)?)", hover(shown, 10, weakest))
    assert note and float(note[1].replace("−", "-")) >= row[weakest]
    shown.locator(".hw-nav .cell[data-head='0.2']").click()  # the page holds its q and k
    browser_tab.frame()
    exact = long.layers[0].rows([10], [2])[0, 0]
    assert f"{exact[9]:.4f}" in hover(shown, 10, 9) and "at most" not in hover(shown, 10, 3)
    shown.get_by_role("radio", name="its mean").click()
    shown.locator("body").press("3")
    assert shown.locator(".hw-weight").count() == 1
    shown.locator(".hw-nav .cell[data-head='5.5']").click()
    assert "head 5.5 is not among them" in shown.locator(".hw-steps").inner_text()


def test_pictures_of_a_long_text_are_drawn_one_after_the_other(tab: Any, tmp_path: Path, long: capture.Pass) -> None:
    page.save(payload.data(long), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html")
    assert shown.locator(".hw-map .cell canvas").count() == 72
    drawn = "(side) => [...document.querySelectorAll('.hw-map .cell canvas')].every(({ width }) => width === side)"
    shown.wait_for_function(drawn, arg=4)  # squares per side in the fixture; an empty canvas has 300 pixels


def test_link_window_of_a_long_text_can_be_moved(
    tab: Any, tmp_path: Path, run: Callable[..., capture.Pass], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "EXACT", 0)
    monkeypatch.setattr(pack, "BYTES", 0)
    page.save(payload.data(run("The street was wide and the animal tired. " * 23)), tmp_path / "a.html")
    browser_tab = tab()
    shown = browser_tab.open(tmp_path / "a.html", "view=head&heads=3.1&token=101")
    browser_tab.frame()
    chosen_token = shown.locator(".hw-tokens.from .chosen")
    outer, inner = shown.locator(".hw-links").bounding_box(), chosen_token.bounding_box()
    assert outer["y"] <= inner["y"] <= outer["y"] + outer["height"]
    count = len(run("The street was wide and the animal tired. " * 23).texts[0].pieces)
    assert f"tokens 41 to 160 of {count}" in shown.locator(".hw-pager").inner_text()
    shown.get_by_role("button", name="later").click()
    assert f"to {count - 1} of {count}" in shown.locator(".hw-pager").inner_text()
    assert shown.get_by_role("button", name="later").is_disabled()


# --- manners ---


def test_right_to_left_text_is_set_right_to_left(tab: Any, tmp_path: Path, run: Callable[..., capture.Pass]) -> None:
    page.save(payload.data(run("הכלב לא חצה את הרחוב")), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html", "view=head&heads=0.2")
    first, last = shown.locator(".hw-sentence .token").first, shown.locator(".hw-sentence .token").last
    assert first.inner_text() == "[CLS]" and first.bounding_box()["x"] > last.bounding_box()["x"]


def test_tokens_with_markup_are_shown_as_text(tab: Any, tmp_path: Path, run: Callable[..., capture.Pass]) -> None:
    value = payload.data(run())
    text = value["runs"][0]["texts"][0]
    text["pieces"][1 : 1 + len(NASTY)] = NASTY
    text["words"][1 : 1 + len(NASTY)] = NASTY
    assert (len(text["pieces"]), len(text["words"])) == (16, 14)  # none was added
    value["runs"][0].update(text=" ".join(NASTY), name="<script>alert(4)</script>", notes=["<b>note</b>"])
    page.save(value, tmp_path / "a.html", title="</title><img src=x onerror=alert(5)>")
    browser_tab = tab()
    for view in ("map", "head", "steps"):
        shown = browser_tab.open(tmp_path / "a.html", f"view={view}&heads=3.1&token=2")
        shown.reload()
        assert shown.locator(".headwise img, .headwise script, .headwise b >> text=note").count() == 0
        assert shown.locator("[onmouseover], [style*=url], body style, title >> nth=1").count() == 0
    shown = browser_tab.open(tmp_path / "a.html", "view=head&heads=3.1")
    names = shown.locator(".hw-tokens.from .hw-token").all_inner_texts()
    assert names[1] == NASTY[0] and names[2] == NASTY[1] and len(names[3]) == 61
    assert names[6] == "⟨202E⟩evil⟨202C⟩" and names[8] == "␀␇" and names[4] == NASTY[3]
    width = shown.evaluate("document.documentElement.scrollWidth")
    assert width <= 1400


@pytest.mark.parametrize("view", ["map", "head", "steps"])
def test_narrow_window_does_not_scroll_sideways(view: str, tab: Any, sentence: Path) -> None:
    browser_tab = tab(viewport={"width": 360, "height": 700})
    shown = browser_tab.open(sentence, f"view={view}")
    browser_tab.frame()
    assert shown.evaluate("document.documentElement.scrollWidth") <= 360


def test_themes_follow_the_system_and_the_button(tab: Any, sentence: Path) -> None:
    shown = tab(color_scheme="dark").open(sentence)
    ground = "getComputedStyle(document.querySelector('.headwise')).backgroundColor"
    dark = shown.evaluate(ground)
    shown.get_by_role("button", name="light").click()
    assert shown.evaluate(ground) != dark
    assert "theme=light" in shown.url
    shown.get_by_role("button", name="undo").click()
    assert shown.evaluate(ground) == dark


def test_every_control_has_a_name(tab: Any, sentence: Path) -> None:
    browser_tab = tab()
    for view in ("map", "head", "steps"):
        shown = browser_tab.open(sentence, f"view={view}")
        shown.reload()
        nameless = shown.locator("button, select, input, canvas[tabindex], textarea").evaluate_all(
            """all => all
              .filter((el) => !(el.textContent.trim() || el.getAttribute("aria-label") || el.labels?.length))
              .map((el) => el.outerHTML.slice(0, 200))"""
        )
        assert nameless == []


def test_focus_stays_on_the_control_that_had_it(tab: Any, sentence: Path) -> None:
    shown = tab().open(sentence, "paint=value")
    shown.get_by_label("order", exact=True).focus()
    shown.keyboard.press("ArrowDown")
    assert shown.evaluate("document.activeElement.dataset.key") == "select:order" and "order=value" in shown.url


def test_invalid_data_is_reported(tab: Any, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(page.page({"headwise": 7, "runs": []})[0])
    browser_tab = tab()
    browser_tab.page.goto((tmp_path / "a.html").as_uri())
    assert (
        browser_tab.page.get_by_role("alert").inner_text()
        == "This cannot be shown: this view shows data of form 1, got 7"
    )


def test_invalid_state_in_the_address_is_ignored(tab: Any, sentence: Path) -> None:
    shown = tab().open(sentence, "view=head&heads=99.99&token=1000000&stat=constructor&palette=%3Cscript%3E&unit=x")
    assert shown.locator(".hw-chosen b").inner_text() == "head 3.1"
