// The atlas as a page: every head as a cell, coloured by one score; all scores of a chosen head; a table by role.
import { h } from "./lib/dom.js";
import { legend } from "./lib/heatmap.js";
import { placeLabels } from "./lib/labels.js";
import { figure, headings, pageHeader, resetFocus, roveFocus, Theme } from "./lib/report.js";
import { svg } from "./lib/svg.js";

/**
 * @typedef {(number | null)[][]} Table
 * @typedef {{ score: Table, low: Table, high: Table, baseline: (number | null)[] }} Score
 * @typedef {{ kind: string, layer: number, head: number, role: string, score: number, baseline: number }} Role
 * @typedef {{ kind: string, layer: number, head: number, x: number, y: number }} Point
 */

/**
 * @typedef {object} AtlasData as headwise.ui.atlas writes it
 * @property {string} title
 * @property {string} summary
 * @property {Record<string, number[]>} layers by kind
 * @property {Role[]} roles
 * @property {Record<string, Record<string, Score>>} scores by name and kind
 * @property {Record<string, string>} meanings of the scores
 * @property {Record<string, Point[]>} maps by kind
 * @property {Record<string, { score: string, words: string }>} definitions of the roles
 */

const LISTED = 6; // heads of a role
const MAP_LEAST = 300; // pixels across, for narrow windows
const MAP_MOST = 900;
const MAP_EDGE = 30;
const MAP_LABEL = { width: 29, height: 13 };

/** @type {AtlasData} */
const data = JSON.parse(/** @type {HTMLElement} */ (document.getElementById("atlas-data")).textContent || "{}");
const root = /** @type {HTMLElement} */ (document.getElementById("atlas"));
/** @type {HTMLSelectElement} */
const select = h("select", { id: "score", on: { change: drawGrids } });
const grids = h("div", { id: "grids" });
const meaning = h("div", { class: "hw-card" });
const theme = new Theme(root, drawGrids);
const detail = h(
  "div",
  { id: "detail", class: "hw-card", "aria-live": "polite" },
  h("p", { class: "soft", text: "Click a head for all that was measured of it." }),
);

/** @param {number | null} x */
function number(x) {
  return x === null ? "–" : x.toFixed(2);
}

/** @param {string} kind @param {number} layer @param {number} head */
function rolesOf(kind, layer, head) {
  return data.roles.filter((role) => role.kind === kind && role.layer === layer && role.head === head);
}

/** All scores of one head. @param {string} kind @param {number} row @param {number} head */
function showHead(kind, row, head) {
  const layer = data.layers[kind][row];
  const roles = rolesOf(kind, layer, head).map(({ role }) => role);
  const measured = Object.entries(data.scores).filter(([, kinds]) => kind in kinds);
  const lines = measured.map(([name, { [kind]: table }]) =>
    h(
      "tr",
      {},
      ...headings([name], "row"),
      h("td", {}, number(table.score[row][head])),
      h("td", {}, `${number(table.low[row][head])} to ${number(table.high[row][head])}`),
      h("td", {}, number(table.baseline[row])),
    ),
  );
  const columns = headings(["score", "mean", "95 % interval", "baseline"], "col");
  detail.replaceChildren(
    h("h2", {}, `${kind} ${layer}.${head}: ${roles.join(", ") || "no clean role"}`),
    h("table", {}, h("thead", {}, h("tr", {}, ...columns)), h("tbody", {}, ...lines)),
  );
}

/** The ends of a score's colour scale, over all kinds of attention. @returns {[number, number]} */
function extent() {
  const values = Object.values(data.scores[select.value])
    .flatMap(({ score }) => score.flat())
    .filter((x) => x !== null);
  return [Math.min(...values, 0), Math.max(...values)];
}

function drawGrids() {
  const kinds = Object.entries(data.scores[select.value]);
  const [least, most] = extent();
  grids.replaceChildren(...kinds.map(([kind, { score }]) => grid(kind, score)));
  resetFocus(grids);
  meaning.replaceChildren(
    h("h3", { text: select.value }),
    h("p", { text: data.meanings[select.value] || select.value }),
    legend(theme.colours, number(least), number(most)),
    h("p", { class: "soft", text: "An outlined head has a role." }),
  );
}

/** @param {string} kind @param {Table} table */
function grid(kind, table) {
  const [least, most] = extent();
  /** @param {number | null} value @param {number} row @param {number} head */
  const cell = (value, row, head) => {
    if (value === null) return h("td");
    const share = most > least ? (value - least) / (most - least) : 0;
    const layer = data.layers[kind][row];
    const roles = rolesOf(kind, layer, head).map(({ role }) => role);
    const button = h("button", {
      type: "button",
      class: roles.length ? "named" : "",
      title: `${layer}.${head} ${roles.join(", ")}`,
      text: number(value),
      on: { click: () => showHead(kind, row, head) },
    });
    theme.paint(button, share);
    return h("td", {}, button);
  };
  const rows = table.map((line, row) => {
    const cells = line.map((value, head) => cell(value, row, head));
    return h("tr", {}, ...headings([String(data.layers[kind][row])], "row"), ...cells);
  });
  const widest = Math.max(...table.map((line) => line.length));
  const columns = ["layer", ...Array.from({ length: widest }, (_, head) => String(head))];
  return h(
    "table",
    { class: "grid", style: { "--hw-heads": widest } },
    h("caption", {}, `${kind} attention: a row per layer, a column per head`),
    h("thead", {}, h("tr", {}, ...headings(columns, "col"))),
    h("tbody", {}, ...rows),
  );
}

