// Two passes beside each other, and what changed: another text, another model, or the same with some heads off.
import { pick, ramp } from "../lib/colour.js";
import { h, notesText, select } from "../lib/dom.js";
import { grid, moveFocus } from "../lib/grid.js";
import { Heatmap, legend, picture } from "../lib/heatmap.js";
import { matrixSource, shownMatrix } from "../lib/matrix.js";
import { registerView } from "../lib/registry.js";
import { colourScale, difference, headValues, measureChoices, measures, orderedHeads } from "../lib/scores.js";
import { unitChoice } from "../lib/sentence.js";
import { cellText, format, visible, weightText } from "../lib/text.js";

/** @import { App } from "../app.js" */
/** @import { Rgb } from "../lib/colour.js" */
/** @import { Note } from "../lib/dom.js" */
/** @import { Position, Source } from "../lib/heatmap.js" */
/** @import { Head, Run, Side, Table, Unit } from "../lib/run.js" */

const PANELS = ["first", "second", "second less first"];
const LISTED = 4; // heads that changed most

/** Whether two passes have the same layers and heads. @param {Run} a @param {Run} b */
export function sameShape(a, b) {
  if (a.layers.length !== b.layers.length) return false;
  return a.layers.every(({ heads, kind }, row) => heads === b.layers[row].heads && kind === b.layers[row].kind);
}

/** A text, with the part marked in which it differs from another. @param {string} text @param {string} other
 * @returns {(string | Node)[]} */
function markChanges(text, other) {
  const [mine, theirs] = [text, other].map((words) => words.split(/(?<=\s)/));
  const shorter = Math.min(mine.length, theirs.length);
  let first = 0;
  while (first < shorter && mine[first] === theirs[first]) first++;
  let last = 0;
  while (last < shorter - first && mine[mine.length - 1 - last] === theirs[theirs.length - 1 - last]) last++;
  /** @param {string[]} words */
  const part = (words) => (words.length ? visible(words.join("").trim(), 120) : "");
  const changed = part(mine.slice(first, mine.length - last));
  return [
    part(mine.slice(0, first)),
    changed && first ? " " : "",
    changed ? h("mark", { text: changed }) : "",
    last ? " " : "",
    part(mine.slice(mine.length - last)),
  ];
}

/** The model of a pass, and the heads that are off. @param {Run} run */
function runTitle(run) {
  const { name, off } = run.json;
  return off.length ? `${name} without ${off.map((at) => run.label(at)).join(", ")}` : name;
}

/** Whether a pass has a head. @param {Run} run @param {Head} at */
function hasHead(run, [row, head]) {
  return row < run.layers.length && head < run.layers[row].heads;
}

