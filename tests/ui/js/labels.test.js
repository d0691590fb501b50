import assert from "node:assert/strict";
import { test } from "node:test";
import { placeLabels } from "#js/lib/labels.js";

const LABEL = { width: 26, height: 12 };
const ROOM = { width: 700, height: 500 };

/** @param {{ x: number, y: number }} a @param {{ x: number, y: number }} b */
function overlap(a, b) {
  return Math.abs(a.x - b.x) < LABEL.width && Math.abs(a.y - b.y) < LABEL.height;
}

test("labels of a crowd of points cover neither each other nor a point, and stay in the room", () => {
  const points = Array.from({ length: 23 }, (_, n) => ({
    x: 300 + 83 * Math.cos(n * n),
    y: 250 + 61 * Math.sin(3 * n),
  }));
  const labels = placeLabels(points, LABEL, ROOM).filter((label) => label !== null);
  assert.equal(labels.length, 23);
  for (const [n, label] of labels.entries()) {
    assert.ok(
      labels.slice(0, n).every((other) => !overlap(label, other)),
      `label ${n}`,
    );
    const covered = points.some(({ x, y }) => Math.abs(label.x - x) < 13 && Math.abs(label.y - y) < 6);
    assert.ok(!covered, `a point under label ${n}`);
  }
});

test("a point in the corner has its label inside", () => {
  const [label] = placeLabels([{ x: 0, y: 0 }], LABEL, ROOM);
  assert.ok(label && label.x >= 13 && label.y >= 6);
});

test("a lonely point has its label above it", () => {
  const [label] = placeLabels([{ x: 300, y: 200 }], LABEL, ROOM);
  assert.ok(label && Math.abs(label.x - 300) < 1e-9 && label.y < 200);
});

test("a label without a free place is left out", () => {
  const labels = placeLabels(Array(300).fill({ x: 100, y: 100 }), LABEL, ROOM);
  assert.ok(labels[0] !== null && labels[299] === null);
});
