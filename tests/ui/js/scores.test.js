import assert from "node:assert/strict";
import { test } from "node:test";
import { ramp } from "#js/lib/colour.js";
import { colourScale, difference, extent, orderedHeads, rankedHeads } from "#js/lib/scores.js";
import { exampleRun, LAYER } from "./example.js";

test("a difference is null where either table has no value", () => {
  const first = [
    [1, null],
    [0.5, 2],
  ];
  const second = [
    [2, 1],
    [0.25, null],
  ];
  const expected = [
    [1, null],
    [-0.25, null],
  ];
  assert.deepEqual(difference(first, second), expected);
});

test("heads of a layer are ordered by value on request", () => {
  assert.deepEqual(orderedHeads(LAYER, [0.1, 0.9], "value"), [1, 0]);
  assert.deepEqual(orderedHeads({ heads: 3 }, [], "model"), [0, 1, 2]);
});

test("a scale begins at 0 unless a value is negative", () => {
  assert.deepEqual(extent([[1, 3], [null]]), [0, 3]);
  assert.deepEqual(extent([[-1, 3]]), [-1, 3]);
});

test("the colours of a signed score are around 0", () => {
  const run = exampleRun({ scores: { effect: [], michel: [] }, signed: ["effect"] });
  const scale = (/** @type {string} */ stat) => colourScale(run, stat, "ink", "light", [[-1, 3]]);
  assert.deepEqual(scale("effect"), { low: -3, high: 3, colours: ramp("diverging", "light") });
  assert.deepEqual(scale("michel"), { low: -1, high: 3, colours: ramp("ink", "light") });
});

test("ranked heads leave out those without a value", () => {
  const table = [[0.2, 0.7, null], [0.5]];
  const highest = [
    [0, 1],
    [1, 0],
    [0, 0],
  ];
  assert.deepEqual(rankedHeads(table, false), highest);
  assert.deepEqual(rankedHeads(table, true), [...highest].reverse());
});
