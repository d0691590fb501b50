// A circuit: heads as nodes of a layered graph, its edges by effect, and how much of the metric it explains.
import { curveExtent, layoutGraph, nodeName, sizeShare } from "../lib/circuit_graph.js";
import { category, css, inkOn, pick, ramp } from "../lib/colour.js";
import { h, select } from "../lib/dom.js";
import { legend } from "../lib/heatmap.js";
import { consume } from "../lib/keys.js";
import { pointBox } from "../lib/placement.js";
import { registerView } from "../lib/registry.js";
import { colourScale, headValues } from "../lib/scores.js";
import { MOST_HEADS } from "../lib/state.js";
import { svg } from "../lib/svg.js";
import { cellText, format, plural, thousands, visible } from "../lib/text.js";

/** @import { App } from "../app.js" */
/** @import { Circuit, CircuitEdge, CurvePoint, Graph, PlacedNode, Triple } from "../lib/circuit_graph.js" */
/** @import { Note } from "../lib/dom.js" */
/** @import { Head, Run } from "../lib/run.js" */

/**
 * @typedef {{ kind: string, layer: number, head: number, effect: number, low: number | null, high: number | null }} Row
 * @typedef {object} EffectTable
 * @property {string} name
 * @property {string} method
 * @property {string[]} notes
 * @property {Row[]} heads strongest first
 * @property {[string, number][]} rest what is not a head
 */

const SIZES = ["20", "40", "80", "160", "all"];
const ROW = 40; // pixels from one row of nodes to the next
const COLUMNS = { least: 50, most: 86, all: 860 }; // pixels: of one column, and of all
const NODE = { width: 44, height: 22 };
const EDGE = { top: 34, left: 74 }; // pixels around the nodes
const WIDEST = 7; // pixels of the strongest edge
const CHART = { width: 340, height: 190, left: 34, bottom: 30, top: 8, right: 10 };
const LISTED = 10;

/** Where an edge ends on its target, by what it feeds. @type {Record<string, number>} */
const PLACES = { query: -0.3, key: 0, value: 0.3, input: 0 };
const LINES = ["faithfulness", "completeness", "random"];
/** @type {Record<string, string>} */
const MEANINGS = {
  faithfulness: "what the circuit alone keeps of the metric, all other edges from the corrupted run",
  completeness: "what is lost without the circuit",
  random: "faithfulness of random circuits of the same size",
};

