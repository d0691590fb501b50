// The small map beside a view, to move from head to head.
import { css, pick } from "./colour.js";
import { h, reveal } from "./dom.js";
import { grid } from "./grid.js";
import { arrowStep, consume } from "./keys.js";
import { headColours } from "./matrix.js";
import { colourScale, headValues, orderedHeads } from "./scores.js";
import { MOST_HEADS } from "./state.js";
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
  if (several && heads.every(([row]) => row === heads[0][0])) return layerHeads(app, run, heads);
  const colours = headColours(app, run, heads);
  /** @param {Head} at @param {number} n */
  const name = (at, n) => {
    const { index, heads: count, dim } = run.layers[at[0]];
    const off = run.off.has(at.join("."));
    return h(
      "span",
      { class: "hw-name", style: several ? { "--hw-dot": css(colours[n]) } : {} },
      h("b", { class: several ? "dot" : "", text: `head ${run.label(at)}` }),
      h("span", { class: "soft", text: several ? "" : `layer ${index}, ${plural(count, "head")}, each ${dim} wide` }),
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

/** All heads of one layer as switches, each in its colour. @param {App} app @param {Run} run @param {Head[]} chosen */
function layerHeads(app, run, chosen) {
  const [[row]] = chosen;
  const { index, heads: count } = run.layers[row];
  const all = Array.from({ length: count }, (_, head) => /** @type {Head} */ ([row, head]));
  const colours = headColours(app, run, all);
  /** @param {Head} at */
  const shown = ([, head]) => chosen.some(([, other]) => other === head);
  /** @param {Head} at @param {number} n */
  const chip = (at, n) => {
    const heads = all.filter((other) => shown(other) !== (other === at));
    return h("button", {
      type: "button",
      class: "hw-chip dot",
      style: { "--hw-dot": css(colours[n]) },
      text: run.label(at),
      "aria-pressed": shown(at),
      data: { key: `overlay:${at.join(".")}` },
      on: { click: () => app.set({ heads: heads.length ? heads : [at] }) },
    });
  };
  return h(
    "div",
    { class: "hw-chosen hw-overlaid", role: "group", "aria-label": `heads of layer ${index}` },
    h("b", { text: `${plural(chosen.length, "head")} of layer ${index}` }),
    ...all.map(chip),
  );
}

/** A button that lays all heads of the chosen head's layer over each other, or goes back to one of them.
 * @param {App} app @param {Run} run */
export function overlayButton(app, run) {
  const [at] = app.state.heads;
  const { index, heads } = run.layers[at[0]];
  if (heads < 2 || heads > MOST_HEADS) return null;
  return h("button", {
    type: "button",
    class: "hw-small",
    text: app.overlaid ? `head ${run.label(at)} alone` : `all heads of layer ${index}`,
    title: "key a",
    data: { key: "overlay" },
    on: { click: () => app.toggleOverlay() },
  });
}
