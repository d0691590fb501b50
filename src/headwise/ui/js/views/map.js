// All heads of a model as a grid, a layer a row: coloured by a statistic, by kind, or drawn small.
import { category, css, inkOn, pick, ramp } from "../lib/colour.js";
import { cellText, choice, format, h, select, several, tokenElement } from "../lib/dom.js";
import { legend, picture } from "../lib/heatmap.js";

const THUMBNAIL = "thumbnail";
const KINDS = "kind"; // what stands out on this text
const ROLES = "role"; // what an atlas says
const ORDERS = /** @type {[string, string][]} */ ([["model", "as in the model"], ["value", "each layer, highest first"], ["ranked", "all heads, highest first"], ["lowest", "all heads, lowest first"]]);

/** Everything that heads can be coloured by: statistics of the text, and scores that came along. @param {any} run @returns {Record<string, string>} */
export function measures(run) {
  return { ...run.json.statistics, ...Object.fromEntries(Object.keys(run.json.scores).map((name) => [name, run.json.about?.[name] ?? "a score that came along"])) };
}

/** The same to choose from. @param {any} run @returns {[string, string, string?][]} */
export function choices(run) {
  const own = Object.keys(run.json.scores).length ? "on this text" : undefined;
  return Object.keys(measures(run)).map((name) => [name, name, Object.hasOwn(run.json.scores, name) ? "that came along" : own]);
}

/** @param {any} run @param {string} stat @returns {(number | null)[][]} a row a layer */
export function values(run, stat) {
  const table = run.json.stats[stat] ?? run.json.scores[stat];
  return run.layers.map((/** @type {any} */ layer, /** @type {number} */ row) => table?.[row] ?? Array(layer.heads).fill(null));
}

/** Lowest and highest of a table, from 0 where nothing is negative. @param {(number | null)[][][]} tables @returns {[number, number]} */
export function extent(...tables) {
  const all = tables.flat(2).filter((x) => x !== null);
  return all.length ? [Math.min(0, ...all), Math.max(...all, 1e-9)] : [0, 1];
}

/** The heads of each kind that stand out, or have a role. @param {any[]} listed @returns {Map<string, any[]>} by "row.head" */
export function byHead(listed) {
  const found = new Map();
  for (const one of listed) {
    const key = one.head.join(".");
    found.set(key, [...(found.get(key) ?? []), one]);
  }
  return found;
}

/** Layers of one kind of attention beside each other. @param {any} run @returns {[string, number[]][]} */
export function kinds(run) {
  const found = new Map();
  run.layers.forEach((/** @type {any} */ layer, /** @type {number} */ row) => found.set(layer.kind, [...(found.get(layer.kind) ?? []), row]));
  return [...found];
}

/** The order in which the heads of a layer are drawn. @param {any} layer @param {(number | null)[]} row @param {string} order */
export function ordered(layer, row, order) {
  const heads = Array.from({ length: layer.heads }, (_, head) => head);
  return order === "value" ? heads.sort((a, b) => (row[b] ?? -Infinity) - (row[a] ?? -Infinity)) : heads;
}

/** All heads by their value. @param {(number | null)[][]} table @param {boolean} lowest first @returns {import("../lib/run.js").Head[]} */
export function ranked(table, lowest) {
  const all = table.flatMap((values, row) => values.map((value, head) => ({ at: /** @type {import("../lib/run.js").Head} */ ([row, head]), value }))).filter((one) => one.value !== null);
  const sign = lowest ? 1 : -1;
  return all.sort((a, b) => sign * (/** @type {number} */ (a.value) - /** @type {number} */ (b.value))).map((one) => one.at);
}

/** What one head's cell says when asked. @param {any} app @param {any} run @param {import("../lib/run.js").Head} at @returns {any[]} */
export function headNotes(app, run, at) {
  const [row, head] = at;
  const layer = run.layers[row];
  const notes = /** @type {any[]} */ ([`head ${run.label(at)}${layer.kv < layer.heads ? `, reads KV head ${Math.floor(head / (layer.heads / layer.kv))}` : ""}${run.off.has(at.join(".")) ? " (switched off)" : ""}`]);
  const came = Object.keys(run.json.scores); // an atlas has dozens: then only the one that is shown
  for (const name of [...Object.keys(run.json.statistics), ...came.filter((one) => came.length <= 4 || one === app.state.stat)]) {
    const value = values(run, name)[row][head];
    if (value !== null) notes.push([name, format(value, 4)]);
  }
  for (const one of byHead(run.json.standouts).get(at.join(".")) ?? []) notes.push(`${one.kind}: ${one.criterion}`);
  for (const one of byHead(run.json.roles ?? []).get(at.join(".")) ?? []) notes.push(`role: ${one.kind}, ${one.criterion}`);
  const small = run.thumbnail(at);
  const colours = ramp(app.state.palette, app.theme);
  const image = picture(small.rows, small.columns, (n) => pick(colours, small.values[n] / (small.top || 1)));
  image.className = "hw-thumb-large";
  notes.push(image);
  return notes;
}

