import assert from "node:assert/strict";
import { test } from "node:test";
import { registeredViews, registerView } from "#js/lib/registry.js";
import { initialState, readState, writeState } from "#js/lib/state.js";
import { exampleRun } from "./example.js";
import "#js/views/causes.js";
import "#js/views/compare.js";
import "#js/views/head.js";
import "#js/views/map.js";
import "#js/views/steps.js";

test("views register themselves, and their tabs are in order", () => {
  const names = registeredViews().map(({ name }) => name);
  assert.deepEqual(names, ["map", "head", "steps", "compare", "causes"]);
  assert.throws(() => registerView(registeredViews()[0]), /two views are called map/);
});

test("a view has state of its own", () => {
  const run = exampleRun();
  assert.equal(initialState().order, "model");
  assert.deepEqual(readState("order=ranked&paint=nonsense", run), { order: "ranked" });
});

test("a shared state reads back, without what a link may not carry", () => {
  const run = exampleRun();
  /** @type {Partial<import("#js/lib/state.js").State>} */
  const fields = {
    view: "head",
    heads: [
      [1, 0],
      [0, 1],
    ],
    token: 2,
    unit: "pieces",
    bare: true,
  };
  const shared = writeState({ ...fields, key: null, stat: "entropy", text: "a & b" }, run);
  assert.equal(new URLSearchParams(shared).get("text"), "a & b");
  assert.deepEqual(readState(shared, run), fields);
});

test("a field of a view without a list of values takes any text, up to a length", () => {
  assert.deepEqual(readState(`answer=+Mary&other=${"x".repeat(300)}`, exampleRun()), {
    answer: " Mary",
    other: "x".repeat(200),
  });
});

test("invalid fields of a shared state are ignored", () => {
  const shared = "view=evil&heads=9.9,x&token=-1&stat=__proto__&palette=<&theme=2";
  assert.deepEqual(readState(shared, exampleRun()), { token: null });
});
