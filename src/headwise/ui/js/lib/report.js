// What the pages of an atlas and of a training log share: the head of the page, its theme, and cells in colours.
import { css, inkOn, pick, ramp } from "./colour.js";
import { h } from "./dom.js";
import { arrowStep, consume } from "./keys.js";
import { svg } from "./svg.js";

const PALETTE = "sea";

/** The theme of a page: the system's, until the button is used. */
export class Theme {
  /** @param {HTMLElement} root @param {() => void} redraw */
  constructor(root, redraw) {
    this.root = root;
    this.redraw = redraw;
    this.dark = window.matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", () => this._apply());
    /** @type {"light" | "dark" | null} */
    this.chosen = null;
    this.button = h("button", {
      type: "button",
      class: "hw-small",
      on: { click: () => this._choose() },
    });
    this._label();
  }

  /** @returns {"light" | "dark"} */
  get name() {
    return this.chosen ?? (this.dark.matches ? "dark" : "light");
  }

  _choose() {
    this.chosen = this.name === "dark" ? "light" : "dark";
    this._apply();
  }

  _apply() {
    this._label();
    this.redraw();
  }

  _label() {
    this.root.dataset.theme = this.name;
    this.button.textContent = this.name === "dark" ? "☀ light" : "☾ dark";
  }

  get colours() {
    return ramp(PALETTE, this.name);
  }

  /** Colour a cell. @param {HTMLElement} cell @param {number} share 0 to 1 */
  paint(cell, share) {
    const rgb = pick(this.colours, share);
    cell.style.setProperty("background-color", css(rgb));
    cell.style.setProperty("color", inkOn(rgb));
  }
}

/** The head of a page. @param {Theme} theme @param {string} about @param {string} title */
export function pageHeader(theme, about, title) {
  const brand = h(
    "div",
    { class: "hw-brand" },
    h("b", { text: "headwise" }),
    h("span", { class: "soft", text: about }),
  );
  return h("header", {}, h("div", { class: "hw-title" }, brand, theme.button), h("h1", { text: title }));
}

/** Make tables of buttons one stop of the Tab key; inside, arrow keys move. @param {HTMLElement} box */
export function roveFocus(box) {
  const buttons = () => /** @type {HTMLElement[]} */ ([...box.querySelectorAll("td > button")]);
  box.addEventListener("focusin", ({ target }) => {
    for (const button of buttons()) button.tabIndex = button === target ? 0 : -1;
  });
  box.addEventListener("keydown", (event) => {
    const step = arrowStep(event);
    const cell = /** @type {HTMLElement} */ (event.target).closest("td");
    if (!step || !cell) return;
    const rows = [...box.querySelectorAll("tbody tr")];
    const row = rows.findIndex((other) => other.contains(cell));
    const column = [...rows[row].children].indexOf(cell) + step[1];
    const next = rows[row + step[0]]?.children[column]?.querySelector("button");
    /** @type {HTMLElement | null | undefined} */ (next)?.focus();
    consume(event);
  });
}

/** Let the first of new buttons be the stop. @param {HTMLElement} box */
export function resetFocus(box) {
  box.querySelectorAll("td > button").forEach((button, n) => {
    /** @type {HTMLElement} */ (button).tabIndex = n ? -1 : 0;
  });
}

/** Cells of headings. @param {string[]} names @param {string} scope "row" or "col" */
export function headings(names, scope) {
  return names.map((name) => h("th", { scope }, name));
}

/** A picture with a name. @param {string} label @param {string} box its view box @param {...Node} parts */
export function figure(label, box, ...parts) {
  return svg("svg", { viewBox: box, role: "img", "aria-label": label }, ...parts);
}
