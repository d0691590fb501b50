// The grid of heads: one row per layer, one cell per head.
import { css, inkOn, pick, ramp } from "./colour.js";
import { h } from "./dom.js";
import { picture } from "./heatmap.js";
import { arrowStep, consume } from "./keys.js";
import { headColours, weightShare } from "./matrix.js";
import { patchWeights } from "./patches.js";
import { byHead, headValues, layersByKind } from "./scores.js";
import { format } from "./text.js";

/** @import { App } from "../app.js" */
/** @import { Rgb } from "./colour.js" */
/** @import { Note } from "./dom.js" */
/** @import { Head, Layer, Run } from "./run.js" */

const MOST_SCORES = 4; // that a tooltip lists; an atlas has dozens, then only the one that is shown
const FRAME = 12; // milliseconds of drawing between two frames
const ROWS = 6; // of a ranked grid, for the height of its cells

/**
 * @typedef {object} GridOptions
 * @property {string} name of the grid, for screen readers
 * @property {(at: Head) => { colour: Rgb | null, text: string, role?: string }} cell
 * @property {(row: number) => number[]} order of the heads of one layer
 * @property {(at: Head, event: MouseEvent) => void} choose
 * @property {Head[]} chosen
 * @property {(at: Head) => Note[]} [notes] of the tooltip
 * @property {boolean} [small] without numbers and headers
 * @property {boolean} [thumbnails] with pictures instead of numbers
 * @property {Head[] | null} [ranked] all heads in one list instead of one row per layer
 */

/** The tooltip of one head. @param {App} app @param {Run} run @param {Head} at @returns {Note[]} */
function headNotes(app, run, at) {
  const [row, head] = at;
  const { heads, kv } = run.layers[row];
  const { scores, statistics, standouts, roles } = run.json;
  const key = at.join(".");
  const shared = kv < heads ? `, reads KV head ${Math.floor(head / (heads / kv))}` : "";
  const off = run.off.has(key) ? " (switched off)" : "";
  const loaded = Object.keys(scores);
  const listed = loaded.filter((name) => loaded.length <= MOST_SCORES || name === app.state.stat);
  const values = [...Object.keys(statistics), ...listed].map((name) => ({
    name,
    value: headValues(run, name)[row][head],
  }));
  const image = thumbnail(app, run, at);
  image.className = "hw-thumb-large";
  return [
    `head ${run.label(at)}${shared}${off}`,
    ...values.filter(({ value }) => value !== null).map(({ name, value }) => [name, format(value, 4)]),
    ...(byHead(standouts).get(key) ?? []).map(({ kind, criterion }) => `${kind}: ${criterion}`),
    ...(byHead(roles ?? []).get(key) ?? []).map(({ kind, criterion }) => `role: ${kind}, ${criterion}`),
    image,
  ];
}

/** The grid of heads. @param {App} app @param {Run} run @param {GridOptions} options @returns {HTMLElement} */
export function grid(app, run, options) {
  const most = Math.max(...run.layers.map((layer) => layer.heads));
  const { ranked } = options;
  if (ranked) return h("div", { class: "hw-grids" }, rankedGrid(app, run, options, ranked, most));
  const groups = layersByKind(run);
  const sections = groups.map(([kind, rows]) =>
    h(
      "section",
      { class: "hw-kind" },
      groups.length > 1 && h("h3", { text: `${kind} attention` }),
      kindGrid(app, run, options, kind, rows, most),
    ),
  );
  return h("div", { class: "hw-grids" }, ...sections);
}

/** @param {App} app @param {Run} run @param {GridOptions} options @param {Head[]} ranked @param {number} most */
function rankedGrid(app, run, options, ranked, most) {
  const cells = ranked.map((at) => gridCell(app, run, at, options, run.label(at), false));
  const style = { "--hw-heads": most, "--hw-layers": ROWS };
  return h(
    "div",
    { class: "hw-grid ranked", role: "grid", "aria-label": options.name, style },
    h("div", { class: "row", role: "row" }, ...cells),
  );
}

/** The layers of one kind of attention.
 * @param {App} app @param {Run} run @param {GridOptions} options @param {string} kind @param {number[]} rows
 * @param {number} most heads of any layer */
function kindGrid(app, run, options, kind, rows, most) {
  const { small, thumbnails, order, name } = options;
  const [first] = rows.map((row) => run.layers[row]);
  const sorted = rows.some((row) => order(row).some((head, n) => head !== n));
  const grouped = !sorted && first.kv < first.heads;
  const classes = ["hw-grid", small && "small", grouped && "grouped", thumbnails && "thumbnails"];
  return h(
    "div",
    {
      class: classes.filter(Boolean).join(" "),
      role: "grid",
      "aria-label": `${name}, ${kind} attention`,
      style: { "--hw-heads": most, "--hw-layers": rows.length },
    },
    !small && grouped && kvHeader(first),
    !small && header(first, most, sorted, grouped),
    ...rows.map((row) => gridRow(app, run, row, options, sorted, grouped)),
  );
}

/** @param {Layer} layer @param {number} most @param {boolean} sorted @param {boolean} grouped */
function header(layer, most, sorted, grouped) {
  const size = layer.heads / layer.kv;
  const numbers = Array.from({ length: most }, (_, head) =>
    h("span", { class: grouped && head % size === 0 && head ? "group" : "", text: String(head) }),
  );
  return h(
    "div",
    { class: "row head", "aria-hidden": "true" },
    h("span", { class: "layer" }, !sorted && h("span", { text: "head →" }), h("span", { text: "layer ↓" })),
    ...(sorted ? [h("span", { class: "wide", text: "each layer's heads, highest first" })] : numbers),
  );
}

