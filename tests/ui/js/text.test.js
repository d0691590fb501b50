import assert from "node:assert/strict";
import { test } from "node:test";
import { cellText, direction, format, plural, visible } from "#js/lib/text.js";

test("invisible characters of a token get a symbol", () => {
  assert.equal(visible(" a\n"), "␣a↵");
  assert.equal(visible("\t\u0000\u007f\u2028\u00a0"), "⇥␀␡⏎⍽");
  assert.equal(visible("\u202eabc\u200b"), "⟨202E⟩abc⟨200B⟩");
  assert.equal(visible("👩‍👩‍👧"), "👩‍👩‍👧");
  assert.equal(visible("\ud800"), "\ufffd");
  assert.equal(visible(""), "∅");
  assert.equal(visible("x".repeat(10000)).length, 61);
  assert.equal(visible("<img src=x onerror=alert(1)>"), "<img src=x onerror=alert(1)>");
});

test("numbers have as many digits as they need", () => {
  assert.deepEqual([format(0.6768, 3), format(-1.5, 2), format(0, 2)], ["0.677", "−1.50", "0.00"]);
  assert.deepEqual([format(-Infinity), format(null)], ["−∞", "–"]);
  assert.deepEqual([format(123.456), format(1e-7, 4)], ["123.5", "1.0e−7"]);
  assert.deepEqual([cellText(-0.001), cellText(-0.19)], ["0.00", "−0.19"]);
  assert.deepEqual([plural(1, "head"), plural(2048, "token")], ["1 head", "2,048 tokens"]);
});

test("the first letter gives the direction of a text", () => {
  assert.equal(direction("(1) שלום abc"), "rtl");
  assert.equal(direction("… مرحبا"), "rtl");
  assert.equal(direction("abc שלום"), "ltr");
  assert.equal(direction("日本語 123"), "ltr");
  assert.equal(direction(""), "ltr");
});
