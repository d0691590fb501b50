// The page: one state, and the views that show it.
// The contract is anywidget's: export default { render({ model, el }) }.

import { largestChange, mostChangedHead } from "./lib/changes.js";
import { category, oklch, PALETTES } from "./lib/colour.js";
import { changedText, choice, h, keepFocus, Tooltip } from "./lib/dom.js";
import { arrowStep, consume } from "./lib/keys.js";
import { LiveBar } from "./lib/live.js";
import { hasImage } from "./lib/patches.js";
import { registeredViews } from "./lib/registry.js";
import { messageChannel, Requests } from "./lib/requests.js";
import { Run } from "./lib/run.js";
import { clampState, initialState, MOST_HEADS, REQUEST_FIELDS, readState, writeState } from "./lib/state.js";
import { plural, visible } from "./lib/text.js";

/** @import { ViewDefinition, ViewInstance } from "./lib/registry.js" */
/** @import { Send } from "./lib/requests.js" */
/** @import { Head, RunJson, Unit } from "./lib/run.js" */
/** @import { State } from "./lib/state.js" */

/**
 * @typedef {object} Model what is around the page: a file, a server or a notebook
 * @property {(name: string) => any} get "data", "state", and "page" where the page is a document of its own
 * @property {(name: string, value: any) => void} [set]
 * @property {(event: string, act: (...args: any[]) => void) => void} [on]
 * @property {(event: string, act: (...args: any[]) => void) => void} [off]
 * @property {() => void} [save_changes]
 * @property {(message: any) => void} [send]
 * @property {Send} [ask]
 *
 * @typedef {{ models: string[], text: string, target: string | null, longest?: number }} Live
 */

const UNDO_STEPS = 200;
const LONG_TITLE = 160; // characters
const ALL_REQUEST_FIELDS = [...REQUEST_FIELDS, ...REQUEST_FIELDS.map((name) => `${name}2`)];

export class App {
  /** @param {Model} model @param {HTMLElement} el */
  constructor(model, el) {
    this.model = model;
    this.el = el;
    /** @type {State[]} */
    this.past = [];
    /** @type {HTMLElement} */
    this.root = h("div", { class: "headwise", on: { keydown: (event) => this._key(event) } });
    /** @type {HTMLElement} */
    this.header = h("header", { class: "hw-header" });
    /** @type {HTMLElement} */
    this.body = h("main", { class: "hw-body" });
    /** @type {HTMLElement} */
    this.voice = h("div", { class: "hw-voice", "aria-live": "polite" });
    this.root.append(this.header, this.body, this.voice);
    el.append(this.root);
    this.tooltip = new Tooltip(this.root);
    this.dark = window.matchMedia("(prefers-color-scheme: dark)");
    this.state = initialState();
    /** @type {Map<string, ViewInstance>} */
    this.views = new Map(registeredViews().map(({ name, create }) => [name, create(this)]));
    /** @type {Run[]} */
    this.runs = [];
    /** @type {Live | null} */
    this.live = null;
    /** @type {LiveBar | null} */
    this.bar = null;
    /** @type {Requests | null} */
    this.requests = null;
    this.shared = "";
    /** @type {string | null} the text, model and target whose word was chosen to follow */
    this.followed = null;
    /** @type {string | null} what both passes were requested by */
    this.compared = null;
  }

  /** @param {any} data @param {string} [shared] a state that was shared */
  load(data, shared = "") {
    if (!data?.headwise) throw new Error("there is nothing to show");
    if (data.headwise !== 1) throw new Error(`this view shows data of form 1, got ${data.headwise}`);
    this.live = data.live;
    this.bar = this.live ? new LiveBar(this) : null;
    this.requests = this.live ? new Requests(this, this.model.ask ?? messageChannel(this.model)) : null;
    if (!data.runs.length) {
      this._requestFirst(data.live, shared);
      return;
    }
    /** @type {RunJson[]} */
    const runs = data.runs;
    this._start(
      runs.map((json) => new Run(json)),
      shared,
    );
    if (this.live) {
      const { text, name, target } = this.run.json;
      Object.assign(this.state, { text, model: name, target: target ?? "" });
      this.followed = this._followedKey();
    }
    this.update();
  }

  /** There is no pass yet: request what the address says. @param {Live} live @param {string} shared */
  _requestFirst(live, shared) {
    const fields = new URLSearchParams(shared);
    const model = live.models.find((name) => name === fields.get("model")) ?? live.models[0];
    Object.assign(this.state, {
      text: fields.get("text") || live.text,
      model,
      off: fields.get("off") ?? "",
      target: fields.get("target") ?? live.target ?? "",
    });
    if (fields.get("text2")) {
      Object.assign(this.state, {
        text2: fields.get("text2"),
        model2: live.models.find((name) => name === fields.get("model2")) ?? model,
        off2: fields.get("off2") ?? "",
        target2: fields.get("target2") ?? "",
      });
    }
    this.shared = shared;
    this.showLoading();
    this.requests?.requestRuns();
  }

