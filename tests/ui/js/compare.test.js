import assert from "node:assert/strict";
import { test } from "node:test";
import { sameShape } from "#js/views/compare.js";
import { exampleRun, LAYER } from "./example.js";

test("passes have the same shape when their layers have as many heads", () => {
  assert.ok(sameShape(exampleRun(), exampleRun()));
  assert.ok(!sameShape(exampleRun(), exampleRun({ layers: [LAYER] })));
});
