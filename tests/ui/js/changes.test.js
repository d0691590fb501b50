import assert from "node:assert/strict";
import { test } from "node:test";
import { alignWords, largestChange, sameShape, splitChange } from "#js/lib/changes.js";
import { exampleRun, f32, LAYER, near, WEIGHTS } from "./example.js";

test("passes have the same shape when their layers have as many heads", () => {
  assert.ok(sameShape(exampleRun(), exampleRun()));
  assert.ok(!sameShape(exampleRun(), exampleRun({ layers: [LAYER] })));
});

test("words are aligned before and after the part that differs", () => {
  assert.deepEqual(alignWords(["a", "b"], ["c", "d"]), [
    [0, 0],
    [1, 1],
  ]);
  assert.deepEqual(alignWords(["a", "b", "d"], ["a", "b", "c", "c", "d"]), [
    [0, 0],
    [1, 1],
    [2, 4],
  ]);
  assert.deepEqual(alignWords(["a"], ["a", "a"]), [[0, 0]]);
});

test("a text is split at the words in which it differs", () => {
  assert.deepEqual(splitChange("it was too tired to go", "it was too wide to go"), ["it was too ", "tired ", "to go"]);
  assert.deepEqual(splitChange("it was", "it was"), ["it was", "", ""]);
});

test("the largest change is between two words that are no delimiters", () => {
  const changed = {
    form: "f32",
    data: f32([...WEIGHTS.slice(0, 4), 0.25, 0.25, 0.1, 0.3, 0.1, ...Array(9).fill(1 / 3)]),
  };
  const second = exampleRun({ weights: [changed, exampleRun().json.weights[1]] });
  const change = largestChange(exampleRun(), second, "pieces");
  assert.deepEqual([change?.at, change?.from, change?.to], [[0, 0], "c", "c"]); // 1 to 0 would be larger
  assert.ok(near(change?.before ?? 0, 0.5) && near(change?.after ?? 0, 0.1));
});

test("passes of different shape and long texts have no largest change", () => {
  assert.equal(largestChange(exampleRun(), exampleRun({ layers: [LAYER] }), "words"), null);
});
