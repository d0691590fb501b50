// Where a tooltip goes: beside what it explains, never over it.

/**
 * @typedef {{ left: number, top: number, right: number, bottom: number }} Box in pixels of the window
 * @typedef {"right" | "left" | "below" | "above"} Side
 */

const GAP = 8;
const EDGE = 4; // pixels to the border of the window

/** The order in which sides are tried. @type {Record<"right" | "left", Side[]>} */
const SIDES = { right: ["right", "left", "below", "above"], left: ["left", "right", "below", "above"] };

/** The corner of a tooltip beside a box: on the first side with enough room, else above or below it.
 * @param {Box} box what is explained @param {{ width: number, height: number }} size of the tooltip
 * @param {{ width: number, height: number }} window @param {"right" | "left"} [preferred]
 * @returns {{ x: number, y: number }} */
export function placeBeside(box, size, window, preferred = "right") {
  const x = clamp(box.left, window.width - size.width);
  const y = clamp(box.top, window.height - size.height);
  const corners = {
    right: { x: box.right + GAP, y },
    left: { x: box.left - GAP - size.width, y },
    below: { x, y: box.bottom + GAP },
    above: { x, y: box.top - GAP - size.height },
  };
  const fits = SIDES[preferred].find((side) => {
    const corner = corners[side];
    const right = corner.x + size.width <= window.width - EDGE;
    const bottom = corner.y + size.height <= window.height - EDGE;
    return corner.x >= EDGE && corner.y >= EDGE && right && bottom;
  });
  return corners[fits ?? (window.height - box.bottom > box.top ? "below" : "above")];
}

/** @param {number} at @param {number} room */
function clamp(at, room) {
  return Math.max(EDGE, Math.min(at, room - EDGE));
}

/** A part of an element: from a share of its width to another, in the height of the whole.
 * @param {Element} element @param {number} first @param {number} last @returns {Box} */
export function sliceBox(element, first, last) {
  const { left, top, bottom, width } = element.getBoundingClientRect();
  return { left: left + first * width, right: left + last * width, top, bottom };
}

/** The pixel under the pointer. @param {{ clientX: number, clientY: number }} event @returns {Box} */
export function pointBox({ clientX, clientY }) {
  return { left: clientX, right: clientX, top: clientY, bottom: clientY };
}
