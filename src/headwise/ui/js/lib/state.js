// The state of the page: what is shown, all of which a link can carry.
import { PALETTES } from "./colour.js";
import { registeredViews, viewState } from "./registry.js";
import { measures } from "./scores.js";

/** @import { Head, Run } from "./run.js" */

const INITIAL = {
  view: "map",
  heads: /** @type {Head[]} */ ([[0, 0]]),
  token: /** @type {number | null} */ (null),
  key: /** @type {number | null} */ (null),
  unit: "words",
  stat: "entropy",
  palette: "sea",
  theme: "auto",
  bare: false,
  reduce: "max",
  // what is requested of a model behind the page; the fields that end in 2 describe the pass to compare with
  text: /** @type {string | null} */ (null),
  model: /** @type {string | null} */ (null),
  off: "",
  target: "",
  text2: /** @type {string | null} */ (null),
  model2: /** @type {string | null} */ (null),
  off2: "",
  target2: "",
};
/** @typedef {typeof INITIAL & Record<string, any>} State with the fields of the views */

export const REQUEST_FIELDS = ["text", "model", "off", "target"];
export const MOST_HEADS = 64; // chosen at once
const LONGEST = 200; // characters of a text that a link gives to a view
const INTEGER = /^\d{1,9}$/;

/** The state at the start. @returns {State} */
export function initialState() {
  const fields = Object.entries(viewState()).map(([name, { initial }]) => [name, initial]);
  return { ...INITIAL, ...Object.fromEntries(fields) };
}

/** The values that a link may give to a field. @returns {Record<string, string[]>} */
function allowedValues() {
  return {
    view: registeredViews().map(({ name }) => name),
    unit: ["words", "pieces"],
    palette: PALETTES,
    theme: ["auto", "light", "dark"],
    reduce: ["max", "mean"],
    ...Object.fromEntries(
      Object.entries(viewState()).flatMap(([name, { allowed }]) => (allowed ? [[name, allowed]] : [])),
    ),
  };
}

/** The state as a short text that can be shared. @param {Partial<State>} state @param {Run} run */
export function writeState(state, run) {
  const parts = new URLSearchParams();
  const initial = initialState();
  const always = Object.keys(run.json.scores).length ? ["paint", "stat"] : []; // these start differently with scores
  for (const [name, value] of Object.entries(state)) {
    if (name === "heads") parts.set("heads", value.map((/** @type {Head} */ at) => run.label(at)).join(","));
    else if (value === null || value === undefined) continue;
    else if (always.includes(name) || value !== initial[name]) parts.set(name, String(value));
  }
  return parts.toString();
}

/** The valid fields of a shared state. @param {string} text @param {Run} run @returns {Partial<State>} */
export function readState(text, run) {
  /** @type {Partial<State>} */
  const state = {};
  const allowed = allowedValues();
  const fields = viewState();
  for (const [name, value] of new URLSearchParams(text)) {
    if (name === "heads") {
      const heads = value.split(",").map((label) => run.parse(label));
      const known = heads.filter((at) => at !== null);
      if (known.length) state.heads = known.slice(0, MOST_HEADS);
    } else if (name === "token" || name === "key") state[name] = INTEGER.test(value) ? Number(value) : null;
    else if (name === "bare") state.bare = value === "true";
    else if (Object.hasOwn(allowed, name) && allowed[name].includes(value)) state[name] = value;
    else if (Object.hasOwn(fields, name) && !fields[name].allowed) state[name] = value.slice(0, LONGEST);
    else if (name === "stat" && Object.hasOwn(measures(run), value)) state.stat = value;
  }
  return state;
}

/** Reset every field that refers to something this run does not have. @param {State} state @param {Run} run */
export function clampState(state, run) {
  state.heads = state.heads.filter(([row, head]) => run.layers[row] && head < run.layers[row].heads);
  if (!state.heads.length) state.heads = [[0, 0]];
  const [row] = state.heads[0];
  if (state.token !== null && !(state.token < run.text(row, "from").pieces.length)) state.token = null;
  if (state.key !== null && !(state.key < run.text(row, "to").pieces.length)) state.key = null;
  if (state.paint === "role" && !run.json.roles?.length) state.paint = "kind";
  if (!Object.hasOwn(measures(run), state.stat)) state.stat = Object.keys(measures(run))[0];
}
