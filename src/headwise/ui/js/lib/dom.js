// Small tools for building the page. Text is only ever set as text: a token may be "<img onerror=...>".

/** @typedef {Record<string, any>} Props */

/** An element. Props: class, text, on: {event: handler}, data: {...}, style: {...}; all others are attributes.
 * @param {string} tag @param {Props} [props] @param {...(Node | string | null | false | undefined)} children
 * @returns {any} */
export function h(tag, props = {}, ...children) {
  const el = document.createElement(tag);
  const { class: name, text, on = {}, data = {}, style = {}, ...rest } = props;
  if (name) el.className = name;
  if (text !== undefined) el.textContent = text;
  for (const [event, handler] of Object.entries(on)) el.addEventListener(event, /** @type {any} */ (handler));
  for (const [key, value] of Object.entries(data)) el.dataset[key] = String(value);
  for (const [key, value] of Object.entries(style)) el.style.setProperty(key, String(value));
  for (const [key, value] of Object.entries(rest)) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("aria-")) el.setAttribute(key, String(value)); // there, false is said too
    else if (value === true) el.setAttribute(key, "");
    else if (value !== false) el.setAttribute(key, String(value));
  }
  el.append(.../** @type {any[]} */ (children.filter((child) => child !== null && child !== undefined && child !== false)));
  return el;
}

const NAMED = { "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u2028": "⏎", "\u2029": "⏎", "\u007f": "␡" };
// zero-width signs and those that turn the direction of what follows: shown, or a token could look like another
const UNSEEN = /[\u200b\u200c\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\u061c]/gu;
const SHOWN = 60; // characters of a token; the rest is in its title

/** A token as it can be seen: spaces at its ends, line breaks, controls and signs without width get a shape.
 * @param {string} token @param {number} [most] */
export function visible(token, most = SHOWN) {
  const cut = token.length > most * 2 ? token.slice(0, most * 2) : token;
  const seen = cut
    .replace(/[\n\r\t\u00a0\u2028\u2029\u007f]/g, (sign) => NAMED[/** @type {keyof typeof NAMED} */ (sign)])
    .replace(/[\u0000-\u001f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)))
    .replace(UNSEEN, (sign) => `⟨${sign.codePointAt(0)?.toString(16).toUpperCase().padStart(4, "0")}⟩`)
    .replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length))
    .replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");
  const signs = [...seen];
  return signs.length > most ? signs.slice(0, most).join("") + "…" : seen || "∅";
}

/** Which way a text runs, by its first letter: its tokens may begin with a mark such as [CLS], which says nothing about it.
 * @param {string} text @returns {"rtl" | "ltr"} */
export function direction(text) {
  return /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u.test(/\p{L}/u.exec(text)?.[0] ?? "") ? "rtl" : "ltr";
}

/** A token in an element of its own, so that its direction is its own. @param {string} token @param {Props} [props] */
export function tokenElement(token, props = {}) {
  const shown = visible(token);
  return h("bdi", { ...props, text: shown, title: shown.endsWith("…") ? `${token.length} characters: ${visible(token, 300)}` : null });
}

/** @param {number | null | undefined} x @param {number} [digits] */
export function format(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === -Infinity) return "−∞";
  const size = Math.abs(x);
  const text = size !== 0 && (size >= 1e5 || size < 0.5 * 10 ** -digits) ? x.toExponential(1) : x.toFixed(size >= 100 ? 1 : size >= 10 ? Math.min(2, digits) : digits);
  return text.replace("-", "−");
}

/** A number with two places for a small cell. @param {number} x */
export function cellText(x) {
  return (Math.abs(x) < 0.005 ? 0 : x).toFixed(2).replace("-", "−");
}

/** A weight in words, with what is not known about it. @param {import("./run.js").Weight} weight */
export function weightText({ value, error, atMost }) {
  if (atMost) return `at most ${format(value, 4)} (not among the strongest links that this page holds)`;
  if (error >= 0.00005) return `≈ ${format(value, 4)} (± ${format(error, 4)}, stored in one byte)`;
  return format(value, 4);
}

/** @param {number} n */
export function thousands(n) {
  return n.toLocaleString("en-US");
}

/** @param {number} n @param {string} noun */
export function several(n, noun) {
  return `${thousands(n)} ${noun}${n === 1 ? "" : "s"}`;
}

