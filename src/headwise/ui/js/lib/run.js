// What the page was given: weights as they are stored, and how exact each number is.

/**
 * @typedef {{ kind: string, index: number, name: string, heads: number, kv: number, dim: number, width: number,
 *   from: number, to: number }} Layer
 * @typedef {{ pieces: string[], words: string[], of: number[], delimiter: number[] }} Text
 * @typedef {"words" | "pieces"} Unit
 * @typedef {{ value: number, error: number, atMost?: boolean }} Weight  atMost: no more than value
 * @typedef {{ rows: number, columns: number, values: Float32Array, top: number }} Matrix
 * @typedef {{ cell: number, rows: number, columns: number, values: Float32Array, top: number }} Reduced
 * @typedef {[number, number]} Head  its layer's place in the list of layers, and its number
 */

/** @param {string} text base64 @returns {Uint8Array} */
export function bytes(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}

/** @param {string} text base64 of float32 */
export function floats(text) {
  return new Float32Array(bytes(text).buffer);
}

/** Numbers as they are, or as shares of the largest. @param {string | {top: number, data: string}} stored @returns {Float32Array} */
export function numbers(stored) {
  if (typeof stored === "string") return floats(stored);
  return Float32Array.from(new Uint16Array(bytes(stored.data).buffer), (share) => (stored.top * share) / 65535);
}

/** How far a byte's weight may be off: half a step to either side. @param {number} byte @param {number} top */
export function rootError(byte, top) {
  return top * (((byte + 0.5) / 255) ** 2 - (byte / 255) ** 2);
}

/** A text's pieces merged to words: weights to pieces add up, those from them are averaged.
 * @param {Float32Array} values @param {Text} from @param {Text} to @returns {Matrix} */
