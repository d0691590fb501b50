// Two columns of tokens and a curve for each weight between them: as thick and as dark as the weight.
import { css } from "./colour.js";
import { h, keepFocus, reveal, scaleCanvas, tokenElement } from "./dom.js";
import { consume } from "./keys.js";
import { comparableHeads, headColours } from "./matrix.js";
import { weightText } from "./text.js";

/** @import { App } from "../app.js" */
/** @import { Rgb } from "./colour.js" */
/** @import { Head, Run, Side, Unit } from "./run.js" */

const ROW = 25; // pixels per token
const FAINT = 0.015; // smaller weights get no line
const MOST_LINES = 4000;
const WINDOW = 120; // tokens of a long input that are shown at once
const LISTED = 6; // links in a tooltip
const NAME = 24; // characters of a token in a tooltip

/**
 * @typedef {{ head: number, i: number, j: number, weight: number }} Line head: its place among the heads
 * @typedef {{ side: Side, token: number }} Focus
 * @typedef {{ unit: Unit, pinned: number | null, bare: boolean }} Options bare: without delimiters
 */

/**
 * @typedef {object} Shown what the diagram shows
 * @property {Run} run
 * @property {Head[]} heads
 * @property {Options} options
 * @property {Record<Side, string[]>} names
 * @property {Record<Side, Set<number>>} delimiters
 * @property {Record<Side, number>} first the first token of the window
 * @property {Line[]} lines the strongest last
 */

