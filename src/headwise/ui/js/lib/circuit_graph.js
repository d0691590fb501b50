// A circuit as a layered graph: which nodes and edges are drawn, and where; and its curve over sizes.

/**
 * @typedef {object} CircuitNode
 * @property {string} id
 * @property {string} type "embedding", "head", "kv" (a KV head that several query heads share), "feed-forward", "output"
 * @property {number} layer
 * @property {number} [order] from input to output
 * @property {string} [kind] of attention, of a head
 * @property {number} [head] of a head
 * @property {number[]} [heads] the query heads of a KV head
 *
 * @typedef {object} CircuitEdge
 * @property {string} from
 * @property {string} to
 * @property {string} input "query", "key", "value" or "input"
 * @property {number} score
 * @property {number | null} [low]
 * @property {number | null} [high]
 *
 * @typedef {[number | null, number | null, number | null] | null} Triple a mean, and the ends of its interval
 * @typedef {{ edges: number, faithfulness: Triple, completeness: Triple, random: Triple }} CurvePoint
 *
 * @typedef {object} Circuit as headwise.Circuit.to_json gives it
 * @property {string} metric
 * @property {number} clean
 * @property {number} corrupted
 * @property {number} prompts
 * @property {string} method
 * @property {CircuitNode[]} nodes
 * @property {CircuitEdge[]} edges strongest first
 * @property {number} size
 * @property {number} [total] edges of the model
 * @property {CurvePoint[]} curve
 * @property {string[]} notes
 *
 * @typedef {CircuitNode & { x: number, y: number, span: number }} PlacedNode x: 0 to 1; y: its row, 0 at the bottom;
 *   span: columns that it is wide
 * @typedef {{ nodes: PlacedNode[], edges: CircuitEdge[], rows: string[], columns: number }} Graph rows: their labels
 */

const BEFORE_ALL = -1; // the order of the embeddings, which have none of their own

/** @param {CircuitNode} node */
function isAttention({ type }) {
  return type === "head" || type === "kv";
}

/** The place of each node's row from input to output: the heads of a layer share one, its KV heads are just below.
 * @param {CircuitNode[]} nodes @returns {(node: CircuitNode) => number} */
function rowOrder(nodes) {
  /** @param {CircuitNode} node */
  const own = ({ order, type, layer }) => order ?? (type === "embedding" ? BEFORE_ALL : layer);
  /** @type {Map<string, number>} */
  const layers = new Map();
  for (const node of nodes.filter(isAttention)) {
    const key = `${node.kind} ${node.layer}`;
    layers.set(key, Math.min(own(node), layers.get(key) ?? Infinity));
  }
  return (node) => {
    if (!isAttention(node)) return own(node);
    return (layers.get(`${node.kind} ${node.layer}`) ?? own(node)) - (node.type === "kv" ? 0.5 : 0);
  };
}

/** The strongest edges, and their nodes in rows from input (0) to output.
 * @param {Circuit} circuit @param {number} count of edges @returns {Graph} */
export function layoutGraph(circuit, count) {
  const known = new Map(circuit.nodes.map((node) => [node.id, node]));
  const edges = circuit.edges.filter(({ from, to }) => known.has(from) && known.has(to)).slice(0, count);
  const used = new Set(edges.flatMap(({ from, to }) => [from, to]));
  const shown = circuit.nodes.filter(({ id }) => used.has(id));
  const orderOf = rowOrder(circuit.nodes);
  const orders = [...new Set(shown.map(orderOf))].sort((a, b) => a - b);
  const heads = 1 + Math.max(-1, ...circuit.nodes.flatMap(({ head, heads: group }) => [head ?? -1, ...(group ?? [])]));
  const columns = heads + 1; // feed-forward blocks have the last one
  /** @param {CircuitNode} node */
  const column = ({ type, head, heads: group = [] }) => {
    if (type === "head") return (head ?? 0) + 0.5;
    if (type === "kv" && group.length) return (Math.min(...group) + Math.max(...group) + 1) / 2;
    return type === "feed-forward" ? heads + 0.5 : columns / 2;
  };
  const nodes = shown.map((node) => ({
    ...node,
    x: column(node) / columns,
    y: orders.indexOf(orderOf(node)),
    span: node.type === "kv" ? (node.heads?.length ?? 1) : 1,
  }));
  const rows = orders.map((order) => rowLabel(shown.filter((node) => orderOf(node) === order)));
  return { nodes, edges, rows, columns };
}

/** @param {CircuitNode[]} nodes of one row */
function rowLabel(nodes) {
  const [{ type, layer, kind }] = nodes;
  if (type !== "head") return ""; // the names of other nodes say it all
  return `${kind === "self" ? "" : `${kind} `}layer ${layer}`;
}

/** The name of a node on the graph. @param {CircuitNode} node */
export function nodeName({ type, layer, head, heads = [] }) {
  if (type === "head") return `${layer}.${head}`;
  if (type === "kv") return `KV ${layer}.${Math.floor((heads[0] ?? 0) / (heads.length || 1))}`;
  return type === "feed-forward" ? `FF ${layer}` : type;
}

/** Where a number of edges is on a logarithmic axis, from 0 to 1. @param {number[]} sizes @param {number} edges */
export function sizeShare(sizes, edges) {
  const [low, high] = [Math.min(...sizes), Math.max(...sizes)];
  return high > low ? Math.log(edges / low) / Math.log(high / low) : 0.5;
}

/** Lowest and highest of all means and ends of a curve; 0 and 1 are always on it. @param {CurvePoint[]} curve
 * @returns {[number, number]} */
export function curveExtent(curve) {
  const values = curve.flatMap(({ faithfulness, completeness, random }) => [
    ...(faithfulness ?? []),
    ...(completeness ?? []),
    ...(random ?? []),
  ]);
  const numbers = values.filter((x) => x !== null);
  return [Math.min(0, ...numbers), Math.max(1, ...numbers)];
}
