// Two passes beside each other, and what changed: another text, another model, or the same with some heads off.
import { pick, ramp } from "../lib/colour.js";
import { cellText, choice, format, h, select, visible, weightText } from "../lib/dom.js";
import { source } from "./head.js";
import { Heat, legend, picture } from "../lib/heatmap.js";
import { choices, extent, grid, measures, ordered, values, walk } from "./map.js";

/** Whether two passes have the same layers and heads. @param {any} a @param {any} b */
export function alike(a, b) {
  return a.layers.length === b.layers.length && a.layers.every((/** @type {any} */ layer, /** @type {number} */ row) => layer.heads === b.layers[row].heads && layer.kind === b.layers[row].kind);
}

/** The second table less the first. @param {(number | null)[][]} a @param {(number | null)[][]} b */
export function difference(a, b) {
  return a.map((row, n) => row.map((x, head) => (x === null || b[n]?.[head] === null || b[n]?.[head] === undefined ? null : /** @type {number} */ (b[n][head]) - x)));
}

/** A text, the part marked in which it differs from another. @param {string} text @param {string} other @returns {(string | Node)[]} */
export function marked(text, other) {
  const [mine, theirs] = [text, other].map((one) => one.split(/(?<=\s)/));
  let first = 0;
  while (first < Math.min(mine.length, theirs.length) && mine[first] === theirs[first]) first++;
  let last = 0;
  while (last < Math.min(mine.length, theirs.length) - first && mine[mine.length - 1 - last] === theirs[theirs.length - 1 - last]) last++;
  const part = (/** @type {string[]} */ words) => (words.length ? visible(words.join("").trim(), 120) : "");
  const changed = part(mine.slice(first, mine.length - last));
  return [part(mine.slice(0, first)), changed && first ? " " : "", changed ? h("mark", { text: changed }) : "", last ? " " : "", part(mine.slice(mine.length - last))];
}

/** What a pass is called here. @param {any} run */
function title(run) {
  const off = run.json.off.length ? ` without ${run.json.off.map((/** @type {any} */ at) => run.label(at)).join(", ")}` : "";
  return `${run.json.name}${off}`;
}

