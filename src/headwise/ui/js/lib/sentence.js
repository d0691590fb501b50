// The text, each token coloured by its weight from the chosen token.
import { css, inkOn } from "./colour.js";
import { choice, h } from "./dom.js";
import { comparableHeads, headTints, weightRow } from "./matrix.js";
import { direction, format, plural, visible } from "./text.js";

/** @import { App } from "../app.js" */
/** @import { Rgb } from "./colour.js" */
/** @import { Props } from "./dom.js" */
/** @import { Head, Run, Unit } from "./run.js" */

const LONG = 500; // tokens; of a longer text only some are shown
const BEFORE = 120; // of them in front of the chosen token
const WINDOW = 300;
const DENSE = 60; // tokens from which on they are set closer

/** The text with each token on the colour of its weight from the chosen token; a click chooses. With two texts, both.
 * @param {App} app @param {Run} run @param {{unit?: Unit, heads?: Head[], token?: number | null}} [options] */
export function sentence(app, run, { unit = app.unit, heads = app.state.heads, token = app.token(unit) } = {}) {
  const [row] = heads[0];
  const from = run.text(row, "from");
  const to = run.text(row, "to");
  const colour = token === null ? null : tokenColours(app, run, comparableHeads(run, heads), unit, token);
  /** @param {number} n */
  const choose = (n) => app.set({ token: n === token ? null : unit === "words" ? from.of.indexOf(n) : n });
  const queries = { names: from[unit], chosen: token, choose, dir: direction(run.sourceText(from)) };
  if (from === to) return tokenLine({ ...queries, colour });
  return h(
    "div",
    { class: "hw-two" },
    h("span", { class: "soft", text: "looks" }),
    tokenLine({ ...queries, colour: null }),
    h("span", { class: "soft", text: "is looked at" }),
    tokenLine({ names: to[unit], chosen: null, colour, choose: null, dir: direction(run.sourceText(to)) }),
  );
}

/** @typedef {(n: number) => { rgb: Rgb, title: string }} TokenColour */

/** @param {App} app @param {Run} run @param {Head[]} heads @param {Unit} unit @param {number} token
 * @returns {TokenColour} */
function tokenColours(app, run, heads, unit, token) {
  const rows = heads.map((at) => weightRow(run, at, unit, token));
  const top = rows
    .flatMap((weights) => weights.reduce((a, b) => Math.max(a, b), 1e-9))
    .reduce((a, b) => Math.max(a, b));
  const tint = headTints(app, run, heads);
  return (n) => ({
    rgb: tint(rows.map((weights) => (0.85 * weights[n]) / top)),
    title: rows.map((weights) => format(weights[n], 4)).join(", "),
  });
}

/** Tokens in one line, those of a long text around the chosen one.
 * @param {{names: string[], chosen: number | null, colour: TokenColour | null, choose: ((n: number) => void) | null,
 *   dir: string}} options */
function tokenLine({ names, chosen, colour, choose, dir }) {
  const start = names.length > LONG ? Math.max(0, (chosen ?? 0) - BEFORE) : 0;
  const shown = names.length > LONG ? names.slice(start, start + WINDOW) : names;
  const left = names.length - start - shown.length;
  /** @param {string} name @param {number} n */
  const token = (name, n) => {
    const { rgb, title } = colour?.(n) ?? { rgb: null, title: null };
    return h(
      choose ? "button" : "span",
      {
        type: choose ? "button" : null,
        class: `token${n === chosen ? " chosen" : ""}`,
        data: { key: `word:${choose ? "" : "to:"}${n}` },
        title,
        "aria-pressed": choose ? n === chosen : null,
        style: rgb ? { "background-color": css(rgb), color: inkOn(rgb) } : {},
        on: choose ? { click: () => choose(n) } : {},
      },
      h("bdi", { text: visible(name, 40) }),
    );
  };
  return h(
    "p",
    { class: `hw-sentence${shown.length > DENSE ? " dense" : ""}`, dir },
    start > 0 && h("span", { class: "soft", text: `… ${plural(start, "token")} … ` }),
    ...shown.map((name, n) => token(name, start + n)),
    left > 0 && h("span", { class: "soft", text: ` … ${plural(left, "token")} more` }),
  );
}

/** Whether tokens are shown as words or pieces. @param {App} app @param {Unit} unit @param {Props} [props] */
export function unitChoice(app, unit, props = {}) {
  /** @type {[string, string][]} */
  const units = [
    ["words", "words"],
    ["pieces", "pieces"],
  ];
  return choice("tokens", units, unit, (value) => app.set({ unit: value }), props);
}
