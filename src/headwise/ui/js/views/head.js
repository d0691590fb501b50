// One head, or several in colours: links between tokens, and the matrix.
import { category, css, inkOn, oklch, pick, ramp } from "../lib/colour.js";
import { choice, direction, format, h, reveal, several, toggle, visible, weightText } from "../lib/dom.js";
import { Heat, legend, picture } from "../lib/heatmap.js";
import { LinksView } from "../lib/links.js";
import { extent, grid, ordered, values } from "./map.js";

/** The small map beside a head, to go to another. @param {any} app @param {any} run */
export function navigator(app, run) {
  const { state } = app;
  const table = values(run, state.stat);
  const [low, high] = extent(table);
  const colours = ramp(state.palette, app.theme);
  const [row] = state.heads[0];
  const layer = run.layers[row];
  const rows = run.layers.map((/** @type {any} */ one, /** @type {number} */ place) => (one.kind === layer.kind ? place : -1)).filter((/** @type {number} */ n) => n >= 0);
  const slider = h("input", {
    type: "range", min: 0, max: rows.length - 1, step: 1, value: rows.indexOf(row), "aria-label": "layer", "aria-valuetext": `layer ${layer.index}`, data: { key: "layer" },
    on: {
      input: (/** @type {any} */ event) => app.step(rows[Number(event.target.value)] - app.state.heads[0][0], 0),
      keydown: (/** @type {Event} */ event) => event.stopPropagation(),
    },
  });
  const go = (/** @type {KeyboardEvent} */ event) => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by || !(/** @type {HTMLElement} */ (event.target).classList.contains("cell"))) return;
    event.preventDefault();
    event.stopPropagation();
    app.step(...by);
    app.root.querySelector(".hw-nav .cell.chosen")?.focus(); // the focus goes along
  };
  return h("aside", { class: "hw-nav", on: { keydown: go } },
    h("label", { class: "hw-slider" }, h("span", { text: `layer ${layer.index}` }), slider),
    grid(app, run, {
      small: true, name: `choose a head; colour is ${state.stat}`, chosen: state.heads, order: (one) => ordered(run.layers[one], [], "model"),
      cell: (at) => ({ colour: table[at[0]][at[1]] === null ? null : pick(colours, (/** @type {number} */ (table[at[0]][at[1]]) - low) / (high - low)), text: format(table[at[0]][at[1]], 2) }),
      choose: (at, event) => app.choose(at, event, state.view),
    }),
    h("p", { class: "soft hint", text: "Arrow keys go from head to head; Shift and click lays a head over the others." }));
}

/** Draw the small map anew where it stands; of a deep model it stays at what was in sight, and the chosen head comes there.
 * @param {HTMLElement} box @param {any} app @param {any} run */
export function navigate(box, app, run) {
  const before = box.querySelector(".hw-grids")?.scrollTop ?? 0;
  box.replaceChildren(navigator(app, run));
  const grids = /** @type {HTMLElement} */ (box.querySelector(".hw-grids"));
  grids.scrollTop = before;
  reveal(grids, grids.querySelector(".chosen"));
}

/** The chosen heads by name, with their colours. @param {any} app @param {any} run */
export function chosen(app, run) {
  const { state } = app;
  return h("div", { class: "hw-chosen" }, ...state.heads.map((/** @type {import("../lib/run.js").Head} */ at, /** @type {number} */ n) => {
    const row = at[0];
    const off = run.off.has(at.join("."));
    return h("span", { class: "hw-name", style: state.heads.length > 1 ? { "--hw-dot": css(category(n, app.theme)) } : {} },
      h("b", { class: state.heads.length > 1 ? "dot" : "", text: `head ${run.label(at)}` }),
      h("span", { class: "soft", text: state.heads.length > 1 ? "" : `layer ${run.layers[row].index}, ${several(run.layers[row].heads, "head")} of ${run.layers[row].dim}` }),
      app.live && h("button", { type: "button", class: "hw-small", "aria-pressed": off, text: off ? "switch on" : "switch off", data: { key: `off:${at.join(".")}` }, on: { click: () => app.switchHead(at) } }),
      state.heads.length > 1 && h("button", { type: "button", class: "hw-small", text: "✕", "aria-label": `remove head ${run.label(at)}`, on: { click: () => app.set({ heads: state.heads.filter((/** @type {any} */ _, /** @type {number} */ m) => m !== n) }) } }));
  }));
}

