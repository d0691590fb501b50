// A matrix of weights on a canvas: zoom by wheel, keys or buttons, pan by dragging; labels and numbers where they fit.
import { css, inkOn, pick } from "./colour.js";
import { h, scaleCanvas } from "./dom.js";
import { arrowStep, consume } from "./keys.js";
import { visible } from "./text.js";

/** @import { App } from "../app.js" */
/** @import { Rgb } from "./colour.js" */
/** @import { Box } from "./placement.js" */

/**
 * @typedef {object} Source what a heat map shows
 * @property {number} rows
 * @property {number} columns
 * @property {(i: number) => string} rowName
 * @property {(j: number) => string} columnName
 * @property {() => Picture} picture of the whole matrix
 * @property {(i: number) => (j: number) => Cell | null} exact the cells of one row, null where they are not known
 * @property {(first: number, last: number) => boolean} [prepare] compute rows for some milliseconds; whether all are
 * @property {string} label
 *
 * @typedef {{ image: HTMLCanvasElement, cell: number }} Picture one pixel per square of cell x cell tokens
 * @typedef {[Rgb, number]} Cell its colour and its weight
 * @typedef {[number, number]} Position row and column
 * @typedef {{ first: number, last: number, left: number, right: number }} Range the rows and columns in sight
 *
 * @typedef {object} Handlers
 * @property {(at: Position | null, box: Box) => void} [hover]
 * @property {(at: Position) => void} [click]
 * @property {(at: Position) => string} [say] the text for a screen reader
 */

const LABEL_SIZE = 92; // pixels for names
const NUMBER_SIZE = 30; // pixels that a cell needs to show its number
const NAME_SIZE = 11; // and to show its name at the side
const GRID_SIZE = 9; // and to be framed by lines
const LARGEST_SIZE = 72;
const MOST_CELLS = 40000; // that are drawn one by one
const ZOOM = 1.6;

/** A canvas with one pixel per cell. @param {number} rows @param {number} columns @param {(n: number) => Rgb} colour */
export function picture(rows, columns, colour) {
  const image = h("canvas", { width: columns, height: rows });
  const pen = image.getContext("2d");
  const pixels = pen.createImageData(columns, rows);
  const { data } = pixels;
  for (let n = 0; n < rows * columns; n++) {
    const rgb = colour(n);
    data[n * 4] = rgb[0];
    data[n * 4 + 1] = rgb[1];
    data[n * 4 + 2] = rgb[2];
    data[n * 4 + 3] = 255;
  }
  pen.putImageData(pixels, 0, 0);
  return image;
}

