// A page from a server: it sends its requests there.
import { mount } from "./document.js";

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

mount(askServer);
