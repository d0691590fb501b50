// The view: one state, several ways to look at it. The contract is anywidget's: export default { render({ model, el }) }.
import { Questions, messages } from "./lib/requests.js";
import { category, oklch, PALETTES } from "./lib/colour.js";
import { CompareView } from "./views/compare.js";
import { Run } from "./lib/run.js";
import { Tip, choice, h, keepFocus, several, visible } from "./lib/dom.js";
import { HeadView } from "./views/head.js";
import { Bar } from "./lib/live.js";
import { MapView } from "./views/map.js";
import { ASKED, START, mend, readState, write } from "./lib/state.js";
import { StepsView } from "./views/steps.js";

/**
 * @typedef {{ get(name: string): any, set?(name: string, value: any): void, on?(event: string, act: (...args: any[]) => void): void,
 *   off?(event: string, act: (...args: any[]) => void): void, save_changes?(): void, ask?(request: any, signal?: AbortSignal): Promise<any> }} Model
 */

const VIEWS = /** @type {[string, string][]} */ ([["map", "Map"], ["head", "Head"], ["steps", "Steps"], ["compare", "Compare"]]);
const UNDOS = 200;
export class App {
  /** @param {Model} model @param {HTMLElement} el */
  constructor(model, el) {
    this.model = model;
    this.el = el;
    this.past = /** @type {any[]} */ ([]);
    this.root = h("div", { class: "headwise", on: { keydown: (/** @type {KeyboardEvent} */ event) => this._key(event) } });
    this.head = h("header", { class: "hw-header" });
    this.body = h("main", { class: "hw-body" });
    this.voice = h("div", { class: "hw-voice", "aria-live": "polite" });
    this.root.append(this.head, this.body, this.voice);
    el.append(this.root);
    this.tip = new Tip(this.root);
    this.dark = window.matchMedia("(prefers-color-scheme: dark)");
    this.state = { ...START };
    this.views = /** @type {Record<string, any>} */ ({ map: new MapView(this), head: new HeadView(this), steps: new StepsView(this), compare: new CompareView(this) });
    this.runs = /** @type {any[]} */ ([]);
  }

  /** @param {any} data @param {string} [shared] a state that was shared */
  load(data, shared = "") {
    if (!data || data.headwise !== 1) throw new Error(data?.headwise ? `this view shows data of form 1, got ${data.headwise}` : "there is nothing to show");
    this.live = data.live;
    this.bar = this.live ? new Bar(this) : null;
    this.questions = this.live ? new Questions(this, this.model.ask ?? messages(this.model)) : null;
    if (!data.runs.length) return this._begin(shared);
    this._show(data.runs.map((/** @type {any} */ json) => new Run(json)), shared);
    if (this.live) Object.assign(this.state, { text: this.run.json.text, model: this.run.json.name, target: this.run.json.target ?? "" });
    return this.update();
  }

  /** Nothing is here yet: ask for what the address says. @param {string} shared */
  _begin(shared) {
    const asked = new URLSearchParams(shared);
    const known = (/** @type {string | null} */ name) => (name !== null && this.live.models.includes(name) ? name : null);
    Object.assign(this.state, { text: asked.get("text") || this.live.text, model: known(asked.get("model")) ?? this.live.models[0], off: asked.get("off") ?? "", target: asked.get("target") ?? this.live.target ?? "" });
    if (asked.get("text2")) Object.assign(this.state, { text2: asked.get("text2"), model2: known(asked.get("model2")) ?? this.state.model, off2: asked.get("off2") ?? "", target2: asked.get("target2") ?? "" });
    this.shared = shared;
    this.waiting();
    this.questions?.request();
  }

  /** @param {Run[]} runs @param {string} shared */
  _show(runs, shared) {
    this.runs = runs;
    const { run } = this;
    const { follow, chosen } = run.json;
    const first = chosen[0] ?? follow?.head ?? [0, 0];
    const token = follow && (!chosen.length || String(chosen[0]) === String(follow.head)) ? run.texts[0].of.indexOf(follow.word) : null;
    const key = follow && token !== null ? run.texts[0].of.indexOf(follow.to) : null;
    const [score] = Object.keys(run.json.scores); // what came along is what one wants to see
    if (score) Object.assign(this.state, { paint: run.json.roles?.length ? "role" : "value", stat: score });
    Object.assign(this.state, { heads: chosen.length > 1 ? chosen.slice(0, 8) : [first], token, key, view: this.runs[1] ? "compare" : chosen.length ? "head" : "map" }, readState(shared, run));
    this._mend();
  }

  // --- with a model behind the page ---

  /** The answer to what the state asked for. @param {Run[]} runs */
  arrived(runs) {
    const first = !this.runs.length;
    if (first) this._show(runs, this.shared ?? "");
    else this.runs = runs;
    this._mend();
    if (!first && this.state.token === null && this.state.text !== this.told) this._follow();
    this.told = this.state.text;
    this.update();
  }

