// Attention for one query, in the order of the formula.

/**
 * @typedef {object} HeadSteps the inputs of one head
 * @property {number} dim of queries and keys
 * @property {number} value dimension of values
 * @property {number} queries
 * @property {number} keys
 * @property {number} group query heads per KV head
 * @property {number} offset key position of the first query
 * @property {number} scale
 * @property {number | null} softcap
 * @property {boolean} causal
 * @property {[number | null, number | null] | null} window keys to the left and to the right, null for open
 * @property {number | null} sink extra logit in the denominator
 * @property {((i: number, j: number) => number) | null} bias is added to the scores
 * @property {boolean} complete whether these inputs give the model's own weights
 * @property {Float32Array} q
 * @property {Float32Array} k
 * @property {Float32Array} v
 */

/** Weights and output of query i, with every step on the way: product, scale, softcap, mask, softmax, sum of values.
 * @param {HeadSteps} step @param {number} i */
export function attention(step, i) {
  const { dim, keys, value, q, k, v } = step;
  const position = i + step.offset;
  const products = new Float64Array(keys);
  const scores = new Float64Array(keys);
  let top = step.sink ?? -Infinity;
  for (let j = 0; j < keys; j++) {
    let dot = 0;
    for (let d = 0; d < dim; d++) dot += q[i * dim + d] * k[j * dim + d];
    products[j] = dot;
    let score = dot * step.scale;
    if (step.softcap) score = step.softcap * Math.tanh(score / step.softcap);
    if (isHidden(step, position, j)) score = -Infinity;
    else if (step.bias) score += step.bias(i, j);
    scores[j] = score;
    if (score > top) top = score;
  }
  const powers = scores.map((score) => (score === -Infinity ? 0 : Math.exp(score - top)));
  const sinkPower = step.sink === null || step.sink === undefined ? 0 : Math.exp(step.sink - top);
  const sum = powers.reduce((a, b) => a + b, 0) + sinkPower;
  const weights = Float32Array.from(powers, (power) => (sum > 0 ? power / sum : 0)); // no visible keys: zeros
  const output = new Float64Array(value);
  for (let j = 0; j < keys; j++) {
    if (weights[j] > 0) for (let d = 0; d < value; d++) output[d] += weights[j] * v[j * value + d];
  }
  return { products, scores, top, powers, sum, weights, output, sinkWeight: sum > 0 ? sinkPower / sum : 0 };
}

/** Whether causality or the window hides key j. @param {HeadSteps} step @param {number} position @param {number} j */
function isHidden(step, position, j) {
  if (step.causal && j > position) return true;
  const [left, right] = step.window ?? [null, null];
  return (left !== null && j < position - left) || (right !== null && j > position + right);
}
