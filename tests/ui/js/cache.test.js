import assert from "node:assert/strict";
import { test } from "node:test";
import { LruCache } from "#js/lib/cache.js";

test("the entry that was used longest ago is dropped", () => {
  const cache = new LruCache(2);
  let computed = 0;
  const get = (/** @type {string} */ key) => cache.get(key, () => ++computed);
  for (const key of ["a", "b", "a", "c"]) get(key);
  assert.deepEqual([...cache.entries.keys()], ["a", "c"]);
  assert.equal(get("a"), 1);
});
