// SVG elements. Text is only ever set as text.

const NAMESPACE = "http://www.w3.org/2000/svg";

/** An SVG element. @param {string} tag @param {Record<string, string | number | null | undefined>} [attributes]
 * @param {...(Node | string | null | false)} children @returns {SVGElement} */
export function svg(tag, attributes = {}, ...children) {
  const el = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) el.setAttribute(name, String(value));
  }
  el.append(.../** @type {(Node | string)[]} */ (children.filter((child) => child !== null && child !== false)));
  return el;
}
