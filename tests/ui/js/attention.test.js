import assert from "node:assert/strict";
import { test } from "node:test";
import { attention } from "#js/lib/attention.js";
import { near } from "./example.js";

const STEP = {
  dim: 2,
  queries: 3,
  keys: 3,
  group: 1,
  value: 1,
  offset: 0,
  scale: 0.5,
  softcap: null,
  causal: false,
  window: null,
  sink: null,
  bias: null,
  complete: true,
  q: new Float32Array([2, 0, 0, 2, 1, 1]),
  k: new Float32Array([1, 0, 0, 1, 1, 1]),
  v: new Float32Array([1, 10, 100]),
};

test("products are scaled, and the weights are their softmax", () => {
  const { products, scores, weights, output } = attention(STEP, 0);
  assert.deepEqual([...products], [2, 0, 2]);
  assert.deepEqual([...scores], [1, 0, 1]);
  const total = 2 * Math.E + 1;
  assert.ok(near(weights[0], Math.E / total));
  assert.ok(Math.abs(output[0] - (Math.E * 101 + 10) / total) < 1e-4);
});

test("causality and the window hide keys", () => {
  assert.deepEqual([...attention({ ...STEP, causal: true }, 0).weights], [1, 0, 0]);
  assert.deepEqual([...attention({ ...STEP, window: [0, 0] }, 1).weights], [0, 1, 0]);
});

test("softcap bounds the scores", () => {
  assert.ok(near(attention({ ...STEP, softcap: 0.5 }, 0).scores[0], 0.5 * Math.tanh(2)));
});

test("a sink takes part of the weight", () => {
  const { weights, sinkWeight } = attention({ ...STEP, sink: 1 }, 0);
  assert.ok(sinkWeight > 0 && near(weights.reduce((a, b) => a + b, 0) + sinkWeight, 1));
});

test("a query with no visible keys gets zeros", () => {
  const { weights, output } = attention({ ...STEP, bias: () => -Infinity }, 0);
  assert.deepEqual([...weights], [0, 0, 0]);
  assert.deepEqual([...output], [0]);
});
