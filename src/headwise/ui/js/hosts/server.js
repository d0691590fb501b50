// A page that a server gave: it asks the server, and the state in the address can be shared.
import { render } from "../app.js";

/** @param {any} request @param {AbortSignal} [signal] */
async function askServer(request, signal) {
  const token = new URLSearchParams(location.search).get("token");
  const headers = { "Content-Type": "application/json", ...(token ? { "X-Headwise-Token": token } : {}) };
  let answer;
  try {
    answer = await fetch("api", { method: "POST", headers, body: JSON.stringify(request), signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("The server does not answer; is headwise serve still running?");
  }
  const text = await answer.text();
  try {
    return JSON.parse(text);
  } catch {
    return { error: text || `the server answered ${answer.status}` };
  }
}

/** Show the page and answer its questions. */
function mount() {
  const el = /** @type {HTMLElement} */ (document.getElementById("headwise"));
  el.replaceChildren();
  render({
    el,
    model: {
      get: (name) =>
        name === "data"
          ? document.getElementById("headwise-data")?.textContent
          : name === "state"
            ? location.hash.slice(1)
            : name === "page",
      on: (name, act) => {
        if (name === "change:state") window.addEventListener("hashchange", act);
      },
      set: (name, value) => {
        if (name === "state") history.replaceState(null, "", `#${value}`);
      },
      ask: askServer,
    },
  });
}

mount();
