// A training log as a page: every head as a cell, coloured by one statistic; a slider over the steps of the training;
// the lines of a chosen head; the alarms.
import { h } from "./lib/dom.js";
import { legend } from "./lib/heatmap.js";
import { figure, headings, pageHeader, resetFocus, roveFocus, Theme } from "./lib/report.js";
import { svg } from "./lib/svg.js";
import { linePath, nearestStep, share, stepShare, timeScale } from "./lib/timeline.js";

/** @import { Scale } from "./lib/timeline.js" */

/**
 * @typedef {(number | null)[][]} Table a row per layer, a number per head
 * @typedef {{ layer: number, heads: number }} Layer
 * @typedef {object} Alarm
 * @property {number} step
 * @property {string} kind of attention
 * @property {number} layer
 * @property {number[]} heads
 * @property {string} text
 */

/**
 * @typedef {object} RecorderData as headwise.ui.recorder_page writes it
 * @property {string} title
 * @property {string} summary
 * @property {number[]} steps
 * @property {Record<string, Layer[]>} layers by kind of attention
 * @property {Record<string, Record<string, Table[]>>} statistics by name and kind, one table per step
 * @property {Record<string, string>} meanings of the statistics
 * @property {string[]} logarithmic statistics with values of several orders of magnitude
 * @property {Alarm[]} alarms
 */

const CHART = { width: 220, height: 56 };
const MOST_NUMBERS = 20; // heads of a layer; more of them are shown as colours only
const PLAY_INTERVAL = 160; // milliseconds

/** @type {RecorderData} */
const data = JSON.parse(/** @type {HTMLElement} */ (document.getElementById("recorder-data")).textContent || "{}");
const root = /** @type {HTMLElement} */ (document.getElementById("recorder"));
const { steps } = data;
const last = steps.length - 1;

/** @type {HTMLSelectElement} */
const select = h("select", { id: "statistic", on: { change: drawGrids } });
/** @type {HTMLInputElement} */
const slider = h("input", {
  id: "step",
  type: "range",
  min: 0,
  max: last,
  value: last,
  step: 1,
  list: "alarm-steps",
  on: { input: showStep },
});
const stepName = h("output", { for: "step", id: "step-name" });
const play = h("button", { type: "button", id: "play", class: "hw-small", text: "▶ play", on: { click: togglePlay } });
const grids = h("div", { id: "grids" });
const meaning = h("div", { class: "hw-card" });
const detail = h("div", { id: "detail", class: "hw-card", "aria-live": "polite" });
const theme = new Theme(root, drawGrids);

/** @type {{ kind: string, row: number, head: number, button: HTMLButtonElement }[]} */
let cells = [];
/** @type {{ kind: string, row: number, head: number } | null} */
let chosen = null;
/** @type {number | undefined} */
let timer;

/** @param {number | null | undefined} x */
function number(x) {
  if (x === null || x === undefined) return "–";
  return Math.abs(x) >= 99.5 ? x.toFixed(0) : x.toFixed(2);
}

/** Every value of a statistic, in all steps. @param {string} name @returns {(number | null)[]} */
function allValues(name) {
  return Object.values(data.statistics[name]).flat(3);
}

/** @type {Map<string, Scale>} */
const scales = new Map(
  Object.keys(data.statistics).map((name) => [name, timeScale(allValues(name), data.logarithmic.includes(name))]),
);

/** @param {string} name */
function scaleOf(name) {
  return /** @type {Scale} */ (scales.get(name));
}

/** @param {string} kind @param {number} layer @param {number} head */
function headKey(kind, layer, head) {
  return `${kind} ${layer}.${head}`;
}

/** @type {Map<string, Alarm[]>} */
const alarmsByHead = new Map();
for (const alarm of data.alarms) {
  for (const head of alarm.heads) {
    const key = headKey(alarm.kind, alarm.layer, head);
    alarmsByHead.set(key, [...(alarmsByHead.get(key) ?? []), alarm]);
  }
}

/** The alarms of a head that began until a step. @param {string} kind @param {number} layer @param {number} head */
function alarmsOf(kind, layer, head) {
  const step = steps[slider.valueAsNumber];
  return (alarmsByHead.get(headKey(kind, layer, head)) ?? []).filter((alarm) => alarm.step <= step);
}

function drawGrids() {
  cells = [];
  grids.replaceChildren(...Object.keys(data.statistics[select.value]).map(grid));
  resetFocus(grids);
  const { low, high, logarithmic } = scaleOf(select.value);
  const scale = `The scale is the same in all steps${logarithmic ? ", and logarithmic" : ""}.`;
  meaning.replaceChildren(
    h("h3", { text: select.value }),
    h("p", { text: data.meanings[select.value] }),
    legend(theme.colours, number(low), number(high)),
    h("p", { class: "soft", text: `${scale} An outlined head has raised an alarm.` }),
  );
  showStep();
}