/** Rebuild part of the page and give the focus back to the control that had it. @param {HTMLElement} root @param {() => void} change */
export function keepFocus(root, change) {
  const scope = /** @type {Document | ShadowRoot} */ (root.getRootNode());
  const active = scope.activeElement;
  const key = active instanceof HTMLElement && root.contains(active) ? active.dataset.key : undefined;
  change();
  if (!key || (scope.activeElement && root.contains(scope.activeElement))) return;
  for (const el of root.querySelectorAll("[data-key]")) {
    if (/** @type {HTMLElement} */ (el).dataset.key === key) {
      /** @type {HTMLElement} */ (el).focus({ preventScroll: true });
      return;
    }
  }
}

/** Scroll a box of its own, and nothing around it, until a child is in sight. @param {HTMLElement} box @param {HTMLElement | null} child */
export function reveal(box, child) {
  if (!child) return;
  const [outer, inner] = [box.getBoundingClientRect(), child.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - outer.height / 3;
}

/** The one floating note of a view. */
export class Tip {
  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    this.el = h("div", { class: "hw-tip", role: "tooltip", hidden: true });
    root.append(this.el);
  }

  /** @param {{clientX: number, clientY: number}} at @param {(string | [string, string] | Node)[]} lines a pair is a name and its value */
  show(at, lines) {
    this.el.replaceChildren(...lines.map((line) => {
      if (line instanceof Node) return line;
      if (Array.isArray(line)) return h("div", { class: "pair" }, h("span", { text: line[0] }), h("b", { text: line[1] }));
      return h("div", { text: line });
    }));
    this.el.hidden = false;
    this.move(at);
  }

  /** @param {{clientX: number, clientY: number}} at */
  move(at) {
    const { width, height } = this.el.getBoundingClientRect();
    const x = Math.min(at.clientX + 14, window.innerWidth - width - 8);
    const below = at.clientY + 18 + height < window.innerHeight;
    this.el.style.left = `${Math.max(4, x)}px`;
    this.el.style.top = `${Math.max(4, below ? at.clientY + 18 : at.clientY - height - 10)}px`;
  }

  hide() {
    this.el.hidden = true;
  }
}

/** A row of buttons of which one is on. @param {string} label @param {[string, string][]} options value and text
 * @param {string} value @param {(value: string) => void} choose @param {Props} [props] */
export function choice(label, options, value, choose, props = {}) {
  return h("div", { class: "hw-choice", role: "radiogroup", "aria-label": label, ...props },
    ...options.map(([each, text], place) => h("button", {
      type: "button", role: "radio", "aria-checked": each === value, tabindex: each === value ? 0 : -1, text,
      data: { key: `${label}:${each}` },
      on: {
        click: () => choose(each),
        keydown: (/** @type {KeyboardEvent} */ event) => {
          const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
          if (!by) return;
          event.preventDefault();
          event.stopPropagation();
          const next = (place + by + options.length) % options.length;
          event.currentTarget.parentElement.children[next].focus();
          choose(options[next][0]);
        },
      },
    })));
}

/** @param {string} label @param {[string, string, string?][]} options value, text, and the group that they are listed in
 * @param {string} value @param {(value: string) => void} choose */
export function select(label, options, value, choose) {
  const option = (/** @type {[string, string, string?]} */ [each, text]) => h("option", { value: each, text, selected: each === value });
  const groups = [...new Set(options.map(([, , group]) => group))];
  return h("label", { class: "hw-field" }, h("span", { text: label }),
    h("select", { "aria-label": label, data: { key: `select:${label}` }, on: { change: (/** @type {any} */ event) => choose(event.target.value) } },
      ...groups.flatMap((group) => {
        const members = options.filter(([, , other]) => other === group).map(option);
        return group === undefined ? members : [h("optgroup", { label: group }, ...members)];
      })));
}

/** @param {string} label @param {boolean} value @param {(value: boolean) => void} choose @param {Props} [props] */
export function toggle(label, value, choose, props = {}) {
  return h("label", { class: "hw-toggle", title: props.title },
    h("input", { type: "checkbox", checked: value, disabled: props.disabled, data: { key: `toggle:${label}` }, on: { change: (/** @type {any} */ event) => choose(event.target.checked) } }),
    h("span", { text: label }));
}

/** A canvas as sharp as the screen. @param {HTMLCanvasElement} canvas @param {number} width @param {number} height */
export function sharp(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const [wide, high] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}
