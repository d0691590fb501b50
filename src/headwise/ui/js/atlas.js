// The atlas as a page: every head as a cell, coloured by one score; what is known of a chosen head; a table by role.

/** @param {string} name @param {Record<string, string>} [attributes] @param {...(Node | string)} children */
function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const data = JSON.parse(/** @type {HTMLElement} */ (document.getElementById("atlas-data")).textContent || "{}");
const root = /** @type {HTMLElement} */ (document.getElementById("atlas"));
const number = (/** @type {number | null} */ x) => (x === null ? "–" : x.toFixed(2));
const rolesOf = (/** @type {string} */ kind, /** @type {number} */ layer, /** @type {number} */ head) =>
  data.roles.filter((/** @type {any} */ r) => r.kind === kind && r.layer === layer && r.head === head);

const score = /** @type {HTMLSelectElement} */ (make("select", { id: "score" }));
const grids = make("div", { id: "grids" });
const detail = make("div", { id: "detail", "aria-live": "polite" });

for (const name of Object.keys(data.scores)) score.append(make("option", { value: name }, name));
score.value = data.roles.length ? data.definitions[data.roles[0].role].score : "entropy";
score.addEventListener("change", draw);

/** @param {string} kind @param {number} row @param {number} head */
function show(kind, row, head) {
  const layer = data.layers[kind][row];
  const roles = rolesOf(kind, layer, head);
  const lines = Object.entries(data.scores).filter(([, kinds]) => kind in kinds).map(([name, kinds]) => {
    const at = kinds[kind];
    return make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, number(at.score[row][head])),
      make("td", {}, `${number(at.low[row][head])} to ${number(at.high[row][head])}`), make("td", {}, number(at.baseline[row])));
  });
  const heads = ["score", "mean", "95 % interval", "equal attention"].map((text) => make("th", { scope: "col" }, text));
  detail.replaceChildren(
    make("h2", {}, `${kind} ${layer}.${head}: ${roles.map((/** @type {any} */ r) => r.role).join(", ") || "no clean role"}`),
    make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines)),
  );
}

function draw() {
  const kinds = data.scores[score.value];
  grids.replaceChildren(...Object.entries(kinds).map(([kind, at]) => {
    const values = at.score.flat().filter((/** @type {number | null} */ x) => x !== null);
    const most = Math.max(...values), least = Math.min(...values, 0);
    const rows = at.score.map((/** @type {(number | null)[]} */ line, /** @type {number} */ row) => make(
      "tr", {}, make("th", { scope: "row" }, String(data.layers[kind][row])),
      ...line.map((value, head) => {
        if (value === null) return make("td");
        const share = most > least ? (value - least) / (most - least) : 0;
        const roles = rolesOf(kind, data.layers[kind][row], head).map((/** @type {any} */ r) => r.role).join(", ");
        const cell = make("button", { type: "button", title: `${data.layers[kind][row]}.${head} ${roles}` }, number(value));
        cell.style.setProperty("--share", `${Math.round(share * 100)}%`);
        cell.classList.toggle("strong", share > 0.55);
        cell.classList.toggle("named", roles !== "");
        cell.addEventListener("click", () => show(kind, row, head));
        return make("td", {}, cell);
      })));
    const caption = `${kind}: ${data.meanings[score.value] || score.value}. An outlined head has a role; click a head for all that was measured of it.`;
    const widest = Math.max(...at.score.map((/** @type {any[]} */ line) => line.length));
    const numbers = [...Array(widest).keys()].map((head) => make("th", { scope: "col" }, String(head)));
    const top = make("tr", {}, make("th", { scope: "col" }, "layer"), ...numbers);
    return make("table", { class: "grid" }, make("caption", {}, caption), make("thead", {}, top), make("tbody", {}, ...rows));
  }));
}

/** The heads of a kind as points, near each other where they look alike. @param {string} kind @param {any[]} points */
function map(kind, points) {
  const size = 460, edge = 24;
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${size} ${size}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "heads that look alike, side by side");
  const ends = ["x", "y"].map((axis) => points.map((p) => p[axis])).map((all) => [Math.min(...all), Math.max(...all)]);
  const far = Math.max(...ends.map(([low, high]) => high - low), 1e-9); // one scale for both axes, or near would not be near
  const place = (/** @type {number} */ x, /** @type {number[]} */ [low, high]) => size / 2 + ((x - (low + high) / 2) / far) * (size - 2 * edge);
  for (const point of points) {
    const dot = document.createElementNS(space, "text");
    dot.setAttribute("x", String(place(point.x, ends[0])));
    dot.setAttribute("y", String(place(point.y, ends[1])));
    dot.setAttribute("class", rolesOf(point.kind, point.layer, point.head).length ? "named" : "");
    dot.textContent = `${point.layer}.${point.head}`;
    dot.addEventListener("click", () => show(point.kind, data.layers[point.kind].indexOf(point.layer), point.head));
    svg.append(dot);
  }
  const words = "Near each other: they spread their weight alike (Jensen-Shannon divergence). Coloured heads have a role.";
  return make("section", {}, make("h2", {}, `Which ${kind} heads look alike`), make("p", { class: "soft" }, words), svg);
}

const table = make("table", { id: "roles" }, make("caption", {}, data.summary), make("tbody", {}, ...Object.entries(data.definitions).flatMap(([name, one]) => {
  const heads = data.roles.filter((/** @type {any} */ r) => r.role === name);
  if (!heads.length && name.startsWith("offset")) return []; // rows of nothing would hide the rest
  const pick = make("button", { type: "button", class: "link" }, name);
  pick.addEventListener("click", () => { score.value = one.score; draw(); });
  const shown = heads.slice(0, 6).map((/** @type {any} */ r) => `${r.layer}.${r.head} ${number(r.score)} (${number(r.baseline)})`).join(", ");
  return make("tr", {}, make("th", { scope: "row" }, pick), make("td", {}, String(heads.length)), make("td", {}, shown), make("td", { class: "soft" }, one.words));
})));
root.replaceChildren(
  make("h1", {}, data.title), table,
  make("p", {}, make("label", { for: "score" }, "Colour by "), score), grids, detail, ...Object.entries(data.maps).map(([kind, points]) => map(kind, points)),
);
draw();
