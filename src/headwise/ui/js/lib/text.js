// Tokens and numbers as text.
/** @import { Weight } from "./run.js" */

/** @type {Record<string, string>} */
const SYMBOLS = { "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u2028": "⏎", "\u2029": "⏎", "\u007f": "␡" };
// zero-width characters and direction overrides: shown, or a token could look like another
const INVISIBLE = /[\u200b\u200c\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\u061c]/gu;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
const MOST_CHARACTERS = 60; // characters of a token; the rest is in its title

/** A token as it can be seen: outer spaces, line breaks, control and zero-width characters get a symbol.
 * @param {string} token @param {number} [most] */
export function visible(token, most = MOST_CHARACTERS) {
  const cut = token.length > most * 2 ? token.slice(0, most * 2) : token;
  const shown = cut
    .replace(/[\n\r\t\u00a0\u2028\u2029\u007f]/g, (character) => SYMBOLS[character])
    .replace(/[\u0000-\u001f]/g, (character) => String.fromCharCode(0x2400 + character.charCodeAt(0)))
    .replace(INVISIBLE, (character) => `⟨${character.codePointAt(0)?.toString(16).toUpperCase().padStart(4, "0")}⟩`)
    .replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length))
    .replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");
  const characters = [...shown];
  return characters.length > most ? `${characters.slice(0, most).join("")}…` : shown || "∅";
}

/** The direction of a text, by its first letter: its first token may be a mark such as [CLS].
 * @param {string} text @returns {"rtl" | "ltr"} */
export function direction(text) {
  const letter = /\p{L}/u.exec(text)?.[0] ?? "";
  return RIGHT_TO_LEFT.test(letter) ? "rtl" : "ltr";
}

/** @param {number | null | undefined} x @param {number} [digits] */
export function format(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === -Infinity) return "−∞";
  const size = Math.abs(x);
  const text =
    size !== 0 && (size >= 1e5 || size < 0.5 * 10 ** -digits)
      ? x.toExponential(1)
      : x.toFixed(size >= 100 ? 1 : size >= 10 ? Math.min(2, digits) : digits);
  return text.replace("-", "−");
}

/** A number with two decimals, for a small cell. @param {number} x */
export function cellText(x) {
  return (Math.abs(x) < 0.005 ? 0 : x).toFixed(2).replace("-", "−");
}

/** A weight, and how exact it is. @param {Weight} weight */
export function weightText({ value, error, atMost }) {
  if (atMost) return `at most ${format(value, 4)} (not among the strongest links that this page holds)`;
  if (error >= 0.00005) return `≈ ${format(value, 4)} (± ${format(error, 4)}, stored in one byte)`;
  return format(value, 4);
}

/** @param {number} n */
export function thousands(n) {
  return n.toLocaleString("en-US");
}

/** A count with its noun: "1 head", "2,048 tokens". @param {number} n @param {string} noun */
export function plural(n, noun) {
  return `${thousands(n)} ${noun}${n === 1 ? "" : "s"}`;
}
