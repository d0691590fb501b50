// With a model behind the page: which heads raise the logit of one next token over another, directly.
import { pick } from "../lib/colour.js";
import { h } from "../lib/dom.js";
import { grid, moveFocus } from "../lib/grid.js";
import { legend } from "../lib/heatmap.js";
import { registerView } from "../lib/registry.js";
import { causesKey } from "../lib/requests.js";
import { orderedHeads, signedScale } from "../lib/scores.js";
import { cellText, format, visible } from "../lib/text.js";

/** @import { App } from "../app.js" */
/** @import { Head, Run, Table } from "../lib/run.js" */

/**
 * @typedef {{ text: string, probability: number }} Prediction
 * @typedef {object} Causes as headwise.ui.causes gives them
 * @property {string} [refusal] why there are none
 * @property {Prediction} answer
 * @property {Prediction} other
 * @property {Prediction[]} predictions
 * @property {number} value of the metric
 * @property {string} method
 * @property {string[]} notes
 * @property {Table} effects
 * @property {[string, number][]} rest
 */

const LISTED = 8;

export class CausesView {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    /** @type {HTMLElement} */
    this.el = h("div", { class: "hw-map hw-causes", on: { keydown: (event) => moveFocus(this.el, event) } });
  }

  update() {
    const { run, state, requests } = this.app;
    requests?.fetchCauses(run, state.answer, state.other);
    /** @type {Causes | null} */
    const causes = run.causes.get(causesKey(state.answer, state.other)) ?? null;
    const main = causes ? this._main(run, causes) : [h("p", { class: "soft", role: "status", text: "Measuring …" })];
    this.el.replaceChildren(
      h("div", { class: "hw-main" }, ...main),
      h("aside", { class: "hw-side" }, ...(causes && !causes.refusal ? this._side(run, causes) : [])),
    );
    if (!this.el.querySelector('.cell[tabindex="0"]')) this.el.querySelector(".cell")?.setAttribute("tabindex", "0");
  }

  /** @param {Run} run @param {Causes} causes */
  _main(run, causes) {
    const { state } = this.app;
    if (causes.refusal) {
      const chosen = Boolean(state.answer || state.other);
      return [h("p", { class: "hw-refusal", role: "alert", text: causes.refusal }), chosen && this._reset()];
    }
    return [this._story(causes), this._tokens(causes), this._grid(run, causes)];
  }

  _reset() {
    return h("button", {
      type: "button",
      class: "hw-small",
      text: "back to the model's own predictions",
      data: { key: "causes-reset" },
      on: { click: () => this.app.set({ answer: "", other: "" }) },
    });
  }

  /** @param {Causes} causes */
  _story({ answer, other, value }) {
    return h(
      "p",
      { class: "hw-lead first" },
      h("bdi", { class: "hw-word", text: visible(answer.text) }),
      ` (${format(answer.probability, 3)}) over `,
      h("bdi", { class: "hw-word key", text: visible(other.text) }),
      ` (${format(other.probability, 3)}): the logits differ by ${format(value, 2)}. `,
      h("span", { class: "soft", text: "Each head adds its number to that difference." }),
    );
  }

  /** The choice of both tokens. @param {Causes} causes */
  _tokens(causes) {
    return h(
      "div",
      { class: "hw-controls" },
      ...this._choice("answer", causes.answer, causes.predictions),
      ...this._choice("other", causes.other, causes.predictions),
    );
  }

  /** @param {"answer" | "other"} name @param {Prediction} chosen @param {Prediction[]} predictions */
  _choice(name, chosen, predictions) {
    const { app } = this;
    const list = `hw-${name}-tokens`;
    const label = name === "answer" ? "answer, with its space" : "compared with";
    return [
      h(
        "label",
        { class: "hw-field" },
        h("span", { text: label }),
        h("input", {
          value: chosen.text,
          list,
          size: 14,
          maxlength: 100,
          spellcheck: "false",
          autocomplete: "off",
          "aria-label": label,
          data: { key: `causes-${name}` },
          on: { change: (event) => app.set({ [name]: event.target.value }) },
        }),
      ),
      h(
        "datalist",
        { id: list },
        ...predictions.map(({ text, probability }) => h("option", { value: text, text: format(probability, 3) })),
      ),
    ];
  }

  /** @param {Run} run @param {Causes} causes */
  _grid(run, { effects }) {
    const { app } = this;
    const table = run.layers.map((layer, row) => effects[row] ?? Array(layer.heads).fill(null));
    const { low, high, colours } = signedScale(app.theme, table);
    return grid(app, run, {
      name: "heads by direct effect",
      chosen: app.state.heads,
      order: (row) => orderedHeads(run.layers[row], [], "model"),
      cell: ([row, head]) => {
        const value = table[row][head];
        if (value === null) return { colour: null, text: "" };
        return { colour: pick(colours, (value - low) / (high - low)), text: cellText(value) };
      },
      notes: ([row, head]) => [
        `head ${run.label([row, head])}`,
        ["direct effect", format(table[row][head], 4)],
        "click: its attention",
      ],
      choose: (at, event) => app.choose(at, event, app.headView),
    });
  }

  /** @param {Run} run @param {Causes} causes */
  _side(run, { effects, rest, method, notes }) {
    const { app } = this;
    const { low, high, colours } = signedScale(app.theme, effects);
    const heads = effects.flatMap((row, layer) =>
      (row ?? []).map((value, head) => ({ at: /** @type {Head} */ ([layer, head]), value: value ?? 0 })),
    );
    const strongest = heads.sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, LISTED);
    const others = [...rest].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, LISTED);
    return [
      h(
        "div",
        { class: "hw-card" },
        h("h3", { text: "direct effect" }),
        h("p", { text: method }),
        legend(colours, format(low, 2), format(high, 2)),
        ...notes.map((text) => h("p", { class: "soft", text })),
      ),
      h(
        "div",
        { class: "hw-card" },
        h("h3", { text: "Strongest heads" }),
        h(
          "div",
          { class: "hw-chips" },
          ...strongest.map(({ at, value }) =>
            h(
              "button",
              {
                type: "button",
                class: "hw-chip",
                data: { key: `cause:${at.join(".")}` },
                on: { click: (event) => app.choose(at, event, app.headView) },
              },
              h("b", { text: run.label(at) }),
              h("span", { text: format(value, 2) }),
            ),
          ),
        ),
      ),
      h(
        "div",
        { class: "hw-card" },
        h("h3", { text: "What is not a head" }),
        h(
          "table",
          { class: "hw-table" },
          h(
            "tbody",
            {},
            ...others.map(([name, effect]) =>
              h("tr", {}, h("th", { scope: "row", text: name }), h("td", { text: format(effect, 3) })),
            ),
          ),
        ),
      ),
    ];
  }
}

registerView({
  name: "causes",
  label: "Causes",
  order: 5,
  available: (app) => Boolean(app.live),
  create: (app) => new CausesView(app),
  state: { answer: { initial: "" }, other: { initial: "" } },
});
