// Labels beside points that lie close together, so that every label can be read.

/** @typedef {{ x: number, y: number }} Place */

const DIRECTIONS = 12;
const RINGS = [11, 20, 30]; // pixels from the point to the middle of its label, the nearest first

/** The middle of each label: the nearest place around its point where it covers no other label and no point.
 * Null where none is free.
 * @param {Place[]} points in the order in which they may choose
 * @param {{ width: number, height: number }} label @param {{ width: number, height: number }} room
 * @returns {(Place | null)[]} */
export function placeLabels(points, label, room) {
  /** @type {(Place | null)[]} */
  const placed = [];
  for (const point of points) {
    const free = around(point, label).find((place) => {
      const inside =
        Math.abs(place.x - room.width / 2) <= (room.width - label.width) / 2 &&
        Math.abs(place.y - room.height / 2) <= (room.height - label.height) / 2;
      return inside && !placed.some((other) => other && meets(place, other, label)) && !covers(place, points, label);
    });
    placed.push(free ?? null);
  }
  return placed;
}

/** Places around a point. A label is wider than high: beside the point it needs more distance.
 * @param {Place} point @param {{ width: number, height: number }} label @returns {Place[]} */
function around({ x, y }, label) {
  return RINGS.flatMap((ring) =>
    Array.from({ length: DIRECTIONS }, (_, n) => {
      const angle = (2 * Math.PI * n) / DIRECTIONS - Math.PI / 2; // above first
      return { x: x + Math.cos(angle) * (ring + (label.width - label.height) / 2), y: y + Math.sin(angle) * ring };
    }),
  );
}

/** @param {Place} a @param {Place} b @param {{ width: number, height: number }} label */
function meets(a, b, label) {
  return Math.abs(a.x - b.x) < label.width && Math.abs(a.y - b.y) < label.height;
}

/** @param {Place} place @param {Place[]} points @param {{ width: number, height: number }} label */
function covers(place, points, label) {
  return points.some(
    (point) => Math.abs(place.x - point.x) < label.width / 2 && Math.abs(place.y - point.y) < label.height / 2,
  );
}
