import assert from "node:assert/strict";
import { test } from "node:test";
import { PALETTES, inkOn, luminance, pick, ramp } from "../../../src/headwise/ui/js/lib/colour.js";
import { Recent, Run, attention, merged, numbers, rootError } from "../../../src/headwise/ui/js/lib/run.js";
import { cellText, direction, format, several, visible, weightText } from "../../../src/headwise/ui/js/lib/dom.js";
import { alike, difference } from "../../../src/headwise/ui/js/views/compare.js";
import { extent, ordered, ranked } from "../../../src/headwise/ui/js/views/map.js";
import { messages } from "../../../src/headwise/ui/js/lib/requests.js";
import { readState, write } from "../../../src/headwise/ui/js/lib/state.js";

const f32 = (values) => Buffer.from(new Float32Array(values).buffer).toString("base64");
const layer = { kind: "self", index: 0, heads: 2, kv: 1, dim: 3, width: 6, from: 0, to: 0 };
const text = { pieces: ["a", "b", "c"], words: ["a", "bc"], of: [0, 1, 1], delimiter: [0] };

function example(more = {}) {
  const weights = [0.5, 0.25, 0.25, 1, 0, 0, 0.2, 0.3, 0.5, ...Array(9).fill(1 / 3)];
  return new Run({
    name: "m", text: "abc", texts: [text], layers: [layer, { ...layer, index: 4 }], off: [], scores: {}, statistics: { entropy: "e" }, stats: {}, standouts: [],
    weights: [{ form: "f32", data: f32(weights) }, { form: "f32", data: f32(weights) }], steps: [null, null], output: [null, null], ...more,
  });
}

test("palettes run evenly from light to dark, or the other way", () => {
  for (const name of PALETTES) {
    for (const theme of ["light", "dark"]) {
      const light = Array.from({ length: 256 }, (_, n) => luminance(pick(ramp(name, theme), n / 255)));
      const sign = theme === "light" ? -1 : 1;
      for (let n = 8; n < 256; n += 8) assert.ok(sign * (light[n] - light[n - 8]) > 0, `${name} ${theme} ${n}`);
      assert.ok(Math.abs(light[255] - light[0]) > 0.6);
    }
  }
});

test("ink on any ground can be read", () => {
  for (let n = 0; n <= 20; n++) {
    const ground = pick(ramp("sea", "light"), n / 20);
    const ink = inkOn(ground) === "#ffffff" ? 1 : 0.006;
    const [high, low] = [luminance(ground), ink].sort((a, b) => b - a);
    assert.ok((high + 0.05) / (low + 0.05) >= 4, `${n}: ${(high + 0.05) / (low + 0.05)}`);
  }
});

test("pieces merge to words: to them add up, from them average", () => {
  const { rows, columns, values } = merged(new Float32Array([0.5, 0.25, 0.25, 1, 0, 0, 0.2, 0.3, 0.5]), text, text);
  assert.deepEqual([rows, columns], [2, 2]);
  [0.5, 0.5, 0.6, 0.4].forEach((w, n) => assert.ok(Math.abs(values[n] - w) < 1e-6));
});

test("weights as they are stored", () => {
  assert.deepEqual(example().weight([0, 0], "pieces", 2, 1), { value: Math.fround(0.3), error: 0 });
  const bytes = example({ weights: [{ form: "u8", top: [1, 0.5], data: Buffer.from([255, 128, 0, ...Array(15).fill(255)]).toString("base64") }, {}] });
  const { value, error } = bytes.weight([0, 0], "pieces", 0, 1);
  assert.ok(Math.abs(value - (128 / 255) ** 2) < 1e-6);
  assert.ok(Math.abs(error - rootError(128, 1)) < 1e-6);
  assert.match(weightText({ value, error }), /≈ 0\.2520 \(± 0\.0020, stored in one byte\)/);
  assert.ok(Math.abs(bytes.weight([0, 1], "pieces", 0, 0).value - 0.5) < 1e-6);
});

test("of long texts a weight is a link's, or at most its square's", () => {
  const keys = Buffer.from(Array(2 * 3).fill([2, 0]).flat()).toString("base64");
  const u16 = Buffer.from(new Uint16Array(Array(2 * 3).fill([40000, 10000]).flat()).buffer).toString("base64");
  const square = { top: [0.62, 0.62], data: Buffer.from([255, 255]).toString("base64") };
  const run = example({ weights: [{ form: "links", k: 2, number: 1, keys, weights: u16, reduced: { cell: 3, rows: 1, columns: 1, max: square, mean: square } }, {}] });
  assert.ok(run.long);
  assert.deepEqual(run.links([0, 1], 1).map((link) => link.key), [2, 0]);
  assert.ok(Math.abs(run.weight([0, 0], "pieces", 1, 2).value - 40000 / 65535) < 1e-9);
  const rest = run.weight([0, 0], "pieces", 1, 1);
  assert.ok(rest.atMost && rest.value <= 10000 / 65535 + 1e-9);
  assert.match(weightText(rest), /^at most 0\.1526/);
});