/** Which query heads share keys and values. @param {Layer} layer */
function kvHeader(layer) {
  const size = layer.heads / layer.kv;
  return h(
    "div",
    { class: "row head kv", "aria-hidden": "true" },
    h("span", { class: "layer" }),
    ...Array.from({ length: layer.kv }, (_, pair) =>
      h("span", {
        class: `pair${pair ? " group" : ""}`,
        style: { "--hw-span": size },
        text: `KV ${pair}`,
        title: `query heads ${pair * size} to ${(pair + 1) * size - 1} share key/value head ${pair}`,
      }),
    ),
  );
}

/** @param {App} app @param {Run} run @param {number} row @param {GridOptions} options @param {boolean} sorted
 * @param {boolean} grouped */
function gridRow(app, run, row, options, sorted, grouped) {
  const layer = run.layers[row];
  const size = layer.heads / layer.kv;
  /** @param {number} head */
  const cell = (head) => {
    const first = grouped && head % size === 0 && head > 0;
    return gridCell(app, run, [row, head], options, sorted ? String(head) : "", first);
  };
  return h(
    "div",
    { class: "row", role: "row" },
    h("span", { class: "layer", role: "rowheader", text: String(layer.index) }),
    ...options.order(row).map(cell),
  );
}

/** @param {App} app @param {Run} run @param {Head} at @param {GridOptions} options @param {string} name
 * @param {boolean} first whether a KV group begins here */
function gridCell(app, run, at, options, name, first) {
  const { chosen, choose, notes, small, thumbnails } = options;
  const { colour, text, role } = options.cell(at);
  const place = chosen.findIndex(([row, head]) => row === at[0] && head === at[1]);
  const off = run.off.has(at.join("."));
  const classes = ["cell", first && "group", place >= 0 && "chosen", off && "off", !colour && "none"];
  const label = [`head ${run.label(at)}`, role, text].filter(Boolean).join(": ");
  const cell = h("button", {
    type: "button",
    role: "gridcell",
    tabindex: place === 0 ? 0 : -1,
    "aria-selected": place >= 0,
    class: classes.filter(Boolean).join(" "),
    "aria-label": `${label}${off ? ", switched off" : ""}`,
    data: { key: `head:${at.join(".")}`, head: run.label(at) },
    style: colour && !thumbnails && !off ? { "background-color": css(colour), color: inkOn(colour) } : {},
    on: {
      click: (event) => choose(at, event),
      pointerenter: () => app.tooltip.show(cell.getBoundingClientRect(), notes ? notes(at) : headNotes(app, run, at)),
      pointerleave: () => app.tooltip.hide(),
    },
  });
  const title = role || name;
  if (thumbnails) cell.append(run.long ? drawLater(() => thumbnail(app, run, at)) : thumbnail(app, run, at));
  else if (!small) cell.append(...(title ? [h("small", { text: title })] : []), h("span", { text }));
  if (place >= 0 && chosen.length > 1) cell.style.setProperty("--hw-ring", css(headColours(app, run, chosen)[place]));
  return cell;
}

/** @type {(() => void)[]} pictures that are still to be drawn */
let waiting = [];

/** An empty canvas that a picture replaces in one of the next frames: those of many heads of a long text take a second.
 * @param {() => HTMLCanvasElement} draw @returns {HTMLCanvasElement} */
function drawLater(draw) {
  const place = h("canvas");
  if (!waiting.length) requestAnimationFrame(drawWaiting);
  waiting.push(() => {
    if (place.isConnected) place.replaceWith(draw());
  });
  return place;
}

/** Draw for some milliseconds, and the rest in the next frame. */
function drawWaiting() {
  const end = performance.now() + FRAME;
  let count = 0;
  while (count < waiting.length && performance.now() < end) waiting[count++]();
  waiting = waiting.slice(count);
  if (waiting.length) requestAnimationFrame(drawWaiting);
}

/** The matrix of a head; on an image, its weights to the patches. @param {App} app @param {Run} run @param {Head} at
 * @returns {HTMLCanvasElement} */
function thumbnail(app, run, at) {
  const patches = patchWeights(run, at, app.state.token);
  const { rows, columns, values, top } = patches ?? run.thumbnail(at);
  const share = patches ? (/** @type {number} */ weight) => weight / (top || 1) : weightShare(run);
  const colours = ramp(app.state.palette, app.theme);
  return picture(rows, columns, (n) => pick(colours, share(values[n], top)));
}

/** Arrow keys move the focus over the grid. @param {HTMLElement} box @param {KeyboardEvent} event */
export function moveFocus(box, event) {
  const step = arrowStep(event);
  const active = event.target;
  if (!step || !(active instanceof HTMLElement) || !active.classList.contains("cell")) return;
  const rows = [...box.querySelectorAll(".row:not(.head)")].map(
    (row) => /** @type {HTMLElement[]} */ ([...row.querySelectorAll(".cell")]),
  );
  const row = rows.findIndex((cells) => cells.includes(active));
  const next = rows[row + step[0]];
  const place = rows[row].indexOf(active) + step[1];
  (next?.[Math.min(place, next.length - 1)] ?? active).focus();
  consume(event);
}