  /** The state of the first passes: what is worth a look, and what was shared.
   * @param {Run[]} runs @param {string} shared */
  _start(runs, shared) {
    this.runs = runs;
    const { run } = this;
    const { follow, chosen, scores, roles, circuit } = run.json;
    const first = chosen[0] ?? follow?.head ?? [0, 0];
    const { of } = run.texts[0];
    const followed = follow && String(first) === String(follow.head) ? follow : null;
    const [score] = Object.keys(scores);
    if (score) Object.assign(this.state, { paint: roles?.length ? "role" : "value", stat: score });
    Object.assign(this.state, {
      heads: chosen.length > 1 ? chosen.slice(0, MOST_HEADS) : [first],
      token: followed ? of.indexOf(followed.word) : null,
      key: followed ? of.indexOf(followed.to) : null,
      view: this.runs[1] ? "compare" : chosen.length || hasImage(run) ? this.headView : "map",
    });
    if (circuit) this.state.view = "circuit";
    if (!chosen.length) this._chooseChange();
    Object.assign(this.state, readState(shared, run));
    this._clamp();
  }

  /** Choose the head that differs most between two passes. */
  _chooseChange() {
    const [a, b] = this.runs;
    const at = b && (largestChange(a, b, "words")?.at ?? mostChangedHead(a, b, this.state.stat));
    if (at) this.state.heads = [at];
  }

  // --- with a model behind the page ---

  /** Show the passes that the state requested. @param {Run[]} runs */
  receiveRuns(runs) {
    const first = !this.runs.length;
    const before = first ? null : this.run.json.follow;
    if (first) this._start(runs, this.shared);
    else this.runs = runs;
    this._clamp();
    const followed = this._followedKey();
    if (!first && this.state.token === null && followed !== this.followed) this._follow(before);
    this.followed = followed;
    const compared = JSON.stringify(ALL_REQUEST_FIELDS.map((name) => this.state[name]));
    if (!first && this.runs[1] && this.state.view === "compare" && compared !== this.compared) this._chooseChange();
    this.compared = compared;
    this.update();
  }

  _followedKey() {
    const { text, model, target } = this.state;
    return JSON.stringify([text, model, target]);
  }

  /** Choose the word that is worth following in a new text, and its head: in the map, where it is announced, and
   * elsewhere unless another head was chosen. @param {RunJson["follow"]} before what was followed in the old text */
  _follow(before) {
    const { follow } = this.run.json;
    if (!follow) return;
    const { of } = this.run.texts[0];
    const { view, heads } = this.state;
    const unchosen = view === "map" || String(heads) === String(before?.head);
    Object.assign(this.state, { token: of.indexOf(follow.word), key: of.indexOf(follow.to) });
    if (unchosen) this.state.heads = [follow.head];
  }

  /** Fetch q, k and v behind a head that the page does not have yet. @param {Run} run @param {Head} at */
  fetchSteps(run, at) {
    return this.requests?.fetchSteps(run, at);
  }

  /** Switch a head off, or on again. @param {Head} at */
  switchHead(at) {
    const label = this.run.label(at);
    const labels = this.state.off ? this.state.off.split(",") : [];
    const others = labels.filter((other) => other !== label);
    this.set({ off: (others.length < labels.length ? others : [...labels, label]).join(",") });
  }

  /** Before the first pass has arrived. */
  showLoading() {
    this.root.dataset.theme = this.theme;
    this.bar?.update();
    this.header.replaceChildren(
      h("div", { class: "hw-title" }, h("div", { class: "hw-brand" }, h("b", { text: "headwise" }))),
      this.bar?.el ?? "",
    );
    this.body.replaceChildren(
      this.requests?.failed ? "" : h("p", { class: "soft", role: "status", text: "Loading the model …" }),
    );
  }

  get run() {
    return this.runs[0];
  }

  /** The view of a single head that was chosen in the map. */
  get headView() {
    return hasImage(this.run) ? "image" : "head";
  }

  /** @returns {"light" | "dark"} */
  get theme() {
    const { theme } = this.state;
    if (theme === "light" || theme === "dark") return theme;
    return this.dark.matches ? "dark" : "light";
  }

  /** Long texts are shown in pieces: their words cannot be summed from the strongest links. @returns {Unit} */
  get unit() {
    return this.run.long || this.state.unit === "pieces" ? "pieces" : "words";
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
      ? { ground: "#15171c", ink: "#e8e9ed", soft: "#a3a9b6", accent: "#ffb454", link: category(0, "dark") }
      : { ground: "#fcfbf8", ink: "#1b1f2a", soft: "#5c6371", accent: "#b93c0a", link: oklch(0.45, 0.15, 262) };
  }

