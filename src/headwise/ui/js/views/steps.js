// How one weight and one output are computed, with the model's own numbers, from q and k to the output of W_O.
import { attention } from "../lib/attention.js";
import { css, pick, ramp } from "../lib/colour.js";
import { h, select, tokenElement } from "../lib/dom.js";
import { chosenHeads, updateNavigator } from "../lib/navigator.js";
import { sliceBox } from "../lib/placement.js";
import { registerView } from "../lib/registry.js";
import { sentence } from "../lib/sentence.js";
import { format, plural, visible } from "../lib/text.js";

/** @import { App } from "../app.js" */
/** @import { HeadSteps } from "../lib/attention.js" */
/** @import { Note } from "../lib/dom.js" */
/** @import { Head, Run } from "../lib/run.js" */

const MOST_KEYS = 24; // that are listed
const MOST_VALUES = 8; // that are drawn
const MOST_MASKED = 200; // keys that are drawn as a mask
const MOST_CHIPS = 30;
const NEAR = 300; // tokens of a long text to either side of the chosen one that can be selected
const TERMS = 4; // largest products of entries

/**
 * @typedef {object} Context one query and one key of one head
 * @property {Run} run
 * @property {Head} at
 * @property {HeadSteps} step
 * @property {ReturnType<typeof attention>} result
 * @property {number} i
 * @property {number} j
 * @property {string[]} from
 * @property {string[]} to
 */

