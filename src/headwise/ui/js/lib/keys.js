// Keys that several parts of the page understand.

/** What an arrow key moves: [rows, columns]. @type {Record<string, [number, number]>} */
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** The step of an arrow key, null for other keys. @param {KeyboardEvent} event @returns {[number, number] | null} */
export function arrowStep(event) {
  return Object.hasOwn(ARROWS, event.key) ? ARROWS[event.key] : null;
}

/** Handle the event here alone. @param {Event} event */
export function consume(event) {
  event.preventDefault();
  event.stopPropagation();
}