export class Heatmap {
  /** @param {App} app @param {Handlers} on */
  constructor(app, on) {
    this.app = app;
    this.on = on;
    this.canvas = h("canvas", { class: "hw-heat", tabindex: 0, role: "img", data: { key: "heat" } });
    /** @param {string} text @param {string} label @param {() => void} click */
    const button = (text, label, click) =>
      h("button", { type: "button", class: "hw-small", text, title: label, "aria-label": label, on: { click } });
    this.el = h(
      "div",
      { class: "hw-heat-box" },
      this.canvas,
      h(
        "div",
        { class: "hw-zoom" },
        button("+", "zoom in", () => this.zoom(ZOOM)),
        button("−", "zoom out", () => this.zoom(1 / ZOOM)),
        button("⤢", "show all", () => this.fit()),
      ),
    );
    this.canvas.heatmap = this; // so that scripts can ask where a cell is
    /** @type {Source | null} */
    this.source = null;
    /** @type {Picture | null} */
    this.picture = null;
    this.view = { x: 0, y: 0, size: 0 }; // the token at the corner, and pixels per token
    /** @type {Position | null} */
    this.at = null;
    this.frames = 0;
    this.waiting = false;
    this._listen();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.el);
  }

  /** @param {Source} source @param {boolean} [keep] keep what is zoomed to */
  show(source, keep = false) {
    const same = keep && this.source && this.source.rows === source.rows && this.source.columns === source.columns;
    this.source = source;
    this.picture = null;
    this.canvas.setAttribute("aria-label", source.label);
    if (!same) {
      this.view.size = 0;
      this.at = null;
    }
    this.draw();
  }

  /** The part of the canvas that has the cells. */
  get space() {
    const width = this.el.clientWidth;
    const label = Math.min(LABEL_SIZE, width * 0.26);
    return {
      left: label,
      top: label,
      width: Math.max(40, width - label - 2),
      height: Math.max(40, Math.min(width, Math.max(280, window.innerHeight * 0.72)) - label),
    };
  }

  /** Pixels per token that show the whole matrix. */
  get smallest() {
    const { width, height } = this.space;
    const { rows, columns } = /** @type {Source} */ (this.source);
    return Math.min(width / columns, height / rows, 56);
  }

  fit() {
    this.view.size = 0;
    this.draw();
  }

  /** Zoom around a point of the canvas, by default its middle.
   * @param {number} by @param {number} [px] @param {number} [py] */
  zoom(by, px, py) {
    if (!this.source) return;
    const { left, top, width, height } = this.space;
    const x = (px ?? left + width / 2) - left;
    const y = (py ?? top + height / 2) - top;
    const old = this.view.size || this.smallest;
    const size = Math.min(Math.max(old * by, this.smallest), LARGEST_SIZE);
    this.view.x += x / old - x / size;
    this.view.y += y / old - y / size;
    this.view.size = size;
    this.draw();
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (this.source && this.el.isConnected && this.el.clientWidth) this._draw(this.source);
    });
  }

  /** @param {Source} source */
  _draw(source) {
    const { left, top, width, height } = this.space;
    const view = this.view;
    if (!view.size) Object.assign(view, { x: 0, y: 0, size: this.smallest });
    const size = view.size;
    view.x = Math.min(Math.max(view.x, 0), Math.max(0, source.columns - width / size));
    view.y = Math.min(Math.max(view.y, 0), Math.max(0, source.rows - height / size));
    const across = Math.min(width, (source.columns - view.x) * size);
    const down = Math.min(height, (source.rows - view.y) * size);
    const pen = scaleCanvas(this.canvas, left + across + 1, top + down + 1);
    const theme = this.app.colours;
    pen.clearRect(0, 0, left + width + 2, top + height + 2);
    this.picture ??= source.picture();
    const { image, cell } = this.picture;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, across, down);
    pen.clip();
    pen.imageSmoothingEnabled = false;
    pen.drawImage(
      image,
      left - view.x * size,
      top - view.y * size,
      image.width * cell * size,
      image.height * cell * size,
    );
    const box = {
      first: Math.floor(view.y),
      last: Math.min(source.rows, Math.ceil(view.y + height / size)),
      left: Math.floor(view.x),
      right: Math.min(source.columns, Math.ceil(view.x + width / size)),
    };
    const few = (box.last - box.first) * (box.right - box.left) <= MOST_CELLS;
    if (few && (cell > 1 || size >= NUMBER_SIZE)) {
      const ready = source.prepare?.(box.first, box.last) ?? true;
      this._cells(pen, source, box, cell > 1);
      if (!ready) this.draw(); // the rest in the next frame: zooming stays smooth
    }
    if (size >= GRID_SIZE) this._grid(pen, box, theme.ground);
    pen.restore();
    this._names(pen, source, box, theme);
    this._cursor(pen, theme);
    this.frames++;
  }

  /** Draw exact cells over the reduced picture, and numbers.
   * @param {CanvasRenderingContext2D} pen @param {Source} source @param {Range} box @param {boolean} paint */
  _cells(pen, source, box, paint) {
    const { left, top } = this.space;
    const { x, y, size } = this.view;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = `${Math.min(12, size * 0.32)}px system-ui, sans-serif`;
    for (let i = box.first; i < box.last; i++) {
      const row = source.exact(i);
      for (let j = box.left; j < box.right; j++) {
        const cell = row(j);
        if (!cell) continue;
        const [colour, weight] = cell;
        const [px, py] = [left + (j - x) * size, top + (i - y) * size];
        if (paint) {
          pen.fillStyle = css(colour);
          pen.fillRect(px, py, size + 0.5, size + 0.5);
        }
        if (size >= NUMBER_SIZE && Math.abs(weight) >= 0.005) {
          pen.fillStyle = inkOn(colour);
          pen.fillText(weight.toFixed(2).replace("0.", ".").replace("-", "−"), px + size / 2, py + size / 2);
        }
      }
    }
  }

  /** @param {CanvasRenderingContext2D} pen @param {Range} box @param {string} ground */
  _grid(pen, box, ground) {
    const { left, top } = this.space;
    const { x, y, size } = this.view;
    pen.strokeStyle = ground;
    pen.lineWidth = size > 20 ? 1.5 : 0.75;
    pen.beginPath();
    for (let j = box.left; j <= box.right; j++) {
      pen.moveTo(left + (j - x) * size, top);
      pen.lineTo(left + (j - x) * size, top + 1e4);
    }
    for (let i = box.first; i <= box.last; i++) {
      pen.moveTo(left, top + (i - y) * size);
      pen.lineTo(left + 1e4, top + (i - y) * size);
    }
    pen.stroke();
  }

  /** @param {CanvasRenderingContext2D} pen @param {Source} source @param {Range} box @param {App["colours"]} theme */
  _names(pen, source, box, theme) {
    const { left, top, width, height } = this.space;
    const { x, y, size } = this.view;
    const step = Math.max(1, Math.ceil(NAME_SIZE / size));
    const numbers = step > 1; // too many for names: some of their numbers
    const every = numbers ? Math.ceil((step * 3) / 10) * 10 : 1;
    pen.font = `${Math.min(13, Math.max(10, size * 0.6))}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    /** @param {number} n @param {(n: number) => string} name @param {number | undefined} cursor */
    const label = (n, name, cursor) => {
      pen.fillStyle = n === cursor ? theme.accent : theme.soft;
      return numbers ? String(n) : this._short(pen, name(n), left - 12);
    };
    pen.textAlign = "right";
    for (let i = Math.ceil(box.first / every) * every; i < box.last; i += every) {
      const py = top + (i - y + 0.5) * size;
      if (py < top - 4 || py > top + height + 4) continue;
      pen.fillText(label(i, source.rowName, this.at?.[0]), left - 7, py);
    }
    pen.textAlign = "left";
    for (let j = Math.ceil(box.left / every) * every; j < box.right; j += every) {
      const px = left + (j - x + 0.5) * size;
      if (px < left - 4 || px > left + width + 4) continue;
      pen.save();
      pen.translate(px, top - 7);
      pen.rotate(-Math.PI / 2);
      pen.fillText(label(j, source.columnName, this.at?.[1]), 0, 0);
      pen.restore();
    }
  }

  /** @param {CanvasRenderingContext2D} pen @param {string} name @param {number} room */
  _short(pen, name, room) {
    let shown = visible(name, 16);
    while (shown.length > 2 && pen.measureText(shown).width > room) {
      shown = `${[...shown.replace(/…$/, "")].slice(0, -1).join("")}…`;
    }
    return shown;
  }

  /** @param {CanvasRenderingContext2D} pen @param {App["colours"]} theme */
  _cursor(pen, theme) {
    if (!this.at) return;
    const { left, top } = this.space;
    const { x, y, size } = this.view;
    const [px, py] = [left + (this.at[1] - x) * size, top + (this.at[0] - y) * size];
    if (px < left - 1 || py < top - 1) return;
    pen.strokeStyle = theme.accent;
    pen.lineWidth = 2;
    pen.strokeRect(px + 0.5, py + 0.5, Math.max(3, size - 1), Math.max(3, size - 1));
  }

  /** @param {{offsetX: number, offsetY: number}} event @returns {Position | null} */
  _cell(event) {
    const source = this.source;
    if (!source) return null;
    const { left, top } = this.space;
    const j = Math.floor(this.view.x + (event.offsetX - left) / this.view.size);
    const i = Math.floor(this.view.y + (event.offsetY - top) / this.view.size);
    if (event.offsetX < left || event.offsetY < top || i >= source.rows || j >= source.columns) return null;
    return [i, j];
  }

  _listen() {
    /** @type {{x: number, y: number, moved: boolean} | null} */
    let drag = null;
    const { canvas } = this;
    canvas.addEventListener(
      "wheel",
      (/** @type {WheelEvent} */ event) => {
        const zoom = event.ctrlKey || event.metaKey || this.view.size > this.smallest || event.deltaY <= 0;
        if (!zoom) return; // let the page scroll
        event.preventDefault();
        this.zoom(Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) / 160), event.offsetX, event.offsetY);
      },
      { passive: false },
    );
    canvas.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
      drag = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
      if (drag) {
        const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
        if (drag.moved || Math.hypot(dx, dy) > 4) {
          this.view.x -= dx / this.view.size;
          this.view.y -= dy / this.view.size;
          drag = { x: event.clientX, y: event.clientY, moved: true };
          this.draw();
          return;
        }
      }
      this._hover(this._cell(event));
    });
    canvas.addEventListener("pointerup", (/** @type {PointerEvent} */ event) => {
      const cell = drag && !drag.moved ? this._cell(event) : null;
      drag = null;
      if (cell) this.on.click?.(cell);
    });
    canvas.addEventListener("pointerleave", () => this._hover(null));
    canvas.addEventListener("dblclick", (/** @type {MouseEvent} */ event) =>
      this.zoom(2, event.offsetX, event.offsetY),
    );
    canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this._key(event));
  }

  /** Where a cell is in the window. @param {Position} position @returns {Box} */
  cellBox([i, j]) {
    const canvas = this.canvas.getBoundingClientRect();
    const { left, top } = this.space;
    const { x, y, size } = this.view;
    const corner = { left: canvas.left + left + (j - x) * size, top: canvas.top + top + (i - y) * size };
    return { ...corner, right: corner.left + size, bottom: corner.top + size };
  }

  /** @param {Position | null} cell */
  _hover(cell) {
    if (cell?.[0] !== this.at?.[0] || cell?.[1] !== this.at?.[1]) {
      this.at = cell;
      this.draw();
    }
    this.on.hover?.(cell, cell ? this.cellBox(cell) : this.canvas.getBoundingClientRect());
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    const step = arrowStep(event);
    if (step && this.source) {
      const [i, j] = this.at ?? [-step[0], -step[1]];
      this.at = [
        Math.min(Math.max(i + step[0], 0), this.source.rows - 1),
        Math.min(Math.max(j + step[1], 0), this.source.columns - 1),
      ];
      this._reveal();
      if (this.on.say) this.app.say(this.on.say(this.at));
    } else if (event.key === "+" || event.key === "=") this.zoom(ZOOM);
    else if (event.key === "-") this.zoom(1 / ZOOM);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.at) this.on.click?.(this.at);
    else return;
    consume(event);
  }

  /** Pan until the cursor is in sight. */
  _reveal() {
    const { width, height } = this.space;
    const [i, j] = /** @type {Position} */ (this.at);
    const { view } = this;
    if (j < view.x) view.x = j;
    if (i < view.y) view.y = i;
    if (j + 1 > view.x + width / view.size) view.x = j + 1 - width / view.size;
    if (i + 1 > view.y + height / view.size) view.y = i + 1 - height / view.size;
    this.draw();
  }
}

/** The palette as a strip between its ends. @param {Uint8Array} colours @param {string} low @param {string} high
 * @param {{at: number, text: string} | null} [mark] at: from 0 to 1 */
export function legend(colours, low, high, mark = null) {
  const stops = Array.from({ length: 17 }, (_, n) => css(pick(colours, n / 16))).join(", ");
  return h(
    "div",
    { class: "hw-legend" },
    h("span", { text: low }),
    h(
      "div",
      { class: "strip", style: { background: `linear-gradient(to right, ${stops})` } },
      mark && h("i", { title: mark.text, style: { left: `${100 * mark.at}%` } }),
    ),
    h("span", { text: high }),
  );
}
