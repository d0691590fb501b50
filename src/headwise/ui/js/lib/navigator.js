// The small map beside a view, to move from head to head.
import { category, css, pick } from "./colour.js";
import { h, reveal } from "./dom.js";
import { grid } from "./grid.js";
import { arrowStep, consume } from "./keys.js";
import { colourScale, headValues, orderedHeads } from "./scores.js";
import { format, plural } from "./text.js";
/** @import { App } from "../app.js" */
/** @import { Head, Run } from "./run.js" */

/** Draw the small map again. In a deep model it keeps its scroll position, and shows the chosen head.
 * @param {HTMLElement} box @param {App} app @param {Run} run */
export function updateNavigator(box, app, run) {
  const scrolled = box.querySelector(".hw-grids")?.scrollTop ?? 0;
  box.replaceChildren(navigator(app, run));
  const grids = /** @type {HTMLElement} */ (box.querySelector(".hw-grids"));
  grids.scrollTop = scrolled;
  reveal(grids, grids.querySelector(".chosen"));
}

/** @param {App} app @param {Run} run */
function navigator(app, run) {
  const { state } = app;
  const table = headValues(run, state.stat);
  const { low, high, colours } = colourScale(run, state.stat, state.palette, app.theme, table);
  /** @param {KeyboardEvent} event */
  const move = (event) => {
    const step = arrowStep(event);
    if (!step || !(/** @type {HTMLElement} */ (event.target).classList.contains("cell"))) return;
    consume(event);
    app.step(...step);
    /** @type {HTMLElement | null} */ (app.root.querySelector(".hw-nav .cell.chosen"))?.focus();
  };
  return h(
    "aside",
    { class: "hw-nav", on: { keydown: move } },
    layerSlider(app, run),
    grid(app, run, {
      small: true,
      name: `choose a head; colour is ${state.stat}`,
      chosen: state.heads,
      order: (row) => orderedHeads(run.layers[row], [], "model"),
      cell: ([row, head]) => {
        const value = table[row][head];
        return {
          colour: value === null ? null : pick(colours, (value - low) / (high - low)),
          text: format(value, 2),
        };
      },
      choose: (at, event) => app.choose(at, event, state.view),
    }),
    h("p", {
      class: "soft hint",
      text: "Arrow keys go from head to head; Shift and click lays a head over the others.",
    }),
  );
}

/** A slider over the layers of one kind of attention. @param {App} app @param {Run} run */
function layerSlider(app, run) {
  const [row] = app.state.heads[0];
  const { kind, index } = run.layers[row];
  const rows = run.layers.flatMap((layer, n) => (layer.kind === kind ? [n] : []));
  return h(
    "label",
    { class: "hw-slider" },
    h("span", { text: `layer ${index}` }),
    h("input", {
      type: "range",
      min: 0,
      max: rows.length - 1,
      step: 1,
      value: rows.indexOf(row),
      "aria-label": "layer",
      "aria-valuetext": `layer ${index}`,
      data: { key: "layer" },
      on: {
        input: (event) => app.step(rows[Number(event.target.value)] - app.state.heads[0][0], 0),
        keydown: (event) => event.stopPropagation(),
      },
    }),
  );
}

/** The chosen heads by name, with their colours. @param {App} app @param {Run} run @param {Head[]} [heads] */
export function chosenHeads(app, run, heads = app.state.heads) {
  const several = heads.length > 1;
  /** @param {Head} at @param {number} n */
  const name = (at, n) => {
    const { index, heads: count, dim } = run.layers[at[0]];
    const off = run.off.has(at.join("."));
    return h(
      "span",
      { class: "hw-name", style: several ? { "--hw-dot": css(category(n, app.theme)) } : {} },
      h("b", { class: several ? "dot" : "", text: `head ${run.label(at)}` }),
      h("span", { class: "soft", text: several ? "" : `layer ${index}, ${plural(count, "head")} of ${dim}` }),
      app.live &&
        h("button", {
          type: "button",
          class: "hw-small",
          "aria-pressed": off,
          text: off ? "switch on" : "switch off",
          data: { key: `off:${at.join(".")}` },
          on: { click: () => app.switchHead(at) },
        }),
      several &&
        h("button", {
          type: "button",
          class: "hw-small",
          text: "✕",
          "aria-label": `remove head ${run.label(at)}`,
          on: { click: () => app.set({ heads: heads.filter((_, other) => other !== n) }) },
        }),
    );
  };
  return h("div", { class: "hw-chosen" }, ...heads.map(name));
}