export class LinkDiagram {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    /** @type {Record<Side, HTMLElement>} */
    this.columns = {
      from: h("div", { class: "hw-tokens from", role: "listbox", "aria-label": "tokens that look" }),
      to: h("div", { class: "hw-tokens to", role: "listbox", "aria-label": "tokens looked at" }),
    };
    this.pager = h("div", { class: "hw-pager" });
    const curves = h("div", { class: "hw-curves" }, this.canvas);
    /** @type {HTMLElement} */
    this.list = h("div", { class: "hw-links" }, this.columns.from, curves, this.columns.to);
    /** @type {HTMLElement} */
    this.el = h("div", {}, this.pager, this.list);
    this.shift = 0; // tokens by which the window of a long text was moved
    /** @type {Focus | null} */
    this.hover = null;
    /** @type {Shown | null} */
    this.shown = null;
    this.waiting = false;
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.el);
  }

  /** @param {Run} run @param {Head[]} heads @param {Options} options */
  show(run, heads, options) {
    const [row] = heads[0];
    const { unit, pinned } = options;
    const moved = pinned !== this.shown?.options.pinned;
    if (moved || run !== this.shown?.run) this.shift = 0;
    const names = { from: run.names(row, "from", unit), to: run.names(row, "to", unit) };
    const long = Math.max(names.from.length, names.to.length) > WINDOW;
    const centre = (pinned ?? 0) - WINDOW / 2 + this.shift;
    const start = long ? Math.max(0, Math.min(centre, names.from.length - WINDOW)) : 0;
    const first = { from: start, to: long ? Math.max(0, Math.min(start, names.to.length - WINDOW)) : 0 };
    const delimiters = { from: run.delimiters(row, "from", unit), to: run.delimiters(row, "to", unit) };
    const layer = heads.every(([other]) => other === row); // then in the order of their numbers
    const sorted = layer ? [...heads].sort(([, a], [, b]) => a - b) : heads;
    const shown = { run, heads: comparableHeads(run, sorted), options, names, delimiters, first };
    this.shown = { ...shown, lines: strongestLines(shown) };
    this._updatePager(long, start, () => this.show(run, heads, options));
    this._updateTokens("from", this.shown);
    this._updateTokens("to", this.shown);
    if (moved) reveal(this.list, this.columns.from.querySelector(".chosen"));
    this.draw();
  }

  /** The window of a long text, and buttons that move it.
   * @param {boolean} long @param {number} start @param {() => void} redraw */
  _updatePager(long, start, redraw) {
    const count = this.shown?.names.from.length ?? 0;
    /** @param {string} text @param {number} by @param {boolean} disabled */
    const button = (text, by, disabled) => {
      const click = () => {
        this.shift += by;
        keepFocus(this.el, redraw);
      };
      return h("button", {
        type: "button",
        class: "hw-small",
        text,
        disabled,
        data: { key: `pager:${by}` },
        on: { click },
      });
    };
    this.pager.hidden = !long;
    this.pager.replaceChildren(
      button("◂ earlier", -WINDOW, start === 0),
      h("span", { class: "soft", text: `tokens ${start} to ${Math.min(count, start + WINDOW) - 1} of ${count}` }),
      button("later ▸", WINDOW, start + WINDOW >= count),
    );
  }

  /** @param {Side} side @param {Shown} shown */
  _updateTokens(side, { run, heads, options: { unit, pinned }, names, first, delimiters }) {
    /** @param {string} name @param {number} n place in the window */
    const token = (name, n) => {
      const token = first[side] + n;
      const chosen = side === "from" && token === pinned;
      const choose = () => {
        const piece = unit === "words" ? run.text(heads[0][0], "from").of.indexOf(token) : token;
        if (side === "from") this.app.set({ token: chosen ? null : piece });
      };
      return h(
        "button",
        {
          type: "button",
          class: `hw-token${delimiters[side].has(token) ? " mark" : ""}${chosen ? " chosen" : ""}`,
          role: "option",
          "aria-selected": chosen,
          tabindex: chosen || (pinned === null && n === 0) ? 0 : -1,
          data: { key: `${side}:${token}`, token },
          on: {
            pointerenter: (event) => this._focus({ side, token }, event),
            pointerleave: () => this._blur(),
            focus: () => this._focus({ side, token }, null),
            blur: () => this._blur(),
            click: choose,
            keydown: moveFocus,
          },
        },
        tokenElement(name),
        side === "to" &&
          heads.length > 1 &&
          h("span", { class: "bars", "aria-hidden": "true", style: { "--hw-count": heads.length } }),
      );
    };
    this.columns[side].replaceChildren(...names[side].slice(first[side], first[side] + WINDOW).map(token));
  }

  _blur() {
    this.hover = null;
    this.draw();
    this.app.tooltip.hide();
  }

  /** Show the links of one token alone, and list them. @param {Focus} focus @param {PointerEvent | null} event */
  _focus(focus, event) {
    this.hover = focus;
    this.draw();
    if (!this.shown) return;
    const { run, heads, options, names, lines } = this.shown;
    const { side, token } = focus;
    const queries = side === "from";
    /** @param {Side} of @param {number} n */
    const name = (of, n) => (names[of][n].length > NAME ? `${names[of][n].slice(0, NAME)}…` : names[of][n]);
    const own = lines.filter(({ i, j }) => (queries ? i : j) === token);
    const links = own.slice(-LISTED).reverse();
    const notes = links.map(({ head, i, j }) => {
      const prefix = heads.length > 1 ? `${run.label(heads[head])}  ` : "";
      const other = queries ? `→ ${name("to", j)}` : `← ${name("from", i)}`;
      return [`${prefix}${other}`, weightText(run.weight(heads[head], options.unit, i, j))];
    });
    const title = `${name(side, token)} ${queries ? "looks at" : "is looked at by"}`;
    const box = /** @type {HTMLElement | null} */ (event?.currentTarget)?.getBoundingClientRect();
    const outside = queries ? "left" : "right"; // away from the links
    const listed = notes.length ? notes : [`nothing with more than ${FAINT}`];
    if (box) this.app.tooltip.show(box, [title, ...listed], outside);
    else this.app.say(`${title} ${notes.map((pair) => pair.join(" ")).join(", ")}`);
  }

  draw() {
    if (this.waiting || !this.shown) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (this.el.isConnected && this.shown) this._draw(this.shown);
    });
  }

  /** @param {Shown} shown */
  _draw({ run, heads, lines, names, first, options: { pinned } }) {
    const width = /** @type {HTMLElement} */ (this.canvas.parentElement).clientWidth;
    const height = Math.min(WINDOW, Math.max(names.from.length, names.to.length)) * ROW;
    const pen = scaleCanvas(this.canvas, width, height);
    pen.clearRect(0, 0, width, height);
    pen.lineCap = "round";
    const single = heads.length === 1;
    /** @type {Focus | null} */
    const pin = pinned === null ? null : { side: "from", token: pinned };
    const focus = this.hover ?? pin;
    const colours = headColours(this.app, run, heads);
    const spread = Math.min(3.5, (ROW - 7) / heads.length); // the same link in several heads: side by side
    const faint = 0.035 * Math.min(1, 3 / heads.length); // the other tokens' links, which add up over many heads
    /** @type {Record<Side, Map<number, Float32Array>>} */
    const strength = { from: new Map(), to: new Map() };
    /** @param {Side} side @param {number} token @param {number} head @param {number} weight */
    const raise = (side, token, head, weight) => {
      const weights = strength[side].get(token) ?? new Float32Array(heads.length);
      weights[head] = Math.max(weight, weights[head]);
      strength[side].set(token, weights);
    };
    for (const { head, i, j, weight } of lines) {
      const on = !focus || (focus.side === "from" ? i : j) === focus.token;
      if (on) {
        raise("from", i, head, weight);
        raise("to", j, head, weight);
      }
      const aside = (head - (heads.length - 1) / 2) * spread;
      const y = (i - first.from + 0.5) * ROW + aside;
      const z = (j - first.to + 0.5) * ROW + aside;
      if (z < -ROW * 8 || z > height + ROW * 8) continue;
      const rgb = single ? this.app.colours.link : colours[head];
      pen.strokeStyle = css(rgb, on ? 0.1 + 0.88 * weight : focus ? faint : 0.1 * weight);
      pen.lineWidth = on ? 0.7 + 5 * weight : 0.8;
      pen.beginPath();
      pen.moveTo(2, y);
      pen.bezierCurveTo(width * 0.45, y, width * 0.55, z, width - 2, z);
      pen.stroke();
    }
    this._shade("from", strength.from, focus, colours);
    this._shade("to", strength.to, focus, colours);
  }

  /** Darken the tokens that take part, fade the others.
   * @param {Side} side @param {Map<number, Float32Array>} strength the largest weight of each head
   * @param {Focus | null} focus @param {Rgb[]} colours of the heads */
  _shade(side, strength, focus, colours) {
    for (const child of this.columns[side].children) {
      const el = /** @type {HTMLElement} */ (child);
      const token = Number(el.dataset.token);
      const own = focus !== null && focus.side === side && focus.token === token;
      const other = focus !== null && !own;
      const weights = strength.get(token);
      const share = weights?.reduce((most, weight) => Math.max(most, weight), 0) ?? 0;
      const bars = /** @type {HTMLElement | null} */ (el.querySelector(".bars"));
      if (bars)
        bars.style.backgroundImage = other && focus.side !== side && weights ? stripes(colours, weights) : "none";
      el.style.setProperty("--hw-share", other && colours.length === 1 ? String(Math.min(1, share)) : "0");
      el.classList.toggle("pale", other && share < 0.05);
      el.classList.toggle("focus", own);
    }
  }
}

