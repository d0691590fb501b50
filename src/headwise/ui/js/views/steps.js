// How one weight and one output come about, with the model's own numbers, from q and k to what W_O makes of it.
import { css, pick, ramp } from "../lib/colour.js";
import { attention } from "../lib/run.js";
import { format, h, select, several, tokenElement, visible } from "../lib/dom.js";
import { chosen, navigate, sentence } from "./head.js";

const KEYS = 24; // keys that are listed
const STRIPS = 8; // values that are drawn

export class StepsView {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.side = h("div", {});
    this.main = h("div", { class: "hw-main" });
    this.el = h("div", { class: "hw-steps" }, this.side, this.main);
  }

  update() {
    const { app } = this;
    const { run, state } = app;
    const at = state.heads[0];
    navigate(this.side, app, run);
    const step = run.steps(at);
    const top = h("div", { class: "hw-top" }, h("div", { class: "hw-controls" }, chosen({ ...shallow(app), state: { ...state, heads: [at] } }, run)));
    if (!step) {
      this.main.replaceChildren(top, this._missing(run, at));
      if (app.live) app.learn(run, at);
      return;
    }
    const i = state.token ?? Math.min(1, step.queries - 1);
    const made = attention(step, i);
    const j = state.key !== null && state.key < step.keys && made.weights[state.key] > 0 ? state.key : strongest(made.weights);
    const from = run.names(at[0], "from", "pieces");
    const to = run.names(at[0], "to", "pieces");
    const context = { run, at, step, made, i, j, from, to };
    top.append(h("p", { class: "hw-lead" }, "How ", tokenElement(from[i], { class: "hw-word" }), " comes to look at ", tokenElement(to[j], { class: "hw-word key" }),
      ` by ${format(made.weights[j], 3)}, and what it takes from there`),
    h("div", { class: "hw-controls" }, this._tokens("looks", from, i, (token) => app.set({ token })), this._tokens("at", to, j, (key) => app.set({ key })), h("span", { class: "soft", text: "or click a token; the rows of step 3 choose the key." })),
    sentence({ ...shallow(app), state: { ...state, heads: [at] }, token: () => i, colours: app.colours }, run, "pieces"));
    this.main.replaceChildren(top, this._thread(context), h("ol", { class: "hw-story" }, this._product(context), this._scale(context), this._softmax(context), this._sum(context), this._together(context), this._output(context)));
  }

  /** The whole way of one number, step by step; a click goes there. @param {any} c */
  _thread({ run, at, step, made, i, j }) {
    const found = run.output(at[0], i);
    const stations = [
      ["q · k", format(made.products[j], 2)], ["scaled, masked", format(made.scores[j], 2)], ["softmax", format(made.weights[j], 3)],
      ["Σ a · v", `‖o‖ ${format(Math.hypot(...made.output), 2)}`], ["side by side", `${run.layers[at[0]].heads} × ${step.value}`], ["W_O", found ? `${format(found.norms[at[1]], 2)} of ${format(found.total, 2)}` : "–"],
    ];
    return h("nav", { class: "hw-thread", "aria-label": "steps" }, ...stations.map(([name, value], n) => h("button", {
      type: "button", data: { key: `thread:${n}` }, on: { click: () => this.main.querySelector(`#hw-step-${n + 1}`)?.scrollIntoView({ block: "start" }) },
    }, h("small", { text: `${n + 1} ${name}` }), h("b", { text: value }))));
  }

  /** @param {any} run @param {any} at */
  _missing(run, at) {
    const { app } = this;
    const held = run.json.steps.flatMap((/** @type {any} */ one, /** @type {number} */ row) => (one ? one.heads.map((/** @type {number} */ head) => [row, head]) : []));
    if (app.live) return h("p", { class: "soft", role: "status", text: "Asking for the numbers of this head …" });
    return h("div", { class: "hw-card" },
      h("p", { text: held.length ? `This page holds the numbers behind ${several(held.length, "head")}; head ${run.label(at)} is not among them. With “headwise serve” every head has its steps.` : "This page holds no steps: the model's own code makes its weights in a way that is not q·k alone." }),
      h("div", { class: "hw-chips" }, ...held.slice(0, 30).map((/** @type {any} */ one) => h("button", { type: "button", class: "hw-chip", text: run.label(one), on: { click: () => app.set({ heads: [one] }) } }))));
  }

  /** @param {string} label @param {string[]} names @param {number} value @param {(n: number) => void} choose */
  _tokens(label, names, value, choose) {
    const near = names.length <= 600 ? names.map((_, n) => n) : names.map((_, n) => n).slice(Math.max(0, value - 300), value + 300);
    return select(label, near.map((n) => [String(n), `${n}  ${visible(names[n], 24)}`]), String(value), (text) => choose(Number(text)));
  }

  /** @param {number} number @param {string} title @param {string} formula @param {string} why @param {...any} parts */
  _card(number, title, formula, why, ...parts) {
    return h("li", { class: "hw-card hw-step", id: `hw-step-${number}` },
      h("div", { class: "hw-step-title" }, h("span", { class: "hw-number", text: String(number) }), h("h2", { text: title }), h("code", { text: formula })),
      h("p", { class: "soft", text: why }), ...parts);
  }

  /** Numbers as a strip of colours: blue below zero, orange above. @param {ArrayLike<number>} numbers @param {string} label @param {{top?: number, mark?: [number, number] | null}} [how] */
  strip(numbers, label, { top, mark } = {}) {
    const { app } = this;
    const colours = ramp("diverging", app.theme);
    const most = top ?? Math.max(...Array.from(numbers, Math.abs), 1e-9);
    const canvas = h("canvas", { width: numbers.length, height: 1, class: "hw-strip", role: "img", "aria-label": `${label}: ${several(numbers.length, "number")}` });
    const pen = canvas.getContext("2d");
    Array.from(numbers).forEach((x, n) => {
      pen.fillStyle = css(pick(colours, 0.5 + x / most / 2));
      pen.fillRect(n, 0, 1, 1);
    });
    canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
      const n = Math.min(numbers.length - 1, Math.floor((event.offsetX / canvas.clientWidth) * numbers.length));
      app.tip.show(event, [label, [`entry ${n}`, format(numbers[n], 4)]]);
    });
    canvas.addEventListener("pointerleave", () => app.tip.hide());
    return h("div", { class: "hw-strip-box" }, canvas, mark && h("i", { class: "hw-mark", style: { left: `${(100 * mark[0]) / numbers.length}%`, width: `${(100 * (mark[1] - mark[0])) / numbers.length}%` } }));
  }

  /** Numbers as bars up and down from zero, rows of them entry under entry; pointing at one marks it in all.
   * @param {{name: any, values: ArrayLike<number>, value: string, top?: number}[]} rows @param {(n: number) => any[]} notes */
  bars(rows, notes) {
    const { app } = this;
    const colours = ramp("diverging", app.theme);
    const marks = rows.map(() => h("i", { class: "hw-mark", hidden: true }));
    const count = rows[0].values.length;
    return rows.map(({ name, values, value, top }, row) => {
      const canvas = h("canvas", { width: count * 12, height: 60, class: "hw-entries", role: "img", "aria-label": `${several(count, "number")}: ${Array.from(values, (x) => format(x, 2)).join(" ")}` });
      const pen = canvas.getContext("2d");
      const most = top ?? Math.max(...Array.from(values, Math.abs), 1e-9);
      pen.fillStyle = app.colours.soft;
      pen.fillRect(0, 29.5, count * 12, 1);
      Array.from(values).forEach((x, n) => {
        const tall = (29 * Math.abs(x)) / most;
        pen.fillStyle = css(pick(colours, x > 0 ? 0.86 : 0.14));
        pen.fillRect(n * 12 + 1.5, x > 0 ? 30 - tall : 30, 9, tall);
      });
      const point = (/** @type {PointerEvent} */ event) => {
        const n = Math.min(count - 1, Math.max(0, Math.floor((event.offsetX / canvas.clientWidth) * count)));
        for (const mark of marks) Object.assign(mark.style, { left: `${(100 * n) / count}%`, width: `${100 / count}%` });
        marks.forEach((mark) => { mark.hidden = false; });
        app.tip.show(event, notes(n));
      };
      canvas.addEventListener("pointermove", point);
      canvas.addEventListener("pointerleave", () => {
        marks.forEach((mark) => { mark.hidden = true; });
        app.tip.hide();
      });
      return h("div", { class: "hw-line" }, h("span", { class: "name" }, ...[name].flat()), h("div", { class: "hw-strip-box" }, canvas, marks[row]), h("b", { text: value }));
    });
  }

  /** @param {any} c */
  _product({ step, made, i, j, from, to }) {
    const q = step.q.subarray(i * step.dim, (i + 1) * step.dim);
    const k = step.k.subarray(j * step.dim, (j + 1) * step.dim);
    const each = Array.from(q, (/** @type {number} */ x, /** @type {number} */ d) => x * k[d]);
    const order = each.map((_, d) => d).sort((a, b) => Math.abs(each[b]) - Math.abs(each[a])).slice(0, 4);
    const top = Math.max(...Array.from(q, Math.abs), ...Array.from(k, Math.abs));
    let total = 0;
    const sums = each.map((x) => (total += x));
    return this._card(1, "Query times key", "qᵢ · kⱼ = Σ qᵢ[d] · kⱼ[d]", `The query says what “${visible(from[i], 20)}” looks for, the key what “${visible(to[j], 20)}” has to offer: ${several(step.dim, "number")} each, as the attention gets them (with positions already in them, where a model turns them in). Entries of one sign raise the product, entries of opposite signs lower it.`,
      ...this.bars([
        { name: ["q of ", tokenElement(from[i])], values: q, value: "", top }, { name: ["k of ", tokenElement(to[j])], values: k, value: "", top },
        { name: "q × k", values: each, value: "" }, { name: "added up", values: sums, value: `Σ = ${format(made.products[j], 3)}` },
      ], (n) => [`entry ${n}`, ["q", format(q[n], 4)], ["k", format(k[n], 4)], ["q × k", format(each[n], 4)], ["sum so far", format(sums[n], 4)]]),
      h("p", { class: "soft", text: `The largest: ${order.map((d) => `entry ${d}: ${format(q[d], 2)} × ${format(k[d], 2)} = ${format(each[d], 2)}`).join("; ")}.` }));
  }

  /** @param {any} c */
  _scale({ step, made, i, j, to }) {
    const score = made.products[j] * step.scale;
    const root = Math.abs(step.scale - 1 / Math.sqrt(step.dim)) < 1e-6;
    const hiddenKeys = Array.from(made.scores).filter((x) => x === -Infinity).length;
    const parts = [`${format(made.products[j], 3)} × ${format(step.scale, 4)} = `];
    const capped = step.softcap ? step.softcap * Math.tanh(score / step.softcap) : score;
    const bias = step.bias ? step.bias(i, j) : 0;
    const why = [root ? `Products of ${step.dim} numbers grow with their count; dividing by √${step.dim} keeps them in the range where softmax can still choose.` : `This model scales by ${format(step.scale, 4)}, not by 1/√${step.dim} = ${format(1 / Math.sqrt(step.dim), 4)}.`];
    if (step.softcap) why.push(`Then it is kept below ${format(step.softcap, 1)} by tanh.`);
    if (bias && bias !== -Infinity) why.push("A bias for the distance of the two is added.");
    why.push(hiddenKeys ? `The mask hides ${several(hiddenKeys, "key")} of ${step.keys} from this query: their score is −∞.` : `No key is hidden: all ${step.keys} may be looked at.`);
    return this._card(2, "Scale and mask", root ? `sᵢⱼ = qᵢ · kⱼ / √${step.dim}` : "sᵢⱼ = scale · qᵢ · kⱼ", why.join(" "),
      h("p", { class: "hw-sum" }, parts[0], h("b", { text: format(score, 3) }), step.softcap ? ` → ${format(capped, 3)}` : "", bias ? ` + ${format(bias, 3)} = ${format(made.scores[j], 3)}` : ""),
      h("div", { class: "hw-mask", role: "img", "aria-label": `${step.keys - hiddenKeys} of ${step.keys} keys may be looked at` },
        ...Array.from(made.scores).slice(0, 200).map((x, n) => h("i", { class: `${x === -Infinity ? "hidden" : ""}${n === j ? " chosen" : ""}`, title: `${visible(to[n], 24)}: ${x === -Infinity ? "hidden" : format(x, 3)}` }))));
  }

  /** @param {any} c */
  _softmax({ made, j, to, step }) {
    const { app } = this;
    const colours = ramp(app.state.palette, app.theme);
    const order = Array.from(made.weights, (_, n) => n);
    const listed = order.length <= KEYS ? order : [...order].sort((a, b) => made.weights[b] - made.weights[a]).slice(0, KEYS);
    if (!listed.includes(j)) listed.push(j);
    const most = Math.max(...made.weights, 1e-9);
    const rest = order.filter((n) => !listed.includes(n)).reduce((sum, n) => sum + made.weights[n], 0);
    const rows = listed.map((n) => h("tr", { class: n === j ? "chosen" : "", data: { key: n }, on: { click: () => app.set({ key: n }) } },
      h("th", { scope: "row" }, h("button", { type: "button", data: { key: `key:${n}` } }, tokenElement(to[n]))),
      h("td", { text: format(made.scores[n], 2) }), h("td", { text: format(made.powers[n], 3) }),
      h("td", { class: "weight", text: format(made.weights[n], 4) }),
      h("td", { class: "bar" }, h("i", { style: { width: `${(100 * made.weights[n]) / most}%`, background: css(pick(colours, 0.25 + (0.6 * made.weights[n]) / most)) } }))));
    return this._card(3, "Softmax", "aᵢⱼ = exp(sᵢⱼ) / Σ exp(sᵢ·)", `Every score becomes a positive number, and all are divided by their sum, so that the weights of one query add up to 1${step.sink === null ? "" : " (with the head's sink, which takes its part and gives nothing)"}. The largest score, ${format(made.top, 2)}, is taken off first: it changes nothing but keeps exp from overflowing.`,
      h("p", { class: "hw-sum" }, `exp(${format(made.scores[j], 2)} − ${format(made.top, 2)}) / ${format(made.sum, 3)} = ${format(made.powers[j], 3)} / ${format(made.sum, 3)} = `, h("b", { class: "hw-weight", text: format(made.weights[j], 4) })),
      h("div", { class: "hw-scroll" }, h("table", { class: "hw-table" },
        h("thead", {}, h("tr", {}, ...["key", "score", "exp", "weight", ""].map((text) => h("th", { scope: "col", text })))),
        h("tbody", {}, ...rows))),
      rest > 0 && h("p", { class: "soft", text: `${several(order.length - listed.length, "more key")} share ${format(rest, 4)}.` }),
      made.rest > 0 && h("p", { class: "soft", text: `The sink takes ${format(made.rest, 4)}.` }));
  }

  /** @param {any} c */
  _sum({ made, step, to, i, from }) {
    const order = Array.from(made.weights, (_, n) => n).sort((a, b) => made.weights[b] - made.weights[a]).slice(0, STRIPS).filter((n) => made.weights[n] > 0);
    const value = (/** @type {number} */ n) => step.v.subarray(n * step.value, (n + 1) * step.value);
    const top = Math.max(...order.flatMap((n) => Array.from(value(n), Math.abs)), 1e-9);
    const covered = order.reduce((sum, n) => sum + made.weights[n], 0);
    const line = (/** @type {number} */ n) => h("div", { class: "hw-line", style: { opacity: 0.35 + 0.65 * Math.sqrt(made.weights[n] / made.weights[order[0]]) } },
      h("span", { class: "name" }, h("b", { text: `${format(made.weights[n], 3)} ×` }), " v of ", tokenElement(to[n])), this.strip(value(n), `v of ${visible(to[n], 20)}`, { top }), h("b", { text: "" }));
    return this._card(4, "Weighted sum of values", "oᵢ = Σ aᵢⱼ · vⱼ", `What “${visible(from[i], 20)}” takes along: every token's value (${several(step.value, "number")}) times its weight. The ${several(order.length, "strongest")} below carry ${format(100 * covered, 1)} % of it.`.replace("strongests", "strongest"),
      ...order.map(line),
      h("div", { class: "hw-line total" }, h("span", { class: "name", text: "sum: this head's output" }), this.strip(made.output, "this head's output"), h("b", { text: `‖o‖ = ${format(Math.hypot(...made.output), 3)}` })));
  }

  /** @param {any} c */
  _together({ run, at, step, i }) {
    const [row, head] = at;
    const layer = run.layers[row];
    const all = Array.from({ length: layer.heads }, (_, other) => run.steps([row, other]));
    const known = all.every(Boolean);
    const outputs = known ? all.flatMap((one, other) => (run.off.has(`${row}.${other}`) ? Array(step.value).fill(0) : Array.from(attention(one, i).output))) : null;
    return this._card(5, "Side by side with the other heads", `concat(o⁰, …, o${superscript(layer.heads - 1)})`, `Each of the ${several(layer.heads, "head")} of layer ${layer.index} did the same with its own q, k and v${layer.kv < layer.heads ? ` (here ${several(layer.kv, "KV head")} serve ${step.group} query heads each)` : ""}. Their outputs are laid side by side: ${layer.heads} × ${step.value} = ${layer.heads * step.value} numbers. Head ${head} fills entries ${head * step.value} to ${(head + 1) * step.value - 1}.`,
      outputs ? h("div", { class: "hw-line wide" }, h("div", {}, this.strip(outputs, "all heads side by side", { mark: [head * step.value, (head + 1) * step.value] }),
        h("div", { class: "hw-ticks", "aria-hidden": "true" }, ...all.map((_, other) => h("span", { class: other === head ? "chosen" : "", text: layer.heads <= 40 || other === head ? String(other) : "" })))))
        : h("div", { class: "hw-blocks" }, ...all.map((_, other) => h("i", { class: other === head ? "chosen" : "", text: String(other), title: run.label([row, other]) }))));
  }

  /** @param {any} c */
  _output({ run, at, i, from }) {
    const { app } = this;
    const [row, head] = at;
    const layer = run.layers[row];
    const found = run.output(row, i);
    if (!found) return this._card(6, "What W_O makes of it", "yᵢ = concat · W_O", "W_O of this model was not found, so that the heads' parts cannot be told apart here.");
    const most = Math.max(...found.norms, 1e-9);
    const rank = found.norms.filter((x) => x > found.norms[head]).length + 1;
    const colours = ramp(app.state.palette, app.theme);
    const bars = found.norms.map((norm, other) => h("button", {
      type: "button", class: `hw-column${other === head ? " chosen" : ""}`, "aria-label": `head ${run.label([row, other])}: norm ${format(norm, 3)}`, data: { key: `norm:${other}`, norm: format(norm, 3) },
      on: {
        click: () => app.set({ heads: [[row, other]] }),
        pointermove: (/** @type {PointerEvent} */ event) => app.tip.show(event, [`head ${run.label([row, other])}`, ["norm of its part", format(norm, 4)], ...(found.along ? [["along the sum", format(found.along[other], 4)]] : [])]),
        pointerleave: () => app.tip.hide(),
      },
    }, h("span", { text: layer.heads <= 20 ? format(norm, 2) : "" }), h("i", { style: { height: `${(90 * norm) / most}px`, background: css(pick(colours, 0.2 + (0.7 * norm) / most)) } }), h("small", { text: String(other) })));
    const part = found.part(head);
    return this._card(6, "What W_O makes of it", "yᵢ = Σ oʰ · W_Oʰ + b", `Multiplying all heads by W_O is the same as multiplying each head's part by its own rows of W_O and adding up: so each head has its own, separate part in the output. For “${visible(from[i], 20)}”, head ${head}'s part has norm ${format(found.norms[head], 3)}, number ${rank} of ${layer.heads}; the sum of all${found.bias === null ? "" : ", with the bias,"} has norm ${format(found.total, 3)}.${found.along ? ` Along that sum it counts ${format(found.along[head], 3)} (below zero: it works against the others).` : ""}`,
      h("div", { class: "hw-columns", role: "group", "aria-label": "norm of each head's part of the output" }, ...bars),
      part && h("div", { class: "hw-line wide" }, this.strip(part, `what W_O makes of head ${head}`)),
      part && h("p", { class: "soft", text: `Head ${head}'s part: ${layer.width} numbers, added to the token's own vector and handed on.` }));
  }
}

/** @param {any} app everything of it but the state, which the caller gives */
function shallow(app) {
  return { theme: app.theme, live: app.live, unit: "pieces", switchHead: app.switchHead?.bind(app), set: app.set.bind(app) };
}

/** @param {Float32Array} weights */
function strongest(weights) {
  return weights.reduce((best, w, n) => (w > weights[best] ? n : best), 0);
}

/** @param {number} n */
function superscript(n) {
  return [...String(n)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(digit)]).join("");
}
