// A document of its own around the page: it carries the data, and its address the state, after "#".
import { render } from "../app.js";
/** @import { Send } from "../lib/requests.js" */

/** Show the page. @param {Send} [ask] sends requests to the model behind the page, if there is one */
export function mount(ask) {
  const el = /** @type {HTMLElement} */ (document.getElementById("headwise"));
  const data = document.getElementById("headwise-data")?.textContent ?? "";
  el.replaceChildren();
  render({
    el,
    model: {
      get: (name) => {
        if (name === "data") return data;
        return name === "state" ? location.hash.slice(1) : name === "page";
      },
      on: (name, act) => {
        if (name === "change:state") window.addEventListener("hashchange", act);
      },
      set: (name, value) => {
        if (name !== "state") return;
        try {
          history.replaceState(null, "", `#${value}`);
        } catch {
          // a page inside a notebook's frame has no address of its own
        }
      },
      ask,
    },
  });
}