/** The grid of heads. @param {any} app @param {any} run
 * @param {{cell: (at: import("../lib/run.js").Head) => {colour: import("../lib/colour.js").Rgb | null, text: string}, order: (row: number) => number[], small?: boolean, choose: (at: import("../lib/run.js").Head, event: MouseEvent) => void, chosen: import("../lib/run.js").Head[], name: string, notes?: (at: import("../lib/run.js").Head) => any[], thumbnails?: boolean, ranked?: import("../lib/run.js").Head[] | null}} how */
export function grid(app, run, how) {
  const most = Math.max(...run.layers.map((/** @type {any} */ layer) => layer.heads));
  if (how.ranked) return h("div", { class: "hw-grids" }, h("div", { class: "hw-grid ranked", role: "grid", "aria-label": how.name, style: { "--hw-heads": most, "--hw-layers": 6 } },
    h("div", { class: "row", role: "row" }, ...how.ranked.map((at) => gridCell(app, run, at, how, run.label(at), false)))));
  const boxes = kinds(run).map(([kind, rows], _, all) => {
    const sorted = rows.some((row) => how.order(row).some((head, place) => head !== place));
    const grouped = !sorted && run.layers[rows[0]].kv < run.layers[rows[0]].heads;
    return h("section", { class: "hw-kind" },
      all.length > 1 && h("h3", { text: `${kind} attention` }),
      h("div", { class: `hw-grid${how.small ? " small" : ""}${grouped ? " grouped" : ""}${how.thumbnails ? " thumbnails" : ""}`, role: "grid", "aria-label": `${how.name}, ${kind} attention`, style: { "--hw-heads": most, "--hw-layers": rows.length } },
        !how.small && grouped && kvHeader(run.layers[rows[0]]),
        !how.small && header(run, rows, most, sorted, grouped),
        ...rows.map((row) => gridRow(app, run, row, how, sorted, grouped))));
  });
  return h("div", { class: "hw-grids" }, ...boxes);
}

/** @param {any} run @param {number[]} rows @param {number} most @param {boolean} sorted @param {boolean} grouped */
function header(run, rows, most, sorted, grouped) {
  const layer = run.layers[rows[0]];
  const size = layer.heads / layer.kv;
  const cells = sorted
    ? [h("span", { class: "wide", text: "each layer's heads, highest first" })]
    : Array.from({ length: most }, (_, head) => h("span", { class: grouped && head % size === 0 && head ? "group" : "", text: String(head) }));
  return h("div", { class: "row head", "aria-hidden": "true" }, h("span", { class: "layer", text: "layer" }), ...cells);
}

/** Which query heads share keys and values. @param {any} layer */
function kvHeader(layer) {
  const size = layer.heads / layer.kv;
  return h("div", { class: "row head kv", "aria-hidden": "true" }, h("span", { class: "layer" }),
    ...Array.from({ length: layer.kv }, (_, pair) => h("span", { class: `pair${pair ? " group" : ""}`, style: { "--hw-span": size }, text: `KV ${pair}`, title: `query heads ${pair * size} to ${(pair + 1) * size - 1} share key/value head ${pair}` })));
}

/** @param {any} app @param {any} run @param {number} row @param {any} how @param {boolean} sorted @param {boolean} grouped */
function gridRow(app, run, row, how, sorted, grouped) {
  const layer = run.layers[row];
  const size = layer.heads / layer.kv;
  return h("div", { class: "row", role: "row" }, h("span", { class: "layer", role: "rowheader", text: String(layer.index) }),
    ...how.order(row).map((/** @type {number} */ head) => gridCell(app, run, [row, head], how, sorted ? String(head) : "", grouped && head % size === 0 && head > 0)));
}

