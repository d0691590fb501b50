// The controls of a page with a model behind it: another text or model, heads switched off, and what that changes.
import { css, pick, ramp } from "./colour.js";
import { h, select } from "./dom.js";
import { format, visible } from "./text.js";

/** @import { App } from "../app.js" */

const MOST_CHARACTERS = 100000;
const MOST_TOKENS = 8; // listed by how far they moved

/** @typedef {(text: string) => void} Submit */

export class LiveBar {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    /** @type {HTMLElement} */
    this.el = h("div", { class: "hw-live" });
  }

  /** A text field with its button.
   * @param {string} label @param {string} value @param {Submit} submit @param {string} key */
  _text(label, value, submit, key) {
    const field = h("textarea", {
      rows: Math.min(4, 1 + Math.floor(value.length / 90)),
      "aria-label": label,
      spellcheck: "false",
      dir: "auto",
      maxlength: this.app.live?.longest ?? MOST_CHARACTERS,
      data: { key },
      on: {
        keydown: (event) => {
          if (event.key !== "Enter" || event.shiftKey) return;
          event.preventDefault();
          submit(field.value);
        },
      },
    });
    field.value = value;
    const button = { type: "button", class: "hw-go", text: "Look", data: { key: `${key}-go` } };
    return h("div", { class: "hw-entry" }, field, h("button", { ...button, on: { click: () => submit(field.value) } }));
  }

  /** The text of the decoder. @param {string} value @param {Submit} submit */
  _target(value, submit) {
    const label = "what the decoder is given";
    return h(
      "label",
      { class: "hw-target" },
      h("span", { class: "soft", text: `${label}${value ? "" : " (empty: the encoder alone is run)"}` }),
      this._text(label, value, submit, "target"),
    );
  }

  /** @param {string} label @param {string | null} value @param {(name: string) => void} choose */
  _models(label, value, choose) {
    const names = this.app.live?.models ?? [];
    if (names.length < 2) return false;
    return select(
      label,
      names.map((name) => [name, name]),
      value ?? "",
      choose,
    );
  }

  update() {
    const { app } = this;
    const { state, requests } = app;
    const run = app.runs[0];
    this.el.replaceChildren(
      this._text("text", state.text ?? "", (text) => app.set({ text, token: null, key: null }), "text"),
      run?.json.pair ? this._target(state.target, (target) => this._setTarget(target)) : "",
      h(
        "div",
        { class: "hw-controls" },
        this._models("model", state.model, (model) => app.set({ model, off: "", target: "", token: null, key: null })),
        ...this._off(),
        requests?.busy && h("span", { class: "hw-busy", role: "status", text: requests.busy }),
      ),
      requests?.failed ? h("p", { class: "hw-error", role: "alert", text: requests.failed }) : "",
      run ? effectElement(app, run.json.effect) : "",
    );
  }

  /** Labels of heads differ with and without a decoder, so that a change switches all heads on. @param {string} target */
  _setTarget(target) {
    const { state } = this.app;
    const off = Boolean(target) === Boolean(state.target) ? state.off : "";
    this.app.set({ target, off, token: null, key: null });
  }

  /** The heads that are switched off. */
  _off() {
    const { app } = this;
    const { state } = app;
    const labels = state.off ? state.off.split(",") : [];
    if (!labels.length) {
      return app.runs[0] ? [h("span", { class: "soft", text: "Key x switches the chosen head off." })] : [];
    }
    /** @param {string} label */
    const chip = (label) =>
      h(
        "button",
        {
          type: "button",
          class: "hw-chip",
          title: "switch on again",
          data: { key: `on:${label}` },
          on: { click: () => app.set({ off: labels.filter((other) => other !== label).join(",") }) },
        },
        h("b", { text: label }),
        h("span", { text: "✕" }),
      );
    const second = { text2: state.text, model2: state.model, target2: state.target, off2: "" };
    return [
      h("span", { class: "soft", text: "switched off:" }),
      ...labels.map(chip),
      h("button", {
        type: "button",
        class: "hw-small",
        text: "compare with all heads on",
        on: { click: () => app.set({ view: "compare", ...second }) },
      }),
    ];
  }

  /** The pass that the first is compared with. */
  other() {
    const { app } = this;
    const { state } = app;
    const first = state.text2 === null;
    /** @param {string} text2 */
    const submit = (text2) =>
      app.set({
        text2,
        model2: state.model2 ?? state.model,
        target2: first ? state.target : state.target2,
        off2: first ? "" : state.off2,
      });
    return h(
      "div",
      { class: "hw-live" },
      h("h3", { text: "Compare with" }),
      first &&
        h("p", {
          class: "soft",
          text: "Change the text or choose another model: both are then shown side by side, with their difference.",
        }),
      this._text("second text", state.text2 ?? state.text ?? "", submit, "text2"),
      h(
        "div",
        { class: "hw-controls" },
        this._models("second model", state.model2 ?? state.model, (model2) =>
          app.set({ model2, text2: state.text2 ?? state.text, target2: "", off2: "" }),
        ),
      ),
    );
  }
}