  /** The word that is worth following in a new text. */
  _follow() {
    const { follow } = this.run.json;
    if (!follow) return;
    Object.assign(this.state, { token: this.run.texts[0].of.indexOf(follow.word), key: this.run.texts[0].of.indexOf(follow.to) });
  }

  /** The numbers behind a head that the page does not have yet. @param {Run} run @param {import("./lib/run.js").Head} at */
  learn(run, at) {
    return this.questions?.learn(run, at);
  }

  /** Switch a head off, or on again. @param {import("./lib/run.js").Head} at */
  switchHead(at) {
    const label = this.run.label(at);
    const labels = this.state.off ? this.state.off.split(",") : [];
    this.set({ off: (labels.includes(label) ? labels.filter((one) => one !== label) : [...labels, label]).join(",") });
  }

  /** Before the first pass is there. */
  waiting() {
    this.root.dataset.theme = this.theme;
    this.bar?.update();
    this.head.replaceChildren(h("div", { class: "hw-title" }, h("div", { class: "hw-brand" }, h("b", { text: "headwise" }))), this.bar?.el ?? "");
    this.body.replaceChildren(this.questions?.failed ? "" : h("p", { class: "soft", role: "status", text: "Loading the model …" }));
  }

  get run() {
    return this.runs[0];
  }

  /** @returns {"light" | "dark"} */
  get theme() {
    return this.state.theme === "auto" ? (this.dark.matches ? "dark" : "light") : /** @type {"light" | "dark"} */ (this.state.theme);
  }

  /** Long texts are shown in pieces: their words cannot be summed from the strongest links. */
  get unit() {
    return this.run.long ? "pieces" : this.state.unit;
  }

  /** The chosen token as a word or piece. @param {string} unit @returns {number | null} */
  token(unit) {
    const { token } = this.state;
    if (token === null) return null;
    return unit === "words" ? this.run.text(this.state.heads[0][0], "from").of[token] : token;
  }

  get colours() {
    const dark = this.theme === "dark";
    return dark
      ? { ground: "#15171c", ink: "#e8e9ed", soft: "#9aa0ad", accent: "#ffb454", link: category(0, "dark") }
      : { ground: "#fcfbf8", ink: "#1b1f2a", soft: "#646b7a", accent: "#c2410c", link: oklch(0.45, 0.15, 262) };
  }

  /** @param {any} patch @param {boolean} [remember] whether undo comes back to here */
  set(patch, remember = true) {
    if (Object.entries(patch).every(([name, value]) => JSON.stringify(/** @type {any} */ (this.state)[name]) === JSON.stringify(value))) return;
    if (remember) this.past = [...this.past.slice(-UNDOS), { ...this.state }];
    this._change({ ...this.state, ...patch });
  }

  /** @param {any} state */
  _change(state) {
    const before = this.state;
    this.state = state;
    if (this.questions && [...ASKED, ...ASKED.map((name) => `${name}2`)].some((name) => before[name] !== state[name])) {
      this.questions.request();
      if (before.view === state.view) return; // what is there stays until the answer comes
    }
    if (!this.runs.length) return;
    this._mend();
    this.update();
  }

  /** The address, or the notebook, says what to show. @param {string} shared */
  adopt(shared) {
    if (!this.runs.length || shared === write(this.state, this.run)) return;
    const asked = new URLSearchParams(shared);
    const questions = this.live ? Object.fromEntries([...asked].filter(([name]) => ASKED.includes(name.replace(/2$/, "")))) : {};
    this.set({ ...readState(shared, this.run), ...questions });
  }

  undo() {
    const before = this.past.pop();
    if (!before) return;
    this._change(before);
    this.say("undone");
  }

  _mend() {
    mend(this.state, this.run);
    if (this.state.view === "compare" && !this.runs[1] && !this.live) this.state.view = "map";
  }

  /** A head was clicked: it alone, or with Shift laid over the others. @param {import("./lib/run.js").Head} at @param {MouseEvent} event @param {string} view */
  choose(at, event, view) {
    const { heads } = this.state;
    if (!event.shiftKey && !event.ctrlKey && !event.metaKey) return this.set({ heads: [at], view });
    const without = heads.filter((one) => String(one) !== String(at));
    return this.set({ heads: without.length < heads.length && without.length ? without : [...without, at].slice(-8), view });
  }

  /** Go on by so many layers and heads. @param {number} layers @param {number} heads */
  step(layers, heads) {
    const { run } = this;
    const [row, head] = this.state.heads[0];
    const next = Math.min(Math.max(row + layers, 0), run.layers.length - 1);
    const count = run.layers[next].heads;
    this.set({ heads: [[next, Math.min(Math.max(head + heads, 0), count - 1)]] });
    this.say(`head ${run.label(this.state.heads[0])}`);
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    if (!this.runs.length) return;
    const target = /** @type {HTMLElement} */ (event.target);
    if (target.matches("input, textarea, select")) return;
    if ((event.ctrlKey || event.metaKey) && event.key === "z") this.undo();
    else if (event.ctrlKey || event.metaKey || event.altKey) return;
    else if (this.state.view !== "map" && Object.hasOwn(ARROWS, event.key)) this.step(...ARROWS[event.key]);
    else if (/^[1-4]$/.test(event.key) && this._views()[Number(event.key) - 1]) this.set({ view: this._views()[Number(event.key) - 1][0] });
    else if (event.key === "Escape") this.set({ token: null });
    else if (event.key === "x" && this.live) this.switchHead(this.state.heads[0]);
    else return;
    event.preventDefault();
  }

