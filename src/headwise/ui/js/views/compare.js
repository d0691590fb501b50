// Two passes beside each other, and what changed: another text, another model, or the same with some heads off.
import { largestChange, mostChangedHead, sameShape } from "../lib/changes.js";
import { pick, ramp } from "../lib/colour.js";
import { changedText, h, notesText, select, tokenElement } from "../lib/dom.js";
import { grid, moveFocus } from "../lib/grid.js";
import { Heatmap, legend, picture } from "../lib/heatmap.js";
import { hasRootScale, matrixSource, shownMatrix } from "../lib/matrix.js";
import { registerView } from "../lib/registry.js";
import { colourScale, difference, headValues, measureChoices, measures, orderedHeads } from "../lib/scores.js";
import { unitChoice } from "../lib/sentence.js";
import { cellText, format, visible, weightText } from "../lib/text.js";

/** @import { App } from "../app.js" */
/** @import { Change } from "../lib/changes.js" */
/** @import { Rgb } from "../lib/colour.js" */
/** @import { Note } from "../lib/dom.js" */
/** @import { Position, Source } from "../lib/heatmap.js" */
/** @import { Head, Run, Side, Table, Unit } from "../lib/run.js" */

const PANELS = ["first", "second", "second less first"];
const LISTED = 4; // heads that changed most

/** The model of a pass, and the heads that are off. @param {Run} run */
function runTitle(run) {
  const { name, off } = run.json;
  return off.length ? `${name} without ${off.map((at) => run.label(at)).join(", ")}` : name;
}

export class CompareView {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.heatmaps = PANELS.map(
      (_, panel) =>
        new Heatmap(app, {
          hover: (at, box) => (at ? app.tooltip.show(box, this._notes(panel, at)) : app.tooltip.hide()),
          say: (at) => notesText(this._notes(panel, at)),
        }),
    );
    this.panels = this.heatmaps.map((heatmap, panel) =>
      h("section", { class: "hw-panel" }, h("h3", { text: PANELS[panel] }), heatmap.el),
    );
    this.form = h("div", {});
    this.lead = h("div", { class: "hw-findings" });
    this.maps = h("div", {});
    this.head = h("div", {});
    this.matrices = h("div", { class: "hw-three" }, ...this.panels);
    this.message = h("div", {});
    /** @type {{ a: Run, b: Run, unit: Unit, change: Change | null } | null} */
    this.computed = null;
    /** @type {HTMLElement} */
    this.el = h(
      "div",
      { class: "hw-compare", on: { keydown: (event) => moveFocus(this.el, event) } },
      this.form,
      this.lead,
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
    this.form.hidden = !bar;
    for (const part of [this.lead, this.maps, this.head, this.matrices, this.message]) part.hidden = !b;
    if (!b) return;
    this.lead.replaceChildren(...(sameShape(a, b) ? this._findings(a, b) : this._follows(a, b)));
    this._updateMaps(a, b);
    this._updateMatrices(a, b);
  }

  /** The chosen head of a pass: heads of models of different shape are chosen apart. @param {number} n @returns {Head} */
  _at(n) {
    const [a, b] = this.app.runs;
    const [first] = this.app.state.heads;
    if (n === 0 || sameShape(a, b)) return first;
    return b.parse(this.app.state.head2) ?? b.json.follow?.head ?? [0, 0];
  }

  /** What changed most in the chosen head, and in any. @param {Run} a @param {Run} b */
  _findings(a, b) {
    const { app, unit } = this;
    const own = largestChange(a, b, unit, this._at(0));
    const most = this._largestChange(a, b);
    if (!own || !most) return this._statFinding(a, b);
    const same = String(own.at) === String(most.at);
    const findings = [
      h("p", { class: "hw-lead first" }, ...changeWords(a, own), same ? ", more than in any other head." : "."),
    ];
    if (!same) {
      const choose = () => app.set({ heads: [most.at] });
      findings.push(
        h(
          "p",
          { class: "soft" },
          "The largest change of all: ",
          ...changeWords(a, most),
          ". ",
          h("button", {
            type: "button",
            class: "hw-small",
            text: "see it",
            data: { key: "most" },
            on: { click: choose },
          }),
        ),
      );
    }
    return findings;
  }

  /** The largest change of all heads; of the same passes it is computed once. @param {Run} a @param {Run} b */
  _largestChange(a, b) {
    const { unit } = this;
    const { computed } = this;
    if (computed?.a !== a || computed.b !== b || computed.unit !== unit) {
      this.computed = { a, b, unit, change: largestChange(a, b, unit) };
    }
    return this.computed?.change ?? null;
  }

  /** How the chosen statistic changed, where weights cannot be compared one by one. @param {Run} a @param {Run} b */
  _statFinding(a, b) {
    const { stat } = this.app.state;
    const [row, head] = this._at(0);
    const [before, after] = [a, b].map((run) => format(headValues(run, stat)[row][head], 2));
    const most = String(mostChangedHead(a, b, stat)) === String([row, head]) ? ", more than in any other head" : "";
    return [
      h("p", { class: "hw-lead first", text: `${stat} ${before} → ${after} in head ${a.label([row, head])}${most}.` }),
    ];
  }

