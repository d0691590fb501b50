// One pass of a model over a text: the stored weights, and how exact each number is.
import { attention } from "./attention.js";
import { LruCache } from "./cache.js";
import { bytes, floats, numbers, rootError } from "./encoding.js";
/** @import { HeadSteps } from "./attention.js" */

/**
 * @typedef {{ kind: string, index: number, name: string, heads: number, kv: number, dim: number, width: number,
 *   from: number, to: number }} Layer from, to: the texts of its queries and keys
 * @typedef {{ pieces: string[], words: string[], of: number[], delimiter: number[], image?: ImageGrid | null }} Text
 *   of: the word of each piece
 * @typedef {{ rows: number, columns: number, offset: number, picture: string }} ImageGrid offset: the first patch's
 *   position among the tokens; picture: a data URI
 * @typedef {"words" | "pieces"} Unit
 * @typedef {"from" | "to"} Side
 * @typedef {{ value: number, error: number, atMost?: boolean }} Weight atMost: no more than value
 * @typedef {{ rows: number, columns: number, values: Float32Array, top: number }} Matrix top: its largest value
 * @typedef {Matrix & { cell: number }} Reduced cell: tokens per side of the square that one value stands for
 * @typedef {[number, number]} Head the position of its layer in the list of layers, and its number
 * @typedef {(number | null)[][]} Table one row per layer, one value per head
 * @typedef {{ kind: string, criterion: string, head: Head, score: number }} Standout
 */

/**
 * @typedef {object} RunJson one pass, as headwise.ui.payload.run writes it
 * @property {string} name of the model
 * @property {string} text
 * @property {string | null} target text of the decoder
 * @property {boolean} pair whether the model has an encoder and a decoder
 * @property {string[]} notes
 * @property {Head[]} off
 * @property {Text[]} texts
 * @property {Layer[]} layers
 * @property {Record<string, string>} statistics name to meaning
 * @property {Record<string, (Table[number] | null)[]>} stats
 * @property {Record<string, (number | null)[]>} equal statistics of uniform attention, per layer
 * @property {Record<string, (Table[number] | null)[]>} scores
 * @property {Record<string, string>} [about] name of a score to its meaning
 * @property {string[]} [signed] names of the scores whose sign matters
 * @property {Standout[]} standouts
 * @property {Standout[]} [roles]
 * @property {{ head: Head, word: number, to: number } | null} follow
 * @property {Head[]} chosen
 * @property {any[]} weights per layer, in one of three forms: f32, u8 or links
 * @property {any[]} steps per layer: q, k and v of some heads
 * @property {any[]} output per layer: what each head adds through W_O
 * @property {any} [effect] what switching heads off changed
 * @property {any} [circuit] as headwise.Circuit.to_json gives it
 * @property {string | null} [corrupted] the prompt that a circuit's clean prompt is compared with
 * @property {any[]} [effects] tables of the strongest heads, beside a circuit
 */

/** Merge pieces to words: weights to the pieces of a word add up, weights from them are averaged.
 * @param {Float32Array} values @param {Text} from @param {Text} to @returns {Matrix} */
export function mergePieces(values, from, to) {
  const rows = from.words.length;
  const columns = to.words.length;
  const count = new Float64Array(rows);
  for (const word of from.of) count[word]++;
  const sums = new Float64Array(rows * columns);
  const keys = to.of.length;
  from.of.forEach((word, i) => {
    for (let j = 0; j < keys; j++) sums[word * columns + to.of[j]] += values[i * keys + j] / count[word];
  });
  return matrix(rows, columns, Float32Array.from(sums));
}

/** @param {number} rows @param {number} columns @param {Float32Array} values @returns {Matrix} */
function matrix(rows, columns, values) {
  let top = 0;
  for (const v of values) if (v > top) top = v;
  return { rows, columns, values, top };
}

/** One pass of a model over a text. */
export class Run {
  /** @param {RunJson} json */
  constructor(json) {
    this.json = json;
    this.layers = json.layers;
    this.texts = json.texts;
    this.form = json.weights[0].form;
    this.decoded = new LruCache(48);
    this.rows = new LruCache(6000); // exact rows of long inputs
    /** @type {Map<string, any>} steps that a server sent later */
    this.fetchedSteps = new Map();
    /** @type {Set<string>} heads whose steps were requested */
    this.requestedSteps = new Set();
    /** @type {Map<string, any>} causes by the tokens that were asked for; null until the answer arrives */
    this.causes = new Map();
    /** @type {Set<string>} */
    this.off = new Set(json.off.map((at) => at.join(".")));
  }

  get long() {
    return this.form === "links";
  }

