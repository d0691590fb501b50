// Two columns of tokens and a curve for each weight between them: as thick and as dark as the weight.
import { category, css } from "./colour.js";
import { h, keepFocus, reveal, sharp, tokenElement, weightText } from "./dom.js";

const ROW = 25; // pixels a token
const FAINT = 0.015; // weights that are not worth a line
const MOST = 4000; // lines
const WINDOW = 120; // tokens of a long input that are shown at once

export class LinksView {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.left = h("div", { class: "hw-tokens from", role: "listbox", "aria-label": "tokens that look" });
    this.right = h("div", { class: "hw-tokens to", role: "listbox", "aria-label": "tokens looked at" });
    this.pager = h("div", { class: "hw-pager" });
    this.list = h("div", { class: "hw-links" }, this.left, h("div", { class: "hw-curves" }, this.canvas), this.right);
    this.el = h("div", {}, this.pager, this.list);
    this.shift = 0; // tokens that a long text's window was moved by
    /** @type {{side: "from" | "to", token: number} | null} */ this.hover = null;
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.el);
  }

  /** @param {any} run @param {import("./run.js").Head[]} heads @param {{unit: import("./run.js").Unit, pinned: number | null, bare: boolean}} how */
  show(run, heads, { unit, pinned, bare }) {
    const [row] = heads[0];
    if (pinned !== this.pinned || run !== this.run) this.shift = 0;
    const moved = pinned !== this.pinned;
    this.run = run;
    this.heads = heads.filter(([other]) => run.layers[other].from === run.layers[row].from && run.layers[other].to === run.layers[row].to);
    this.unit = unit;
    this.pinned = pinned;
    this.bare = bare;
    this.names = { from: run.names(row, "from", unit), to: run.names(row, "to", unit) };
    this.marks = { from: run.delimiters(row, "from", unit), to: run.delimiters(row, "to", unit) };
    const long = Math.max(this.names.from.length, this.names.to.length) > WINDOW;
    const start = long ? Math.max(0, Math.min((pinned ?? 0) - WINDOW / 2 + this.shift, this.names.from.length - WINDOW)) : 0;
    this.first = { from: long ? start : 0, to: long ? Math.max(0, Math.min(start, this.names.to.length - WINDOW)) : 0 };
    this._pages(long, start, () => this.show(run, heads, { unit, pinned, bare }));
    this._lines();
    this._tokens("from");
    this._tokens("to");
    if (moved) reveal(this.list, this.left.querySelector(".chosen"));
    this.draw();
  }

  /** A long text's window, and how to move it. @param {boolean} long @param {number} start @param {() => void} again */
  _pages(long, start, again) {
    const count = this.names.from.length;
    const button = (/** @type {string} */ text, /** @type {number} */ by, /** @type {boolean} */ end) => h("button", {
      type: "button", class: "hw-small", text, disabled: end, data: { key: `pager:${by}` },
      on: { click: () => { this.shift += by; keepFocus(this.el, again); } },
    });
    this.pager.hidden = !long;
    this.pager.replaceChildren(button("◂ earlier", -WINDOW, start === 0), h("span", { class: "soft", text: `tokens ${start} to ${Math.min(count, start + WINDOW) - 1} of ${count}` }), button("later ▸", WINDOW, start + WINDOW >= count));
  }

  /** Which links there are, the strongest first. */
  _lines() {
    const { run, heads, unit, marks, names, first } = this;
    /** @type {{head: number, i: number, j: number, w: number}[]} */ const lines = [];
    heads.forEach((/** @type {import("./run.js").Head} */ at, /** @type {number} */ head) => {
      for (let i = first.from; i < Math.min(names.from.length, first.from + WINDOW); i++) {
        const add = (/** @type {number} */ j, /** @type {number} */ w) => {
          if (w >= FAINT && !(this.bare && (marks.to.has(j) || marks.from.has(i)))) lines.push({ head, i, j, w });
        };
        if (run.long) {
          const exact = run.exactRow(at, i);
          if (exact) exact.forEach((/** @type {number} */ w, /** @type {number} */ j) => add(j, w));
          else for (const { key, weight } of run.links(at, i)) add(key, weight);
        } else {
          const { values, columns } = run.matrix(at, unit);
          for (let j = 0; j < columns; j++) add(j, values[i * columns + j]);
        }
      }
    });
    this.lines = lines.sort((a, b) => b.w - a.w).slice(0, MOST).reverse(); // the strongest are drawn last
  }

  /** @param {"from" | "to"} side */
  _tokens(side) {
    const { names, first, marks } = this;
    const box = side === "from" ? this.left : this.right;
    const shown = names[side].slice(first[side], first[side] + WINDOW);
    box.replaceChildren(...shown.map((/** @type {string} */ name, /** @type {number} */ n) => {
      const token = first[side] + n;
      const chosen = side === "from" && token === this.pinned;
      const el = h("button", {
        type: "button", class: `hw-token${marks[side].has(token) ? " mark" : ""}${chosen ? " chosen" : ""}`, role: "option",
        "aria-selected": chosen, tabindex: chosen || (this.pinned === null && n === 0) ? 0 : -1,
        data: { key: `${side}:${token}`, token },
        on: {
          pointerenter: (/** @type {any} */ event) => this._hover(side, token, event),
          pointerleave: () => this._hover(null, 0, null),
          focus: () => this._hover(side, token, null),
          blur: () => this._hover(null, 0, null),
          click: () => side === "from" && this.app.set({ token: chosen ? null : this._piece(token) }),
          keydown: (/** @type {KeyboardEvent} */ event) => this._key(event, el),
        },
      }, tokenElement(name));
      return el;
    }));
  }

  /** The first piece of a token. @param {number} token */
  _piece(token) {
    return this.unit === "words" ? this.run.text(this.heads[0][0], "from").of.indexOf(token) : token;
  }

  /** @param {KeyboardEvent} event @param {HTMLElement} el */
  _key(event, el) {
    const by = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (!by || event.shiftKey) return;
    const next = /** @type {HTMLElement | null} */ (/** @type {any} */ (el)[by]);
    if (next) next.focus();
    event.preventDefault();
    event.stopPropagation();
  }

  /** @param {"from" | "to" | null} side @param {number} token @param {PointerEvent | null} event */
  _hover(side, token, event) {
    this.hover = side ? { side, token } : null;
    this.draw();
    if (!side) return this.app.tip.hide();
    const lines = this.lines.filter((line) => (side === "from" ? line.i : line.j) === token).slice(-6).reverse();
    const said = lines.map((line) => [
      `${this.heads.length > 1 ? `${this.run.label(this.heads[line.head])}  ` : ""}${side === "from" ? "→" : "←"} ${this._name(side === "from" ? "to" : "from", side === "from" ? line.j : line.i)}`,
      this._weight(line),
    ]);
    const title = `${this._name(side, token)} ${side === "from" ? "looks at" : "is looked at by"}`;
    if (event) this.app.tip.show(event, [title, ...(said.length ? said : ["nothing by more than 0.015"])]);
    else this.app.say(`${title} ${said.map((pair) => pair.join(" ")).join(", ")}`);
    return undefined;
  }

  /** @param {{head: number, i: number, j: number, w: number}} line */
  _weight(line) {
    return weightText(this.run.weight(this.heads[line.head], this.unit, line.i, line.j));
  }

  /** @param {"from" | "to"} side @param {number} token */
  _name(side, token) {
    const name = this.names[side][token];
    return name.length > 24 ? `${name.slice(0, 24)}…` : name;
  }

  draw() {
    if (this.waiting || !this.run) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (this.el.isConnected) this._draw();
    });
  }

  _draw() {
    const { lines, names, first, hover } = this;
    const box = /** @type {HTMLElement} */ (this.canvas.parentElement);
    const width = box.clientWidth;
    const count = Math.min(WINDOW, Math.max(names.from.length, names.to.length));
    const height = count * ROW;
    const pen = sharp(this.canvas, width, height);
    pen.clearRect(0, 0, width, height);
    pen.lineCap = "round";
    const single = this.heads.length === 1;
    const focus = hover ?? (this.pinned === null ? null : { side: "from", token: this.pinned });
    /** @type {{from: Map<number, number>, to: Map<number, number>}} */ const strength = { from: new Map(), to: new Map() };
    for (const { head, i, j, w } of lines) {
      const on = !focus || (focus.side === "from" ? i : j) === focus.token;
      if (on) {
        strength.from.set(i, Math.max(w, strength.from.get(i) ?? 0));
        strength.to.set(j, Math.max(w, strength.to.get(j) ?? 0));
      }
      const aside = single ? 0 : (head - (this.heads.length - 1) / 2) * 3.5; // the same link in two heads: side by side
      const y = (i - first.from + 0.5) * ROW + aside;
      const z = (j - first.to + 0.5) * ROW + aside;
      if (z < -ROW * 8 || z > height + ROW * 8) continue;
      const rgb = single ? this.app.colours.link : category(head, this.app.theme);
      pen.strokeStyle = css(rgb, on ? 0.1 + 0.88 * w : focus ? 0.035 : 0.1 * w);
      pen.lineWidth = on ? 0.7 + 5 * w : 0.8;
      pen.beginPath();
      pen.moveTo(2, y);
      pen.bezierCurveTo(width * 0.45, y, width * 0.55, z, width - 2, z);
      pen.stroke();
    }
    this._shade("from", strength.from, focus);
    this._shade("to", strength.to, focus);
  }

  /** Tokens that take part are dark, the others pale. @param {"from" | "to"} side @param {Map<number, number>} strength @param {any} focus */
  _shade(side, strength, focus) {
    for (const el of (side === "from" ? this.left : this.right).children) {
      const token = Number(/** @type {HTMLElement} */ (el).dataset.token);
      const own = focus && focus.side === side && focus.token === token;
      const share = focus ? (own ? 1 : strength.get(token) ?? 0) : 0;
      /** @type {HTMLElement} */ (el).style.setProperty("--hw-share", focus && !own ? String(Math.min(1, share)) : "0");
      el.classList.toggle("pale", Boolean(focus) && !own && share < 0.05);
      el.classList.toggle("focus", Boolean(own));
    }
  }
}
