import assert from "node:assert/strict";
import { test } from "node:test";
import { placeBeside } from "#js/lib/placement.js";

const SIZE = { width: 100, height: 50 };
const WINDOW = { width: 400, height: 300 };

/** @param {number} left @param {number} top */
function box(left, top) {
  return { left, top, right: left + 40, bottom: top + 20 };
}

/** @param {ReturnType<typeof box>} explained @param {{ x: number, y: number }} corner */
function covers(explained, { x, y }) {
  const across = x < explained.right && x + SIZE.width > explained.left;
  return across && y < explained.bottom && y + SIZE.height > explained.top;
}

test("a tooltip is in the window and never over what it explains", () => {
  for (let left = 0; left <= 360; left += 9) {
    for (let top = 0; top <= 280; top += 7) {
      for (const side of /** @type {const} */ (["left", "right"])) {
        const corner = placeBeside(box(left, top), SIZE, WINDOW, side);
        assert.ok(!covers(box(left, top), corner), `${left}, ${top}`);
        assert.ok(corner.x >= 0 && corner.x + SIZE.width <= WINDOW.width, `${left}, ${top}`);
        assert.ok(corner.y >= 0 && corner.y + SIZE.height <= WINDOW.height, `${left}, ${top}`);
      }
    }
  }
});

test("a tooltip goes to the preferred side where there is room, and below a box as wide as the window", () => {
  assert.ok(placeBeside(box(200, 100), SIZE, WINDOW, "left").x < 200);
  assert.ok(placeBeside(box(200, 100), SIZE, WINDOW, "right").x > 240);
  assert.ok(placeBeside({ left: 0, top: 100, right: 400, bottom: 120 }, SIZE, WINDOW).y > 120);
});
