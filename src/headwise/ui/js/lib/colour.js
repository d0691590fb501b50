// Palettes, computed in OKLab: each runs evenly from the background to the far end of lightness, so that it reads the
// same with any kind of colour vision, in grey and in print.

/** @typedef {[number, number, number]} Rgb */

/** OKLCH stops [lightness, chroma, hue in degrees], for a light ground; the dark ones run the other way. */
/** @type {Record<string, {light: number[][], dark: number[][]}>} */
const RAMPS = {
  sea: {
    light: [
      [0.985, 0.012, 100],
      [0.86, 0.085, 165],
      [0.66, 0.115, 205],
      [0.46, 0.125, 255],
      [0.27, 0.11, 285],
    ],
    dark: [
      [0.225, 0.02, 270],
      [0.38, 0.1, 275],
      [0.55, 0.125, 235],
      [0.75, 0.12, 185],
      [0.95, 0.1, 110],
    ],
  },
  ink: {
    light: [
      [0.985, 0.008, 250],
      [0.7, 0.09, 250],
      [0.28, 0.09, 262],
    ],
    dark: [
      [0.225, 0.02, 265],
      [0.55, 0.11, 255],
      [0.95, 0.04, 235],
    ],
  },
  ember: {
    light: [
      [0.985, 0.015, 90],
      [0.84, 0.1, 75],
      [0.6, 0.16, 40],
      [0.3, 0.1, 20],
    ],
    dark: [
      [0.225, 0.02, 30],
      [0.42, 0.13, 25],
      [0.67, 0.16, 50],
      [0.96, 0.08, 95],
    ],
  },
};
export const PALETTES = Object.keys(RAMPS);

/** From negative (blue) to positive (orange): two hues that are distinct with any kind of colour vision. */
const DIVERGING = {
  light: [
    [0.4, 0.13, 255],
    [0.72, 0.09, 240],
    [0.98, 0.005, 100],
    [0.76, 0.12, 65],
    [0.48, 0.14, 45],
  ],
  dark: [
    [0.8, 0.11, 240],
    [0.5, 0.11, 255],
    [0.25, 0.01, 270],
    [0.52, 0.12, 50],
    [0.84, 0.12, 70],
  ],
};

const GOLDEN_ANGLE = 137.508; // degrees

/** For several heads at once: distinct in lightness as well as in hue.
 * @type {Record<"light" | "dark", [number, number, number][]>} */
const CATEGORIES = {
  light: [
    [0.5, 0.15, 255],
    [0.6, 0.17, 45],
    [0.52, 0.12, 160],
    [0.45, 0.16, 320],
    [0.7, 0.14, 85],
    [0.63, 0.11, 220],
    [0.35, 0.08, 20],
    [0.62, 0.15, 350],
  ],
  dark: [
    [0.74, 0.12, 245],
    [0.76, 0.15, 60],
    [0.78, 0.13, 160],
    [0.7, 0.15, 320],
    [0.88, 0.13, 95],
    [0.84, 0.08, 215],
    [0.65, 0.12, 25],
    [0.8, 0.11, 350],
  ],
};

/** @param {number} l @param {number} c @param {number} h @returns {Rgb} in 0..255 */
export function oklch(l, c, h) {
  const turn = (h * Math.PI) / 180;
  return oklab(l, c * Math.cos(turn), c * Math.sin(turn));
}

/** @param {number} l @param {number} a @param {number} b @returns {Rgb} */
function oklab(l, a, b) {
  const x = (l + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const y = (l - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const z = (l - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * x - 3.3077115913 * y + 0.2309699292 * z,
    -1.2684380046 * x + 2.6097574011 * y - 0.3413193965 * z,
    -0.0041960863 * x - 0.7034186147 * y + 1.707614701 * z,
  ];
  return /** @type {Rgb} */ (
    linear.map((v) => {
      const clipped = Math.min(1, Math.max(0, v));
      return Math.round(255 * (clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055));
    })
  );
}

/** @param {number[][]} stops @returns {Uint8Array} 256 colours, three bytes each */
function table(stops) {
  const colours = new Uint8Array(256 * 3);
  const points = stops.map(([l, c, h]) => [l, c * Math.cos((h * Math.PI) / 180), c * Math.sin((h * Math.PI) / 180)]);
  for (let i = 0; i < 256; i++) {
    const place = (i / 255) * (points.length - 1);
    const low = Math.min(Math.floor(place), points.length - 2);
    const mix = points[low].map((v, axis) => v + (points[low + 1][axis] - v) * (place - low));
    colours.set(oklab(mix[0], mix[1], mix[2]), i * 3);
  }
  return colours;
}

/** @type {Map<string, Uint8Array>} */
const ramps = new Map();

/** @param {string} name a palette, or "diverging" @param {"light" | "dark"} theme @returns {Uint8Array} */
export function ramp(name, theme) {
  const key = `${name}/${theme}`;
  const stops = name === "diverging" ? DIVERGING : (RAMPS[name] ?? RAMPS.sea);
  const colours = ramps.get(key) ?? table(stops[theme]);
  ramps.set(key, colours);
  return colours;
}

/** @param {Uint8Array} colours @param {number} share 0..1 @returns {Rgb} */
export function pick(colours, share) {
  const at = 3 * Math.round(255 * Math.min(1, Math.max(0, share)));
  return [colours[at], colours[at + 1], colours[at + 2]];
}

/** The colour of one thing among several: chosen for the first eight, then hues a golden angle apart.
 * @param {number} number @param {"light" | "dark"} theme @returns {Rgb} */
export function category(number, theme) {
  const chosen = CATEGORIES[theme];
  if (number < chosen.length) return oklch(...chosen[number]);
  const lightness = (theme === "dark" ? 0.68 : 0.42) + 0.07 * (number % 3);
  return oklch(lightness, 0.12, (number * GOLDEN_ANGLE) % 360);
}

/** @param {Rgb} rgb @param {number} [alpha] */
export function css(rgb, alpha = 1) {
  return alpha >= 1 ? `rgb(${rgb.join(" ")})` : `rgb(${rgb.join(" ")} / ${alpha.toFixed(3)})`;
}

/** Relative luminance, 0..1. @param {Rgb} rgb */
export function luminance(rgb) {
  const [r, g, b] = rgb.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Black or white text for a background: whichever has more contrast. @param {Rgb} rgb */
export function inkOn(rgb) {
  const light = luminance(rgb);
  return (light + 0.05) / 0.05 > 1.05 / (light + 0.05) ? "#000000" : "#ffffff";
}
