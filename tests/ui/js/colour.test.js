import assert from "node:assert/strict";
import { test } from "node:test";
import { inkOn, luminance, PALETTES, pick, ramp } from "#js/lib/colour.js";

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

test("text on any colour has a contrast of at least 4", () => {
  for (let n = 0; n <= 20; n++) {
    const ground = pick(ramp("sea", "light"), n / 20);
    const ink = inkOn(ground) === "#ffffff" ? 1 : 0.006;
    const [high, low] = [luminance(ground), ink].sort((a, b) => b - a);
    assert.ok((high + 0.05) / (low + 0.05) >= 4, `${n}: ${(high + 0.05) / (low + 0.05)}`);
  }
});