/** @param {any} app @param {any} run @param {import("../lib/run.js").Head} at @param {any} how @param {string} name @param {boolean} apart whether a KV group begins here */
function gridCell(app, run, at, how, name, apart) {
  const { colour, text, said } = how.cell(at);
  const place = how.chosen.findIndex((/** @type {any} */ one) => one[0] === at[0] && one[1] === at[1]);
  const off = run.off.has(at.join("."));
  const cell = h("button", {
    type: "button", role: "gridcell", tabindex: place === 0 ? 0 : -1, "aria-selected": place >= 0,
    class: `cell${apart ? " group" : ""}${place >= 0 ? " chosen" : ""}${off ? " off" : ""}${colour ? "" : " none"}`,
    "aria-label": `head ${run.label(at)}${said ? `: ${said}` : ""}${text ? `: ${text}` : ""}${off ? ", switched off" : ""}`,
    data: { key: `head:${at.join(".")}`, head: run.label(at) },
    style: colour && !how.thumbnails ? { "background-color": css(colour), color: inkOn(colour) } : {},
    on: {
      click: (/** @type {MouseEvent} */ event) => how.choose(at, event),
      pointerenter: (/** @type {PointerEvent} */ event) => app.tip.show(event, (how.notes ?? ((/** @type {any} */ one) => headNotes(app, run, one)))(at)),
      pointermove: (/** @type {PointerEvent} */ event) => app.tip.move(event),
      pointerleave: () => app.tip.hide(),
    },
  });
  if (how.thumbnails) cell.append(thumbnail(app, run, at));
  else if (!how.small) cell.append(...[said || name].filter(Boolean).map((one) => h("small", { text: one })), h("span", { text }));
  if (place > 0 || (place === 0 && how.chosen.length > 1)) cell.style.setProperty("--hw-ring", css(category(place, app.theme)));
  return cell;
}

/** @param {any} app @param {any} run @param {import("../lib/run.js").Head} at */
function thumbnail(app, run, at) {
  const small = run.thumbnail(at);
  const colours = ramp(app.state.palette, app.theme);
  return picture(small.rows, small.columns, (n) => pick(colours, small.values[n] / (small.top || 1)));
}

/** Arrow keys walk over the grid. @param {HTMLElement} box @param {KeyboardEvent} event */
export function walk(box, event) {
  const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  const active = event.target;
  if (!by || !(active instanceof HTMLElement) || !active.classList.contains("cell")) return false;
  const rows = [...box.querySelectorAll(".row:not(.head)")].map((row) => /** @type {HTMLElement[]} */ ([...row.querySelectorAll(".cell")]));
  const row = rows.findIndex((cells) => cells.includes(active));
  const next = rows[row + by[0]];
  const place = rows[row].indexOf(active) + by[1];
  (next?.[Math.min(place, next.length - 1)] ?? active).focus();
  event.preventDefault();
  event.stopPropagation();
  return true;
}