/** The heads of one kind of attention. @param {string} kind */
function grid(kind) {
  const layers = data.layers[kind];
  const rows = layers.map(({ layer, heads }, row) => {
    const buttons = Array.from({ length: heads }, (_, head) => {
      const choose = () => {
        chosen = { kind, row, head };
        showHead();
      };
      const button = h("button", { type: "button", on: { click: choose } });
      cells.push({ kind, row, head, button });
      return h("td", {}, button);
    });
    return h("tr", {}, ...headings([String(layer)], "row"), ...buttons);
  });
  const widest = Math.max(...layers.map(({ heads }) => heads));
  const columns = ["layer", ...Array.from({ length: widest }, (_, head) => String(head))];
  return h(
    "table",
    { class: widest > MOST_NUMBERS ? "grid many" : "grid", style: { "--hw-heads": widest } },
    h("caption", {}, `${kind} attention: a row per layer, a column per head`),
    h("thead", {}, h("tr", {}, ...headings(columns, "col"))),
    h("tbody", {}, ...rows),
  );
}

/** Draw the step that the slider is at. */
function showStep() {
  const index = slider.valueAsNumber;
  const name = select.value;
  stepName.textContent = `step ${steps[index].toLocaleString("en")}`;
  slider.setAttribute("aria-valuetext", stepName.textContent);
  const scale = scaleOf(name);
  for (const { kind, row, head, button } of cells) {
    const value = data.statistics[name][kind][index]?.[row]?.[head] ?? null;
    const place = value === null ? 0 : share(value, scale);
    const { layer } = data.layers[kind][row];
    const alarms = alarmsOf(kind, layer, head);
    button.textContent = number(value);
    button.title = [`${headKey(kind, layer, head)}: ${number(value)}`, ...alarms.map(({ text }) => text)].join("\n");
    button.className = alarms.length ? "named" : "";
    theme.paint(button, place);
  }
  showHead();
}

/** One statistic of the chosen head over time. @param {string} name @param {(number | null)[]} values */
function chart(name, values) {
  const x = stepShare(steps, slider.valueAsNumber) * CHART.width;
  return figure(
    `${name} over time`,
    `-2 -2 ${CHART.width + 4} ${CHART.height + 4}`,
    svg("path", { class: "cursor", d: `M${x.toFixed(1)} 0V${CHART.height}` }),
    svg("path", { d: linePath(steps, values, scaleOf(name), CHART) }),
  );
}

/** The lines and numbers of the chosen head. */
function showHead() {
  if (!chosen) {
    detail.replaceChildren(h("p", { class: "soft" }, "Click a head for all that was recorded of it."));
    return;
  }
  const { kind, row, head } = chosen;
  const { layer } = data.layers[kind][row];
  const charts = Object.entries(data.statistics)
    .filter(([, kinds]) => kind in kinds)
    .map(([name, { [kind]: tables }]) => {
      const values = tables.map((table) => table[row]?.[head] ?? null);
      const now = number(values[slider.valueAsNumber]);
      const caption = h("figcaption", { title: data.meanings[name] }, h("b", {}, name), ` ${now}`);
      return h("figure", {}, caption, chart(name, values));
    });
  detail.replaceChildren(
    h("h2", {}, headKey(kind, layer, head)),
    ...alarmsOf(kind, layer, head).map(({ step, text }) => h("p", { class: "soft" }, `step ${step}: ${text}`)),
    h("div", { class: "charts" }, ...charts),
  );
}

function togglePlay() {
  if (timer !== undefined) {
    stopPlay();
    return;
  }
  if (slider.valueAsNumber === last) slider.value = "0";
  play.textContent = "⏸ pause";
  showStep();
  timer = window.setInterval(() => {
    slider.value = String(slider.valueAsNumber + 1);
    showStep();
    if (slider.valueAsNumber === last) stopPlay();
  }, PLAY_INTERVAL);
}

function stopPlay() {
  window.clearInterval(timer);
  timer = undefined;
  play.textContent = "▶ play";
}

/** The alarms; each leads to its step and head. */
function alarmList() {
  if (!data.alarms.length) return h("p", { class: "soft" }, "No alarm was raised.");
  const items = data.alarms.map((alarm) => {
    const show = () => {
      stopPlay();
      slider.value = String(nearestStep(steps, alarm.step));
      const row = data.layers[alarm.kind].findIndex(({ layer }) => layer === alarm.layer);
      chosen = { kind: alarm.kind, row, head: alarm.heads[0] };
      showStep();
    };
    const text = `step ${alarm.step.toLocaleString("en")}: ${alarm.text}`;
    return h("li", {}, h("button", { type: "button", class: "link", text, on: { click: show } }));
  });
  return h("ol", { id: "alarms" }, ...items);
}

const names = Object.keys(data.statistics);
select.append(...names.map((name) => h("option", { value: name }, name)));
const alarmSteps = [...new Set(data.alarms.map(({ step }) => nearestStep(steps, step)))];
root.replaceChildren(
  pageHeader(theme, "training log", data.title),
  h("p", { class: "hw-lead soft", text: data.summary }),
  h("datalist", { id: "alarm-steps" }, ...alarmSteps.map((value) => h("option", { value }))),
  h(
    "div",
    { class: "hw-report" },
    h(
      "div",
      {},
      h("label", { for: "statistic" }, "Colour by "),
      select,
      h("div", { class: "time" }, play, h("label", { for: "step" }, stepName), slider),
      grids,
    ),
    h(
      "aside",
      { class: "hw-side" },
      meaning,
      detail,
      h("div", { class: "hw-card" }, h("h2", {}, "Alarms"), alarmList()),
    ),
  ),
);
roveFocus(grids);
drawGrids();