/** A stripe per head, as opaque as its weight. @param {Rgb[]} colours @param {Float32Array} weights */
function stripes(colours, weights) {
  const width = 100 / colours.length;
  const parts = colours.map((rgb, n) => `${css(rgb, weights[n])} ${n * width}% ${(n + 1) * width}%`);
  return `linear-gradient(to right, ${parts.join(", ")})`;
}

/** The links in the window, the strongest last so that they are drawn on top.
 * @param {Omit<Shown, "lines">} shown @returns {Line[]} */
function strongestLines({ run, heads, options: { unit, bare }, delimiters, names, first }) {
  /** @type {Line[]} */
  const lines = [];
  heads.forEach((at, head) => {
    for (let i = first.from; i < Math.min(names.from.length, first.from + WINDOW); i++) {
      if (bare && delimiters.from.has(i)) continue;
      for (const { key, weight } of linksOf(run, at, unit, i)) {
        if (weight >= FAINT && !(bare && delimiters.to.has(key))) lines.push({ head, i, j: key, weight });
      }
    }
  });
  const sorted = lines.sort((a, b) => b.weight - a.weight);
  return sorted.slice(0, MOST_LINES).reverse();
}

/** @param {Run} run @param {Head} at @param {Unit} unit @param {number} i */
function linksOf(run, at, unit, i) {
  const exact = run.long ? run.exactRow(at, i) : null;
  if (run.long && !exact) return run.links(at, i);
  const { values, columns } = exact ? { values: exact, columns: exact.length } : run.matrix(at, unit);
  const row = exact ? values : values.subarray(i * columns, (i + 1) * columns);
  return Array.from(row, (weight, key) => ({ key, weight }));
}

/** Arrow keys move the focus along the column. @param {KeyboardEvent} event */
function moveFocus(event) {
  const el = /** @type {HTMLElement} */ (event.currentTarget);
  const down = event.key === "ArrowDown";
  if ((!down && event.key !== "ArrowUp") || event.shiftKey) return;
  const next = down ? el.nextElementSibling : el.previousElementSibling;
  /** @type {HTMLElement | null} */ (next)?.focus();
  consume(event);
}