  /** Change some fields of the state. @param {Partial<State>} patch */
  set(patch) {
    /** @param {[string, any]} field */
    const unchanged = ([name, value]) => JSON.stringify(this.state[name]) === JSON.stringify(value);
    if (Object.entries(patch).every(unchanged)) return;
    this.past = [...this.past.slice(-UNDO_STEPS), { ...this.state }];
    this._change({ ...this.state, ...patch });
  }

  /** @param {State} state */
  _change(state) {
    const before = this.state;
    this.state = state;
    if (this.requests && ALL_REQUEST_FIELDS.some((name) => before[name] !== state[name])) {
      this.requests.requestRuns();
      if (before.view === state.view) return; // the old passes stay until the answer arrives
    }
    if (!this.runs.length) return;
    this._clamp();
    this.update();
  }

  /** Show what the address, or the notebook, says. @param {string} shared */
  applyShared(shared) {
    if (!this.runs.length || shared === writeState(this.state, this.run)) return;
    const fields = [...new URLSearchParams(shared)].filter(([name]) => ALL_REQUEST_FIELDS.includes(name));
    this.set({ ...readState(shared, this.run), ...(this.live ? Object.fromEntries(fields) : {}) });
  }

  undo() {
    const before = this.past.pop();
    if (!before) return;
    this._change(before);
    this.say("undone");
  }

  _clamp() {
    clampState(this.state, this.run);
    const available = this._views();
    if (!available.some(({ name }) => name === this.state.view)) this.state.view = available[0].name;
  }

  /** Choose the head that was clicked: alone, or with Shift in addition to the others.
   * @param {Head} at @param {MouseEvent} event @param {string} view */
  choose(at, event, view) {
    const { heads } = this.state;
    const others = heads.filter((head) => String(head) !== String(at));
    const remove = others.length > 0 && others.length < heads.length;
    if (!event.shiftKey && !event.ctrlKey && !event.metaKey) this.set({ heads: [at], view });
    else this.set({ heads: remove ? others : [...others, at].slice(-MOST_HEADS), view });
  }

  /** Whether all heads of the chosen head's layer are laid over each other. */
  get overlaid() {
    const { heads } = this.state;
    const [[row]] = heads;
    return heads.length > 1 && heads.length === this.run.layers[row].heads && heads.every(([other]) => other === row);
  }

  /** Lay all heads of the chosen head's layer over each other, or go back to one of them. */
  toggleOverlay() {
    const [first] = this.state.heads;
    const count = Math.min(this.run.layers[first[0]].heads, MOST_HEADS);
    const all = Array.from({ length: count }, (_, head) => /** @type {Head} */ ([first[0], head]));
    const others = all.filter(([, head]) => head !== first[1]);
    this.set({ heads: this.overlaid ? [first] : [first, ...others] });
  }

