// All heads of a model as a grid, one row per layer: coloured by a statistic, by kind or role, or as small pictures.
import { category, css, pick } from "../lib/colour.js";
import { choice, h, select, tokenElement } from "../lib/dom.js";
import { grid, moveFocus } from "../lib/grid.js";
import { legend } from "../lib/heatmap.js";
import { hasRootScale } from "../lib/matrix.js";
import { hasImage, queryToken } from "../lib/patches.js";
import { registerView } from "../lib/registry.js";
import { byHead, colourScale, headValues, measureChoices, measures, orderedHeads, rankedHeads } from "../lib/scores.js";
import { cellText, format } from "../lib/text.js";

/** @import { App } from "../app.js" */
/** @import { Head, Run, Standout, Table } from "../lib/run.js" */

const VALUE = "value"; // a statistic or score
const KINDS = "kind"; // what stands out on this text
const ROLES = "role"; // from an atlas
const THUMBNAIL = "thumbnail";
const LISTED = 6; // heads in a list

/** @type {[string, string][]} */
const ORDERS = [
  ["model", "as in the model"],
  ["value", "each layer, highest first"],
  ["ranked", "all heads, highest first"],
  ["lowest", "all heads, lowest first"],
];

export class MapView {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    /** @type {HTMLElement} */
    this.el = h("div", { class: "hw-map", on: { keydown: (event) => moveFocus(this.el, event) } });
  }

  /** The heads that are listed beside the map, and coloured by kind or role. @returns {Standout[]} */
  get listed() {
    const { standouts, roles } = this.app.run.json;
    return this.app.state.paint === ROLES ? (roles ?? []) : standouts;
  }

  update() {
    const { run, state } = this.app;
    const table = headValues(run, state.stat);
    const main = h("div", { class: "hw-main" }, this._story(run), this._controls(run), this._grid(run, table));
    this.el.replaceChildren(
      main,
      h(
        "aside",
        { class: "hw-side" },
        state.paint === VALUE && this._scale(run, table),
        state.paint === THUMBNAIL && this._thumbnailCard(),
        state.paint === VALUE && this._ranking(run, table),
        this._listedCard(run),
      ),
    );
    if (!this.el.querySelector('.cell[tabindex="0"]')) this.el.querySelector(".cell")?.setAttribute("tabindex", "0");
  }

  /** @param {Run} run @param {Table} table */
  _grid(run, table) {
    const { app } = this;
    const { paint, order, stat, heads } = app.state;
    const named = paint === KINDS || paint === ROLES;
    const ranked = paint === VALUE && (order === "ranked" || order === "lowest");
    return grid(app, run, {
      cell: named ? this._namedCell() : this._valueCell(table),
      name: `heads by ${named ? paint : stat}`,
      chosen: heads,
      thumbnails: paint === THUMBNAIL,
      ranked: ranked ? rankedHeads(table, order === "lowest") : null,
      order: (row) => orderedHeads(run.layers[row], table[row], paint === VALUE ? order : "model"),
      choose: (at, event) => app.choose(at, event, app.headView),
    });
  }

  /** Cells coloured by value. @param {Table} table */
  _valueCell(table) {
    const { app } = this;
    const { stat, palette } = app.state;
    const { low, high, colours } = colourScale(app.run, stat, palette, app.theme, table);
    return (/** @type {Head} */ [row, head]) => {
      const value = table[row][head];
      if (value === null) return { colour: null, text: "" };
      return { colour: pick(colours, (value - low) / (high - low)), text: cellText(value) };
    };
  }

  /** Cells coloured by kind or role. */
  _namedCell() {
    const heads = byHead(this.listed);
    const kinds = this._kinds();
    return (/** @type {Head} */ at) => {
      const [first] = heads.get(at.join(".")) ?? [];
      if (!first) return { colour: null, text: "" };
      const colour = category(kinds.indexOf(first.kind), this.app.theme);
      return { colour, text: format(first.score, 2), role: first.kind };
    };
  }

  _kinds() {
    return [...new Set(this.listed.map(({ kind }) => kind))];
  }

  /** What is worth a look first: a word, and the head that links it best. @param {Run} run */
  _story(run) {
    const { app } = this;
    const { follow } = run.json;
    if (!follow) return null;
    const { words, of } = run.texts[0];
    const weight = run.weight(follow.head, "words", follow.word, follow.to).value;
    const target = { heads: [follow.head], token: of.indexOf(follow.word), key: of.indexOf(follow.to) };
    /** @param {string} text @param {string} view */
    const link = (text, view) =>
      h("button", {
        type: "button",
        class: "hw-small",
        text,
        data: { key: `story:${view}` },
        on: { click: () => app.set({ view, ...target }) },
      });
    return h(
      "p",
      { class: "hw-lead first" },
      tokenElement(words[follow.word], { class: "hw-word" }),
      " looks at ",
      tokenElement(words[follow.to], { class: "hw-word key" }),
      ` with weight ${format(weight, 2)} in head ${run.label(follow.head)}. `,
      hasImage(run) ? link("see it on the image", "image") : link("see its links", "head"),
      " ",
      link("see how it is computed", "steps"),
    );
  }

  /** @param {Run} run */
  _controls(run) {
    const { app } = this;
    const { state } = app;
    /** @type {[string, string][]} */
    const paints = [
      [THUMBNAIL, "where it looks"],
      [VALUE, Object.keys(run.json.scores).length ? "statistic or score" : "statistic"],
      [KINDS, "kind"],
      [ROLES, "role"],
    ];
    const available = paints.filter(([paint]) => paint !== ROLES || run.json.roles?.length);
    return h(
      "div",
      { class: "hw-controls" },
      choice("colour by", available, state.paint, (paint) => app.set({ paint })),
      state.paint === VALUE && select("statistic", measureChoices(run), state.stat, (stat) => app.set({ stat })),
      state.paint === VALUE && select("order", ORDERS, state.order, (order) => app.set({ order })),
    );
  }

  /** What the colours mean, and what uniform attention would have. @param {Run} run @param {Table} table */
  _scale(run, table) {
    const { app } = this;
    const { stat, palette } = app.state;
    const { low, high, colours } = colourScale(run, stat, palette, app.theme, table);
    const baselines = (run.json.equal[stat] ?? []).filter((x) => x !== null);
    const equal = baselines.length ? baselines.reduce((a, b) => a + b, 0) / baselines.length : null;
    const beyond = equal !== null && equal > high;
    const mark =
      equal === null || beyond
        ? null
        : { at: (equal - low) / (high - low), text: `uniform attention: ${format(equal, 3)}` };
    const place = beyond ? ", more than any here" : " (the mark)";
    const baseline = `A head that looked at everything equally would have ${format(equal, 2)}${place}.`;
    return h(
      "div",
      { class: "hw-card" },
      h("h3", { text: stat }),
      h("p", { text: measures(run)[stat] }),
      legend(colours, format(low, 2), format(high, 2), mark),
      equal !== null && h("p", { class: "soft", text: baseline }),
    );
  }

  _thumbnailCard() {
    const { run, state, theme } = this.app;
    const more = theme === "dark" ? "Brighter" : "Darker";
    const from = run.names(0, "from", "pieces")[queryToken(run, 0, state.token)];
    const text = [
      hasImage(run)
        ? `Each square is one head: the patches of the image, by its weights from ${from}.`
        : "Each square is one head: a row for each token that looks, a column for each token looked at.",
      `${more} means more weight, relative to the head's largest${hasRootScale(run) ? " (square root)" : ""}.`,
    ];
    return h("div", { class: "hw-card" }, h("h3", { text: "where it looks" }), h("p", { text: text.join(" ") }));
  }

  /** @param {Run} run @param {Table} table */
  _ranking(run, table) {
    const top = rankedHeads(table, false).slice(0, LISTED);
    return h(
      "div",
      { class: "hw-card" },
      h("h3", { text: `Highest ${this.app.state.stat}` }),
      h("div", { class: "hw-chips" }, ...top.map((at) => this._chip(run, at, format(table[at[0]][at[1]], 2)))),
    );
  }

  /** The heads of each kind or role. @param {Run} run */
  _listedCard(run) {
    const roles = this.app.state.paint === ROLES;
    const kinds = this._kinds();
    return h(
      "div",
      { class: "hw-card" },
      h("h3", {
        text: roles
          ? "Roles, as the atlas measured them"
          : `Heads that stand out on this ${hasImage(run) ? "image" : "text"}`,
      }),
      kinds.length === 0 && h("p", { class: "soft", text: "None does here, or the text is too short to tell." }),
      ...kinds.map((kind, n) => {
        const members = this.listed.filter((standout) => standout.kind === kind);
        return this._kindList(run, members, n);
      }),
    );
  }

  /** @param {Run} run @param {Standout[]} members @param {number} n place of their colour */
  _kindList(run, members, n) {
    const { paint } = this.app.state;
    const dotted = paint === KINDS || paint === ROLES;
    const [{ kind, criterion }] = members;
    const rest = members.length - LISTED;
    return h(
      "div",
      { class: "hw-standout" },
      h("h4", {
        class: dotted ? "dot" : "",
        style: dotted ? { "--hw-dot": css(category(n, this.app.theme)) } : {},
        text: kind,
      }),
      paint !== ROLES && h("p", { class: "soft", text: criterion }),
      h(
        "div",
        { class: "hw-chips" },
        ...members.slice(0, LISTED).map(({ head, score }) => this._chip(run, head, format(score, 2))),
        rest > 0 && h("span", { class: "soft", text: rest === 1 ? "and 1 more head" : `and ${rest} more` }),
      ),
    );
  }

  /** @param {Run} run @param {Head} at @param {string} text */
  _chip(run, at, text) {
    return h(
      "button",
      {
        type: "button",
        class: "hw-chip",
        data: { key: `chip:${at.join(".")}:${text}` },
        on: { click: (event) => this.app.choose(at, event, this.app.headView) },
      },
      h("b", { text: run.label(at) }),
      h("span", { text }),
    );
  }
}

registerView({
  name: "map",
  label: "Map",
  order: 1,
  create: (app) => new MapView(app),
  state: {
    order: { initial: "model", allowed: ORDERS.map(([order]) => order) },
    paint: { initial: THUMBNAIL, allowed: [VALUE, KINDS, ROLES, THUMBNAIL] },
  },
});