/** The heads of a kind as points, near each other where they look alike. @param {string} kind @param {Point[]} points */
function similarityMap(kind, points) {
  const wide = Math.max(MAP_LEAST, Math.min(MAP_MOST, root.clientWidth - 2 * MAP_EDGE));
  const axes = [points.map(({ x }) => x), points.map(({ y }) => y)];
  const lows = axes.map((values) => Math.min(...values));
  const spans = axes.map((values, axis) => Math.max(...values) - lows[axis]);
  // one scale for both axes keeps distances
  const scale = (wide - 2 * MAP_EDGE) / Math.max(...spans, 1e-9);
  const room = { width: spans[0] * scale + 2 * MAP_EDGE, height: spans[1] * scale + 2 * MAP_EDGE };
  const items = points.map((point) => ({
    point,
    named: rolesOf(point.kind, point.layer, point.head).length > 0,
    x: MAP_EDGE + (point.x - lows[0]) * scale,
    y: MAP_EDGE + (point.y - lows[1]) * scale,
  }));
  items.sort((a, b) => Number(b.named) - Number(a.named)); // heads with a role have their labels nearest
  const labels = placeLabels(items, MAP_LABEL, room);
  const marks = items.map(({ point: { kind: own, layer, head }, named, x, y }, n) => {
    const label = labels[n]; // a crowded head has none, but a tooltip
    const mark = svg(
      "g",
      { class: named ? "named" : "" },
      svg("title", {}, `${layer}.${head}`),
      label && svg("line", { x1: x, y1: y, x2: label.x, y2: label.y }),
      svg("circle", { cx: x, cy: y, r: 3 }),
      label && svg("text", { x: label.x, y: label.y }, `${layer}.${head}`),
    );
    mark.addEventListener("click", () => showHead(own, data.layers[own].indexOf(layer), head));
    return mark;
  });
  const text =
    "Near each other: they spread their weight alike (Jensen-Shannon divergence). Coloured heads have a role." +
    (labels.includes(null) ? " Where there is no room for a label, it is shown on hover." : "");
  const drawing = figure("heads that look alike, side by side", `0 0 ${room.width} ${room.height}`, ...marks);
  drawing.setAttribute("class", "similar");
  drawing.style.maxWidth = `${room.width}px`; // its labels are as large as other text
  return h(
    "section",
    { class: "hw-card" },
    h("h2", {}, `Which ${kind} heads look alike`),
    h("p", { class: "soft" }, text),
    drawing,
  );
}

/** The roles, with the heads that have them. */
function roleTable() {
  const rows = Object.entries(data.definitions).flatMap(([name, { score, words }]) => {
    const roles = data.roles.filter(({ role }) => role === name);
    if (!roles.length && name.startsWith("offset")) return []; // dozens of empty rows would hide the rest
    const show = () => {
      select.value = score;
      drawGrids();
    };
    const items = roles.slice(0, LISTED).map((role) => {
      return `${role.layer}.${role.head} ${number(role.score)} (${number(role.baseline)})`;
    });
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, h("button", { type: "button", class: "link", text: name, on: { click: show } })),
      h("td", {}, String(roles.length)),
      h("td", {}, items.join(", ")),
      h("td", { class: "soft" }, words),
    );
  });
  return h(
    "section",
    { class: "hw-card" },
    h("h2", { text: "Roles" }),
    h("p", {
      class: "soft",
      text: "How many heads have the role, and the clearest: score and, in brackets, uniform attention's.",
    }),
    h("table", { id: "roles" }, h("tbody", {}, ...rows)),
  );
}

select.append(...Object.keys(data.scores).map((name) => h("option", { value: name }, name)));
select.value = data.roles.length ? data.definitions[data.roles[0].role].score : "entropy";
root.replaceChildren(
  pageHeader(theme, "atlas", data.title),
  h("p", { class: "hw-lead soft", text: data.summary }),
  h(
    "div",
    { class: "hw-report" },
    h("div", {}, h("label", { for: "score" }, "Colour by "), select, grids),
    h("aside", { class: "hw-side" }, meaning, detail),
  ),
  roleTable(),
  ...Object.entries(data.maps).map(([kind, points]) => similarityMap(kind, points)),
);
roveFocus(grids);
drawGrids();
