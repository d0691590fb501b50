// What only works with a model behind the page: another text or model, heads switched off, and what that does.
import { css, pick, ramp } from "./colour.js";
import { format, h, select, visible } from "./dom.js";

export class Bar {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.el = h("div", { class: "hw-live" });
  }

  /** @param {string} label @param {string} value @param {(text: string) => void} send @param {string} key */
  _text(label, value, send, key) {
    const field = h("textarea", {
      rows: Math.min(4, 1 + Math.floor(value.length / 90)), "aria-label": label, spellcheck: "false", dir: "auto", maxlength: this.app.live.longest ?? 100000, data: { key },
      on: {
        keydown: (/** @type {KeyboardEvent} */ event) => {
          if (event.key !== "Enter" || event.shiftKey) return;
          event.preventDefault();
          send(field.value);
        },
      },
    });
    field.value = value;
    return h("div", { class: "hw-entry" }, field, h("button", { type: "button", class: "hw-go", text: "Look", data: { key: `${key}-go` }, on: { click: () => send(field.value) } }));
  }

  /** @param {string} label @param {string} value @param {(text: string) => void} send @param {string} key */
  _target(label, value, send, key) {
    return h("label", { class: "hw-target" }, h("span", { class: "soft", text: `${label}${value ? "" : " (empty: the encoder alone is run)"}` }), this._text(label, value, send, key));
  }

  update() {
    const { app } = this;
    const { state, live } = app;
    this.el.replaceChildren(
      this._text("text", state.text ?? "", (text) => app.set({ text, token: null, key: null }), "text"),
      app.runs[0]?.json.pair ? this._target("what the decoder is given", state.target, (target) => app.set({ target, off: Boolean(target) === Boolean(state.target) ? state.off : "", token: null, key: null }), "target") : "",
      h("div", { class: "hw-controls" },
        live.models.length > 1 && select("model", live.models.map((/** @type {string} */ name) => [name, name]), state.model, (model) => app.set({ model, off: "", target: "", token: null, key: null })),
        ...this._off(), app.questions.busy && h("span", { class: "hw-busy", role: "status", text: app.questions.busy })),
      app.questions.failed ? h("p", { class: "hw-error", role: "alert", text: app.questions.failed }) : "",
      app.runs[0] ? effect(app, app.runs[0].json.effect) : "");
  }

  _off() {
    const { app } = this;
    const labels = app.state.off ? app.state.off.split(",") : [];
    if (!labels.length) return app.runs[0] ? [h("span", { class: "soft", text: "Key x switches the chosen head off." })] : [];
    return [h("span", { class: "soft", text: "switched off:" }),
      ...labels.map((label) => h("button", { type: "button", class: "hw-chip", title: "switch on again", data: { key: `on:${label}` }, on: { click: () => app.set({ off: labels.filter((one) => one !== label).join(",") }) } }, h("b", { text: label }), h("span", { text: "✕" }))),
      h("button", { type: "button", class: "hw-small", text: "compare with all heads on", on: { click: () => app.set({ view: "compare", text2: app.state.text, model2: app.state.model, target2: app.state.target, off2: "" }) } })];
  }

  /** What the first is compared with. */
  other() {
    const { app } = this;
    const { state, live } = app;
    const send = (/** @type {string} */ text2) => app.set({ text2, model2: state.model2 ?? state.model, target2: state.text2 === null ? state.target : state.target2, off2: state.text2 === null ? "" : state.off2 });
    return h("div", { class: "hw-live" }, h("h3", { text: "Compare with" }),
      this._text("second text", state.text2 ?? state.text ?? "", send, "text2"),
      h("div", { class: "hw-controls" },
        live.models.length > 1 && select("second model", live.models.map((/** @type {string} */ name) => [name, name]), state.model2 ?? state.model, (model2) => app.set({ model2, text2: state.text2 ?? state.text, target2: "", off2: "" }))));
  }
}

/** What the model says, and how that changes without some heads. @param {any} app @param {any} found */
function effect(app, found) {
  if (!found) return "";
  const colours = ramp(app.state.palette, app.theme);
  if (found.kind === "embedding") {
    if (found.distance === null) return h("p", { class: "soft", text: "Switch a head off to see how far the text's embedding moves." });
    const most = Math.max(...found.tokens, 1e-9);
    const names = app.runs[0].texts[0].pieces;
    const far = found.tokens.map((/** @type {number} */ d, /** @type {number} */ n) => ({ d, n })).sort((/** @type {any} */ a, /** @type {any} */ b) => b.d - a.d).slice(0, 8);
    return h("div", { class: "hw-effect" },
      h("div", {}, h("h3", { text: "Embedding moved by" }), h("p", { class: "hw-big", data: { effect: format(found.distance, 4) }, text: format(found.distance, 4) }), h("p", { class: "soft", text: "1 − cosine, mean over tokens" })),
      h("div", { class: "hw-bars" }, h("h3", { text: "Tokens that moved most" }), ...far.map(({ d, n }) => bar(visible(names[n], 18), d / most, format(d, 4), colours))));
  }
  const most = Math.max(...found.tokens.flatMap((/** @type {any} */ one) => [one.before ?? 0, one.after]), 1e-9);
  return h("div", { class: "hw-effect" }, h("div", { class: "hw-bars" }, h("h3", { text: found.what + (found.divergence === null ? "" : `: changed by ${format(found.divergence, 4)} nats`) }),
    ...found.tokens.map((/** @type {any} */ one) => bar(visible(one.text, 18), one.after / most, one.before === null ? format(one.after, 3) : `${format(one.before, 3)} → ${format(one.after, 3)}`, colours, one.before === null ? null : one.before / most))));
}

/** @param {string} name @param {number} share @param {string} value @param {Uint8Array} colours @param {number | null} [before] */
function bar(name, share, value, colours, before = null) {
  return h("div", { class: "hw-bar" }, h("bdi", { text: name }), h("span", { class: "track" }, h("i", { style: { width: `${100 * share}%`, background: css(pick(colours, 0.3 + 0.5 * share)) } }), before !== null && h("u", { style: { left: `${100 * before}%` }, title: "with all heads" })), h("b", { text: value }));
}