export function merged(values, from, to) {
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

/** Keeps the newest few of what takes time to make. */
export class Recent {
  /** @param {number} most */
  constructor(most) {
    this.most = most;
    this.kept = new Map();
  }

  /** @template T @param {string} key @param {() => T} make @returns {T} */
  get(key, make) {
    const value = this.kept.has(key) ? this.kept.get(key) : make();
    this.kept.delete(key);
    this.kept.set(key, value);
    if (this.kept.size > this.most) this.kept.delete(this.kept.keys().next().value);
    return value;
  }
}

/** One pass of a model over a text. */
export class Run {
  /** @param {any} json */
  constructor(json) {
    this.json = json;
    /** @type {Layer[]} */ this.layers = json.layers;
    /** @type {Text[]} */ this.texts = json.texts;
    this.form = json.weights[0].form;
    this.recent = new Recent(48);
    this.rows = new Recent(6000); // exact rows of long inputs
    /** @type {Map<string, any>} steps that a server sent later */ this.more = new Map();
    /** @type {Set<string> | undefined} heads whose steps were asked for */ this.asked = undefined;
    /** @type {Set<string>} */ this.off = new Set(json.off.map((/** @type {Head} */ at) => at.join(".")));
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
    for (let row = 0; row < this.layers.length; row++) {
      const [, , number] = /^(.*?)(\d+)$/.exec(label) ?? [];
      const head = Number(number);
      if (number !== undefined && head < this.layers[row].heads && this.label([row, head]) === label) return [row, head];
    }
    return null;
  }

  /** @param {number} row @param {"from" | "to"} side @returns {Text} */
  text(row, side) {
    return this.texts[this.layers[row][side]];
  }

  /** A text as it was given. @param {Text} text @returns {string} */
  said(text) {
    return text === this.texts[0] ? this.json.text : this.json.target ?? "";
  }

  /** @param {number} row @param {"from" | "to"} side @param {Unit} unit @returns {string[]} */
  names(row, side, unit) {
    return this.text(row, side)[unit];
  }

  /** @param {number} row @param {"from" | "to"} side @param {Unit} unit @returns {Set<number>} delimiters' places */
  delimiters(row, side, unit) {
    const text = this.text(row, side);
    const marked = new Set(text.delimiter);
    return unit === "words" ? marked : new Set(text.of.flatMap((word, piece) => (marked.has(word) ? [piece] : [])));
  }

  /** All weights of a head, where they are all there. @param {Head} head @param {Unit} unit @returns {Matrix} */
  matrix([row, head], unit) {
    return this.recent.get(`m${row}.${head}.${unit}`, () => {
      const from = this.text(row, "from");
      const to = this.text(row, "to");
      const size = from.pieces.length * to.pieces.length;
      const values = this._values(row).subarray(head * size, (head + 1) * size);
      if (unit === "words") return merged(values, from, to);
      return matrix(from.pieces.length, to.pieces.length, values);
    });
  }

  /** @param {number} row @returns {Float32Array} */
  _values(row) {
    return this.recent.get(`v${row}`, () => {
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
    const [row] = at;
    if (this.long) return this._linked(at, i, j);
    const found = this.matrix(at, unit);
    const value = found.values[i * found.columns + j];
    if (this.form === "f32") return { value, error: 0 };
    const top = this.json.weights[row].top[at[1]];
    const pieces = unit === "pieces" ? 1 : this.text(row, "to").of.filter((word) => word === j).length;
    return { value, error: pieces * rootError(Math.round(Math.sqrt(value / pieces / (top || 1)) * 255), top) };
  }

  /** @param {Head} at @param {number} i @param {number} j @returns {Weight} */
  _linked(at, i, j) {
    const exact = this.exactRow(at, i);
    if (exact) return { value: exact[j], error: 0 };
    const links = this.links(at, i);
    const found = links.find((link) => link.key === j);
    if (found) return { value: found.weight, error: 0.5 / 65535 };
    const cell = this.reduced(at, "max");
    const most = cell.values[Math.floor(i / cell.cell) * cell.columns + Math.floor(j / cell.cell)];
    const least = links.length ? links[links.length - 1].weight : 0;
    return { value: Math.min(most + rootError(255 * Math.sqrt(most / (cell.top || 1)), cell.top), least), error: 0, atMost: true };
  }

  /** The strongest keys of a query, strongest first. @param {Head} at @param {number} i @returns {{key: number, weight: number}[]} */
  links([row, head], i) {
    const stored = this.json.weights[row];
    const { keys, weights } = this.recent.get(`l${row}`, () => {
      const raw = bytes(stored.keys).buffer;
      const kind = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array }[/** @type {1|2|4} */ (stored.number)];
      return { keys: new kind(raw), weights: new Uint16Array(bytes(stored.weights).buffer) };
    });
    const start = (head * this.text(row, "from").pieces.length + i) * stored.k;
    return Array.from({ length: stored.k }, (_, n) => ({ key: keys[start + n], weight: weights[start + n] / 65535 }))
      .filter((link) => link.weight > 0);
  }

  /** Where queries look, merged over squares of tokens. @param {Head} head @param {"max" | "mean"} which @returns {Reduced} */
  reduced([row, head], which) {
    return this.recent.get(`r${row}.${head}.${which}`, () => {
      const { cell, rows, columns, [which]: stored } = this.json.weights[row].reduced;
      const coded = this.recent.get(`b${row}.${which}`, () => bytes(stored.data));
      const size = rows * columns;
      const top = stored.top[head];
      const values = Float32Array.from(coded.subarray(head * size, (head + 1) * size), (byte) => top * (byte / 255) ** 2);
      return { cell, rows, columns, values, top };
    });
  }

  /** A small picture of a head. @param {Head} at @returns {Matrix} */
  thumbnail(at) {
    if (!this.long) return this.matrix(at, "pieces");
    return this.reduced(at, "max");
  }

  /** What a head's weights are made of, where the page has it. @param {Head} at */
  steps([row, head]) {
    return this.recent.get(`s${row}.${head}`, () => {
      const stored = [this.more.get(`${row}.${head}`), this.json.steps[row]].find((one) => one?.heads.includes(head));
      if (!stored) return undefined;
      const place = stored.heads.indexOf(head);
      const group = this.layers[row].heads / this.layers[row].kv;
      const pair = stored.kv.indexOf(Math.floor(head / group));
      const queries = this.text(row, "from").pieces.length;
      const whole = { q: floats(stored.q), k: floats(stored.k), v: floats(stored.v) };
      const keys = whole.k.length / stored.kv.length / stored.dim;
      return {
        ...stored, queries, keys, group,
        q: whole.q.subarray(place * queries * stored.dim, (place + 1) * queries * stored.dim),
        k: whole.k.subarray(pair * keys * stored.dim, (pair + 1) * keys * stored.dim),
        v: whole.v.subarray(pair * keys * stored.value, (pair + 1) * keys * stored.value),
        sink: stored.sinks ? stored.sinks[place] : null,
        bias: stored.mask ? bias(stored.mask, head) : null,
      };
    });
  }

  /** @param {Head} at steps that came later @param {any} stored */
  learn(at, stored) {
    this.more.set(at.join("."), stored);
    this.recent.kept.delete(`s${at.join(".")}`);
  }

  /** A whole row of a long input's head, where it can be had. @param {Head} at @param {number} i @returns {Float32Array | null} */
  exactRow(at, i) {
    const key = `${at.join(".")}.${i}`;
    if (this.rows.kept.has(key)) return this.rows.kept.get(key);
    const step = this.steps(at);
    if (!step || !step.complete) return null;
    return this.rows.get(key, () => attention(step, i).weights);
  }

  /** A row that is there already. @param {Head} at @param {number} i @returns {Float32Array | undefined} */
  ready(at, i) {
    return this.rows.kept.get(`${at.join(".")}.${i}`);
  }

  /** Make rows ready, for a few milliseconds. @param {Head} at @param {number} first @param {number} last @returns {boolean} whether all are */
  prepare(at, first, last) {
    const end = performance.now() + 6;
    for (let i = first; i < last; i++) {
      if (this.ready(at, i)) continue;
      if (performance.now() > end) return false;
      if (!this.exactRow(at, i)) return true; // there are none to be had
    }
    return true;
  }

  /** What each head adds to a token of the layer's output. @param {number} row @param {number} i */
  output(row, i) {
    const stored = this.more.get(`o${row}.${i}`) ?? this.json.output[row];
    if (!stored) return null;
    const one = this.more.has(`o${row}.${i}`);
    const tokens = one ? 1 : this.text(row, "from").pieces.length;
    const place = one ? 0 : i;
    const { heads: count, width } = this.layers[row];
    const column = (/** @type {Float32Array} */ values) => Array.from({ length: count }, (_, h) => values[h * tokens + place]);
    const parts = floats(stored.parts);
    return {
      norms: column(numbers(stored.norms)),
      along: stored.along ? column(floats(stored.along)) : null,
      total: floats(stored.total)[place],
      bias: stored.bias,
      /** @param {number} head */
      part: (head) => {
        const at = stored.heads.indexOf(head);
        return at < 0 ? null : parts.subarray((at * tokens + place) * width, (at * tokens + place + 1) * width);
      },
    };
  }
}

/** What is added to one head's scores. @param {{shape: number[], data: string}} mask @param {number} head */
function bias({ shape: [heads, rows, keys], data }, head) {
  const values = floats(data);
  return (/** @type {number} */ i, /** @type {number} */ j) =>
    values[((heads === 1 ? 0 : head) * rows + (rows === 1 ? 0 : i)) * keys + (keys === 1 ? 0 : j)];
}

/** How one query's weights come about, in the order of the formula: product, scale, softcap, mask, softmax, sum of values.
 * @param {any} step @param {number} i */
export function attention(step, i) {
  const { dim, keys, value, q, k, v } = step;
  const place = i + step.offset;
  const products = new Float64Array(keys);
  const scores = new Float64Array(keys);
  let top = step.sink ?? -Infinity;
  for (let j = 0; j < keys; j++) {
    let dot = 0;
    for (let d = 0; d < dim; d++) dot += q[i * dim + d] * k[j * dim + d];
    products[j] = dot;
    let score = dot * step.scale;
    if (step.softcap) score = step.softcap * Math.tanh(score / step.softcap);
    if (hidden(step, place, j)) score = -Infinity;
    else if (step.bias) score += step.bias(i, j);
    scores[j] = score;
    if (score > top) top = score;
  }
  const powers = scores.map((score) => (score === -Infinity ? 0 : Math.exp(score - top)));
  const rest = step.sink === null || step.sink === undefined ? 0 : Math.exp(step.sink - top);
  const sum = powers.reduce((a, b) => a + b, 0) + rest;
  const weights = Float32Array.from(powers, (power) => (sum > 0 ? power / sum : 0)); // nowhere to look: zeros
  const output = new Float64Array(value);
  for (let j = 0; j < keys; j++) {
    if (weights[j] > 0) for (let d = 0; d < value; d++) output[d] += weights[j] * v[j * value + d];
  }
  return { products, scores, top, powers, sum, weights, output, rest: sum > 0 ? rest / sum : 0 };
}

/** @param {any} step @param {number} place @param {number} j */
function hidden(step, place, j) {
  if (step.causal && j > place) return true;
  const [left, right] = step.window ?? [null, null];
  return (left !== null && j < place - left) || (right !== null && j > place + right);
}
