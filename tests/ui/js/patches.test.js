import assert from "node:assert/strict";
import { test } from "node:test";
import { patchPlace, patchToken, patchWeights, queryToken } from "#js/lib/patches.js";
import { exampleRun, near, TEXT } from "./example.js";

const IMAGE = { rows: 1, columns: 2, offset: 1, picture: "data:," };
const GRID = { rows: 3, columns: 7, offset: 2, picture: "data:," };

/** A pass over [CLS] and two patches. */
function imageRun() {
  return exampleRun({ texts: [{ ...TEXT, image: IMAGE }] });
}

test("a patch and its token lead to each other", () => {
  assert.equal(patchToken(GRID, 2, 5), 2 + 2 * 7 + 5);
  assert.deepEqual(patchPlace(GRID, 2 + 2 * 7 + 5), [2, 5]);
  assert.equal(patchPlace(GRID, 1), null);
  assert.equal(patchPlace(GRID, 2 + 3 * 7), null); // a text that follows the image
});

test("the weights to patches leave out special tokens", () => {
  const weights = patchWeights(imageRun(), [0, 0], 2);
  assert.deepEqual([weights?.rows, weights?.columns], [1, 2]);
  assert.ok(weights && near(weights.values[0], 0.3) && near(weights.values[1], 0.5) && near(weights.top, 0.5));
  assert.equal(patchWeights(exampleRun(), [0, 0], 2), null);
});

test("without a chosen token a special token looks, the patch in the middle, or the last of a text", () => {
  const behind = exampleRun({ texts: [{ ...TEXT, image: { ...IMAGE, columns: 1 } }] });
  assert.equal(queryToken(behind, 0, null), 2);
  assert.equal(queryToken(imageRun(), 0, null), 0);
  assert.equal(queryToken(imageRun(), 0, 2), 2);
  const bare = exampleRun({ texts: [{ ...TEXT, image: { ...IMAGE, columns: 3, offset: 0 } }] });
  assert.equal(queryToken(bare, 0, null), 1);
});
