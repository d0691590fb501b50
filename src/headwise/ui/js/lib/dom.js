// Small tools for building the page. Text is only ever set as text: a token may be "<img onerror=...>".
import { splitChange } from "./changes.js";
import { arrowStep, consume } from "./keys.js";
import { placeBeside } from "./placement.js";
import { visible } from "./text.js";

/** @import { Box } from "./placement.js" */

/**
 * @typedef {object} KnownProps
 * @property {string} [class]
 * @property {string} [text]
 * @property {Record<string, (event: any) => void>} [on] handlers by event
 * @property {Record<string, string | number>} [data] data attributes
 * @property {Record<string, string | number>} [style]
 *
 * @typedef {KnownProps & Record<string, any>} Props everything else is an attribute
 * @typedef {string | string[] | Node} Note a line of a tooltip; an array is a name and its value
 */

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
    const stated = key.startsWith("aria-"); // there, false is a value too
    if (stated) el.setAttribute(key, String(value));
    else if (value === true) el.setAttribute(key, "");
    else if (value !== false) el.setAttribute(key, String(value));
  }
  el.append(
    .../** @type {any[]} */ (children.filter((child) => child !== null && child !== undefined && child !== false)),
  );
  return el;
}

/** A token in an element of its own, so that its direction is its own. @param {string} token @param {Props} [props] */
export function tokenElement(token, props = {}) {
  const shown = visible(token);
  return h("bdi", {
    ...props,
    text: shown,
    title: shown.endsWith("…") ? `${token.length} characters: ${visible(token, 300)}` : null,
  });
}

/** A text, with the part marked in which it differs from another. @param {string} text @param {string} other
 * @returns {(string | Node)[]} */
export function changedText(text, other) {
  const [before, changed, after] = splitChange(text, other).map((part) => {
    const inner = part.trim();
    return inner && visible(inner, 160);
  });
  return [before, before && changed ? " " : "", changed ? h("mark", { text: changed }) : "", after ? " " : "", after];
}

/** Rebuild part of the page and give the focus back to the control that had it.
 * @param {HTMLElement} root @param {() => void} change */
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

/** Scroll a box, and nothing around it, until a child is in sight.
 * @param {Element} box @param {Element | null} child */
export function reveal(box, child) {
  if (!child) return;
  const [outer, inner] = [box.getBoundingClientRect(), child.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - outer.height / 3;
}

/** The tooltip of the page. */
export class Tooltip {
  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    this.el = h("div", { class: "hw-tip", role: "tooltip", hidden: true });
    root.append(this.el);
  }

  /** Explain a part of the page. @param {Box} box where it is @param {Note[]} notes @param {"right" | "left"} [side] */
  show(box, notes, side = "right") {
    this.el.replaceChildren(
      ...notes.map((note) => {
        if (note instanceof Node) return note;
        if (!Array.isArray(note)) return h("div", { text: note });
        return h("div", { class: "pair" }, h("span", { text: note[0] }), h("b", { text: note[1] }));
      }),
    );
    this.el.hidden = false;
    this.el.style.left = "0"; // at the border of the window it would be measured narrower
    const { clientWidth: width, clientHeight: height } = document.documentElement;
    const { x, y } = placeBeside(box, this.el.getBoundingClientRect(), { width, height }, side);
    this.el.style.left = `${x}px`;
    this.el.style.top = `${y}px`;
  }

  hide() {
    this.el.hidden = true;
  }
}

/** The notes of a tooltip as one line. @param {Note[]} notes */
export function notesText(notes) {
  return notes.map((note) => (Array.isArray(note) ? note.join(" ") : note)).join(", ");
}

/** A row of buttons of which one is on. @param {string} label @param {[string, string][]} options value and text
 * @param {string} value @param {(value: string) => void} choose @param {Props} [props] */
export function choice(label, options, value, choose, props = {}) {
  return h(
    "div",
    { class: "hw-choice", role: "radiogroup", "aria-label": label, ...props },
    ...options.map(([each, text], n) =>
      h("button", {
        type: "button",
        role: "radio",
        "aria-checked": each === value,
        tabindex: each === value ? 0 : -1,
        text,
        data: { key: `${label}:${each}` },
        on: {
          click: () => choose(each),
          keydown: (event) => {
            const [rows, columns] = arrowStep(event) ?? [0, 0];
            const step = rows + columns;
            if (!step) return;
            consume(event);
            const next = (n + step + options.length) % options.length;
            event.currentTarget.parentElement.children[next].focus();
            choose(options[next][0]);
          },
        },
      }),
    ),
  );
}

/** A select element. @param {string} label @param {[string, string, string?][]} options value, text, and group
 * @param {string} value @param {(value: string) => void} choose */
export function select(label, options, value, choose) {
  const option = (/** @type {[string, string, string?]} */ [each, text]) =>
    h("option", { value: each, text, selected: each === value });
  const groups = [...new Set(options.map(([, , group]) => group))];
  return h(
    "label",
    { class: "hw-field" },
    h("span", { text: label }),
    h(
      "select",
      { "aria-label": label, data: { key: `select:${label}` }, on: { change: (event) => choose(event.target.value) } },
      ...groups.flatMap((group) => {
        const members = options.filter(([, , other]) => other === group).map(option);
        return group === undefined ? members : [h("optgroup", { label: group }, ...members)];
      }),
    ),
  );
}

/** @param {string} label @param {boolean} value @param {(value: boolean) => void} choose @param {Props} [props] */
export function toggle(label, value, choose, props = {}) {
  return h(
    "label",
    { class: "hw-toggle", title: props.title },
    h("input", {
      type: "checkbox",
      checked: value,
      disabled: props.disabled,
      data: { key: `toggle:${label}` },
      on: { change: (event) => choose(event.target.checked) },
    }),
    h("span", { text: label }),
  );
}

/** Size a canvas in the pixels of the screen.
 * @param {HTMLCanvasElement} canvas @param {number} width @param {number} height */
export function scaleCanvas(canvas, width, height) {
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