export class CompareView {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.heatmaps = PANELS.map(
      (_, panel) =>
        new Heatmap(app, {
          hover: (at, event) => (at && event ? app.tooltip.show(event, this._notes(panel, at)) : app.tooltip.hide()),
          say: (at) => notesText(this._notes(panel, at)),
        }),
    );
    this.panels = this.heatmaps.map((heatmap, panel) =>
      h("section", { class: "hw-panel" }, h("h3", { text: PANELS[panel] }), heatmap.el),
    );
    this.form = h("div", {});
    this.maps = h("div", {});
    this.head = h("div", {});
    this.matrices = h("div", { class: "hw-three" }, ...this.panels);
    this.message = h("div", {});
    /** @type {HTMLElement} */
    this.el = h(
      "div",
      { class: "hw-compare", on: { keydown: (event) => moveFocus(this.el, event) } },
      this.form,
      this.maps,
      this.head,
      this.matrices,
      this.message,
    );
  }

  /** @returns {Unit} */
  get unit() {
    return this.app.runs.some((run) => run.long) ? "pieces" : this.app.unit;
  }

  update() {
    const { bar, runs } = this.app;
    const [a, b] = runs;
    this.form.replaceChildren(bar ? bar.other() : "");
    for (const part of [this.maps, this.head, this.matrices, this.message]) part.hidden = !b;
    if (!b) return;
    this._updateMaps(a, b);
    this._updateMatrices(a, b);
  }

  /** @param {Run} a @param {Run} b */
  _updateMaps(a, b) {
    const { app } = this;
    const { stat, palette } = app.state;
    const tables = [headValues(a, stat), headValues(b, stat)];
    const { low, high, colours } = colourScale(a, stat, palette, app.theme, ...tables);
    /** @param {number} x */
    const colour = (x) => pick(colours, (x - low) / (high - low));
    const panels = [a, b].map((run, n) =>
      h(
        "section",
        { class: "hw-panel" },
        h("h3", { text: `${PANELS[n]}: ${runTitle(run)}` }),
        h("p", { dir: "auto", class: "hw-said" }, ...markChanges(run.json.text, [b, a][n].json.text)),
        this._map(run, tables[n], colour, `${PANELS[n]} by ${stat}`, tables),
        legend(colours, format(low, 2), format(high, 2)),
      ),
    );
    this.maps.replaceChildren(
      h(
        "div",
        { class: "hw-controls" },
        select("statistic", measureChoices(a), stat, (value) => app.set({ stat: value })),
        h("span", { class: "soft", text: measures(a)[stat] }),
      ),
      h(
        "div",
        { class: "hw-three" },
        ...panels,
        h("section", { class: "hw-panel" }, h("h3", { text: PANELS[2] }), ...this._difference(a, b, tables)),
      ),
    );
  }

  /** The map of the differences. @param {Run} a @param {Run} b @param {Table[]} tables */
  _difference(a, b, tables) {
    if (!sameShape(a, b)) {
      const text = "These models have not the same layers and heads, so that their heads cannot be subtracted.";
      return [h("p", { class: "hw-card", text })];
    }
    const changes = difference(tables[0], tables[1]);
    const most = Math.max(...changes.flat().map((x) => Math.abs(x ?? 0)), 1e-9);
    const colours = ramp("diverging", this.app.theme);
    /** @param {number} x */
    const colour = (x) => pick(colours, 0.5 + x / most / 2);
    return [
      h("p", { class: "hw-said soft", text: mostChanged(a, changes) }),
      this._map(a, changes, colour, `difference in ${this.app.state.stat}`, tables),
      legend(colours, format(-most, 2), `+${format(most, 2)}`),
    ];
  }

  /** @param {Run} run @param {Table} table @param {(x: number) => Rgb} colour @param {string} name
   * @param {Table[]} tables of both passes, for the tooltip */
  _map(run, table, colour, name, [first, second]) {
    const { app } = this;
    return grid(app, run, {
      name,
      chosen: app.state.heads,
      order: (row) => orderedHeads(run.layers[row], [], "model"),
      choose: (at, event) => app.choose(at, event, "compare"),
      cell: ([row, head]) => {
        const x = table[row][head];
        return { colour: x === null ? null : colour(x), text: x === null ? "" : cellText(x) };
      },
      notes: (at) => {
        const [row, head] = at;
        return [
          `head ${run.label(at)}`,
          ["first", format(first[row]?.[head], 4)],
          ["second", format(second[row]?.[head], 4)],
        ];
      },
    });
  }

  /** @param {Run} a @param {Run} b */
  _updateMatrices(a, b) {
    const { app, unit } = this;
    const [at] = app.state.heads;
    const exists = hasHead(b, at);
    const change = exists ? this._changeSource(a, b, at, unit) : null;
    this.head.replaceChildren(
      h(
        "div",
        { class: "hw-controls hw-compare-head" },
        h("b", { class: "hw-big", text: `head ${a.label(at)}` }),
        !a.long && !b.long && unitChoice(app, unit),
        h("span", { class: "soft", text: exists ? movedWeight(a, b, at, unit) : "" }),
      ),
    );
    const sources = [matrixSource(app, a, [at], unit), exists ? matrixSource(app, b, [at], unit) : null, change];
    sources.forEach((source, n) => {
      this.panels[n].hidden = !source;
      if (source) this.heatmaps[n].show(source, true);
    });
    const unequal = `The texts have not as many ${unit}, so that one matrix cannot be subtracted from the other.`;
    const text = exists ? unequal : "The second model has no such head.";
    this.message.replaceChildren(change ? "" : h("p", { class: "soft", text }));
  }

  /** The second matrix minus the first, null where their sizes differ.
   * @param {Run} a @param {Run} b @param {Head} at @param {Unit} unit @returns {Source | null} */
  _changeSource(a, b, at, unit) {
    const [row] = at;
    const { reduce } = this.app.state;
    const [x, y] = [a, b].map((run) => shownMatrix(run, at, unit, reduce));
    const equal = x.rows === y.rows && x.columns === y.columns;
    const lengths = [a, b].map((run) => run.names(row, "from", unit).length);
    if (a.long !== b.long || !equal || lengths[0] !== lengths[1]) return null;
    const colours = ramp("diverging", this.app.theme);
    const change = Float32Array.from(x.values, (weight, n) => y.values[n] - weight);
    const most = change.reduce((top, weight) => Math.max(top, Math.abs(weight)), 1e-9);
    /** @param {number} n */
    const colour = (n) => pick(colours, 0.5 + change[n] / most / 2);
    /** @param {Side} side @returns {(n: number) => string} */
    const name = (side) => (n) => {
      const [first, second] = [a, b].map((run) => run.names(row, side, unit)[n]);
      return first === second ? first : `${first}/${second}`;
    };
    return {
      rows: lengths[0],
      columns: a.names(row, "to", unit).length,
      rowName: name("from"),
      columnName: name("to"),
      label: `difference of head ${a.label(at)}`,
      picture: () => ({ cell: x.cell, image: picture(x.rows, x.columns, colour) }),
      exact: (i) => (j) => (a.long ? null : [colour(i * x.columns + j), change[i * x.columns + j]]),
    };
  }

  /** The tooltip of one weight. @param {number} panel @param {Position} position @returns {Note[]} */
  _notes(panel, [i, j]) {
    const { app, unit } = this;
    const [at] = app.state.heads;
    const names = app.runs.map((run) =>
      hasHead(run, at)
        ? { from: run.names(at[0], "from", unit), to: run.names(at[0], "to", unit) }
        : { from: [], to: [] },
    );
    const own = names[panel === 1 ? 1 : 0];
    const [x, y] = app.runs.map((run, n) =>
      i < names[n].from.length && j < names[n].to.length ? run.weight(at, unit, i, j) : null,
    );
    /** @type {Note[]} */
    const notes = [`${visible(own.from[i] ?? "", 24)} → ${visible(own.to[j] ?? "", 24)}`];
    if (panel !== 1 && x) notes.push(["first", weightText(x)]);
    if (panel !== 0 && y) notes.push(["second", weightText(y)]);
    if (panel === 2 && x && y && !x.atMost && !y.atMost) notes.push(["difference", format(y.value - x.value, 4)]);
    return notes;
  }
}