export class MapView {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.el = h("div", { class: "hw-map", on: { keydown: (/** @type {KeyboardEvent} */ event) => walk(this.el, event) } });
  }

  update() {
    const { app } = this;
    const { run, state } = app;
    const table = values(run, state.stat);
    const [low, high] = extent(table);
    const colours = ramp(state.palette, app.theme);
    const named = state.paint === KINDS || state.paint === ROLES;
    const listed = state.paint === ROLES ? run.json.roles : run.json.standouts;
    const by = byHead(listed);
    const names = [...new Set(listed.map((/** @type {any} */ one) => one.kind))];
    const cell = (/** @type {import("../lib/run.js").Head} */ at) => {
      const value = table[at[0]][at[1]];
      if (named) {
        const [first] = by.get(at.join(".")) ?? [];
        return { colour: first ? category(names.indexOf(first.kind), app.theme) : null, text: first ? format(first.score, 2) : "", said: first?.kind ?? "" };
      }
      return { colour: value === null ? null : pick(colours, (value - low) / (high - low)), text: value === null ? "" : cellText(value) };
    };
    const shown = grid(app, run, {
      cell, name: named ? `heads by ${state.paint}` : `heads by ${state.stat}`, chosen: state.heads, thumbnails: state.paint === THUMBNAIL,
      ranked: state.paint === "value" && (state.order === "ranked" || state.order === "lowest") ? ranked(table, state.order === "lowest") : null,
      order: (row) => ordered(run.layers[row], table[row], state.paint === "value" ? state.order : "model"),
      choose: (at, event) => app.choose(at, event, "head"),
    });
    this.el.replaceChildren(h("div", { class: "hw-main" }, this._story(run), this._controls(run), shown), this._side(run, table, low, high, colours, listed));
    if (!this.el.querySelector('.cell[tabindex="0"]')) this.el.querySelector(".cell")?.setAttribute("tabindex", "0");
  }

  /** What is worth a look first: a word, and the head that links it best. @param {any} run */
  _story(run) {
    const { app } = this;
    const { follow } = run.json;
    if (!follow) return null;
    const { words, of } = run.texts[0];
    const go = (/** @type {string} */ view) => () => app.set({ view, heads: [follow.head], token: of.indexOf(follow.word), key: of.indexOf(follow.to) });
    return h("p", { class: "hw-lead first" }, tokenElement(words[follow.word], { class: "hw-word" }), " looks at ", tokenElement(words[follow.to], { class: "hw-word key" }),
      ` by ${format(run.weight(follow.head, "words", follow.word, follow.to).value, 2)} in head ${run.label(follow.head)}. `,
      h("button", { type: "button", class: "hw-small", text: "see its links", data: { key: "story:head" }, on: { click: go("head") } }), " ",
      h("button", { type: "button", class: "hw-small", text: "see how it comes about", data: { key: "story:steps" }, on: { click: go("steps") } }));
  }

  /** @param {any} run */
  _controls(run) {
    const { app } = this;
    const { state } = app;
    return h("div", { class: "hw-controls" },
      choice("colour by", /** @type {[string, string][]} */ ([["value", Object.keys(run.json.scores).length ? "statistic or score" : "statistic"], [KINDS, "kind"], ...(run.json.roles?.length ? [[ROLES, "role"]] : []), [THUMBNAIL, "where it looks"]]), state.paint, (paint) => app.set({ paint })),
      state.paint === "value" && select("statistic", choices(run), state.stat, (stat) => app.set({ stat })),
      state.paint === "value" && select("order", ORDERS, state.order, (order) => app.set({ order })));
  }

  /** @param {any} run @param {(number | null)[][]} table @param {number} low @param {number} high @param {Uint8Array} colours @param {any[]} listed */
  _side(run, table, low, high, colours, listed) {
    const { app } = this;
    const { state } = app;
    const names = [...new Set(listed.map((one) => one.kind))];
    const equals = (run.json.equal[state.stat] ?? []).filter((/** @type {any} */ x) => x !== null);
    const equal = equals.length ? equals.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0) / equals.length : null;
    const about = measures(run)[state.stat];
    return h("aside", { class: "hw-side" },
      state.paint === "value" && h("div", { class: "hw-card" }, h("h3", { text: state.stat }), h("p", { text: about }),
        legend(colours, format(low, 2), format(high, 2), equal === null || equal > high ? null : { at: (equal - low) / (high - low), text: `equal attention: ${format(equal, 3)}` }),
        equal !== null && h("p", { class: "soft", text: `A head that looked at everything equally would have ${format(equal, 2)}${equal > high ? ", more than any here" : " (the mark)"}.` })),
      state.paint === THUMBNAIL && h("div", { class: "hw-card" }, h("h3", { text: "where it looks" }), h("p", { text: `Each square is one head: a row for each token that looks, a column for each token looked at. ${app.theme === "dark" ? "Brighter" : "Darker"} is more, by the head's own largest weight.` })),
      this._ranking(run, table),
      h("div", { class: "hw-card" }, h("h3", { text: state.paint === ROLES ? "Roles, as the atlas measured them" : "Heads that stand out on this text" }),
        names.length ? null : h("p", { class: "soft", text: "None does here, or the text is too short to tell." }),
        ...names.map((kind, number) => this._kind(run, listed.filter((one) => one.kind === kind), number))));
  }

  /** @param {any} run @param {(number | null)[][]} table */
  _ranking(run, table) {
    const { state } = this.app;
    if (state.paint !== "value") return null;
    const top = ranked(table, false).slice(0, 6);
    return h("div", { class: "hw-card" }, h("h3", { text: `Highest ${state.stat}` }), h("div", { class: "hw-chips" },
      ...top.map((at) => this._chip(run, at, format(table[at[0]][at[1]], 2)))));
  }

  /** @param {any} run @param {any} at @param {string} text */
  _chip(run, at, text) {
    return h("button", { type: "button", class: "hw-chip", data: { key: `chip:${at.join(".")}:${text}` }, on: { click: (/** @type {MouseEvent} */ event) => this.app.choose(at, event, "head") } },
      h("b", { text: run.label(at) }), h("span", { text }));
  }

  /** @param {any} run @param {any[]} members @param {number} number */
  _kind(run, members, number) {
    const { paint } = this.app.state;
    const dotted = paint === KINDS || paint === ROLES;
    return h("div", { class: "hw-standout" },
      h("h4", { class: dotted ? "dot" : "", style: dotted ? { "--hw-dot": css(category(number, this.app.theme)) } : {}, text: members[0].kind }),
      paint !== ROLES && h("p", { class: "soft", text: members[0].criterion }),
      h("div", { class: "hw-chips" }, ...members.slice(0, 6).map((/** @type {any} */ one) => this._chip(run, one.head, format(one.score, 2))),
        members.length > 6 && h("span", { class: "soft", text: `and ${several(members.length - 6, "more head")}`.replace("more heads", "more") })));
  }
}