/** The text with each token on the colour of its weight from the chosen one; click chooses. Of two texts, both.
 * @param {any} app @param {any} run @param {import("../lib/run.js").Unit} [unit] */
export function sentence(app, run, unit = app.unit) {
  const { state } = app;
  const [row] = state.heads[0];
  const from = run.text(row, "from");
  const to = run.text(row, "to");
  const own = run.names(row, "from", unit);
  const chosenToken = app.token(unit);
  const heads = state.heads.filter((/** @type {any} */ [other]) => run.text(other, "from") === from && run.text(other, "to") === to);
  const rows = chosenToken === null ? null : heads.map((/** @type {any} */ at) => rowOf(run, at, unit, chosenToken));
  const tint = tints(app, heads.length);
  const tops = rows?.map((/** @type {any} */ one) => one.reduce((/** @type {number} */ a, /** @type {number} */ b) => Math.max(a, b), 1e-9));
  const colour = rows && ((/** @type {number} */ n) => ({ rgb: tint(rows.map((/** @type {any} */ one, /** @type {number} */ m) => (0.85 * one[n]) / tops[m])), said: rows.map((/** @type {any} */ one) => format(one[n], 4)).join(", ") }));
  const choose = (/** @type {number} */ n) => app.set({ token: n === chosenToken ? null : unit === "words" ? from.of.indexOf(n) : n });
  if (from === to) return tokenLine(own, { chosen: chosenToken, colour, choose, dir: direction(run.said(from)) });
  return h("div", { class: "hw-two" },
    h("span", { class: "soft", text: "looks" }), tokenLine(own, { chosen: chosenToken, colour: null, choose, dir: direction(run.said(from)) }),
    h("span", { class: "soft", text: "is looked at" }), tokenLine(run.names(row, "to", unit), { chosen: null, colour, choose: null, dir: direction(run.said(to)) }));
}

/** Tokens in a row, those of a long text around the chosen one. @param {string[]} names
 * @param {{chosen: number | null, colour: null | ((n: number) => {rgb: import("../lib/colour.js").Rgb, said: string}), choose: null | ((n: number) => void), dir: string}} how */
function tokenLine(names, { chosen: place, colour, choose, dir }) {
  const start = names.length > 500 ? Math.max(0, (place ?? 0) - 120) : 0;
  const shown = names.length > 500 ? names.slice(start, start + 300) : names;
  return h("p", { class: `hw-sentence${shown.length > 60 ? " dense" : ""}`, dir },
    start > 0 && h("span", { class: "soft", text: `… ${several(start, "token")} … ` }),
    ...shown.map((name, n) => {
      const found = colour ? colour(start + n) : null;
      return h(choose ? "button" : "span", {
        type: choose ? "button" : null, class: `token${start + n === place ? " chosen" : ""}`, data: { key: `word:${choose ? "" : "to:"}${start + n}` },
        title: found ? found.said : null, "aria-pressed": choose ? start + n === place : null,
        style: found ? { "background-color": css(found.rgb), color: inkOn(found.rgb) } : {},
        on: choose ? { click: () => choose(start + n) } : {},
      }, h("bdi", { text: visible(name, 40) }));
    }),
    start + shown.length < names.length && h("span", { class: "soft", text: ` … ${several(names.length - start - shown.length, "token")} more` }));
}

/** One row of weights, as well as the page knows it; zeros where it does not. @param {any} run @param {import("../lib/run.js").Head} at @param {import("../lib/run.js").Unit} unit @param {number} i @returns {Float32Array | number[]} */
export function rowOf(run, at, unit, i) {
  if (!run.long) {
    const found = run.matrix(at, unit);
    return found.values.subarray(i * found.columns, (i + 1) * found.columns);
  }
  const exact = run.exactRow(at, i);
  if (exact) return exact;
  const row = new Float32Array(run.text(at[0], "to").pieces.length);
  for (const { key, weight } of run.links(at, i)) row[key] = weight;
  return row;
}