/** The heads that changed most. @param {Run} run @param {Table} changes */
function mostChanged(run, changes) {
  const heads = changes.flatMap((row, layer) =>
    row.map((change, head) => ({ at: /** @type {Head} */ ([layer, head]), change: change ?? 0 })),
  );
  const sorted = heads.sort((p, q) => Math.abs(q.change) - Math.abs(p.change)).slice(0, LISTED);
  const changed = sorted.filter(({ change }) => Math.abs(change) > 1e-6);
  if (!changed.length) return "Nothing changed.";
  const items = changed.map(({ at, change }) => `${run.label(at)} ${change > 0 ? "+" : ""}${format(change, 2)}`);
  return `Most changed: ${items.join(", ")}`;
}

/** How much of a head's weight moved to other keys.
 * @param {Run} a @param {Run} b @param {Head} at @param {Unit} unit */
function movedWeight(a, b, at, unit) {
  if (a.long || b.long) return "";
  const [x, y] = [a.matrix(at, unit), b.matrix(at, unit)];
  if (x.rows !== y.rows || x.columns !== y.columns) return "";
  const moved = x.values.reduce((sum, weight, n) => sum + Math.abs(weight - y.values[n]), 0) / 2;
  return `${format((100 * moved) / x.rows, 1)} % of its weight moved`;
}

registerView({
  name: "compare",
  label: "Compare",
  order: 4,
  create: (app) => new CompareView(app),
  available: (app) => Boolean(app.runs[1] || app.live),
});
