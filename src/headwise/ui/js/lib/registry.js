// The views of the page. A view is one file under views/ that registers itself; the page finds it there.
/** @import { App } from "../app.js" */

/**
 * @typedef {object} ViewInstance
 * @property {HTMLElement} el what is shown
 * @property {() => void} update draws the app's state again
 *
 * @typedef {object} StateField a part of the state that belongs to a view, and that a link can carry
 * @property {string} initial
 * @property {string[]} [allowed] values; any text, if left out
 *
 * @typedef {object} ViewDefinition
 * @property {string} name what the state and links call it
 * @property {string} label its tab
 * @property {number} order tabs are sorted by it
 * @property {(app: App) => ViewInstance} create
 * @property {(app: App) => boolean} [available] whether there is anything to show; always, if left out
 * @property {Record<string, StateField>} [state]
 */

/** @type {ViewDefinition[]} */
const definitions = [];

/** Add a view to the page. @param {ViewDefinition} definition */
export function registerView(definition) {
  if (definitions.some(({ name }) => name === definition.name))
    throw new Error(`two views are called ${definition.name}`);
  definitions.push(definition);
  definitions.sort((a, b) => a.order - b.order);
}

/** All views, in the order of their tabs. */
export function registeredViews() {
  return definitions;
}

/** The state that belongs to views. @returns {Record<string, StateField>} */
export function viewState() {
  return Object.assign({}, ...definitions.map(({ state }) => state ?? {}));
}