  /** For those who listen instead of looking. @param {string} text */
  say(text) {
    this.voice.textContent = text;
  }

  _views() {
    return VIEWS.filter(([name]) => name !== "compare" || this.runs[1] || this.live);
  }

  update() {
    this.root.dataset.theme = this.theme;
    this.tip.hide();
    keepFocus(this.root, () => {
      this._header();
      const view = this.views[this.state.view];
      if (this.body.firstChild !== view.el) this.body.replaceChildren(view.el);
      view.update();
    });
    this.model.set?.("state", write(this.state, this.run));
    this.model.save_changes?.();
  }

  _header() {
    const { run, state } = this;
    this.bar?.update();
    const text = run.json.text;
    const layers = run.layers.length;
    const heads = run.layers.reduce((/** @type {number} */ sum, /** @type {any} */ layer) => sum + layer.heads, 0);
    this.head.replaceChildren(
      h("div", { class: "hw-title" },
        h("div", { class: "hw-brand" }, h("b", { text: "headwise" }), h("span", { class: "soft", text: `${run.json.name} · ${several(layers, "layer")}, ${several(heads, "head")} · ${several(run.texts[0].pieces.length, "token")}${run.json.notes.map((/** @type {string} */ note) => ` · ${note}`).join("")}` })),
        h("div", { class: "hw-tools" },
          h("button", { type: "button", class: "hw-small", text: "↶ undo", disabled: !this.past.length, data: { key: "undo" }, title: "Ctrl Z", on: { click: () => this.undo() } }),
          choice("palette", PALETTES.map((name) => [name, name]), state.palette, (palette) => this.set({ palette }), { class: "hw-choice quiet" }),
          h("button", { type: "button", class: "hw-small", text: this.theme === "dark" ? "☀ light" : "☾ dark", data: { key: "theme" }, on: { click: () => this.set({ theme: this.theme === "dark" ? "light" : "dark" }) } }))),
      this.bar ? this.bar.el : h("h1", { dir: "auto", class: text.length > 160 ? "long" : "", text: visible(text, 220) }),
      !this.bar && run.json.target ? h("p", { class: "hw-given" }, h("span", { class: "soft", text: "the decoder is given " }), h("bdi", { text: visible(run.json.target, 220) })) : "",
      h("nav", { class: "hw-tabs", role: "tablist", "aria-label": "views" }, ...this._views().map(([name, label], n) => h("button", {
        type: "button", role: "tab", "aria-selected": name === state.view, tabindex: name === state.view ? 0 : -1, text: label, title: `key ${n + 1}`, data: { key: `tab:${name}` },
        on: {
          click: () => this.set({ view: name }),
          keydown: (/** @type {KeyboardEvent} */ event) => this._tabKey(event, n),
        },
      }))));
  }

  /** @param {KeyboardEvent} event @param {number} place */
  _tabKey(event, place) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const all = this._views();
    const next = (place + by + all.length) % all.length;
    event.preventDefault();
    event.stopPropagation();
    this.set({ view: all[next][0] });
    /** @type {HTMLElement | null} */ (this.head.querySelector('[role="tab"][aria-selected="true"]'))?.focus();
  }
}

const ARROWS = /** @type {Record<string, [number, number]>} */ ({ ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] });

/** Show a view in an element. @param {{ model: Model, el: HTMLElement }} host */
export function render({ model, el }) {
  const app = new App(model, el);
  const show = () => {
    try {
      const data = model.get("data");
      app.load(typeof data === "string" ? JSON.parse(data) : data, model.get("state") || "");
    } catch (error) {
      app.body.replaceChildren(h("p", { class: "hw-error", role: "alert", text: `This cannot be shown: ${error instanceof Error ? error.message : error}` }));
    }
  };
  const retheme = () => app.runs.length && app.update();
  app.dark.addEventListener("change", retheme);
  // a page of its own hears keys also while nothing in it has the focus; a notebook has keys of its own
  const keys = (/** @type {KeyboardEvent} */ event) => event.target === document.body && app._key(event);
  if (model.get("page")) document.addEventListener("keydown", keys);
  const adopt = () => app.adopt(model.get("state") || "");
  model.on?.("change:data", show);
  model.on?.("change:state", adopt);
  show();
  return () => {
    app.dark.removeEventListener("change", retheme);
    document.removeEventListener("keydown", keys);
    model.off?.("change:data", show);
    model.off?.("change:state", adopt);
    app.questions?.asking?.abort();
    app.root.remove();
  };
}

export default { render };
