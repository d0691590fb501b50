import assert from "node:assert/strict";
import { test } from "node:test";
import { numbers, rootError } from "#js/lib/encoding.js";
import { mergePieces } from "#js/lib/run.js";
import { weightText } from "#js/lib/text.js";
import { exampleRun, f32, LAYER, near, TEXT, u8, u16, WEIGHTS } from "./example.js";

test("weights to the pieces of a word add up, weights from them are averaged", () => {
  const { rows, columns, values } = mergePieces(new Float32Array(WEIGHTS), TEXT, TEXT);
  assert.deepEqual([rows, columns], [2, 2]);
  assert.ok([0.5, 0.5, 0.6, 0.4].every((weight, n) => near(values[n], weight)));
});

test("a float32 weight is exact", () => {
  assert.deepEqual(exampleRun().weight([0, 0], "pieces", 2, 1), { value: Math.fround(0.3), error: 0 });
});

test("a weight stored in one byte has an error", () => {
  const stored = { form: "u8", top: [1, 0.5], data: u8([255, 128, 0, ...Array(15).fill(255)]) };
  const run = exampleRun({ weights: [stored, {}] });
  const { value, error } = run.weight([0, 0], "pieces", 0, 1);
  assert.ok(near(value, (128 / 255) ** 2) && near(error, rootError(128, 1)));
  assert.match(weightText({ value, error }), /≈ 0\.2520 \(± 0\.0020, stored in one byte\)/);
  assert.ok(near(run.weight([0, 1], "pieces", 0, 0).value, 0.5));
});

test("a weight of a long text is that of a link, or at most that of its square", () => {
  const queries = Array.from({ length: 2 * 3 });
  const square = { top: [0.62, 0.62], data: u8([255, 255]) };
  const stored = {
    form: "links",
    k: 2,
    number: 1,
    keys: u8(queries.flatMap(() => [2, 0])),
    weights: u16(queries.flatMap(() => [40000, 10000])),
    reduced: { cell: 3, rows: 1, columns: 1, max: square, mean: square },
  };
  const run = exampleRun({ weights: [stored, {}] });
  assert.ok(run.long);
  const keys = run.links([0, 1], 1).map(({ key }) => key);
  assert.deepEqual(keys, [2, 0]);
  assert.ok(near(run.weight([0, 0], "pieces", 1, 2).value, 40000 / 65535));
  const other = run.weight([0, 0], "pieces", 1, 1);
  assert.ok(other.atMost && other.value <= 10000 / 65535 + 1e-9);
  assert.match(weightText(other), /^at most 0\.1526/);
});

test("a head is found by its label", () => {
  const run = exampleRun();
  assert.equal(run.label([1, 0]), "4.0");
  assert.deepEqual(run.parse("4.1"), [1, 1]);
  for (const wrong of ["4.2", "1.0", "", "4", "4.1.1", "x"]) assert.equal(run.parse(wrong), null);
  const cross = exampleRun({ layers: [LAYER, { ...LAYER, kind: "cross", index: 0 }] });
  assert.deepEqual(cross.parse("cross 0.1"), [1, 1]);
});

test("what the heads add to a token is read from the layer's output", () => {
  const stored = {
    norms: f32([1, 2, 3, 4, 5, 6]),
    along: null,
    total: f32([7, 8, 9]),
    bias: null,
    heads: [1],
    parts: f32(Array.from({ length: 3 * 6 }, (_, n) => n)),
  };
  const output = exampleRun({ output: [stored, null] }).output(0, 2);
  assert.ok(output);
  assert.deepEqual(output.norms, [3, 6]);
  assert.equal(output.total, 9);
  assert.deepEqual([...(output.part(1) ?? [])], [12, 13, 14, 15, 16, 17]);
  assert.equal(output.part(0), null);
  assert.equal(exampleRun().output(1, 0), null);
});

test("shares of the largest number are decoded", () => {
  assert.deepEqual([...numbers({ top: 5, data: u16([0, 65535, 13107]) })], [0, 5, 1]);
  assert.deepEqual([...numbers(f32([0.5, 7]))], [0.5, 7]);
});