/** What the heat map shows of some heads. @param {any} app @param {any} run @param {import("../lib/run.js").Head[]} heads @param {import("../lib/run.js").Unit} unit @returns {any} */
export function source(app, run, heads, unit) {
  const [row] = heads[0];
  const own = heads.filter(([other]) => run.layers[other].from === run.layers[row].from && run.layers[other].to === run.layers[row].to);
  const from = run.names(row, "from", unit);
  const to = run.names(row, "to", unit);
  const label = `weights of ${own.map((at) => `head ${run.label(at)}`).join(", ")}: ${several(from.length, "row")} of tokens that look, ${several(to.length, "column")} of tokens looked at; arrow keys read single weights`;
  const maps = own.map((at) => (run.long ? run.reduced(at, app.state.reduce) : run.matrix(at, unit)));
  const tops = run.long ? own.map((at) => run.reduced(at, "max").top) : maps.map((one) => one.top);
  const tint = tints(app, own.length);
  const colour = (/** @type {number[]} */ shares) => tint(shares);
  return {
    rows: from.length, columns: to.length, rowName: (/** @type {number} */ i) => from[i], columnName: (/** @type {number} */ j) => to[j], label,
    picture: () => ({
      cell: run.long ? maps[0].cell : 1,
      image: picture(maps[0].rows, maps[0].columns, (n) => colour(maps.map((one) => one.values[n] / (one.top || 1)))),
    }),
    prepare: (/** @type {number} */ first, /** @type {number} */ last) => own.every((at) => !run.long || run.prepare(at, first, last)),
    exact: (/** @type {number} */ i) => {
      const rows = own.map((at, n) => cells(run, at, maps[n], i));
      return (/** @type {number} */ j) => {
        const found = rows.map((row) => row(j));
        if (found.every((w) => w === null)) return null;
        return [colour(found.map((w, n) => (w ?? 0) / (tops[n] || 1))), found.length === 1 ? found[0] : Math.max(...found.map((w) => w ?? 0))];
      };
    },
  };
}

/** The weights of one row that are known exactly and at once. @param {any} run @param {import("../lib/run.js").Head} at @param {any} map @param {number} i @returns {(j: number) => number | null} */
function cells(run, at, map, i) {
  if (!run.long) return (j) => map.values[i * map.columns + j];
  const row = run.ready(at, i);
  if (row) return (j) => row[j];
  const links = new Map(run.links(at, i).map((/** @type {any} */ link) => [link.key, link.weight]));
  return (j) => links.get(j) ?? null;
}

/** Shares of several heads -> one colour: a palette for one, mixed categories for more. @param {any} app @param {number} count @returns {(shares: number[]) => import("../lib/colour.js").Rgb} */
function tints(app, count) {
  const colours = ramp(app.state.palette, app.theme);
  if (count === 1) return ([share]) => pick(colours, share);
  const ground = app.theme === "dark" ? oklch(0.225, 0.02, 270) : oklch(0.985, 0.012, 100);
  const heads = Array.from({ length: count }, (_, n) => category(n, app.theme));
  return (shares) => {
    const sum = shares.reduce((a, b) => a + b, 0);
    const strong = Math.min(1, Math.max(...shares));
    if (!sum) return ground;
    return /** @type {import("../lib/colour.js").Rgb} */ (ground.map((g, axis) => {
      const mix = heads.reduce((all, rgb, n) => all + (rgb[axis] * shares[n]) / sum, 0);
      return Math.round(g + (mix - g) * strong);
    }));
  };
}

