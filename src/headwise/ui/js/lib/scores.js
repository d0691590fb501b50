// Statistics and scores of the heads, as tables of layers by heads.
import { ramp } from "./colour.js";

/** @import { Head, Layer, Run, Standout, Table } from "./run.js" */

/** Everything that heads can be coloured by, with its meaning: statistics of the text, and scores that were loaded.
 * @param {Run} run @returns {Record<string, string>} */
export function measures(run) {
  const { statistics, scores, about } = run.json;
  const loaded = Object.keys(scores).map((name) => [name, about?.[name] ?? "a score that was loaded"]);
  return { ...statistics, ...Object.fromEntries(loaded) };
}

/** The same as options of a select element, in groups. @param {Run} run @returns {[string, string, string?][]} */
export function measureChoices(run) {
  const { scores } = run.json;
  const own = Object.keys(scores).length ? "on this text" : undefined;
  return Object.keys(measures(run)).map((name) => [name, name, Object.hasOwn(scores, name) ? "loaded scores" : own]);
}

/** One statistic or score of all heads. @param {Run} run @param {string} stat @returns {Table} */
export function headValues(run, stat) {
  const table = run.json.stats[stat] ?? run.json.scores[stat];
  return run.layers.map((layer, row) => table?.[row] ?? Array(layer.heads).fill(null));
}

/** Lowest and highest value of some tables, from 0 where nothing is negative. @param {Table[]} tables
 * @returns {[number, number]} */
export function extent(...tables) {
  const all = tables.flat(2).filter((x) => x !== null);
  return all.length ? [Math.min(0, ...all), Math.max(...all, 1e-9)] : [0, 1];
}

/** The ends of the colour scale of a statistic or score, and its colours: around 0 where the sign matters.
 * @param {Run} run @param {string} stat @param {string} palette @param {"light" | "dark"} theme @param {Table[]} tables
 * @returns {{ low: number, high: number, colours: Uint8Array }} */
export function colourScale(run, stat, palette, theme, ...tables) {
  const [low, high] = extent(...tables);
  if (run.json.signed?.includes(stat)) return signedScale(theme, ...tables);
  return { low, high, colours: ramp(palette, theme) };
}

/** The colour scale of numbers whose sign matters: 0 has the neutral colour.
 * @param {"light" | "dark"} theme @param {Table[]} tables */
export function signedScale(theme, ...tables) {
  const [low, high] = extent(...tables);
  const most = Math.max(-low, high);
  return { low: -most, high: most, colours: ramp("diverging", theme) };
}

/** Standouts or roles by head. @param {Standout[]} listed @returns {Map<string, Standout[]>} keys are "row.head" */
export function byHead(listed) {
  const groups = new Map();
  for (const standout of listed) {
    const key = standout.head.join(".");
    groups.set(key, [...(groups.get(key) ?? []), standout]);
  }
  return groups;
}

/** The rows of each kind of attention. @param {Run} run @returns {[string, number[]][]} */
export function layersByKind(run) {
  /** @type {Map<string, number[]>} */
  const groups = new Map();
  run.layers.forEach(({ kind }, row) => {
    groups.set(kind, [...(groups.get(kind) ?? []), row]);
  });
  return [...groups];
}

/** The order in which the heads of a layer are drawn.
 * @param {Pick<Layer, "heads">} layer @param {(number | null)[]} row @param {string} order "value": highest first */
export function orderedHeads(layer, row, order) {
  const heads = Array.from({ length: layer.heads }, (_, head) => head);
  return order === "value" ? heads.sort((a, b) => (row[b] ?? -Infinity) - (row[a] ?? -Infinity)) : heads;
}

/** All heads that have a value, by their value.
 * @param {Table} table @param {boolean} lowest whether the lowest is first @returns {Head[]} */
export function rankedHeads(table, lowest) {
  const sign = lowest ? 1 : -1;
  const heads = table.flatMap((row, layer) =>
    row.map((value, head) => ({ at: /** @type {Head} */ ([layer, head]), value: value ?? Number.NaN })),
  );
  const valued = heads.filter(({ value }) => !Number.isNaN(value));
  return valued.sort((a, b) => sign * (a.value - b.value)).map(({ at }) => at);
}

/** The second table minus the first. @param {Table} a @param {Table} b @returns {Table} */
export function difference(a, b) {
  return a.map((row, layer) =>
    row.map((x, head) => {
      const y = b[layer]?.[head] ?? null;
      return x === null || y === null ? null : y - x;
    }),
  );
}
