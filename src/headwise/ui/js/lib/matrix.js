// Weights of one or several heads as rows, colours and a source for the heat map.
import { category, oklch, pick, ramp } from "./colour.js";
import { picture } from "./heatmap.js";
import { plural } from "./text.js";

/** @import { App } from "../app.js" */
/** @import { Rgb } from "./colour.js" */
/** @import { Source } from "./heatmap.js" */
/** @import { Head, Matrix, Run, Unit } from "./run.js" */

const LONG = 64; // tokens from which on a matrix has no numbers in its cells

/** One row of weights as far as the page knows it, zeros elsewhere.
 * @param {Run} run @param {Head} at @param {Unit} unit @param {number} i @returns {Float32Array} */
export function weightRow(run, at, unit, i) {
  if (!run.long) {
    const { values, columns } = run.matrix(at, unit);
    return values.subarray(i * columns, (i + 1) * columns);
  }
  const exact = run.exactRow(at, i);
  if (exact) return exact;
  const row = new Float32Array(run.text(at[0], "to").pieces.length);
  for (const { key, weight } of run.links(at, i)) row[key] = weight;
  return row;
}

/** The heads whose queries and keys come from the same texts as those of the first.
 * @param {Run} run @param {Head[]} heads */
export function comparableHeads(run, heads) {
  const first = run.layers[heads[0][0]];
  return heads.filter(([row]) => run.layers[row].from === first.from && run.layers[row].to === first.to);
}

/** The matrices of some heads, reduced for a long input. @param {Run} run @param {Head} at @param {Unit} unit
 * @param {string} reduce "max" or "mean" @returns {Matrix & { cell: number }} */
export function shownMatrix(run, at, unit, reduce) {
  return run.long ? run.reduced(at, reduce) : { ...run.matrix(at, unit), cell: 1 };
}

/** What the heat map shows of some heads. @param {App} app @param {Run} run @param {Head[]} heads @param {Unit} unit
 * @returns {Source} */
export function matrixSource(app, run, heads, unit) {
  const shown = comparableHeads(run, heads);
  const [row] = shown[0];
  const from = run.names(row, "from", unit);
  const to = run.names(row, "to", unit);
  const matrices = shown.map((at) => shownMatrix(run, at, unit, app.state.reduce));
  const tops = shown.map((at, n) => (run.long ? run.reduced(at, "max").top : matrices[n].top));
  const tint = headTints(app, run, shown);
  const share = weightShare(run);
  const [{ rows, columns, cell }] = matrices;
  const names = shown.map((at) => `head ${run.label(at)}`).join(", ");
  const size = `${plural(from.length, "row")} of tokens that look, ${plural(to.length, "column")} of tokens looked at`;
  return {
    rows: from.length,
    columns: to.length,
    rowName: (i) => from[i],
    columnName: (j) => to[j],
    label: `weights of ${names}: ${size}; arrow keys read single weights`,
    picture: () => ({
      cell,
      image: picture(rows, columns, (n) => tint(matrices.map(({ values, top }) => share(values[n], top)))),
    }),
    prepare: (first, last) => shown.every((at) => !run.long || run.prepare(at, first, last)),
    exact: (i) => {
      const known = shown.map((at, n) => knownWeights(run, at, matrices[n], i));
      return (j) => {
        const weights = known.map((weight) => weight(j));
        if (weights.every((weight) => weight === null)) return null;
        const colour = tint(weights.map((weight, n) => share(weight ?? 0, tops[n])));
        return [colour, Math.max(...weights.map((weight) => weight ?? 0))];
      };
    },
  };
}

/** The weights of one row that are known exactly without computing anything.
 * @param {Run} run @param {Head} at @param {Matrix} matrix @param {number} i @returns {(j: number) => number | null} */
function knownWeights(run, at, matrix, i) {
  if (!run.long) return (j) => matrix.values[i * matrix.columns + j];
  const row = run.computedRow(at, i);
  if (row) return (j) => row[j];
  const links = new Map(run.links(at, i).map(({ key, weight }) => [key, weight]));
  return (j) => links.get(j) ?? null;
}

/** Whether colours follow the square root of the weights: in a long text one weight of 1, such as that of the first
 * token on itself, would leave all others pale. @param {Run} run */
export function hasRootScale(run) {
  return run.texts.some(({ pieces }) => pieces.length > LONG);
}

/** The place of a weight on the colour scale, 0 to 1, by the largest weight.
 * @param {Run} run @returns {(weight: number, top: number) => number} */
export function weightShare(run) {
  return hasRootScale(run) ? (weight, top) => Math.sqrt(weight / (top || 1)) : (weight, top) => weight / (top || 1);
}

/** The colours of several heads: by their numbers if they are of one layer, so that a head keeps its colour.
 * @param {App} app @param {Run} run @param {Head[]} heads @returns {Rgb[]} */
export function headColours(app, run, heads) {
  const [[first]] = heads;
  const layer = heads.every(([row]) => row === first) && run.layers[first].heads > 1;
  return heads.map(([, head], place) => category(layer ? head : place, app.theme));
}

/** Shares of several heads to one colour: from a palette for one head, mixed categories for more.
 * @param {App} app @param {Run} run @param {Head[]} chosen @returns {(shares: number[]) => Rgb} */
export function headTints(app, run, chosen) {
  const colours = ramp(app.state.palette, app.theme);
  if (chosen.length === 1) return ([share]) => pick(colours, share);
  const ground = app.theme === "dark" ? oklch(0.225, 0.02, 270) : oklch(0.985, 0.012, 100);
  const heads = headColours(app, run, chosen);
  return (shares) => {
    const parts = shares.map((share) => share ** 3); // the strongest head prevails: the mean of many would be grey
    const sum = parts.reduce((a, b) => a + b, 0);
    const strength = Math.min(1, Math.max(...shares));
    if (!sum) return ground;
    /** @param {number} channel */
    const mix = (channel) => {
      const mean = heads.reduce((total, rgb, n) => total + (rgb[channel] * parts[n]) / sum, 0);
      return Math.round(ground[channel] + (mean - ground[channel]) * strength);
    };
    return [mix(0), mix(1), mix(2)];
  };
}
