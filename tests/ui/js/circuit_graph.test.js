import assert from "node:assert/strict";
import { test } from "node:test";
import { curveExtent, layoutGraph, nodeName, sizeShare } from "#js/lib/circuit_graph.js";

/** @import { Circuit } from "#js/lib/circuit_graph.js" */

const NODES = [
  { id: "output", type: "output", layer: 2, order: 4 },
  { id: "embedding", type: "embedding", layer: -1 },
  { id: "a", type: "head", kind: "self", layer: 0, head: 3, order: 0 },
  { id: "b", type: "head", kind: "cross", layer: 1, head: 0, order: 2 },
  { id: "f", type: "feed-forward", layer: 1, order: 3 },
  { id: "alone", type: "head", kind: "self", layer: 1, head: 2, order: 2 },
];

/** @param {[string, string][]} edges @returns {Circuit} */
function circuit(edges) {
  return {
    metric: "m",
    clean: 1,
    corrupted: 0,
    prompts: 1,
    method: "",
    nodes: NODES,
    edges: edges.map(([from, to], n) => ({ from, to, input: "input", score: 1 / (n + 1) })),
    size: edges.length,
    curve: [],
    notes: [],
  };
}

test("nodes are in rows from input to output, heads in the columns of their numbers", () => {
  const graph = layoutGraph(
    circuit([
      ["b", "output"],
      ["a", "f"],
      ["embedding", "a"],
    ]),
    10,
  );
  const places = Object.fromEntries(graph.nodes.map(({ id, x, y }) => [id, [x, y]]));
  assert.deepEqual(places, { embedding: [0.5, 0], a: [0.7, 1], b: [0.1, 2], f: [0.9, 3], output: [0.5, 4] });
  assert.deepEqual(graph.rows, ["", "layer 0", "cross layer 1", "", ""]);
});

test("a KV head is below the heads that share it, and as wide", () => {
  const nodes = [
    { id: "q", type: "head", kind: "self", layer: 1, head: 4, heads: [4], order: 5 },
    { id: "r", type: "head", kind: "self", layer: 1, head: 1, heads: [1], order: 4 },
    { id: "kv", type: "kv", kind: "self", layer: 1, heads: [3, 4, 5], order: 6 },
    { id: "a", type: "head", kind: "self", layer: 0, head: 0, heads: [0], order: 0 },
  ];
  const graph = layoutGraph(
    {
      ...circuit([
        ["a", "kv"],
        ["a", "q"],
        ["a", "r"],
      ]),
      nodes,
    },
    9,
  );
  const places = Object.fromEntries(graph.nodes.map(({ id, x, y, span }) => [id, [x, y, span]]));
  assert.deepEqual(places, { a: [0.5 / 7, 0, 1], kv: [4.5 / 7, 1, 3], q: [4.5 / 7, 2, 1], r: [1.5 / 7, 2, 1] });
  assert.equal(nodeName(nodes[2]), "KV 1.1");
});

test("only the strongest edges and their nodes are drawn, and none of an unknown node", () => {
  const edges = /** @type {[string, string][]} */ ([
    ["a", "nowhere"],
    ["a", "b"],
    ["b", "output"],
  ]);
  const { nodes, edges: shown } = layoutGraph(circuit(edges), 1);
  assert.deepEqual(
    nodes.map(({ id }) => id),
    ["a", "b"],
  );
  assert.equal(shown.length, 1);
  assert.deepEqual(layoutGraph(circuit([]), 5).nodes, []);
});

test("nodes are named by layer and head", () => {
  assert.deepEqual(NODES.slice(0, 5).map(nodeName), ["output", "embedding", "0.3", "1.0", "FF 1"]);
});

test("sizes are on a logarithmic axis", () => {
  assert.deepEqual(
    [10, 100, 1000].map((edges) => sizeShare([10, 100, 1000], edges)),
    [0, 0.5, 1],
  );
  assert.equal(sizeShare([7], 7), 0.5);
});

test("a curve's axis has 0, 1 and all ends of intervals", () => {
  const point = { edges: 1, completeness: null, random: [0, null, null], faithfulness: [0.5, -0.25, 1.5] };
  assert.deepEqual(curveExtent([/** @type {any} */ (point)]), [-0.25, 1.5]);
  assert.deepEqual(curveExtent([]), [0, 1]);
});
