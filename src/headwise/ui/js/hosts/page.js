// A page by itself: the data stands in it, the state in the address after "#".
import { render } from "../app.js";

/** Read the page's own data and show it. */
function mount() {
  const el = /** @type {HTMLElement} */ (document.getElementById("headwise"));
  el.replaceChildren();
  const held = document.getElementById("headwise-data")?.textContent ?? "";
  render({
    el,
    model: {
      get: (name) => (name === "data" ? held : name === "state" ? location.hash.slice(1) : name === "page"),
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
    },
  });
}

mount();
