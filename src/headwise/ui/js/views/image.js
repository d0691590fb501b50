// The patches of an image under the weights of one head, from a patch or a special token.
import { css, inkOn, pick, ramp } from "../lib/colour.js";
import { choice, h, notesText } from "../lib/dom.js";
import { legend } from "../lib/heatmap.js";
import { arrowStep, consume } from "../lib/keys.js";
import { comparableHeads, headTints, weightRow } from "../lib/matrix.js";
import { chosenHeads, overlayButton, updateNavigator } from "../lib/navigator.js";
import { hasImage, keyImage, patchPlace, patchToken, patchWeights, queryToken } from "../lib/patches.js";
import { registerView } from "../lib/registry.js";
import { format, visible, weightText } from "../lib/text.js";

/** @import { App } from "../app.js" */
/** @import { Note } from "../lib/dom.js" */
/** @import { Box } from "../lib/placement.js" */
/** @import { Head, ImageGrid, Matrix, Run } from "../lib/run.js" */

const HEAT_OPACITY = 0.66;
const SHADOW_OPACITY = 0.88;

/** @type {[string, string][]} */
const SHADES = [
  ["heat", "heat"],
  ["light", "light on what it looks at"],
  ["none", "image alone"],
];

export class ImageView {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.side = h("div", {});
    this.top = h("div", { class: "hw-top" });
    this.tokens = h("div", {
      class: "hw-chips hw-special",
      role: "group",
      "aria-label": "from a token that is no patch",
    });
    this.picture = h("img", { class: "hw-picture", draggable: "false" });
    this.overlay = h("canvas", { class: "hw-overlay", "aria-hidden": "true" });
    this.mark = h("div", { class: "hw-patch", "aria-hidden": "true" });
    this.box = h(
      "div",
      {
        class: "hw-image",
        role: "application",
        tabindex: 0,
        data: { key: "image" },
        on: {
          click: (event) => this._click(event),
          keydown: (event) => this._key(event),
          pointermove: (event) => this._hover(event),
          pointerleave: () => app.tooltip.hide(),
        },
      },
      this.picture,
      this.overlay,
      this.mark,
    );
    this.legend = h("div", { class: "hw-image-legend" });
    /** @type {HTMLElement} */
    this.el = h(
      "div",
      { class: "hw-head" },
      this.side,
      h("div", { class: "hw-main" }, this.top, this.tokens, this.box, this.legend),
    );
  }

  /** The first chosen head: its layer decides what can be chosen. @returns {Head} */
  get _at() {
    return this.app.state.heads[0];
  }

  /** The heads that are drawn over each other. */
  get _heads() {
    return comparableHeads(this.app.run, this.app.state.heads);
  }

  /** @returns {ImageGrid | null} */
  get _image() {
    return keyImage(this.app.run, this._at[0]);
  }

  /** The token that looks. */
  get _query() {
    return queryToken(this.app.run, this._at[0], this.app.state.token);
  }

  update() {
    const { app } = this;
    const { run, state } = app;
    const image = this._image;
    updateNavigator(this.side, app, run);
    this.top.replaceChildren(
      h(
        "div",
        { class: "hw-controls" },
        chosenHeads(app, run, this._heads),
        overlayButton(app, run),
        choice("overlay", SHADES, state.shade, (shade) => app.set({ shade })),
      ),
    );
    this.box.hidden = !image;
    this.tokens.replaceChildren(...this._tokenButtons(run));
    if (!image) {
      this.legend.replaceChildren(h("p", { text: "This head attends to no image." }));
      return;
    }
    this._draw(run, image);
  }

  /** @param {Run} run @param {ImageGrid} image */
  _draw(run, image) {
    const from = visible(this._names("from")[this._query], 30);
    const weights = this._heads.flatMap((at) => patchWeights(run, at, this.app.state.token) ?? []);
    const title = `weights of ${this._heads.map((at) => `head ${run.label(at)}`).join(", ")} from ${from}`;
    if (this.picture.getAttribute("src") !== image.picture) this.picture.src = image.picture;
    this.picture.alt = `${run.json.text} as the model reads it, under the ${title}`;
    this.box.setAttribute("aria-label", `${title}, over ${image.rows} x ${image.columns} patches; arrow keys move`);
    this.box.style.setProperty("--hw-ratio", `${image.columns} / ${image.rows}`);
    this._paint(weights);
    this._placeMark(run);
    const heat = this.app.state.shade === "heat" && weights.length === 1;
    this.legend.replaceChildren(
      heat ? legend(ramp(this.app.state.palette, "dark"), "0", format(weights[0].top, 3)) : "",
      h("p", { class: "soft", text: this._about(run, image, weights) }),
    );
  }

  /** One pixel of the canvas per patch. @param {Matrix[]} weights of each head */
  _paint(weights) {
    const [{ rows, columns }] = weights;
    Object.assign(this.overlay, { width: columns, height: rows });
    const pen = this.overlay.getContext("2d");
    const pixels = pen.createImageData(columns, rows);
    const colour = this._colour();
    for (let n = 0; n < rows * columns; n++) {
      pixels.data.set(colour(weights.map(({ values, top }) => values[n] / (top || 1))), n * 4);
    }
    pen.putImageData(pixels, 0, 0);
  }

  /** Red, green, blue and opacity of a patch, by its share of each head's largest weight.
   * @returns {(shares: number[]) => number[]} */
  _colour() {
    const { palette, shade } = this.app.state;
    const colours = ramp(palette, "dark"); // bright is more on any ground, as on a photograph
    const several = this._heads.length > 1;
    const tint = several
      ? headTints(this.app, this.app.run, this._heads)
      : (/** @type {number[]} */ [share]) => pick(colours, share);
    if (shade === "none") return () => [0, 0, 0, 0];
    if (shade === "heat") return (shares) => [...tint(shares), Math.round(255 * HEAT_OPACITY)];
    return (shares) => [0, 0, 0, Math.round(255 * SHADOW_OPACITY * (1 - Math.sqrt(Math.max(...shares))))];
  }

  /** Frame the patch that looks. @param {Run} run */
  _placeMark(run) {
    const { image } = run.text(this._at[0], "from");
    const place = image ? patchPlace(image, this._query) : null;
    this.mark.hidden = !place;
    if (!image || !place) return;
    const [row, column] = place;
    const { style } = this.mark;
    style.left = `${(100 * column) / image.columns}%`;
    style.top = `${(100 * row) / image.rows}%`;
    style.width = `${100 / image.columns}%`;
    style.height = `${100 / image.rows}%`;
  }

  /** @param {Run} run @param {ImageGrid} image @param {Matrix[]} weights */
  _about(run, { rows, columns }, weights) {
    const equal = format(1 / this._names("to").length, 4);
    const clickable = run.text(this._at[0], "from").image;
    return [
      `${rows} x ${columns} patches; uniform attention would give each ${equal}.`,
      weights.every(({ top }) => top === 0) ? "From here, there is no weight on the image." : "",
      clickable ? "Click a patch to look from it; arrow keys move it." : "",
      storedNote(run, this._at, this._query, rows * columns),
    ]
      .filter(Boolean)
      .join(" ");
  }

  /** @param {"from" | "to"} side */
  _names(side) {
    return this.app.run.names(this._at[0], side, "pieces");
  }

  /** The tokens that are no patches, each with the weight that it receives. @param {Run} run */
  _tokenButtons(run) {
    const { app } = this;
    const { pieces, image } = run.text(this._at[0], "from");
    const same = run.text(this._at[0], "to") === run.text(this._at[0], "from");
    const weights = same ? weightRow(run, this._at, "pieces", this._query) : null;
    const top = weights?.reduce((most, value) => Math.max(most, value), 1e-9) ?? 1;
    const colours = ramp(app.state.palette, app.theme);
    /** @param {string} name @param {number} n */
    const button = (name, n) => {
      const rgb = weights && pick(colours, (0.85 * weights[n]) / top);
      return h(
        "button",
        {
          type: "button",
          class: "hw-chip",
          "aria-pressed": n === this._query,
          "aria-label": `look from ${name}`,
          data: { key: `special:${n}` },
          style: rgb ? { "background-color": css(rgb), color: inkOn(rgb) } : {},
          on: { click: () => app.set({ token: n }) },
        },
        h("b", { text: visible(name, 30) }),
        weights && h("span", { text: format(weights[n], 4) }),
      );
    };
    return pieces.flatMap((name, n) => (image && patchPlace(image, n) ? [] : [button(name, n)]));
  }

  /** The patch under the pointer. @param {MouseEvent} event @returns {[number, number] | null} */
  _patchAt(event) {
    const image = this._image;
    if (!image) return null;
    const box = this.overlay.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * image.rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * image.columns);
    return row >= 0 && column >= 0 && row < image.rows && column < image.columns ? [row, column] : null;
  }

  /** Where a patch is in the window. @param {[number, number]} place @returns {Box} */
  _patchBox([row, column]) {
    const { rows, columns } = /** @type {ImageGrid} */ (this._image);
    const { left, top, width, height } = this.overlay.getBoundingClientRect();
    return {
      left: left + (column * width) / columns,
      right: left + ((column + 1) * width) / columns,
      top: top + (row * height) / rows,
      bottom: top + ((row + 1) * height) / rows,
    };
  }

  /** @param {MouseEvent} event */
  _hover(event) {
    const place = this._patchAt(event);
    if (place) this.app.tooltip.show(this._patchBox(place), this._notes(place));
    else this.app.tooltip.hide();
  }

  /** @param {[number, number]} place @returns {Note[]} */
  _notes([row, column]) {
    const { run } = this.app;
    const key = patchToken(/** @type {ImageGrid} */ (this._image), row, column);
    const from = visible(this._names("from")[this._query], 30);
    return [
      `${from} → patch ${this._names("to")[key]}`,
      ...this._heads.map((at) => [`head ${run.label(at)}`, weightText(run.weight(at, "pieces", this._query, key))]),
    ];
  }

  /** @param {MouseEvent} event */
  _click(event) {
    const place = this._patchAt(event);
    if (place) this._choose(place);
  }

  /** Look from a patch. @param {[number, number]} place */
  _choose([row, column]) {
    const { image } = this.app.run.text(this._at[0], "from");
    if (!image) return;
    this.app.set({ token: patchToken(image, row, column) });
    this.app.say(notesText([`from patch ${row},${column}`, ...this._notes([row, column])]));
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    const step = arrowStep(event);
    const { image } = this.app.run.text(this._at[0], "from");
    if (!step || !image) return;
    consume(event);
    const place = patchPlace(image, this._query);
    if (!place) {
      this._choose([image.rows >> 1, image.columns >> 1]); // from a special token into the middle of the image
      return;
    }
    const row = Math.min(Math.max(place[0] + step[0], 0), image.rows - 1);
    const column = Math.min(Math.max(place[1] + step[1], 0), image.columns - 1);
    this._choose([row, column]);
  }
}

/** How exact the drawn weights are. @param {Run} run @param {Head} at @param {number} query @param {number} patches */
function storedNote(run, at, query, patches) {
  if (run.form === "f32") return "Every weight is as the model computed it.";
  if (run.form === "u8") return "Weights are stored in one byte each; the number on hover says how far it may be off.";
  if (run.exactRow(at, query)) return "Every weight is computed from this head's queries and keys.";
  const { k } = run.json.weights[at[0]];
  return `Of ${patches} patches this page holds the ${k} strongest; the others are drawn as 0.`;
}

registerView({
  name: "image",
  label: "Image",
  order: 0,
  create: (app) => new ImageView(app),
  available: (app) => hasImage(app.run),
  state: { shade: { initial: "heat", allowed: SHADES.map(([shade]) => shade) } },
});