export class CompareView {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.heats = ["first", "second", "difference"].map((name) => new Heat(app, {
      hover: (at, event) => (at && event ? app.tip.show(event, this._notes(name, at)) : app.tip.hide()),
      say: (at) => this._notes(name, at).map((one) => (Array.isArray(one) ? one.join(" ") : one)).join(", "),
    }));
    this.form = h("div", {});
    this.maps = h("div", {});
    this.matrices = h("div", { class: "hw-three" }, ...this.heats.map((heat, n) => h("section", { class: "hw-panel" }, h("h3", { text: ["first", "second", "second less first"][n] }), heat.el)));
    this.head = h("div", {});
    this.legend = h("div", {});
    this.el = h("div", { class: "hw-compare", on: { keydown: (/** @type {KeyboardEvent} */ event) => walk(this.el, event) } }, this.form, this.maps, this.head, this.matrices, this.legend);
  }

  get pair() {
    return [this.app.runs[0], this.app.runs[1]];
  }

  get unit() {
    const [a, b] = this.pair;
    return a.long || b.long ? "pieces" : this.app.state.unit;
  }

  update() {
    const { app } = this;
    const [a, b] = this.pair;
    this.form.replaceChildren(app.bar ? app.bar.other() : "");
    const empty = !b;
    for (const part of [this.maps, this.head, this.matrices, this.legend]) part.hidden = empty;
    if (empty) return;
    this._maps(a, b);
    this._matrices(a, b);
  }

  /** @param {any} a @param {any} b */
  _maps(a, b) {
    const { app } = this;
    const { state } = app;
    const tables = [values(a, state.stat), values(b, state.stat)];
    const [low, high] = extent(...tables);
    const colours = ramp(state.palette, app.theme);
    const same = alike(a, b);
    const apart = same ? difference(tables[0], tables[1]) : null;
    const most = apart ? Math.max(...apart.flat().map((x) => Math.abs(x ?? 0)), 1e-9) : 1;
    const diverging = ramp("diverging", app.theme);
    const one = (/** @type {any} */ run, /** @type {(number | null)[][]} */ table, /** @type {(x: number) => any} */ colour, /** @type {string} */ name) => grid(app, run, {
      name, chosen: state.heads, order: (row) => ordered(run.layers[row], [], "model"), choose: (at, event) => app.choose(at, event, "compare"),
      cell: (at) => {
        const x = table[at[0]][at[1]];
        return { colour: x === null ? null : colour(x), text: x === null ? "" : cellText(x) };
      },
      notes: (at) => [`head ${run.label(at)}`, ["first", format(tables[0][at[0]]?.[at[1]], 4)], ["second", format(tables[1][at[0]]?.[at[1]], 4)]],
    });
    const plain = (/** @type {number} */ x) => pick(colours, (x - low) / (high - low));
    this.maps.replaceChildren(
      h("div", { class: "hw-controls" }, select("statistic", choices(a), state.stat, (stat) => app.set({ stat })),
        h("span", { class: "soft", text: measures(a)[state.stat] })),
      h("div", { class: "hw-three" },
        ...[[a, tables[0]], [b, tables[1]]].map(([run, table], n) => h("section", { class: "hw-panel" }, h("h3", { text: `${n ? "second" : "first"}: ${title(run)}` }), h("p", { dir: "auto", class: "hw-said" }, ...marked(run.json.text, (n ? a : b).json.text)), one(run, table, plain, `${n ? "second" : "first"} by ${state.stat}`), legend(colours, format(low, 2), format(high, 2)))),
        h("section", { class: "hw-panel" }, h("h3", { text: "second less first" }),
          apart ? h("p", { class: "hw-said soft", text: this._changed(a, apart) }) : null,
          apart ? one(a, apart, (x) => pick(diverging, 0.5 + x / most / 2), `difference in ${state.stat}`) : h("p", { class: "hw-card", text: "These models have not the same layers and heads, so that their heads cannot be taken from each other one by one." }),
          apart ? legend(diverging, format(-most, 2), `+${format(most, 2)}`) : null)));
  }

  /** @param {any} run @param {(number | null)[][]} apart */
  _changed(run, apart) {
    const all = apart.flatMap((row, layer) => row.map((x, head) => ({ at: /** @type {any} */ ([layer, head]), x: x ?? 0 })));
    const top = all.sort((p, q) => Math.abs(q.x) - Math.abs(p.x)).slice(0, 4).filter((one) => Math.abs(one.x) > 1e-6);
    return top.length ? `Most changed: ${top.map(({ at, x }) => `${run.label(at)} ${x > 0 ? "+" : ""}${format(x, 2)}`).join(", ")}` : "Nothing changed.";
  }

  /** @param {any} a @param {any} b */
  _matrices(a, b) {
    const { app } = this;
    const { state } = app;
    const at = state.heads[0];
    const there = b.layers[at[0]] && at[1] < b.layers[at[0]].heads;
    const unit = this.unit;
    this.head.replaceChildren(h("div", { class: "hw-controls hw-compare-head" }, h("b", { class: "hw-big", text: `head ${a.label(at)}` }),
      !(a.long || b.long) && choice("tokens", [["words", "words"], ["pieces", "pieces"]], unit, (value) => app.set({ unit: value })),
      h("span", { class: "soft", text: this._moved(a, b, at, unit) })));
    const [first, second, apart] = this.heats;
    first.show(source(app, a, [at], unit), true);
    second.el.parentElement.hidden = !there;
    const less = there ? this._less(a, b, at, unit) : null;
    apart.el.parentElement.hidden = !less;
    if (there) second.show(source(app, b, [at], unit), true);
    if (less) apart.show(less, true);
    this.legend.replaceChildren(!there ? h("p", { class: "soft", text: "The second model has no such head." }) : !less ? h("p", { class: "soft", text: `The texts have not as many ${unit}, so that one matrix cannot be taken from the other.` }) : "");
  }

  /** How much of a head's weight went elsewhere. @param {any} a @param {any} b @param {any} at @param {any} unit */
  _moved(a, b, at, unit) {
    if (a.long || b.long || !b.layers[at[0]] || at[1] >= b.layers[at[0]].heads) return "";
    const [x, y] = [a.matrix(at, unit), b.matrix(at, unit)];
    if (x.rows !== y.rows || x.columns !== y.columns) return "";
    let moved = 0;
    x.values.forEach((/** @type {number} */ w, /** @type {number} */ n) => { moved += Math.abs(w - y.values[n]); });
    return `${format((100 * moved) / 2 / x.rows, 1)} % of its weight moved`;
  }

  /** The second matrix less the first. @param {any} a @param {any} b @param {any} at @param {any} unit @returns {any} */
  _less(a, b, at, unit) {
    const maps = [a, b].map((run) => (run.long ? run.reduced(at, this.app.state.reduce) : run.matrix(at, unit)));
    const [x, y] = maps;
    const names = [a, b].map((run) => ({ from: run.names(at[0], "from", unit), to: run.names(at[0], "to", unit) }));
    if (a.long !== b.long || x.rows !== y.rows || x.columns !== y.columns || names[0].from.length !== names[1].from.length) return null;
    const diverging = ramp("diverging", this.app.theme);
    const apart = Float32Array.from(x.values, (w, n) => y.values[n] - w);
    const most = apart.reduce((top, w) => Math.max(top, Math.abs(w)), 1e-9);
    const colour = (/** @type {number} */ w) => pick(diverging, 0.5 + w / most / 2);
    const name = (/** @type {"from" | "to"} */ side) => (/** @type {number} */ n) => (names[0][side][n] === names[1][side][n] ? names[0][side][n] : `${names[0][side][n]}/${names[1][side][n]}`);
    return {
      rows: names[0].from.length, columns: names[0].to.length, rowName: name("from"), columnName: name("to"), label: `difference of head ${a.label(at)}`,
      picture: () => ({ cell: a.long ? x.cell : 1, image: picture(x.rows, x.columns, (n) => colour(apart[n])) }),
      exact: (/** @type {number} */ i) => (/** @type {number} */ j) => (a.long ? null : [colour(apart[i * x.columns + j]), apart[i * x.columns + j]]),
    };
  }

  /** @param {string} which @param {[number, number]} place @returns {any[]} */
  _notes(which, [i, j]) {
    const [a, b] = this.pair;
    const at = this.app.state.heads[0];
    const unit = this.unit;
    const run = which === "second" ? b : a;
    const name = (/** @type {"from" | "to"} */ side, /** @type {number} */ n) => visible(run.names(at[0], side, unit)[n] ?? "", 24);
    const notes = /** @type {any[]} */ ([`${name("from", i)} → ${name("to", j)}`]);
    const told = (/** @type {any} */ one) => {
      const names = [one.names(at[0], "from", unit), one.names(at[0], "to", unit)];
      return i < names[0].length && j < names[1].length ? one.weight(at, unit, i, j) : null;
    };
    const [x, y] = [told(a), told(b)];
    if (which !== "second" && x) notes.push(["first", weightText(x)]);
    if (which !== "first" && y) notes.push(["second", weightText(y)]);
    if (which === "difference" && x && y && !x.atMost && !y.atMost) notes.push(["difference", format(y.value - x.value, 4)]);
    return notes;
  }
}
