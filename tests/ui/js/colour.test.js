import assert from "node:assert/strict";
import { test } from "node:test";
import { category, inkOn, luminance, PALETTES, pick, ramp } from "#js/lib/colour.js";

test("the luminance of a palette is monotonic", () => {
  for (const name of PALETTES) {
    for (const theme of /** @type {const} */ (["light", "dark"])) {
      const light = Array.from({ length: 256 }, (_, n) => luminance(pick(ramp(name, theme), n / 255)));
      const sign = theme === "light" ? -1 : 1;
      for (let n = 8; n < 256; n += 8) assert.ok(sign * (light[n] - light[n - 8]) > 0, `${name} ${theme} ${n}`);
      assert.ok(Math.abs(light[255] - light[0]) > 0.6);
    }
  }
});

test("text on any colour has a contrast of at least 4.5", () => {
  for (let light = 0; light <= 255; light++) {
    const [ground, ink] = [luminance([light, light, light]), inkOn([light, light, light]) === "#ffffff" ? 1 : 0];
    const [high, low] = [ground, ink].sort((a, b) => b - a);
    assert.ok((high + 0.05) / (low + 0.05) >= 4.5, `${light}`);
  }
});

test("the colours of many heads are distinct", () => {
  for (const theme of /** @type {const} */ (["light", "dark"])) {
    const colours = Array.from({ length: 32 }, (_, n) => String(category(n, theme)));
    assert.equal(new Set(colours).size, 32);
  }
});
