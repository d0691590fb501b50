// One head, or several in colours: links between tokens, and the matrix.
import { ramp } from "../lib/colour.js";
import { choice, h, notesText, reveal, toggle } from "../lib/dom.js";
import { Heatmap, legend } from "../lib/heatmap.js";
import { LinkDiagram } from "../lib/links.js";
import { hasRootScale, matrixSource, shownMatrix } from "../lib/matrix.js";
import { chosenHeads, overlayButton, updateNavigator } from "../lib/navigator.js";
import { registerView } from "../lib/registry.js";
import { sentence, unitChoice } from "../lib/sentence.js";
import { format, plural, visible, weightText } from "../lib/text.js";

/** @import { App } from "../app.js" */
/** @import { Note } from "../lib/dom.js" */
/** @import { Position } from "../lib/heatmap.js" */
/** @import { Head, Run, Weight } from "../lib/run.js" */

const LISTED = 8; // heads in a tooltip

/** Strongest first. @param {{ weight: Weight }} a @param {{ weight: Weight }} b */
function byWeight(a, b) {
  return b.weight.value - a.weight.value;
}

export class HeadView {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.links = new LinkDiagram(app);
    this.heatmap = new Heatmap(app, {
      hover: (at, box) => (at ? app.tooltip.show(box, this._notes(at)) : app.tooltip.hide()),
      click: ([i]) => app.set({ token: app.unit === "words" ? this._queryText().of.indexOf(i) : i }),
      say: (at) => notesText(this._notes(at)),
    });
    this.top = h("div", { class: "hw-top" });
    this.side = h("div", {});
    this.legend = h("div", {});
    const links = h("section", { class: "hw-panel links" }, h("h3", { text: "Links" }), this.links.el);
    const matrix = h("section", { class: "hw-panel" }, h("h3", { text: "Matrix" }), this.heatmap.el, this.legend);
    /** @type {HTMLElement} */
    this.el = h(
      "div",
      { class: "hw-head" },
      this.side,
      h("div", { class: "hw-main" }, this.top, h("div", { class: "hw-pair" }, links, matrix)),
    );
  }

  _queryText() {
    const { run, state } = this.app;
    return run.text(state.heads[0][0], "from");
  }

  /** The tooltip of one weight. @param {Position} position @returns {Note[]} */
  _notes([i, j]) {
    const { run, state, unit } = this.app;
    const [row] = state.heads[0];
    const from = visible(run.names(row, "from", unit)[i], 30);
    const to = visible(run.names(row, "to", unit)[j], 30);
    const weights = state.heads.map((at) => ({ at, weight: run.weight(at, unit, i, j) }));
    const strongest = weights.length > LISTED ? weights.sort(byWeight).slice(0, LISTED) : weights;
    return [
      `${from} → ${to}`,
      ...strongest.map(({ at, weight }) => [`head ${run.label(at)}`, weightText(weight)]),
      ...(run.long ? [`tokens ${i} and ${j}`] : []),
    ];
  }

  update() {
    const { app } = this;
    const { run, state, unit } = app;
    updateNavigator(this.side, app, run);
    this.top.replaceChildren(this._controls(run), sentence(app, run));
    for (const line of this.top.querySelectorAll(".hw-sentence.dense")) reveal(line, line.querySelector(".chosen"));
    this.links.show(run, state.heads, { unit, pinned: app.token(unit), bare: state.bare });
    this.heatmap.show(matrixSource(app, run, state.heads, unit), true);
    this._updateLegend(run);
    this._fetchSteps(run);
  }

  /** @param {Run} run */
  _controls(run) {
    const { app } = this;
    const { bare, reduce } = app.state;
    const fixed = { title: "long texts are shown in pieces", "aria-disabled": true, class: "hw-choice disabled" };
    /** @type {[string, string][]} */
    const reductions = [
      ["max", "its largest weight"],
      ["mean", "its mean"],
    ];
    return h(
      "div",
      { class: "hw-controls" },
      chosenHeads(app, run),
      overlayButton(app, run),
      unitChoice(app, app.unit, run.long ? fixed : {}),
      toggle("without punctuation and special tokens", bare, (value) => app.set({ bare: value })),
      run.long && choice("a square shows", reductions, reduce, (value) => app.set({ reduce: value })),
    );
  }

  /** @param {Run} run */
  _updateLegend(run) {
    const { app } = this;
    const { heads, palette, reduce } = app.state;
    const { top } = shownMatrix(run, heads[0], app.unit, reduce);
    const mixed = "Colours mix where heads look at the same; a number is the largest of theirs.";
    const scale = hasRootScale(run) ? "Colours follow the square root of the weight. " : "";
    this.legend.replaceChildren(
      heads.length === 1
        ? legend(ramp(palette, app.theme), "0", format(top, 2))
        : h("p", { class: "soft", text: mixed }),
      h("p", { class: "soft", text: `${scale}${exactness(run, heads[0])} Wheel or + and − zoom, dragging pans.` }),
    );
  }

  /** With a server behind the page: fetch q, k and v of long inputs, which make every row exact. @param {Run} run */
  async _fetchSteps(run) {
    const { app } = this;
    if (!app.live || !run.long) return;
    for (const at of app.state.heads) if (!run.steps(at)) await app.fetchSteps(run, at);
  }
}

/** How exact the numbers of a head are. @param {Run} run @param {Head} at */
function exactness(run, at) {
  if (run.form === "f32") return "Every number is as the model computed it.";
  if (run.form === "u8") return "Weights are stored in one byte each; a number on hover says how far it may be off.";
  const { k, reduced } = run.json.weights[at[0]];
  const side = plural(reduced.cell, "token");
  if (run.exactRow(at, 0)) return `Zoomed in, every weight is exact; from afar, a square is ${side} a side.`;
  const links = `the ${plural(k, "strongest link")} of each token ${k === 1 ? "is" : "are"} exact`;
  return `A square is ${side} a side. Zoomed in, ${links}; of the others this page knows the square's.`;
}

registerView({
  name: "head",
  label: "Head",
  order: 2,
  create: (app) => new HeadView(app),
});