/**
 * @typedef {{ kind: "embedding", distance: number | null, tokens: number[] }} EmbeddingEffect
 * @typedef {{ text: string, before: number | null, after: number }} PredictedToken
 * @typedef {{ kind: "prediction", what: string, divergence: number | null, tokens: PredictedToken[] }} PredictionEffect
 */

/** What the model predicts, and how that changes without some heads.
 * @param {App} app @param {EmbeddingEffect | PredictionEffect | null | undefined} effect */
function effectElement(app, effect) {
  if (!effect) return "";
  return effect.kind === "embedding" ? embeddingElement(app, effect) : predictionElement(app, effect);
}

/** @param {App} app @param {EmbeddingEffect} effect */
function embeddingElement(app, { distance, tokens }) {
  if (distance === null) {
    return h("p", { class: "soft", text: "Switch a head off to see how far the text's embedding moves." });
  }
  const colours = ramp(app.state.palette, app.theme);
  const most = Math.max(...tokens, 1e-9);
  const names = app.run.texts[0].pieces;
  const order = tokens.map((moved, n) => ({ moved, n })).sort((a, b) => b.moved - a.moved);
  return h(
    "div",
    { class: "hw-effect" },
    h(
      "div",
      {},
      h("h3", { text: "Embedding moved by" }),
      h("p", { class: "hw-big", data: { effect: format(distance, 4) }, text: format(distance, 4) }),
      h("p", { class: "soft", text: "1 − cosine, mean over tokens" }),
    ),
    h(
      "div",
      { class: "hw-bars" },
      h("h3", { text: "Tokens that moved most" }),
      ...order
        .slice(0, MOST_TOKENS)
        .map(({ moved, n }) => bar(visible(names[n], 18), moved / most, format(moved, 4), colours)),
    ),
  );
}

/** @param {App} app @param {PredictionEffect} effect */
function predictionElement(app, { what, divergence, tokens }) {
  const colours = ramp(app.state.palette, app.theme);
  const most = Math.max(...tokens.flatMap(({ before, after }) => [before ?? 0, after]), 1e-9);
  const title = divergence === null ? what : `${what}: changed by ${format(divergence, 4)} nats`;
  return h(
    "div",
    { class: "hw-effect" },
    h(
      "div",
      { class: "hw-bars" },
      h("h3", { text: title }),
      ...tokens.map(({ text, before, after }) => {
        const value = before === null ? format(after, 3) : `${format(before, 3)} → ${format(after, 3)}`;
        return bar(visible(text, 18), after / most, value, colours, before === null ? null : before / most);
      }),
    ),
  );
}

/** @param {string} name @param {number} share @param {string} value @param {Uint8Array} colours
 * @param {number | null} [before] the share with all heads */
function bar(name, share, value, colours, before = null) {
  const background = css(pick(colours, 0.3 + 0.5 * share));
  return h(
    "div",
    { class: "hw-bar" },
    h("bdi", { text: name }),
    h(
      "span",
      { class: "track" },
      h("i", { style: { width: `${100 * share}%`, background } }),
      before !== null && h("u", { style: { left: `${100 * before}%` }, title: "with all heads" }),
    ),
    h("b", { text: value }),
  );
}
