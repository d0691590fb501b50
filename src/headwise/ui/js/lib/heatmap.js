// A matrix of weights on a canvas: zoom by wheel, keys or buttons, pan by dragging; labels and numbers when there is room.
import { css, inkOn, pick } from "./colour.js";
import { h, sharp, visible } from "./dom.js";

/**
 * @typedef {object} Source what a heat map shows
 * @property {number} rows
 * @property {number} columns
 * @property {(i: number) => string} rowName
 * @property {(j: number) => string} columnName
 * @property {() => {image: HTMLCanvasElement, cell: number}} picture one pixel for each cell tokens square
 * @property {(i: number) => (j: number) => [import("./colour.js").Rgb, number | null] | null} exact of a row: colour and number of one cell, where known
 * @property {(first: number, last: number) => boolean} [prepare] make some rows ready, for a few milliseconds; whether all are
 * @property {string} label
 */

const LABEL = 92; // pixels for names
const NUMBERS = 30; // pixels from which on a cell has room for its number
const NAMES = 11; // and for its name at the side
const FINE = 40000; // cells that are drawn one by one at most

/** Colours put into a small picture. @param {number} rows @param {number} columns @param {(n: number) => import("./colour.js").Rgb} colour */
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

export class Heat {
  /** @param {any} app @param {{ hover?: (at: [number, number] | null, event: PointerEvent | null) => void, click?: (at: [number, number]) => void, say?: (at: [number, number]) => string }} on */
  constructor(app, on) {
    this.app = app;
    this.on = on;
    this.canvas = h("canvas", { class: "hw-heat", tabindex: 0, role: "img", data: { key: "heat" } });
    const button = (/** @type {string} */ text, /** @type {string} */ label, /** @type {() => void} */ act) =>
      h("button", { type: "button", class: "hw-small", text, title: label, "aria-label": label, on: { click: act } });
    this.el = h("div", { class: "hw-heat-box" }, this.canvas,
      h("div", { class: "hw-zoom" }, button("+", "zoom in", () => this.zoom(1.6)), button("−", "zoom out", () => this.zoom(1 / 1.6)), button("⤢", "show all", () => this.fit())));
    this.canvas.hwHeat = this; // for those who want to know what is where
    /** @type {Source | null} */ this.source = null;
    this.view = { x: 0, y: 0, size: 0 }; // the token at the corner, and pixels a token
    /** @type {[number, number] | null} */ this.at = null;
    this.frames = 0;
    this._listen();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.el);
  }

  /** @param {Source} source @param {boolean} [keep] keep what is zoomed to */
  show(source, keep = false) {
    const same = keep && this.source && this.source.rows === source.rows && this.source.columns === source.columns;
    this.source = source;
    this.shown = null;
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
    const label = Math.min(LABEL, width * 0.26);
    return { left: label, top: label, width: Math.max(40, width - label - 2), height: Math.max(40, Math.min(width, Math.max(280, window.innerHeight * 0.72)) - label) };
  }

  get smallest() {
    const { width, height } = this.space;
    const { rows, columns } = /** @type {Source} */ (this.source);
    return Math.min(width / columns, height / rows, 56);
  }

  fit() {
    this.view.size = 0;
    this.draw();
  }

  /** @param {number} by @param {number} [px] @param {number} [py] where on the canvas it stays */
  zoom(by, px, py) {
    if (!this.source) return;
    const { left, top, width, height } = this.space;
    const x = (px ?? left + width / 2) - left;
    const y = (py ?? top + height / 2) - top;
    const old = this.view.size || this.smallest;
    const size = Math.min(Math.max(old * by, this.smallest), 72);
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
    const pen = sharp(this.canvas, left + across + 1, top + down + 1);
    const theme = this.app.colours;
    pen.clearRect(0, 0, left + width + 2, top + height + 2);
    this.shown ??= source.picture();
    const { image, cell } = this.shown;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, across, down);
    pen.clip();
    pen.imageSmoothingEnabled = false;
    pen.drawImage(image, left - view.x * size, top - view.y * size, image.width * cell * size, image.height * cell * size);
    const box = { first: Math.floor(view.y), last: Math.min(source.rows, Math.ceil(view.y + height / size)), left: Math.floor(view.x), right: Math.min(source.columns, Math.ceil(view.x + width / size)) };
    const few = (box.last - box.first) * (box.right - box.left) <= FINE;
    if (few && (cell > 1 || size >= NUMBERS)) {
      const ready = source.prepare ? source.prepare(box.first, box.last) : true;
      this._cells(pen, source, box, cell > 1);
      if (!ready) this.draw(); // the rest in the next frame: zooming stays smooth
    }
    if (size >= 9) this._grid(pen, box, theme.ground);
    pen.restore();
    this._names(pen, source, box, theme);
    this._cursor(pen, theme);
    this.frames++;
  }

  /** Cells one by one: exact ones over the reduced picture, and numbers. @param {CanvasRenderingContext2D} pen @param {Source} source @param {any} box @param {boolean} paint */
  _cells(pen, source, box, paint) {
    const { left, top } = this.space;
    const { x, y, size } = this.view;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = `${Math.min(12, size * 0.32)}px system-ui, sans-serif`;
    for (let i = box.first; i < box.last; i++) {
      const row = source.exact(i);
      for (let j = box.left; j < box.right; j++) {
        const found = row(j);
        if (!found) continue;
        const [px, py] = [left + (j - x) * size, top + (i - y) * size];
        if (paint) {
          pen.fillStyle = css(found[0]);
          pen.fillRect(px, py, size + 0.5, size + 0.5);
        }
        if (size >= NUMBERS && found[1] !== null && Math.abs(found[1]) >= 0.005) {
          pen.fillStyle = inkOn(found[0]);
          pen.fillText(found[1].toFixed(2).replace("0.", ".").replace("-", "−"), px + size / 2, py + size / 2);
        }
      }
    }
  }

  /** @param {CanvasRenderingContext2D} pen @param {any} box @param {string} ground */
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

  /** @param {CanvasRenderingContext2D} pen @param {Source} source @param {any} box @param {any} theme */
  _names(pen, source, box, theme) {
    const { left, top, width, height } = this.space;
    const { x, y, size } = this.view;
    const step = Math.max(1, Math.ceil(NAMES / size));
    const numbers = step > 1; // too many for names: their numbers, now and then
    const every = numbers ? Math.ceil(step * 3 / 10) * 10 : 1;
    pen.font = `${Math.min(13, Math.max(10, size * 0.6))}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    const text = (/** @type {string} */ name) => this._short(pen, name, left - 12);
    const write = (/** @type {number} */ n, /** @type {string} */ name, /** @type {boolean} */ marked) => {
      pen.fillStyle = marked ? theme.accent : theme.soft;
      return numbers ? String(n) : text(name);
    };
    pen.textAlign = "right";
    for (let i = Math.ceil(box.first / every) * every; i < box.last; i += every) {
      const py = top + (i - y + 0.5) * size;
      if (py > top - 4 && py < top + height + 4) pen.fillText(write(i, numbers ? "" : source.rowName(i), this.at?.[0] === i), left - 7, py);
    }
    pen.textAlign = "left";
    for (let j = Math.ceil(box.left / every) * every; j < box.right; j += every) {
      const px = left + (j - x + 0.5) * size;
      if (px < left - 4 || px > left + width + 4) continue;
      pen.save();
      pen.translate(px, top - 7);
      pen.rotate(-Math.PI / 2);
      pen.fillText(write(j, numbers ? "" : source.columnName(j), this.at?.[1] === j), 0, 0);
      pen.restore();
    }
  }

  /** @param {CanvasRenderingContext2D} pen @param {string} name @param {number} room */
  _short(pen, name, room) {
    let shown = visible(name, 16);
    while (shown.length > 2 && pen.measureText(shown).width > room) shown = [...shown.replace(/…$/, "")].slice(0, -1).join("") + "…";
    return shown;
  }

  /** @param {CanvasRenderingContext2D} pen @param {any} theme */
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

  /** @param {{offsetX: number, offsetY: number}} event @returns {[number, number] | null} */
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
    /** @type {{x: number, y: number, moved: boolean} | null} */ let drag = null;
    const { canvas } = this;
    canvas.addEventListener("wheel", (/** @type {WheelEvent} */ event) => {
      if (!event.ctrlKey && !event.metaKey && this.view.size <= this.smallest && event.deltaY > 0) return; // let the page scroll
      event.preventDefault();
      this.zoom(Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) / 160), event.offsetX, event.offsetY);
    }, { passive: false });
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
      this._hover(this._cell(event), event);
    });
    canvas.addEventListener("pointerup", (/** @type {PointerEvent} */ event) => {
      const cell = drag && !drag.moved ? this._cell(event) : null;
      drag = null;
      if (cell) this.on.click?.(cell);
    });
    canvas.addEventListener("pointerleave", () => this._hover(null, null));
    canvas.addEventListener("dblclick", (/** @type {MouseEvent} */ event) => this.zoom(2, event.offsetX, event.offsetY));
    canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this._key(event));
  }

  /** @param {[number, number] | null} cell @param {PointerEvent | null} event */
  _hover(cell, event) {
    if (cell?.[0] !== this.at?.[0] || cell?.[1] !== this.at?.[1]) {
      this.at = cell;
      this.draw();
    }
    this.on.hover?.(cell, event);
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (by && this.source) {
      const [i, j] = this.at ?? [-by[0], -by[1]];
      this.at = [Math.min(Math.max(i + by[0], 0), this.source.rows - 1), Math.min(Math.max(j + by[1], 0), this.source.columns - 1)];
      this._reveal();
      if (this.on.say) this.app.say(this.on.say(this.at));
    } else if (event.key === "+" || event.key === "=") this.zoom(1.6);
    else if (event.key === "-") this.zoom(1 / 1.6);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.at) this.on.click?.(this.at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Pan until the cursor is in sight. */
  _reveal() {
    const { width, height } = this.space;
    const [i, j] = /** @type {[number, number]} */ (this.at);
    const { view } = this;
    if (j < view.x) view.x = j;
    if (i < view.y) view.y = i;
    if (j + 1 > view.x + width / view.size) view.x = j + 1 - width / view.size;
    if (i + 1 > view.y + height / view.size) view.y = i + 1 - height / view.size;
    this.draw();
  }
}

/** A legend: the palette as a strip with its ends. @param {Uint8Array} colours @param {string} low @param {string} high @param {{at: number, text: string} | null} [mark] */
export function legend(colours, low, high, mark = null) {
  const stops = Array.from({ length: 17 }, (_, n) => css(pick(colours, n / 16))).join(", ");
  return h("div", { class: "hw-legend" },
    h("span", { text: low }),
    h("div", { class: "strip", style: { background: `linear-gradient(to right, ${stops})` } },
      mark && h("i", { title: mark.text, style: { left: `${100 * mark.at}%` } })),
    h("span", { text: high }));
}