  /** @param {Head} head */
  label([row, head]) {
    const layer = this.layers[row];
    const several = this.layers.some((other) => other.kind !== layer.kind);
    return `${several ? `${layer.kind} ` : ""}${layer.index}.${head}`;
  }

  /** @param {string} label @returns {Head | null} */
  parse(label) {
    const number = /\d+$/.exec(label)?.[0];
    if (number === undefined) return null;
    const head = Number(number);
    const row = this.layers.findIndex((layer, n) => head < layer.heads && this.label([n, head]) === label);
    return row < 0 ? null : [row, head];
  }

  /** @param {number} row @param {Side} side @returns {Text} */
  text(row, side) {
    return this.texts[this.layers[row][side]];
  }

  /** The whole text that was split into these tokens. @param {Text} text @returns {string} */
  sourceText(text) {
    return text === this.texts[0] ? this.json.text : (this.json.target ?? "");
  }

  /** @param {number} row @param {Side} side @param {Unit} unit @returns {string[]} */
  names(row, side, unit) {
    return this.text(row, side)[unit];
  }

  /** Positions of the delimiters. @param {number} row @param {Side} side @param {Unit} unit @returns {Set<number>} */
  delimiters(row, side, unit) {
    const text = this.text(row, side);
    const marked = new Set(text.delimiter);
    return unit === "words" ? marked : new Set(text.of.flatMap((word, piece) => (marked.has(word) ? [piece] : [])));
  }

  /** All weights of a head, where the page holds them all. @param {Head} head @param {Unit} unit @returns {Matrix} */
  matrix([row, head], unit) {
    return this.decoded.get(`m${row}.${head}.${unit}`, () => {
      const from = this.text(row, "from");
      const to = this.text(row, "to");
      const size = from.pieces.length * to.pieces.length;
      const values = this._values(row).subarray(head * size, (head + 1) * size);
      if (unit === "words") return mergePieces(values, from, to);
      return matrix(from.pieces.length, to.pieces.length, values);
    });
  }

  /** @param {number} row @returns {Float32Array} */
  _values(row) {
    return this.decoded.get(`v${row}`, () => {
      const stored = this.json.weights[row];
      if (stored.form === "f32") return floats(stored.data);
      const coded = bytes(stored.data);
      const size = coded.length / stored.top.length;
      return Float32Array.from(coded, (byte, i) => stored.top[Math.floor(i / size)] * (byte / 255) ** 2);
    });
  }

  /** One weight and how exact it is. @param {Head} at @param {Unit} unit @param {number} i @param {number} j
   * @returns {Weight} */
  weight(at, unit, i, j) {
    const [row, head] = at;
    if (this.long) return this._linkWeight(at, i, j);
    const { values, columns } = this.matrix(at, unit);
    const value = values[i * columns + j];
    if (this.form === "f32") return { value, error: 0 };
    const top = this.json.weights[row].top[head];
    const pieces = unit === "pieces" ? 1 : this.text(row, "to").of.filter((word) => word === j).length;
    return { value, error: pieces * rootError(Math.round(Math.sqrt(value / pieces / (top || 1)) * 255), top) };
  }

  /** @param {Head} at @param {number} i @param {number} j @returns {Weight} */
  _linkWeight(at, i, j) {
    const exact = this.exactRow(at, i);
    if (exact) return { value: exact[j], error: 0 };
    const links = this.links(at, i);
    const link = links.find(({ key }) => key === j);
    if (link) return { value: link.weight, error: 0.5 / 65535 };
    const { values, columns, cell, top } = this.reduced(at, "max");
    const most = values[Math.floor(i / cell) * columns + Math.floor(j / cell)];
    const least = links.length ? links[links.length - 1].weight : 0;
    const bound = most + rootError(255 * Math.sqrt(most / (top || 1)), top);
    return { value: Math.min(bound, least), error: 0, atMost: true };
  }

