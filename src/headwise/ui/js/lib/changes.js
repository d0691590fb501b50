// What changed between two passes: the parts of their texts that differ, and the weight that changed most.

import { difference, headValues, rankedHeads } from "./scores.js";

/** @import { Head, Run, Unit } from "./run.js" */

/**
 * @typedef {object} Change of one weight
 * @property {Head} at
 * @property {string} from the word that looks; both words where they differ
 * @property {string} to
 * @property {number} before
 * @property {number} after
 */

/** Whether two passes have the same layers and heads. @param {Run} a @param {Run} b */
export function sameShape(a, b) {
  if (a.layers.length !== b.layers.length) return false;
  return a.layers.every(({ heads, kind }, row) => heads === b.layers[row].heads && kind === b.layers[row].kind);
}

/** How many words two lists share at their start and, of the rest, at their end. @param {string[]} a @param {string[]} b
 * @returns {[number, number]} */
function commonEnds(a, b) {
  const shorter = Math.min(a.length, b.length);
  let first = 0;
  while (first < shorter && a[first] === b[first]) first++;
  let last = 0;
  while (last < shorter - first && a[a.length - 1 - last] === b[b.length - 1 - last]) last++;
  return [first, last];
}

/** Which words of two lists are the same: all in their order if there are as many, else those before and after the part
 * that differs. @param {string[]} a @param {string[]} b @returns {[number, number][]} */
export function alignWords(a, b) {
  if (a.length === b.length) return a.map((_, n) => [n, n]);
  const [first, last] = commonEnds(a, b);
  /** @param {number} count @param {number} i @param {number} j */
  const pairs = (count, i, j) =>
    Array.from({ length: count }, (_, n) => /** @type {[number, number]} */ ([i + n, j + n]));
  return [...pairs(first, 0, 0), ...pairs(last, a.length - last, b.length - last)];
}

/** A text in three parts: as in the other text, different, and as in the other again.
 * @param {string} text @param {string} other @returns {[string, string, string]} */
export function splitChange(text, other) {
  const [mine, theirs] = [text, other].map((words) => words.split(/(?<=\s)/));
  const [first, last] = commonEnds(mine, theirs);
  const end = mine.length - last;
  return [mine.slice(0, first).join(""), mine.slice(first, end).join(""), mine.slice(end).join("")];
}

/** The weight between two words that changed most, in one head or in any; special tokens and punctuation aside. Null
 * where nothing can be compared: in long texts, models of different shape, texts without a common word.
 * @param {Run} a @param {Run} b @param {Unit} unit @param {Head | null} [only] @returns {Change | null} */
export function largestChange(a, b, unit, only = null) {
  if (a.long || b.long || !sameShape(a, b)) return null;
  const heads = a.layers.flatMap(({ heads: count }, row) =>
    Array.from({ length: count }, (_, head) => /** @type {Head} */ ([row, head])),
  );
  /** @type {Change | null} */
  let largest = null;
  for (const at of only ? [only] : heads) {
    const change = changeOfHead(a, b, unit, at);
    if (change && (!largest || sizeOf(change) > sizeOf(largest))) largest = change;
  }
  return largest;
}

/** @param {{ before: number, after: number }} change */
function sizeOf({ before, after }) {
  return Math.abs(after - before);
}

/** @param {Run} a @param {Run} b @param {Unit} unit @param {Head} at @returns {Change | null} */
function changeOfHead(a, b, unit, at) {
  const [row] = at;
  const [x, y] = [a.matrix(at, unit), b.matrix(at, unit)];
  const rows = comparedWords(a, b, unit, row, "from");
  const columns = comparedWords(a, b, unit, row, "to");
  /** @typedef {[number, number]} Pair */
  /** @type {{ from: Pair, to: Pair, before: number, after: number } | null} */
  let largest = null;
  for (const from of rows) {
    for (const to of columns) {
      const before = x.values[from[0] * x.columns + to[0]];
      const after = y.values[from[1] * y.columns + to[1]];
      if (!largest || Math.abs(after - before) > sizeOf(largest)) largest = { from, to, before, after };
    }
  }
  if (!largest) return null;
  const { from, to, before, after } = largest;
  return { at, before, after, from: pairName(a, b, unit, row, "from", from), to: pairName(a, b, unit, row, "to", to) };
}

/** The words that both passes have, without special tokens and punctuation; where they share none, those that stand in
 * the same place.
 * @param {Run} a @param {Run} b @param {Unit} unit @param {number} row @param {"from" | "to"} side */
function comparedWords(a, b, unit, row, side) {
  const [first, second] = [a.names(row, side, unit), b.names(row, side, unit)];
  const delimiters = a.delimiters(row, side, unit);
  const words = alignWords(first, second).filter(([n]) => !delimiters.has(n));
  const equal = words.filter(([i, j]) => first[i] === second[j]);
  return equal.length ? equal : words;
}

/** @param {Run} a @param {Run} b @param {Unit} unit @param {number} row @param {"from" | "to"} side
 * @param {[number, number]} places */
function pairName(a, b, unit, row, side, [i, j]) {
  const [first, second] = [a.names(row, side, unit)[i], b.names(row, side, unit)[j]];
  return first === second ? first : `${first}/${second}`;
}

/** The head whose statistic or score changed most, for passes whose weights cannot be compared one by one.
 * @param {Run} a @param {Run} b @param {string} stat @returns {Head | null} */
export function mostChangedHead(a, b, stat) {
  if (!sameShape(a, b)) return null;
  const changes = difference(headValues(a, stat), headValues(b, stat));
  const sizes = changes.map((row) => row.map((change) => (change === null ? null : Math.abs(change))));
  return rankedHeads(sizes, false)[0] ?? null;
}
