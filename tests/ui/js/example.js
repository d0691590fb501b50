// A pass of two layers with two heads each over three pieces, as the page stores it.
import { Run } from "#js/lib/run.js";

/** @param {number[]} values */
export function f32(values) {
  return Buffer.from(new Float32Array(values).buffer).toString("base64");
}

/** @param {number[]} values */
export function u16(values) {
  return Buffer.from(new Uint16Array(values).buffer).toString("base64");
}

/** @param {number[]} values */
export function u8(values) {
  return Buffer.from(values).toString("base64");
}

export const LAYER = { kind: "self", index: 0, name: "a", heads: 2, kv: 1, dim: 3, width: 6, from: 0, to: 0 };
export const TEXT = { pieces: ["a", "b", "c"], words: ["a", "bc"], of: [0, 1, 1], delimiter: [0] };
export const WEIGHTS = [0.5, 0.25, 0.25, 1, 0, 0, 0.2, 0.3, 0.5];

/** @param {Partial<import("#js/lib/run.js").RunJson>} [changes] */
export function exampleRun(changes = {}) {
  const stored = { form: "f32", data: f32([...WEIGHTS, ...Array(9).fill(1 / 3)]) };
  return new Run({
    name: "m",
    text: "abc",
    target: null,
    pair: false,
    notes: [],
    texts: [TEXT],
    layers: [LAYER, { ...LAYER, index: 4 }],
    off: [],
    scores: {},
    statistics: { entropy: "e" },
    stats: {},
    equal: {},
    standouts: [],
    follow: null,
    chosen: [],
    weights: [stored, stored],
    steps: [null, null],
    output: [null, null],
    ...changes,
  });
}

/** @param {number} a @param {number} b */
export function near(a, b) {
  return Math.abs(a - b) < 1e-6;
}