  /** The strongest keys of a query, strongest first. @param {Head} at @param {number} i */
  links([row, head], i) {
    const stored = this.json.weights[row];
    const { keys, weights } = this.decoded.get(`l${row}`, () => {
      const raw = bytes(stored.keys).buffer;
      const Keys = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array }[/** @type {1 | 2 | 4} */ (stored.number)];
      return { keys: new Keys(raw), weights: new Uint16Array(bytes(stored.weights).buffer) };
    });
    const start = (head * this.text(row, "from").pieces.length + i) * stored.k;
    const links = Array.from({ length: stored.k }, (_, n) => start + n).map((n) => ({
      key: keys[n],
      weight: weights[n] / 65535,
    }));
    return links.filter((link) => link.weight > 0);
  }

  /** The largest or mean weight of squares of tokens. @param {Head} head @param {string} which "max" or "mean"
   * @returns {Reduced} */
  reduced([row, head], which) {
    return this.decoded.get(`r${row}.${head}.${which}`, () => {
      const { cell, rows, columns, [which]: stored } = this.json.weights[row].reduced;
      const coded = this.decoded.get(`b${row}.${which}`, () => bytes(stored.data));
      const size = rows * columns;
      const top = stored.top[head];
      const part = coded.subarray(head * size, (head + 1) * size);
      return { cell, rows, columns, values: Float32Array.from(part, (byte) => top * (byte / 255) ** 2), top };
    });
  }

  /** A small picture of a head. @param {Head} at @returns {Matrix} */
  thumbnail(at) {
    return this.long ? this.reduced(at, "max") : this.matrix(at, "pieces");
  }

  /** q, k and v behind a head's weights, where the page holds them.
   * @param {Head} at @returns {HeadSteps | undefined} */
  steps([row, head]) {
    return this.decoded.get(`s${row}.${head}`, () => {
      const sources = [this.fetchedSteps.get(`${row}.${head}`), this.json.steps[row]];
      const stored = sources.find((source) => source?.heads.includes(head));
      if (!stored) return undefined;
      const position = stored.heads.indexOf(head);
      const group = this.layers[row].heads / this.layers[row].kv;
      const pair = stored.kv.indexOf(Math.floor(head / group));
      const queries = this.text(row, "from").pieces.length;
      const whole = { q: floats(stored.q), k: floats(stored.k), v: floats(stored.v) };
      const keys = whole.k.length / stored.kv.length / stored.dim;
      return {
        ...stored,
        queries,
        keys,
        group,
        q: whole.q.subarray(position * queries * stored.dim, (position + 1) * queries * stored.dim),
        k: whole.k.subarray(pair * keys * stored.dim, (pair + 1) * keys * stored.dim),
        v: whole.v.subarray(pair * keys * stored.value, (pair + 1) * keys * stored.value),
        sink: stored.sinks ? stored.sinks[position] : null,
        bias: stored.mask ? scoreBias(stored.mask, head) : null,
      };
    });
  }

  /** Add steps that were fetched later. @param {Head} at @param {any} stored */
  addSteps(at, stored) {
    this.fetchedSteps.set(at.join("."), stored);
    this.decoded.delete(`s${at.join(".")}`);
  }

  /** A whole row of weights of a long input, where it can be computed. @param {Head} at @param {number} i
   * @returns {Float32Array | null} */
  exactRow(at, i) {
    const key = `${at.join(".")}.${i}`;
    if (this.rows.has(key)) return this.rows.peek(key);
    const step = this.steps(at);
    if (!step?.complete) return null;
    return this.rows.get(key, () => attention(step, i).weights);
  }

  /** A row that has been computed already. @param {Head} at @param {number} i @returns {Float32Array | undefined} */
  computedRow(at, i) {
    return this.rows.peek(`${at.join(".")}.${i}`);
  }

  /** Compute rows, for a few milliseconds. @param {Head} at @param {number} first @param {number} last
   * @returns {boolean} whether there is nothing left to compute */
  prepare(at, first, last) {
    const end = performance.now() + 6;
    for (let i = first; i < last; i++) {
      if (this.computedRow(at, i)) continue;
      if (performance.now() > end) return false;
      if (!this.exactRow(at, i)) return true; // this head has no exact rows
    }
    return true;
  }

  /** What each head adds to one token of the layer's output. @param {number} row @param {number} i */
  output(row, i) {
    const stored = this.json.output[row];
    if (!stored) return null;
    const tokens = this.text(row, "from").pieces.length;
    const { heads, width } = this.layers[row];
    /** @param {Float32Array} values (heads, tokens) */
    const column = (values) => Array.from({ length: heads }, (_, head) => values[head * tokens + i]);
    const parts = floats(stored.parts);
    return {
      norms: column(numbers(stored.norms)),
      along: stored.along ? column(floats(stored.along)) : null,
      total: floats(stored.total)[i],
      /** @type {number | null} */
      bias: stored.bias,
      /** @param {number} head */
      part: (head) => {
        const position = stored.heads.indexOf(head);
        const start = (position * tokens + i) * width;
        return position < 0 ? null : parts.subarray(start, start + width);
      },
    };
  }
}

/** The mask that is added to one head's scores. @param {{shape: number[], data: string}} mask @param {number} head
 * @returns {(i: number, j: number) => number} */
function scoreBias({ shape: [heads, rows, keys], data }, head) {
  const values = floats(data);
  return (i, j) => values[((heads === 1 ? 0 : head) * rows + (rows === 1 ? 0 : i)) * keys + (keys === 1 ? 0 : j)];
}
