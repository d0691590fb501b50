// Numbers over time: where they are on a scale, and their lines.

/** @typedef {{ low: number, high: number, logarithmic: boolean }} Scale */
/** @typedef {{ width: number, height: number }} Size */

/** The scale of all values of one statistic, the same in every step so that steps can be compared.
 * @param {(number | null)[]} values @param {boolean} logarithmic for values of several orders of magnitude
 * @returns {Scale} */
export function timeScale(values, logarithmic) {
  let [low, high] = [0, 0];
  for (const value of values) {
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return { low: logarithmic ? 0 : low, high, logarithmic };
}

/** Where a value is on a scale, from 0 to 1. @param {number} value @param {Scale} scale */
export function share(value, { low, high, logarithmic }) {
  if (high <= low) return 0;
  const place = logarithmic ? Math.log1p(Math.max(value, 0)) / Math.log1p(high) : (value - low) / (high - low);
  return Math.min(1, Math.max(0, place));
}

/** The place of a step on the axis of time, from 0 to 1. @param {number[]} steps @param {number} index */
export function stepShare(steps, index) {
  const span = steps[steps.length - 1] - steps[0];
  return span ? (steps[index] - steps[0]) / span : 0.5;
}

/** The lines of a statistic over time as an SVG path; a gap where there is no value.
 * @param {number[]} steps @param {(number | null)[]} values @param {Scale} scale @param {Size} size */
export function linePath(steps, values, scale, { width, height }) {
  const parts = [];
  let pen = "M";
  for (const [index, value] of values.entries()) {
    if (value === null) {
      pen = "M";
      continue;
    }
    const [x, y] = [stepShare(steps, index) * width, (1 - share(value, scale)) * height];
    parts.push(`${pen}${x.toFixed(1)} ${y.toFixed(1)}`);
    pen = "L";
  }
  return parts.join("");
}

/** The index of the step that is nearest to one. @param {number[]} steps @param {number} step */
export function nearestStep(steps, step) {
  let best = 0;
  for (const [index, other] of steps.entries()) if (Math.abs(other - step) < Math.abs(steps[best] - step)) best = index;
  return best;
}