  /** Move the choice by some layers and heads. @param {number} layers @param {number} heads */
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
    const step = this.state.view === "map" ? null : arrowStep(event);
    const view = /^[1-9]$/.test(event.key) ? this._views()[Number(event.key) - 1] : undefined;
    if ((event.ctrlKey || event.metaKey) && event.key === "z") this.undo();
    else if (event.ctrlKey || event.metaKey || event.altKey) return;
    else if (step) this.step(...step);
    else if (view) this.set({ view: view.name });
    else if (event.key === "Escape") this.set({ token: null });
    else if (event.key === "a" && this.state.view === this.headView) this.toggleOverlay();
    else if (event.key === "x" && this.live) this.switchHead(this.state.heads[0]);
    else return;
    event.preventDefault();
  }

  /** Tell a screen reader. @param {string} text */
  say(text) {
    this.voice.textContent = text;
  }

  /** The views that have anything to show. */
  _views() {
    return registeredViews().filter(({ available }) => !available || available(this));
  }

  update() {
    this.root.dataset.theme = this.theme;
    this.tooltip.hide();
    keepFocus(this.root, () => {
      this._updateHeader();
      const view = /** @type {ViewInstance} */ (this.views.get(this.state.view));
      if (this.body.firstChild !== view.el) this.body.replaceChildren(view.el);
      view.update();
    });
    this.model.set?.("state", writeState(this.state, this.run));
    this.model.save_changes?.();
  }

  _updateHeader() {
    this.bar?.update();
    this.header.replaceChildren(
      h("div", { class: "hw-title" }, this._brand(), this._tools()),
      ...(this.bar ? [this.bar.el] : this._texts()),
      h(
        "nav",
        { class: "hw-tabs", role: "tablist", "aria-label": "views" },
        ...this._views().map((view, n) => this._tab(view, n)),
      ),
    );
  }

  /** The model and the size of the text. */
  _brand() {
    const { layers, texts, json } = this.run;
    const second = this.state.view === "compare" ? this.runs[1]?.json.name : undefined;
    if (second && second !== json.name) return brand([`${json.name} and ${second}`, ...json.notes]);
    const heads = layers.reduce((sum, layer) => sum + layer.heads, 0);
    const tokens = plural(texts[0].pieces.length, "token");
    const facts = [json.name, `${plural(layers.length, "layer")}, ${plural(heads, "head")}`, tokens, ...json.notes];
    return brand(facts);
  }

  /** Undo, palette and theme. */
  _tools() {
    const { state } = this;
    const dark = this.theme === "dark";
    return h(
      "div",
      { class: "hw-tools" },
      h("button", {
        type: "button",
        class: "hw-small",
        text: "↶ undo",
        disabled: !this.past.length,
        data: { key: "undo" },
        title: "Ctrl Z",
        on: { click: () => this.undo() },
      }),
      choice(
        "palette",
        PALETTES.map((name) => [name, name]),
        state.palette,
        (palette) => this.set({ palette }),
        { class: "hw-choice quiet" },
      ),
      h("button", {
        type: "button",
        class: "hw-small",
        text: dark ? "☀ light" : "☾ dark",
        data: { key: "theme" },
        on: { click: () => this.set({ theme: dark ? "light" : "dark" }) },
      }),
    );
  }

  /** The text, and the text of the decoder. */
  _texts() {
    const { text, target, pair } = this.run.json;
    const other = this.state.view === "compare" ? this.runs[1]?.json.text : undefined;
    if (other !== undefined && other !== text) {
      /** @param {string} own @param {string} their */
      const line = (own, their) => h("span", { dir: "auto" }, ...changedText(own, their));
      return [h("h1", { class: "two" }, line(text, other), line(other, text))];
    }
    const title = { dir: "auto", class: text.length > LONG_TITLE ? "long" : "", text: visible(text, 220) };
    if (!target) return [h("h1", title)];
    return [
      h("h1", title),
      h(
        "p",
        { class: "hw-given" },
        h("span", { class: "soft", text: pair ? "the decoder is given " : "with the text " }),
        h("bdi", { text: visible(target, 220) }),
      ),
    ];
  }

  /** @param {ViewDefinition} view @param {number} n */
  _tab({ name, label }, n) {
    const selected = name === this.state.view;
    return h("button", {
      type: "button",
      role: "tab",
      "aria-selected": selected,
      tabindex: selected ? 0 : -1,
      text: label,
      title: `key ${n + 1}`,
      data: { key: `tab:${name}` },
      on: {
        click: () => this.set({ view: name }),
        keydown: (event) => this._tabKey(event, n),
      },
    });
  }

  /** @param {KeyboardEvent} event @param {number} n */
  _tabKey(event, n) {
    const step = arrowStep(event)?.[1];
    if (!step) return;
    const views = this._views();
    consume(event);
    this.set({ view: views[(n + step + views.length) % views.length].name });
    /** @type {HTMLElement | null} */ (this.header.querySelector('[role="tab"][aria-selected="true"]'))?.focus();
  }
}

/** The name of the package, and what the page is about. @param {string[]} facts */
function brand(facts) {
  return h(
    "div",
    { class: "hw-brand" },
    h("b", { text: "headwise" }),
    h("span", { class: "soft", text: facts.join(" · ") }),
  );
}

/** Show the page in an element. @param {{ model: Model, el: HTMLElement }} host */
export function render({ model, el }) {
  const app = new App(model, el);
  const show = () => {
    try {
      const data = model.get("data");
      app.load(typeof data === "string" ? JSON.parse(data) : data, model.get("state") || "");
    } catch (error) {
      app.body.replaceChildren(
        h("p", {
          class: "hw-error",
          role: "alert",
          text: `This cannot be shown: ${error instanceof Error ? error.message : error}`,
        }),
      );
    }
  };
  const retheme = () => {
    if (app.runs.length) app.update();
  };
  app.dark.addEventListener("change", retheme);
  // a document of its own also takes keys while nothing in it has the focus; a notebook has keys of its own
  const keys = (/** @type {KeyboardEvent} */ event) => {
    if (event.target === document.body) app._key(event);
  };
  if (model.get("page")) document.addEventListener("keydown", keys);
  const adopt = () => app.applyShared(model.get("state") || "");
  model.on?.("change:data", show);
  model.on?.("change:state", adopt);
  show();
  return () => {
    app.dark.removeEventListener("change", retheme);
    document.removeEventListener("keydown", keys);
    model.off?.("change:data", show);
    model.off?.("change:state", adopt);
    app.requests?.pending?.abort();
    app.root.remove();
  };
}

export default { render };
