import assert from "node:assert/strict";
import { test } from "node:test";
import { linePath, nearestStep, share, stepShare, timeScale } from "#js/lib/timeline.js";

test("a scale begins at 0 and spans the values of all steps", () => {
  assert.deepEqual(timeScale([2, null, 5], false), { low: 0, high: 5, logarithmic: false });
  assert.deepEqual(timeScale([-2, 5], false), { low: -2, high: 5, logarithmic: false });
  assert.deepEqual(timeScale([], true), { low: 0, high: 0, logarithmic: true });
});

test("a share is from 0 to 1, on a linear or a logarithmic scale", () => {
  assert.equal(share(2.5, { low: 0, high: 5, logarithmic: false }), 0.5);
  assert.equal(share(9, { low: 0, high: 99, logarithmic: true }), 0.5);
  assert.equal(share(-3, { low: 0, high: 99, logarithmic: true }), 0);
  assert.equal(share(7, { low: 0, high: 0, logarithmic: false }), 0);
});

test("steps are placed by their number, not by their order", () => {
  assert.equal(stepShare([1, 50, 101], 1), 0.49);
  assert.equal(stepShare([7], 0), 0.5);
});

test("a line has a gap where there is no value", () => {
  const scale = { low: 0, high: 2, logarithmic: false };
  const size = { width: 10, height: 4 };
  assert.equal(linePath([0, 5, 10], [0, 1, 2], scale, size), "M0.0 4.0L5.0 2.0L10.0 0.0");
  assert.equal(linePath([0, 5, 10], [0, null, 2], scale, size), "M0.0 4.0M10.0 0.0");
});

test("the nearest step is found", () => {
  assert.equal(nearestStep([1, 50, 100], 70), 1);
  assert.equal(nearestStep([1, 50, 100], 1000), 2);
});