test("attention step by step: scale, softcap, mask, sink, window", () => {
  const step = { dim: 2, keys: 3, value: 1, offset: 0, scale: 0.5, softcap: null, causal: false, window: null, sink: null, bias: null, q: [2, 0, 0, 2, 1, 1], k: [1, 0, 0, 1, 1, 1], v: [1, 10, 100] };
  const plain = attention(step, 0);
  assert.deepEqual([...plain.products], [2, 0, 2]);
  assert.deepEqual([...plain.scores], [1, 0, 1]);
  const total = 2 * Math.E + 1;
  assert.ok(Math.abs(plain.weights[0] - Math.E / total) < 1e-7);
  assert.ok(Math.abs(plain.output[0] - (Math.E * 101 + 10) / total) < 1e-4);
  assert.deepEqual([...attention({ ...step, causal: true }, 0).weights], [1, 0, 0]);
  assert.deepEqual([...attention({ ...step, window: [0, 0] }, 1).weights], [0, 1, 0]);
  assert.ok(Math.abs(attention({ ...step, softcap: 0.5 }, 0).scores[0] - 0.5 * Math.tanh(2)) < 1e-12);
  const sunk = attention({ ...step, sink: 1 }, 0);
  assert.ok(Math.abs(sunk.weights.reduce((a, b) => a + b, 0) + sunk.rest - 1) < 1e-6);
  const nowhere = attention({ ...step, bias: () => -Infinity }, 0);
  assert.deepEqual([...nowhere.weights], [0, 0, 0]);
  assert.deepEqual([...nowhere.output], [0]);
});

test("tokens are shown as what they are", () => {
  assert.equal(visible(" a\n"), "␣a↵");
  assert.equal(visible("\t\u0000\u007f\u2028\u00a0"), "⇥␀␡⏎⍽");
  assert.equal(visible("\u202eabc\u200b"), "⟨202E⟩abc⟨200B⟩");
  assert.equal(visible("👩‍👩‍👧"), "👩‍👩‍👧");
  assert.equal(visible("\ud800"), "\ufffd");
  assert.equal(visible(""), "∅");
  assert.equal(visible("x".repeat(10000)).length, 61);
  assert.equal(visible("<img src=x onerror=alert(1)>"), "<img src=x onerror=alert(1)>");
});

test("numbers", () => {
  assert.deepEqual([format(0.6768, 3), format(-1.5, 2), format(-Infinity), format(null), format(0, 2), format(123.456), format(1e-7, 4)], ["0.677", "−1.50", "−∞", "–", "0.00", "123.5", "1.0e−7"]);
  assert.deepEqual([cellText(-0.001), cellText(-0.19), several(1, "head"), several(2048, "token")], ["0.00", "−0.19", "1 head", "2,048 tokens"]);
});

test("heads by name", () => {
  const run = example();
  assert.equal(run.label([1, 0]), "4.0");
  assert.deepEqual(run.parse("4.1"), [1, 1]);
  for (const wrong of ["4.2", "1.0", "", "4", "4.1.1", "x"]) assert.equal(run.parse(wrong), null);
  const two = example({ layers: [layer, { ...layer, kind: "cross", index: 0 }] });
  assert.deepEqual(two.parse("cross 0.1"), [1, 1]);
});

test("a state can be shared, and nonsense in it does no harm", () => {
  const run = example();
  const state = { view: "head", heads: [[1, 0], [0, 1]], token: 2, key: null, unit: "pieces", bare: true, stat: "entropy", text: "a & b" };
  const shared = write(state, run);
  assert.equal(new URLSearchParams(shared).get("text"), "a & b");
  assert.deepEqual(readState(shared, run), { view: "head", heads: [[1, 0], [0, 1]], token: 2, unit: "pieces", bare: true });
  assert.deepEqual(readState("view=evil&heads=9.9,x&token=-1&stat=__proto__&palette=<&theme=2", run), { token: null });
});

test("what changed", () => {
  assert.deepEqual(difference([[1, null], [0.5, 2]], [[2, 1], [0.25, null]]), [[1, null], [-0.25, null]]);
  assert.ok(alike(example(), example()));
  assert.ok(!alike(example(), example({ layers: [layer] })));
});

test("the order of heads, and the ends of a scale", () => {
  assert.deepEqual(ordered(layer, [0.1, 0.9], "value"), [1, 0]);
  assert.deepEqual(ordered({ heads: 3 }, [], "model"), [0, 1, 2]);
  assert.deepEqual(extent([[1, 3], [null, 2]]), [0, 3]);
  assert.deepEqual(extent([[-1, 3]]), [-1, 3]);
});

test("a notebook's answers find their questions", async () => {
  const sent = [];
  let answer;
  const ask = messages({ on: (_, act) => { answer = act; }, send: (message) => sent.push(message) });
  const [first, second] = [ask({ ask: "a" }), ask({ ask: "b" })];
  answer({ number: 2, answer: "B" });
  answer({ number: 1, answer: "A" });
  assert.deepEqual([await first, await second, sent.map((one) => one.number)], ["A", "B", [1, 2]]);
});

test("only the newest few are kept", () => {
  const recent = new Recent(2);
  let made = 0;
  const get = (key) => recent.get(key, () => ++made);
  get("a"); get("b"); get("a"); get("c");
  assert.deepEqual([...recent.kept.keys()], ["a", "c"]);
  assert.equal(get("a"), 1);
});

test("all heads by their value, those without one left out", () => {
  const table = [[0.2, 0.7, null], [0.5]];
  assert.deepEqual(ranked(table, false), [[0, 1], [1, 0], [0, 0]]);
  assert.deepEqual(ranked(table, true), [[0, 0], [1, 0], [0, 1]]);
});

test("the first letter says which way a text runs", () => {
  assert.equal(direction("(1) שלום abc"), "rtl");
  assert.equal(direction("… مرحبا"), "rtl");
  assert.equal(direction("abc שלום"), "ltr");
  assert.equal(direction("日本語 123"), "ltr");
  assert.equal(direction(""), "ltr");
});

test("shares of the largest are numbers again", () => {
  const data = Buffer.from(new Uint16Array([0, 65535, 13107]).buffer).toString("base64");
  assert.deepEqual([...numbers({ top: 5, data })], [0, 5, 1]);
  assert.deepEqual([...numbers(f32([0.5, 7]))], [0.5, 7]);
});