export class HeadView {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.links = new LinksView(app);
    this.heat = new Heat(app, {
      hover: (at, event) => (at && event ? this.app.tip.show(event, this._notes(at)) : this.app.tip.hide()),
      click: ([i]) => this.app.set({ token: this.app.unit === "words" ? this.app.run.text(this.app.state.heads[0][0], "from").of.indexOf(i) : i }),
      say: (at) => this._notes(at).map((one) => (Array.isArray(one) ? one.join(" ") : one)).join(", "),
    });
    this.top = h("div", { class: "hw-top" });
    this.side = h("div", {});
    this.legend = h("div", {});
    this.left = h("section", { class: "hw-panel links" }, h("h3", { text: "Links" }), this.links.el);
    this.right = h("section", { class: "hw-panel" }, h("h3", { text: "Matrix" }), this.heat.el, this.legend);
    this.el = h("div", { class: "hw-head" }, this.side, h("div", { class: "hw-main" }, this.top, h("div", { class: "hw-pair" }, this.left, this.right)));
  }

  /** @param {[number, number]} at @returns {any[]} */
  _notes([i, j]) {
    const { app } = this;
    const { run, state } = app;
    const unit = app.unit;
    const [row] = state.heads[0];
    const name = (/** @type {"from" | "to"} */ side, /** @type {number} */ n) => visible(run.names(row, side, unit)[n], 30);
    const [from, to] = [name("from", i), name("to", j)];
    const notes = /** @type {any[]} */ ([`${from} → ${to}`]);
    for (const at of state.heads) notes.push([`head ${run.label(at)}`, weightText(run.weight(at, unit, i, j))]);
    if (run.long) notes.push(`tokens ${i} and ${j}`);
    return notes;
  }

  update() {
    const { app } = this;
    const { run, state } = app;
    const unit = app.unit;
    navigate(this.side, app, run);
    this.top.replaceChildren(h("div", { class: "hw-controls" }, chosen(app, run),
      choice("tokens", [["words", "words"], ["pieces", "pieces"]], unit, (value) => app.set({ unit: value }), run.long ? { title: "long texts are shown in pieces", "aria-disabled": true, class: "hw-choice disabled" } : {}),
      toggle("without punctuation and special tokens", state.bare, (bare) => app.set({ bare })),
      run.long && choice("a square shows", [["max", "its largest weight"], ["mean", "its mean"]], state.reduce, (reduce) => app.set({ reduce }))),
      sentence(app, run));
    for (const line of this.top.querySelectorAll(".hw-sentence.dense")) reveal(line, line.querySelector(".chosen"));
    this.links.show(run, state.heads, { unit, pinned: app.token(unit), bare: state.bare });
    this.heat.show(source(app, run, state.heads, unit), true);
    this._legend(run, unit);
    this._fetch(run);
  }

  /** @param {any} run @param {import("../lib/run.js").Unit} unit */
  _legend(run, unit) {
    const { app } = this;
    const { state } = app;
    const colours = ramp(state.palette, app.theme);
    const at = state.heads[0];
    const top = run.long ? run.reduced(at, state.reduce).top : run.matrix(at, unit).top;
    const [row] = at;
    const stored = run.json.weights[row];
    const told = run.form === "f32" ? "Every number is as the model computed it."
      : run.form === "u8" ? "Weights are stored in one byte each; a number on hover says how far it may be off."
        : run.exactRow(at, 0) ? `Zoomed in, every weight is exact; from afar, a square is ${several(stored.reduced.cell, "token")} a side.`
          : `A square is ${several(stored.reduced.cell, "token")} a side. Zoomed in, the ${several(stored.k, "strongest link")} of each token ${stored.k === 1 ? "is" : "are"} exact; of the others this page knows the square's.`;
    this.legend.replaceChildren(
      state.heads.length === 1 ? legend(colours, "0", format(top, 2)) : h("p", { class: "soft", text: "Colours mix where heads look at the same; a number is the largest of theirs." }),
      h("p", { class: "soft", text: `${told} Wheel or + and − zoom, dragging pans.` }));
  }

  /** Where a server is behind the page: the numbers behind a head that the page does not have. @param {any} run */
  async _fetch(run) {
    const { app } = this;
    if (!app.live || !run.long) return;
    for (const at of app.state.heads) if (!run.steps(at)) await app.learn(run, at);
  }
}