export class StepsView {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.side = h("div", {});
    this.main = h("div", { class: "hw-main" });
    /** @type {HTMLElement} */
    this.el = h("div", { class: "hw-steps" }, this.side, this.main);
  }

  update() {
    const { app } = this;
    const { run, state } = app;
    const at = state.heads[0];
    updateNavigator(this.side, app, run);
    const step = run.steps(at);
    const top = h("div", { class: "hw-top" }, h("div", { class: "hw-controls" }, chosenHeads(app, run, [at])));
    if (!step) {
      this.main.replaceChildren(top, this._missing(run, at));
      if (app.live) app.fetchSteps(run, at);
      return;
    }
    const i = state.token ?? Math.min(1, step.queries - 1);
    const result = attention(step, i);
    const { key } = state;
    const j = key !== null && key < step.keys && result.weights[key] > 0 ? key : strongest(result.weights);
    const from = run.names(at[0], "from", "pieces");
    const to = run.names(at[0], "to", "pieces");
    const context = { run, at, step, result, i, j, from, to };
    top.append(
      h(
        "p",
        { class: "hw-lead" },
        "How ",
        tokenElement(from[i], { class: "hw-word" }),
        " comes to look at ",
        tokenElement(to[j], { class: "hw-word key" }),
        ` with weight ${format(result.weights[j], 3)}, and what it takes from there`,
      ),
      h(
        "div",
        { class: "hw-controls" },
        this._tokens("looks", from, i, (token) => app.set({ token })),
        this._tokens("at", to, j, (token) => app.set({ key: token })),
        h("span", { class: "soft", text: "or click a token; the rows of step 3 choose the key." }),
      ),
      sentence(app, run, { unit: "pieces", heads: [at], token: i }),
    );
    this.main.replaceChildren(
      top,
      this._thread(context),
      h(
        "ol",
        { class: "hw-story" },
        this._product(context),
        this._scale(context),
        this._softmax(context),
        this._sum(context),
        this._together(context),
        this._output(context),
      ),
    );
  }

  /** The results of all steps in one line; a click goes to the step. @param {Context} context */
  _thread({ run, at, step, result, i, j }) {
    const output = run.output(at[0], i);
    const steps = [
      ["q · k", format(result.products[j], 2)],
      ["scaled, masked", format(result.scores[j], 2)],
      ["softmax", format(result.weights[j], 3)],
      ["Σ a · v", `‖o‖ ${format(Math.hypot(...result.output), 2)}`],
      ["side by side", `${run.layers[at[0]].heads} × ${step.value}`],
      ["W_O", output ? `${format(output.norms[at[1]], 2)} of ${format(output.total, 2)}` : "–"],
    ];
    return h(
      "nav",
      { class: "hw-thread", "aria-label": "steps" },
      ...steps.map(([name, value], n) =>
        h(
          "button",
          {
            type: "button",
            data: { key: `thread:${n}` },
            on: { click: () => this.main.querySelector(`#hw-step-${n + 1}`)?.scrollIntoView({ block: "start" }) },
          },
          h("small", { text: `${n + 1} ${name}` }),
          h("b", { text: value }),
        ),
      ),
    );
  }

  /** For a head whose steps the page does not hold. @param {Run} run @param {Head} at */
  _missing(run, at) {
    const { app } = this;
    if (app.live) return h("p", { class: "soft", role: "status", text: "Asking for the numbers of this head …" });
    /** @type {Head[]} */
    const available = run.json.steps.flatMap(
      (stored, row) => stored?.heads.map((/** @type {number} */ head) => [row, head]) ?? [],
    );
    const some = [
      `This page holds the numbers behind ${plural(available.length, "head")};`,
      `head ${run.label(at)} is not among them. With “headwise serve” every head has its steps.`,
    ];
    const none = "This page holds no steps: the model's own code makes its weights in a way that is not q·k alone.";
    /** @param {Head} head */
    const chip = (head) =>
      h("button", {
        type: "button",
        class: "hw-chip",
        text: run.label(head),
        on: { click: () => app.set({ heads: [head] }) },
      });
    return h(
      "div",
      { class: "hw-card" },
      h("p", { text: available.length ? some.join(" ") : none }),
      h("div", { class: "hw-chips" }, ...available.slice(0, MOST_CHIPS).map(chip)),
    );
  }

  /** A select element of tokens.
   * @param {string} label @param {string[]} names @param {number} value @param {(n: number) => void} choose */
  _tokens(label, names, value, choose) {
    const all = names.map((_, n) => n);
    const near = names.length <= 2 * NEAR ? all : all.slice(Math.max(0, value - NEAR), value + NEAR);
    return select(
      label,
      near.map((n) => [String(n), `${n}  ${visible(names[n], 24)}`]),
      String(value),
      (text) => choose(Number(text)),
    );
  }

  /** @param {number} number @param {string} title @param {string} formula @param {string[]} text sentences
   * @param {...(Node | string | null | false)} parts */
  _card(number, title, formula, text, ...parts) {
    return h(
      "li",
      { class: "hw-card hw-step", id: `hw-step-${number}` },
      h(
        "div",
        { class: "hw-step-title" },
        h("span", { class: "hw-number", text: String(number) }),
        h("h2", { text: title }),
        h("code", { text: formula }),
      ),
      h("p", { class: "soft", text: text.join(" ") }),
      ...parts,
    );
  }

  /** Numbers as a strip of colours: blue below zero, orange above.
   * @param {ArrayLike<number>} numbers @param {string} label
   * @param {{top?: number, mark?: [number, number] | null}} [options] top: the largest number of the scale */
  strip(numbers, label, { top, mark } = {}) {
    const { app } = this;
    const colours = ramp("diverging", app.theme);
    const most = top ?? Math.max(...Array.from(numbers, Math.abs), 1e-9);
    const canvas = h("canvas", {
      width: numbers.length,
      height: 1,
      class: "hw-strip",
      role: "img",
      "aria-label": `${label}: ${plural(numbers.length, "number")}`,
    });
    const pen = canvas.getContext("2d");
    Array.from(numbers).forEach((x, n) => {
      pen.fillStyle = css(pick(colours, 0.5 + x / most / 2));
      pen.fillRect(n, 0, 1, 1);
    });
    canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
      const n = Math.min(numbers.length - 1, Math.floor((event.offsetX / canvas.clientWidth) * numbers.length));
      const box = sliceBox(canvas, n / numbers.length, (n + 1) / numbers.length);
      app.tooltip.show(box, [label, [`entry ${n}`, format(numbers[n], 4)]]);
    });
    canvas.addEventListener("pointerleave", () => app.tooltip.hide());
    return h(
      "div",
      { class: "hw-strip-box" },
      canvas,
      mark &&
        h("i", {
          class: "hw-mark",
          style: {
            left: `${(100 * mark[0]) / numbers.length}%`,
            width: `${(100 * (mark[1] - mark[0])) / numbers.length}%`,
          },
        }),
    );
  }

  /** Numbers as bars up and down from zero, rows of them entry under entry; pointing at one marks it in all.
   * @param {{name: any, values: ArrayLike<number>, value: string, top?: number}[]} rows
   * @param {(n: number) => Note[]} notes */
  bars(rows, notes) {
    const { app } = this;
    const colours = ramp("diverging", app.theme);
    const marks = rows.map(() => h("i", { class: "hw-mark", hidden: true }));
    const count = rows[0].values.length;
    return rows.map(({ name, values, value, top }, row) => {
      const canvas = h("canvas", {
        width: count * 12,
        height: 60,
        class: "hw-entries",
        role: "img",
        "aria-label": `${plural(count, "number")}: ${Array.from(values, (x) => format(x, 2)).join(" ")}`,
      });
      const pen = canvas.getContext("2d");
      const most = top ?? Math.max(...Array.from(values, Math.abs), 1e-9);
      pen.fillStyle = app.colours.soft;
      pen.fillRect(0, 29.5, count * 12, 1);
      Array.from(values).forEach((x, n) => {
        const tall = (29 * Math.abs(x)) / most;
        pen.fillStyle = css(pick(colours, x > 0 ? 0.86 : 0.14));
        pen.fillRect(n * 12 + 1.5, x > 0 ? 30 - tall : 30, 9, tall);
      });
      /** @param {PointerEvent} event */
      const point = (event) => {
        const n = Math.min(count - 1, Math.max(0, Math.floor((event.offsetX / canvas.clientWidth) * count)));
        for (const mark of marks) {
          Object.assign(mark.style, { left: `${(100 * n) / count}%`, width: `${100 / count}%` });
          mark.hidden = false;
        }
        app.tooltip.show(sliceBox(canvas, n / count, (n + 1) / count), notes(n));
      };
      canvas.addEventListener("pointermove", point);
      canvas.addEventListener("pointerleave", () => {
        for (const mark of marks) mark.hidden = true;
        app.tooltip.hide();
      });
      return h(
        "div",
        { class: "hw-line" },
        h("span", { class: "name" }, ...[name].flat()),
        h("div", { class: "hw-strip-box" }, canvas, marks[row]),
        h("b", { text: value }),
      );
    });
  }

  /** @param {Context} context */
  _product({ step, result, i, j, from, to }) {
    const q = step.q.subarray(i * step.dim, (i + 1) * step.dim);
    const k = step.k.subarray(j * step.dim, (j + 1) * step.dim);
    const each = Array.from(q, (x, d) => x * k[d]);
    const order = each.map((_, d) => d).sort((a, b) => Math.abs(each[b]) - Math.abs(each[a]));
    const terms = order.slice(0, TERMS).map((d) => {
      return `entry ${d}: ${format(q[d], 2)} × ${format(k[d], 2)} = ${format(each[d], 2)}`;
    });
    const top = Math.max(...Array.from(q, Math.abs), ...Array.from(k, Math.abs));
    let total = 0;
    const sums = each.map((x) => {
      total += x;
      return total;
    });
    return this._card(
      1,
      "Query times key",
      "qᵢ · kⱼ = Σ qᵢ[d] · kⱼ[d]",
      [
        `The query says what “${visible(from[i], 20)}” looks for,`,
        `the key what “${visible(to[j], 20)}” has to offer:`,
        `${plural(step.dim, "number")} each, as the attention gets them`,
        "(with positions already in them, where a model turns them in).",
        "Entries of one sign raise the product, entries of opposite signs lower it.",
      ],
      ...this.bars(
        [
          { name: ["q of ", tokenElement(from[i])], values: q, value: "", top },
          { name: ["k of ", tokenElement(to[j])], values: k, value: "", top },
          { name: "q × k", values: each, value: "" },
          { name: "added up", values: sums, value: `Σ = ${format(result.products[j], 3)}` },
        ],
        (n) => [
          `entry ${n}`,
          ["q", format(q[n], 4)],
          ["k", format(k[n], 4)],
          ["q × k", format(each[n], 4)],
          ["sum so far", format(sums[n], 4)],
        ],
      ),
      h("p", { class: "soft", text: `The largest: ${terms.join("; ")}.` }),
    );
  }

  /** @param {Context} context */
  _scale({ step, result, i, j, to }) {
    const score = result.products[j] * step.scale;
    const root = Math.abs(step.scale - 1 / Math.sqrt(step.dim)) < 1e-6;
    const hidden = result.scores.filter((x) => x === -Infinity).length;
    const capped = step.softcap ? step.softcap * Math.tanh(score / step.softcap) : score;
    const bias = step.bias ? step.bias(i, j) : 0;
    const inverse = format(1 / Math.sqrt(step.dim), 4);
    const text = root
      ? [
          `Products of ${step.dim} numbers grow with their count;`,
          `dividing by √${step.dim} keeps them in the range where softmax can still choose.`,
        ]
      : [`This model scales by ${format(step.scale, 4)}, not by 1/√${step.dim} = ${inverse}.`];
    if (step.softcap) text.push(`Then it is kept below ${format(step.softcap, 1)} by tanh.`);
    if (bias && bias !== -Infinity) text.push("A bias for the distance of the two is added.");
    if (hidden)
      text.push(`The mask hides ${plural(hidden, "key")} of ${step.keys} from this query: their score is −∞.`);
    else text.push(`No key is hidden: all ${step.keys} may be looked at.`);
    return this._card(
      2,
      "Scale and mask",
      root ? `sᵢⱼ = qᵢ · kⱼ / √${step.dim}` : "sᵢⱼ = scale · qᵢ · kⱼ",
      text,
      h(
        "p",
        { class: "hw-sum" },
        `${format(result.products[j], 3)} × ${format(step.scale, 4)} = `,
        h("b", { text: format(score, 3) }),
        step.softcap ? ` → ${format(capped, 3)}` : "",
        bias ? ` + ${format(bias, 3)} = ${format(result.scores[j], 3)}` : "",
      ),
      h(
        "div",
        {
          class: "hw-mask",
          role: "img",
          "aria-label": `${step.keys - hidden} of ${step.keys} keys may be looked at`,
        },
        ...Array.from(result.scores)
          .slice(0, MOST_MASKED)
          .map((x, n) =>
            h("i", {
              class: `${x === -Infinity ? "hidden" : ""}${n === j ? " chosen" : ""}`,
              title: `${visible(to[n], 24)}: ${x === -Infinity ? "hidden" : format(x, 3)}`,
            }),
          ),
      ),
    );
  }

  /** @param {Context} context */
  _softmax({ result, j, to, step }) {
    const { app } = this;
    const colours = ramp(app.state.palette, app.theme);
    const order = Array.from(result.weights, (_, n) => n);
    const strongestFirst = [...order].sort((a, b) => result.weights[b] - result.weights[a]);
    const listed = order.length <= MOST_KEYS ? order : strongestFirst.slice(0, MOST_KEYS);
    if (!listed.includes(j)) listed.push(j);
    const most = Math.max(...result.weights, 1e-9);
    const rest = order.filter((n) => !listed.includes(n)).reduce((sum, n) => sum + result.weights[n], 0);
    /** @param {number} n */
    const row = (n) => {
      const share = result.weights[n] / most;
      const style = { width: `${100 * share}%`, background: css(pick(colours, 0.25 + 0.6 * share)) };
      return h(
        "tr",
        { class: n === j ? "chosen" : "", data: { key: n }, on: { click: () => app.set({ key: n }) } },
        h("th", { scope: "row" }, h("button", { type: "button", data: { key: `key:${n}` } }, tokenElement(to[n]))),
        h("td", { text: format(result.scores[n], 2) }),
        h("td", { text: format(result.powers[n], 3) }),
        h("td", { class: "weight", text: format(result.weights[n], 4) }),
        h("td", { class: "bar" }, h("i", { style })),
      );
    };
    const columns = ["key", "score", "exp", "weight", ""].map((name) => h("th", { scope: "col", text: name }));
    const sink = step.sink === null ? "" : " (with the head's sink, which takes its part and gives nothing)";
    const sum = format(result.sum, 3);
    const power = format(result.powers[j], 3);
    return this._card(
      3,
      "Softmax",
      "aᵢⱼ = exp(sᵢⱼ) / Σ exp(sᵢ·)",
      [
        "Every score becomes a positive number, and all are divided by their sum,",
        `so that the weights of one query add up to 1${sink}.`,
        `The largest score, ${format(result.top, 2)}, is taken off first:`,
        "it changes nothing but keeps exp from overflowing.",
      ],
      h(
        "p",
        { class: "hw-sum" },
        `exp(${format(result.scores[j], 2)} − ${format(result.top, 2)}) / ${sum} = ${power} / ${sum} = `,
        h("b", { class: "hw-weight", text: format(result.weights[j], 4) }),
      ),
      h(
        "div",
        { class: "hw-scroll" },
        h("table", { class: "hw-table" }, h("thead", {}, h("tr", {}, ...columns)), h("tbody", {}, ...listed.map(row))),
      ),
      rest > 0 &&
        h("p", {
          class: "soft",
          text: `${plural(order.length - listed.length, "more key")} share ${format(rest, 4)}.`,
        }),
      result.sinkWeight > 0 && h("p", { class: "soft", text: `The sink takes ${format(result.sinkWeight, 4)}.` }),
    );
  }

  /** @param {Context} context */
  _sum({ result, step, to, i, from }) {
    const visibleKeys = Array.from(result.weights, (_, n) => n).filter((n) => result.weights[n] > 0);
    const order = visibleKeys.sort((a, b) => result.weights[b] - result.weights[a]).slice(0, MOST_VALUES);
    /** @param {number} n */
    const value = (n) => step.v.subarray(n * step.value, (n + 1) * step.value);
    const top = Math.max(...order.flatMap((n) => Array.from(value(n), Math.abs)), 1e-9);
    const covered = order.reduce((sum, n) => sum + result.weights[n], 0);
    /** @param {number} n */
    const line = (n) => {
      const strip = this.strip(value(n), `v of ${visible(to[n], 20)}`, { top });
      strip.style.opacity = String(0.35 + 0.65 * Math.sqrt(result.weights[n] / result.weights[order[0]]));
      return h(
        "div",
        { class: "hw-line" },
        h(
          "span",
          { class: "name" },
          h("b", { text: `${format(result.weights[n], 3)} ×` }),
          " v of ",
          tokenElement(to[n]),
        ),
        strip,
        h("b", { text: "" }),
      );
    };
    return this._card(
      4,
      "Weighted sum of values",
      "oᵢ = Σ aᵢⱼ · vⱼ",
      [
        `What “${visible(from[i], 20)}” takes along: every token's value (${plural(step.value, "number")})`,
        `times its weight. The ${order.length} strongest below carry ${format(100 * covered, 1)} % of it.`,
      ],
      ...order.map(line),
      h(
        "div",
        { class: "hw-line total" },
        h("span", { class: "name", text: "sum: this head's output" }),
        this.strip(result.output, "this head's output"),
        h("b", { text: `‖o‖ = ${format(Math.hypot(...result.output), 3)}` }),
      ),
    );
  }

  /** @param {Context} context */
  _together({ run, at, step, i }) {
    const [row, head] = at;
    const layer = run.layers[row];
    const heads = Array.from({ length: layer.heads }, (_, other) => other);
    const width = step.value;
    const shared = layer.kv < layer.heads;
    const groups = shared ? ` (here ${plural(layer.kv, "KV head")} serve ${step.group} query heads each)` : "";
    return this._card(
      5,
      "Side by side with the other heads",
      `concat(o⁰, …, o${superscript(layer.heads - 1)})`,
      [
        `Each of the ${plural(layer.heads, "head")} of layer ${layer.index} did the same`,
        `with its own q, k and v${groups}. Their outputs are laid side by side:`,
        `${layer.heads} × ${width} = ${layer.heads * width} numbers.`,
        `Head ${head} fills entries ${head * width} to ${(head + 1) * width - 1}.`,
      ],
      this._concatenation(run, at, heads, i),
    );
  }

  /** The outputs of all heads of a layer, or boxes where the page does not hold them.
   * @param {Run} run @param {Head} at @param {number[]} heads @param {number} i */
  _concatenation(run, [row, head], heads, i) {
    const steps = heads.flatMap((other) => run.steps([row, other]) ?? []);
    if (steps.length < heads.length) {
      const boxes = heads.map((other) =>
        h("i", { class: other === head ? "chosen" : "", text: String(other), title: run.label([row, other]) }),
      );
      return h("div", { class: "hw-blocks" }, ...boxes);
    }
    const outputs = steps.flatMap((step, other) => {
      const output = attention(step, i).output;
      return Array.from(run.off.has(`${row}.${other}`) ? output.fill(0) : output);
    });
    const width = outputs.length / heads.length;
    const ticks = heads.map((other) =>
      h("span", {
        class: other === head ? "chosen" : "",
        text: heads.length <= 40 || other === head ? String(other) : "",
      }),
    );
    return h(
      "div",
      { class: "hw-line wide" },
      h(
        "div",
        {},
        this.strip(outputs, "all heads side by side", { mark: [head * width, (head + 1) * width] }),
        h("div", { class: "hw-ticks", "aria-hidden": "true" }, ...ticks),
      ),
    );
  }

  /** @param {Context} context */
  _output({ run, at, i, from }) {
    const [row, head] = at;
    const layer = run.layers[row];
    const output = run.output(row, i);
    const title = "What W_O makes of it";
    if (!output) {
      const text = ["W_O of this model was not found, so that the heads' parts cannot be told apart here."];
      return this._card(6, title, "yᵢ = concat · W_O", text);
    }
    const { norms, along, total, bias } = output;
    const rank = norms.filter((norm) => norm > norms[head]).length + 1;
    const text = [
      "Multiplying all heads by W_O is the same as multiplying each head's part by its own rows of W_O and adding up:",
      "so each head has its own, separate part in the output.",
      `For “${visible(from[i], 20)}”, head ${head}'s part has norm ${format(norms[head], 3)},`,
      `number ${rank} of ${layer.heads};`,
      `the sum of all${bias === null ? "" : ", with the bias,"} has norm ${format(total, 3)}.`,
    ];
    if (along)
      text.push(`Along that sum it counts ${format(along[head], 3)} (below zero: it works against the others).`);
    const part = output.part(head);
    const size = `Head ${head}'s part: ${layer.width} numbers, added to the token's own vector and handed on.`;
    return this._card(
      6,
      title,
      "yᵢ = Σ oʰ · W_Oʰ + b",
      text,
      h(
        "div",
        { class: "hw-columns", role: "group", "aria-label": "norm of each head's part of the output" },
        ...this._normColumns(run, at, norms, along),
      ),
      part && h("div", { class: "hw-line wide" }, this.strip(part, `what W_O makes of head ${head}`)),
      part && h("p", { class: "soft", text: size }),
    );
  }

  /** A column per head, as high as the norm of its part; a click chooses it.
   * @param {Run} run @param {Head} at @param {number[]} norms @param {number[] | null} along */
  _normColumns(run, [row, head], norms, along) {
    const { app } = this;
    const most = Math.max(...norms, 1e-9);
    const colours = ramp(app.state.palette, app.theme);
    return norms.map((norm, other) => {
      const label = `head ${run.label([row, other])}`;
      const share = norm / most;
      /** @type {Note[]} */
      const notes = [label, ["norm of its part", format(norm, 4)]];
      if (along) notes.push(["along the sum", format(along[other], 4)]);
      return h(
        "button",
        {
          type: "button",
          class: `hw-column${other === head ? " chosen" : ""}`,
          "aria-label": `${label}: norm ${format(norm, 3)}`,
          data: { key: `norm:${other}`, norm: format(norm, 3) },
          on: {
            click: () => app.set({ heads: [[row, other]] }),
            pointerenter: (event) => app.tooltip.show(event.currentTarget.getBoundingClientRect(), notes),
            pointerleave: () => app.tooltip.hide(),
          },
        },
        h("span", { text: norms.length <= 20 ? format(norm, 2) : "" }),
        h("i", { style: { height: `${90 * share}px`, background: css(pick(colours, 0.2 + 0.7 * share)) } }),
        h("small", { text: String(other) }),
      );
    });
  }
}

/** @param {Float32Array} weights */
function strongest(weights) {
  return weights.reduce((best, w, n) => (w > weights[best] ? n : best), 0);
}

/** @param {number} n */
function superscript(n) {
  return [...String(n)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(digit)]).join("");
}

registerView({
  name: "steps",
  label: "Steps",
  order: 3,
  create: (app) => new StepsView(app),
});