  /** What is worth following in each of two models whose heads have no counterpart. @param {Run} a @param {Run} b */
  _follows(a, b) {
    const text =
      "Their layers and heads differ, so that heads are chosen in each model apart and cannot be subtracted.";
    return [...[a, b].flatMap((run) => followWords(run)), h("p", { class: "soft", text })];
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
        app.live && h("p", { dir: "auto", class: "hw-said" }, ...changedText(run.json.text, [b, a][n].json.text)),
        this._map(n, tables[n], colour, `${PANELS[n]} by ${stat}`, tables),
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
        sameShape(a, b) &&
          h("section", { class: "hw-panel" }, h("h3", { text: PANELS[2] }), ...this._difference(a, tables)),
      ),
    );
  }

  /** The map of the differences. @param {Run} a @param {Table[]} tables */
  _difference(a, tables) {
    const changes = difference(tables[0], tables[1]);
    const most = Math.max(...changes.flat().map((x) => Math.abs(x ?? 0)), 1e-9);
    const colours = ramp("diverging", this.app.theme);
    /** @param {number} x */
    const colour = (x) => pick(colours, 0.5 + x / most / 2);
    return [
      this.app.live && h("p", { class: "hw-said" }),
      this._map(0, changes, colour, `difference in ${this.app.state.stat}`, tables),
      legend(colours, format(-most, 2), `+${format(most, 2)}`),
      h("p", { class: "soft", text: mostChanged(a, changes) }),
    ];
  }

  /** @param {number} n place of the pass @param {Table} table @param {(x: number) => Rgb} colour @param {string} name
   * @param {Table[]} tables of both passes, for the tooltip */
  _map(n, table, colour, name, tables) {
    const { app } = this;
    const run = app.runs[n];
    const apart = !sameShape(app.runs[0], app.runs[1]);
    const values = apart ? [n] : [0, 1]; // the passes that have this head
    return grid(app, run, {
      name,
      chosen: apart && n === 1 ? [this._at(1)] : app.state.heads,
      order: (row) => orderedHeads(run.layers[row], [], "model"),
      choose: (at, event) => (apart && n === 1 ? app.set({ head2: run.label(at) }) : app.choose(at, event, "compare")),
      cell: ([row, head]) => {
        const x = table[row][head];
        return { colour: x === null ? null : colour(x), text: x === null ? "" : cellText(x) };
      },
      notes: (at) => {
        const [row, head] = at;
        return [`head ${run.label(at)}`, ...values.map((each) => [PANELS[each], format(tables[each][row][head], 4)])];
      },
    });
  }

  /** @param {Run} a @param {Run} b */
  _updateMatrices(a, b) {
    const { app, unit } = this;
    const heads = [this._at(0), this._at(1)];
    const same = sameShape(a, b);
    const change = same ? this._changeSource(a, b, heads[0], unit) : null;
    this.head.replaceChildren(
      h(
        "div",
        { class: "hw-controls hw-compare-head" },
        h("b", { class: "hw-big", text: same ? `head ${a.label(heads[0])}` : "one head of each" }),
        !a.long && !b.long && unitChoice(app, unit),
        h("span", { class: "soft", text: same ? movedWeight(a, b, heads[0], unit) : "" }),
      ),
    );
    const sources = [a, b].map((run, n) => matrixSource(app, run, [heads[n]], unit));
    [...sources, change].forEach((source, n) => {
      this.panels[n].hidden = !source;
      if (source) this.heatmaps[n].show(source, true);
    });
    [a, b].forEach((run, n) => {
      const title = /** @type {HTMLElement} */ (this.panels[n].firstChild);
      title.textContent = same ? PANELS[n] : `${PANELS[n]}: ${run.json.name}, head ${run.label(heads[n])}`;
    });
    const text = `The texts have not as many ${unit}, so that one matrix cannot be subtracted from the other.`;
    this.message.replaceChildren(change || !same ? "" : h("p", { class: "soft", text }));
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
    const root = hasRootScale(a);
    /** @param {number} n */
    const colour = (n) => {
      const share = root ? Math.sign(change[n]) * Math.sqrt(Math.abs(change[n]) / most) : change[n] / most;
      return pick(colours, 0.5 + share / 2);
    };
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
    const passes = app.runs.map((run, n) => {
      const at = this._at(n);
      const [from, to] = [run.names(at[0], "from", unit), run.names(at[0], "to", unit)];
      return { from, to, weight: i < from.length && j < to.length ? run.weight(at, unit, i, j) : null };
    });
    const own = passes[panel === 1 ? 1 : 0];
    const [x, y] = passes.map(({ weight }) => weight);
    /** @type {Note[]} */
    const notes = [`${visible(own.from[i] ?? "", 24)} → ${visible(own.to[j] ?? "", 24)}`];
    if (panel !== 1 && x) notes.push(["first", weightText(x)]);
    if (panel !== 0 && y) notes.push(["second", weightText(y)]);
    if (panel === 2 && x && y && !x.atMost && !y.atMost) notes.push(["difference", format(y.value - x.value, 4)]);
    return notes;
  }
}

/** A change in words: "it → animal 0.68 → 0.28 in head 3.1". @param {Run} run @param {Change} change
 * @returns {(string | Node)[]} */
function changeWords(run, { at, from, to, before, after }) {
  return [
    tokenElement(from, { class: "hw-word" }),
    " → ",
    tokenElement(to, { class: "hw-word key" }),
    ` ${format(before, 2)} → ${format(after, 2)} in head ${run.label(at)}`,
  ];
}

/** What a model's pass has to follow, in words. @param {Run} run @returns {Node[]} */
function followWords(run) {
  const { follow, name } = run.json;
  if (!follow || run.long) return [];
  const { words } = run.texts[0];
  const weight = run.weight(follow.head, "words", follow.word, follow.to).value;
  return [
    h(
      "p",
      { class: "hw-lead first" },
      `${name}: `,
      tokenElement(words[follow.word], { class: "hw-word" }),
      " looks at ",
      tokenElement(words[follow.to], { class: "hw-word key" }),
      ` with weight ${format(weight, 2)} in head ${run.label(follow.head)}.`,
    ),
  ];
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
  state: { head2: { initial: "" } }, // of the second model, where its heads are others
});
