// What is shown: everything of it that a link can carry, and nothing else.
import { PALETTES } from "./colour.js";
import { measures } from "../views/map.js";

export const START = {
  view: "map", heads: [[0, 0]], token: /** @type {number | null} */ (null), key: /** @type {number | null} */ (null), unit: "words", stat: "entropy",
  order: "model", paint: "value", palette: "sea", theme: "auto", bare: false, reduce: "max",
  // what is asked of a model behind the page; the second is what the first is compared with
  text: /** @type {string | null} */ (null), model: /** @type {string | null} */ (null), off: "", target: "",
  text2: /** @type {string | null} */ (null), model2: /** @type {string | null} */ (null), off2: "", target2: "",
};
export const ASKED = ["text", "model", "off", "target"];

/** What can be shared: the state as a short text. @param {any} state @param {any} run */
export function write(state, run) {
  const parts = new URLSearchParams();
  const told = Object.keys(run.json.scores).length ? ["paint", "stat"] : []; // these begin otherwise where scores came along
  for (const [name, value] of Object.entries(state)) {
    if (name === "heads") parts.set("heads", value.map((/** @type {any} */ at) => run.label(at)).join(","));
    else if (value !== null && value !== undefined && (told.includes(name) || value !== /** @type {any} */ (START)[name])) parts.set(name, String(value));
  }
  return parts.toString();
}

/** @param {string} text @param {any} run @returns {any} what of it makes sense here */
export function readState(text, run) {
  const found = /** @type {any} */ ({});
  const whole = (/** @type {string} */ value) => (/^\d{1,9}$/.test(value) ? Number(value) : null);
  for (const [name, value] of new URLSearchParams(text)) {
    if (name === "heads") {
      const heads = value.split(",").map((label) => run.parse(label)).filter((at) => at !== null);
      if (heads.length) found.heads = heads.slice(0, 8);
    } else if (name === "token" || name === "key") found[name] = whole(value);
    else if (name === "bare") found.bare = value === "true";
    else if (Object.hasOwn(ALLOWED, name) && ALLOWED[name].includes(value)) found[name] = value;
    else if (name === "stat" && Object.hasOwn(measures(run), value)) found.stat = value;
  }
  return found;
}

const ALLOWED = /** @type {Record<string, string[]>} */ ({
  view: ["map", "head", "steps", "compare"], unit: ["words", "pieces"], order: ["model", "value", "ranked", "lowest"], paint: ["value", "kind", "role", "thumbnail"],
  palette: PALETTES, theme: ["auto", "light", "dark"], reduce: ["max", "mean"],
});

/** Nothing of the state may lie outside of what there is. @param {any} state @param {any} run */
export function mend(state, run) {
  state.heads = state.heads.filter((/** @type {number[]} */ [row, head]) => run.layers[row] && head < run.layers[row].heads);
  if (!state.heads.length) state.heads = [[0, 0]];
  if (state.token !== null && !(state.token < run.text(state.heads[0][0], "from").pieces.length)) state.token = null;
  if (state.key !== null && !(state.key < run.text(state.heads[0][0], "to").pieces.length)) state.key = null;
  if (state.paint === "role" && !run.json.roles?.length) state.paint = "kind";
  if (!Object.hasOwn(measures(run), state.stat)) state.stat = Object.keys(measures(run))[0];
}