export class CircuitView {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    /** @type {HTMLElement} */
    this.el = h("div", { class: "hw-circuit" });
  }

  /** @returns {Circuit} */
  get circuit() {
    return this.app.run.json.circuit;
  }

  update() {
    const { app, circuit } = this;
    const { edges } = app.state;
    const graph = layoutGraph(circuit, edges === "all" ? circuit.edges.length : Number(edges));
    this.el.replaceChildren(
      h(
        "div",
        { class: "hw-main" },
        this._story(),
        this._controls(graph),
        h("div", { class: "hw-graph" }, this._graph(graph)),
      ),
      h(
        "aside",
        { class: "hw-side" },
        this._curveCard(),
        ...(app.run.json.effects ?? []).map((/** @type {EffectTable} */ table) => this._effectCard(table)),
        this._edgeCard(),
      ),
    );
  }

  _story() {
    const { metric, clean, corrupted, prompts, method, size, total } = this.circuit;
    const other = this.app.run.json.corrupted;
    const of = total ? `${thousands(size)} of ${plural(total, "edge")}` : plural(size, "edge");
    return h(
      "p",
      { class: "hw-lead first" },
      other && h("span", { class: "soft", text: "corrupted: " }),
      other && h("bdi", { text: visible(other, 220) }),
      other && h("br"),
      `${metric}: ${format(clean, 2)} on the clean ${prompts === 1 ? "prompt" : "prompts"}, `,
      `${format(corrupted, 2)} on the corrupted. `,
      h("span", {
        class: "soft",
        text: `${prompts === 1 ? "1 pair" : `means over ${prompts} pairs`} of prompts; ${of} by ${method}.`,
      }),
    );
  }

  /** @param {Graph} graph */
  _controls({ edges, nodes }) {
    const { app, circuit } = this;
    const { run, state } = app;
    const signed = run.json.signed ?? [];
    const { low, high, colours } = this._colours();
    /** @type {[string, string][]} */
    const sizes = SIZES.filter((size) => size === "all" || Number(size) < circuit.edges.length).map((size) => [
      size,
      size === "all" ? `${circuit.edges.length}` : size,
    ]);
    const shown = sizes.some(([size]) => size === state.edges) ? state.edges : "all";
    return h(
      "div",
      { class: "hw-controls" },
      select("strongest edges", sizes, shown, (value) => app.set({ edges: value })),
      signed.length > 0 &&
        select(
          "heads coloured by",
          signed.map((name) => [name, name]),
          this._stat,
          (stat) => app.set({ stat }),
        ),
      signed.length > 0 && legend(colours, format(low, 2), format(high, 2)),
      h("span", {
        class: "soft",
        text: [
          `${plural(edges.length, "edge")}: into the left of a head for its query, the middle for its key, the right for`,
          "its value.",
          nodes.some(({ type }) => type === "kv") ? "A KV head is below the heads that share it." : "",
        ].join(" "),
      }),
    );
  }

  /** The effect that heads are coloured by. */
  get _stat() {
    const signed = this.app.run.json.signed ?? [];
    return signed.includes(this.app.state.stat) ? this.app.state.stat : (signed[0] ?? "");
  }

  _colours() {
    const { run, state, theme } = this.app;
    return colourScale(run, this._stat, state.palette, theme, headValues(run, this._stat));
  }

  /** The query heads of a node: a head's own, or those that share a KV head. @param {PlacedNode} node
   * @returns {Head[]} */
  _heads({ kind, layer, head, heads }) {
    const numbers = head === undefined ? (heads ?? []) : [head];
    return numbers.map((number) => this._at({ kind, layer, head: number })).filter((at) => at !== null);
  }

  /** The head of a node among the layers of the pass. @param {{ kind?: string, layer: number, head?: number }} node
   * @returns {Head | null} */
  _at({ kind, layer, head }) {
    const row = this.app.run.layers.findIndex((other) => other.kind === kind && other.index === layer);
    return row < 0 || head === undefined || head >= this.app.run.layers[row].heads ? null : [row, head];
  }

  /** @param {Graph} graph */
  _graph(graph) {
    const { rows, columns, nodes, edges } = graph;
    const room = Math.min(COLUMNS.all, this.app.root.clientWidth - EDGE.left - 30); // a narrow window has less
    const column = Math.max(COLUMNS.least, Math.min(COLUMNS.most, room / columns));
    const [width, height] = [columns * column + EDGE.left, (rows.length - 1) * ROW + 2 * EDGE.top];
    const places = new Map(nodes.map((node) => [node.id, node]));
    /** @param {PlacedNode} node @returns {[number, number]} */
    const point = ({ x, y }) => [EDGE.left + x * columns * column, height - EDGE.top - y * ROW];
    const most = Math.max(...edges.map(({ score }) => Math.abs(score)), 1e-12);
    const title = `circuit of ${plural(edges.length, "edge")} between ${plural(nodes.length, "node")}`;
    const labels = rows.map((row, y) => svg("text", { class: "row", x: 4, y: height - EDGE.top - y * ROW + 4 }, row));
    const lines = [...edges].reverse().map((edge) => {
      const [from, to] = [places.get(edge.from), places.get(edge.to)];
      if (!from || !to) return null;
      return this._edge(edge, point(from), point(to), Math.abs(edge.score) / most, widthOf(to, column));
    });
    return svg(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": title },
      ...labels,
      svg("g", { class: "edges" }, ...lines),
      ...nodes.map((node) => this._node(node, point(node), widthOf(node, column))),
    );
  }

  /** @param {CircuitEdge} edge @param {[number, number]} from @param {[number, number]} to @param {number} share
   * @param {number} width of the target */
  _edge(edge, [x1, y1], [x2, y2], share, width) {
    const { app } = this;
    const [start, end] = [y1 - NODE.height / 2, y2 + NODE.height / 2];
    const place = x2 + (PLACES[edge.input] ?? 0) * width;
    const bend = Math.max(18, (start - end) * 0.45);
    const colours = ramp("diverging", app.theme);
    const line = svg("path", {
      d: `M${x1} ${start}C${x1} ${start - bend} ${place} ${end + bend} ${place} ${end}`,
      class: "edge",
      stroke: css(pick(colours, edge.score < 0 ? 0.12 : 0.88)),
      "stroke-width": (0.6 + (WIDEST - 0.6) * share).toFixed(2),
      "stroke-opacity": (0.25 + 0.6 * share).toFixed(2),
      "data-from": edge.from,
      "data-to": edge.to,
    });
    line.addEventListener("pointermove", (event) => app.tooltip.show(pointBox(event), this._edgeNotes(edge)));
    line.addEventListener("pointerleave", () => app.tooltip.hide());
    return line;
  }

  /** @param {string} id */
  _name(id) {
    const node = this.circuit.nodes.find((other) => other.id === id);
    return node ? nodeName(node) : id;
  }

  /** @param {CircuitEdge} edge */
  _edgeName({ from, to, input }) {
    return `${this._name(from)} → ${input === "input" ? "" : `${input} of `}${this._name(to)}`;
  }

  /** @param {CircuitEdge} edge @returns {Note[]} */
  _edgeNotes(edge) {
    return [this._edgeName(edge), ["score", withInterval(edge.score, edge.low, edge.high)]];
  }

  /** @param {PlacedNode} node @returns {Note[]} */
  _nodeNotes(node) {
    const { run } = this.app;
    const at = node.type === "head" ? this._at(node) : null;
    const edges = this.circuit.edges.filter(({ from, to }) => from === node.id || to === node.id);
    const effects = at
      ? (run.json.signed ?? []).map((name) => [name, format(headValues(run, name)[at[0]][at[1]], 3)])
      : [];
    return [
      node.type === "head"
        ? `head ${nodeName(node)}`
        : `${node.type}${node.type === "feed-forward" ? ` of layer ${node.layer}` : ""}`,
      ...effects,
      ...edges.slice(0, 6).map((edge) => [this._edgeName(edge), format(edge.score, 3)]),
      ...(this._heads(node).length ? ["click: its attention on the clean prompt"] : []),
    ];
  }

  /** @param {PlacedNode} node @param {[number, number]} point @param {number} width */
  _node(node, [x, y], width) {
    const { app } = this;
    const heads = this._heads(node);
    const [at] = node.type === "head" ? heads : [null];
    const { low, high, colours } = this._colours();
    const value = at && this._stat ? headValues(app.run, this._stat)[at[0]][at[1]] : null;
    const rgb = value === null ? null : pick(colours, (value - low) / (high - low || 1));
    const chosen = at && app.state.heads.some((other) => String(other) === String(at));
    const name = nodeName(node);
    const el = svg(
      "g",
      {
        class: `node ${node.type}${chosen ? " chosen" : ""}`,
        "data-node": node.id,
        "data-key": `node:${node.id}`,
        tabindex: 0,
        role: heads.length ? "button" : "img",
        "aria-label": this._nodeNotes(node)
          .map((note) => (Array.isArray(note) ? note.join(" ") : note))
          .join(", "),
      },
      svg("rect", {
        x: x - width / 2,
        y: y - NODE.height / 2,
        width,
        height: NODE.height,
        rx: 6,
        fill: rgb && css(rgb),
      }),
      svg("text", { x, y: y + 4, "text-anchor": "middle", fill: rgb && inkOn(rgb) }, name),
    );
    const mark = (/** @type {boolean} */ on) => this._mark(node.id, on);
    el.addEventListener("pointerenter", () => {
      mark(true);
      app.tooltip.show(el.getBoundingClientRect(), this._nodeNotes(node));
    });
    el.addEventListener("pointerleave", () => {
      mark(false);
      app.tooltip.hide();
    });
    el.addEventListener("focus", () => mark(true));
    el.addEventListener("blur", () => mark(false));
    if (heads.length) {
      const show = () => app.set({ heads: heads.slice(0, MOST_HEADS), view: app.headView });
      el.addEventListener("click", (event) => (at ? app.choose(at, event, app.headView) : show()));
      el.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        consume(event);
        show();
      });
    }
    return el;
  }

  /** Mark the edges of a node. @param {string} id @param {boolean} on */
  _mark(id, on) {
    this.el.classList.toggle("marking", on);
    for (const line of this.el.querySelectorAll(".edge")) {
      const own = line.getAttribute("data-from") === id || line.getAttribute("data-to") === id;
      line.classList.toggle("marked", on && own);
    }
  }

  /** Faithfulness, completeness and random circuits over sizes. */
  _curveCard() {
    const { curve, size, notes } = this.circuit;
    if (!curve.length) return null;
    const numbers = ["edges", ...LINES];
    /** @param {Triple} triple */
    const cell = (triple) => {
      const mean = triple?.[0] ?? null;
      if (mean === null) return h("td", { text: "–" });
      return h("td", { text: cellText(mean), title: withInterval(mean, triple?.[1], triple?.[2]) });
    };
    return h(
      "div",
      { class: "hw-card" },
      h("h3", { text: "How much it explains, by number of edges" }),
      this._chart(curve),
      ...LINES.map((line, n) =>
        h(
          "p",
          { class: "soft dot", style: { "--hw-dot": css(this._line(n)) } },
          h("b", { text: line }),
          ` ${MEANINGS[line]}`,
        ),
      ),
      h(
        "table",
        { class: "hw-table" },
        h("thead", {}, h("tr", {}, ...numbers.map((text) => h("th", { scope: "col", text })))),
        h(
          "tbody",
          {},
          ...curve.map(({ edges, faithfulness, completeness, random }) =>
            h(
              "tr",
              { class: edges === size ? "own" : "" },
              h("th", { scope: "row", text: thousands(edges) }),
              cell(faithfulness),
              cell(completeness),
              cell(random),
            ),
          ),
        ),
      ),
      ...notes.map((text) => h("p", { class: "soft", text })),
    );
  }

  /** @param {number} n */
  _line(n) {
    return category([1, 0, 6][n], this.app.theme);
  }

  /** @param {CurvePoint[]} curve */
  _chart(curve) {
    const { width, height, left, bottom, top, right } = CHART;
    const [low, high] = curveExtent(curve);
    const sizes = curve.map(({ edges }) => edges);
    const x = (/** @type {number} */ edges) => left + sizeShare(sizes, edges) * (width - left - right);
    const y = (/** @type {number} */ value) => top + ((high - value) / (high - low)) * (height - top - bottom);
    const grid = [0, 0.5, 1].flatMap((value) => [
      svg("path", { class: "grid", d: `M${left} ${y(value)}H${width - right}` }),
      svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, String(value)),
    ]);
    const ends = [...new Set([Math.min(...sizes), Math.max(...sizes)])].map((edges, n) =>
      svg("text", { x: x(edges), y: height - 10, "text-anchor": n ? "end" : "start" }, plural(edges, "edge")),
    );
    const lines = LINES.flatMap((name, n) => {
      const points = curve.flatMap((point) => {
        const triple = /** @type {any} */ (point)[name];
        return triple?.[0] !== null && triple?.[0] !== undefined
          ? [{ at: x(point.edges), mean: triple[0], low: triple[1], high: triple[2] }]
          : [];
      });
      const colour = css(this._line(n));
      const banded = points.filter((point) => point.low !== null && point.high !== null);
      const upper = banded.map((point) => `${point.at.toFixed(1)} ${y(point.high).toFixed(1)}`);
      const lower = banded.reverse().map((point) => `${point.at.toFixed(1)} ${y(point.low).toFixed(1)}`);
      const band =
        upper.length > 1
          ? svg("path", { class: "band", fill: colour, d: `M${[...upper, ...lower].join("L")}Z` })
          : null;
      const path = points.map(({ at, mean }) => `${at.toFixed(1)} ${y(mean).toFixed(1)}`).join("L");
      const dots = points.map(({ at, mean }) => svg("circle", { cx: at, cy: y(mean), r: 2.5, fill: colour }));
      return [band, svg("path", { class: "line", "data-line": name, stroke: colour, d: `M${path}` }), ...dots];
    });
    const label = "share of the metric by number of edges; the table below has the numbers";
    return svg(
      "svg",
      { class: "hw-curve", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
      ...grid,
      ...ends,
      ...lines,
    );
  }

  /** The strongest heads by one effect. @param {EffectTable} table */
  _effectCard({ name, method, notes, heads, rest }) {
    const strongest = [...rest].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, LISTED);
    return h(
      "div",
      { class: "hw-card" },
      h("h3", { text: `Strongest heads: ${name}` }),
      h("p", { class: "soft", text: method }),
      h(
        "table",
        { class: "hw-table", data: { effect: name } },
        h("tbody", {}, ...heads.slice(0, LISTED).map((row) => this._effectRow(row))),
      ),
      strongest.length > 0 &&
        h(
          "details",
          {},
          h("summary", { text: "what is not a head" }),
          h(
            "table",
            { class: "hw-table" },
            h(
              "tbody",
              {},
              ...strongest.map(([part, effect]) =>
                h("tr", {}, h("th", { scope: "row", text: part }), h("td", { text: format(effect, 3) })),
              ),
            ),
          ),
        ),
      ...notes.map((text) => h("p", { class: "soft", text })),
    );
  }

  /** @param {Row} row */
  _effectRow(row) {
    const { app } = this;
    const at = this._at(row);
    const name = at ? app.run.label(at) : `${row.layer}.${row.head}`;
    const link = { type: "button", class: "hw-link", text: name, data: { key: `effect:${name}` } };
    return h(
      "tr",
      {},
      h(
        "th",
        { scope: "row" },
        at ? h("button", { ...link, on: { click: (event) => app.choose(at, event, app.headView) } }) : name,
      ),
      h("td", { text: format(row.effect, 3) }),
      h("td", { class: "soft", text: row.low === null ? "" : `${format(row.low, 2)} to ${format(row.high, 2)}` }),
    );
  }

  _edgeCard() {
    return h(
      "div",
      { class: "hw-card" },
      h("h3", { text: "Strongest edges" }),
      h(
        "table",
        { class: "hw-table" },
        h(
          "tbody",
          {},
          ...this.circuit.edges
            .slice(0, LISTED)
            .map((edge) =>
              h(
                "tr",
                {},
                h("th", { scope: "row", text: this._edgeName(edge) }),
                h("td", { text: format(edge.score, 3), title: withInterval(edge.score, edge.low, edge.high) }),
              ),
            ),
        ),
      ),
    );
  }
}

/** @param {number} mean @param {number | null} [low] @param {number | null} [high] */
function withInterval(mean, low, high) {
  const ends = low === null || low === undefined || high === null || high === undefined;
  return ends ? format(mean, 3) : `${format(mean, 3)} (${format(low, 2)} to ${format(high, 2)})`;
}

/** The width of a node in pixels. @param {PlacedNode} node @param {number} column pixels of a column */
function widthOf({ type, span }, column) {
  if (type === "kv") return span * column - (column - NODE.width);
  return type === "embedding" || type === "output" ? NODE.width * 2.2 : NODE.width;
}

registerView({
  name: "circuit",
  label: "Circuit",
  order: 0,
  available: (app) => Boolean(app.run.json.circuit),
  create: (app) => new CircuitView(app),
  state: { edges: { initial: "40", allowed: SIZES } },
});
