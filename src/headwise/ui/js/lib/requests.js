// Questions to the model behind the page: a server's, or a notebook's.
import { Run } from "./run.js";

export class Questions {
  /** @param {any} app @param {(request: any, signal?: AbortSignal) => Promise<any>} ask */
  constructor(app, ask) {
    this.app = app;
    this.ask = ask;
    this.busy = "";
    this.failed = "";
    /** @type {AbortController | null} */ this.asking = null;
  }

  /** Ask for the passes that the state names; a newer question ends an older one. @returns {Promise<void>} */
  async request() {
    const { app } = this;
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    const { text, model, off, target, text2, model2, off2, target2 } = app.state;
    const wanted = [{ text, model, off, target }, ...(text2 === null ? [] : [{ text: text2, model: model2, off: off2, target: target2 }])];
    const answers = this._all(wanted, asking.signal); // on its way before anything is drawn
    this.failed = "";
    this.busy = "running the model …";
    app.bar?.update();
    try {
      const runs = (await answers).map((json) => new Run(json));
      if (asking.signal.aborted) return;
      this.busy = "";
      app.arrived(runs);
    } catch (error) {
      if (asking.signal.aborted) return;
      this.busy = "";
      this._fail(error);
    }
  }

  /** @param {any[]} wanted @param {AbortSignal} signal */
  async _all(wanted, signal) {
    const found = [];
    for (const one of wanted) found.push(await this._answer({ ask: "run", ...one }, signal));
    return found;
  }

  /** @param {any} request @param {AbortSignal} [signal] */
  async _answer(request, signal) {
    const answer = await this.ask(request, signal);
    if (answer.error) throw new Error(answer.error);
    return answer;
  }

  /** The numbers behind a head that the page does not have yet. @param {Run} run @param {import("./run.js").Head} at */
  async learn(run, at) {
    const key = at.join(".");
    run.asked ??= new Set();
    if (run.asked.has(key)) return;
    run.asked.add(key);
    try {
      const asked = { text: run.json.text, target: run.json.target ?? "", model: run.json.name, off: run.json.off.map((/** @type {any} */ one) => run.label(one)).join(",") };
      const found = await this._answer({ ask: "steps", ...asked, head: run.label(at) });
      if (!found.steps) return;
      run.learn(at, found.steps);
      if (this.app.runs.includes(run)) this.app.update();
    } catch (error) {
      this._fail(error);
    }
  }

  /** @param {unknown} error */
  _fail(error) {
    this.failed = error instanceof Error ? error.message : String(error);
    if (this.app.runs.length) this.app.bar?.update();
    else this.app.waiting();
  }
}

/** A notebook answers by messages: each carries the number of its question. @param {any} model @returns {(request: any) => Promise<any>} */
export function messages(model) {
  /** @type {Map<number, (answer: any) => void>} */ const open = new Map();
  let last = 0;
  model.on?.("msg:custom", (/** @type {any} */ message) => {
    open.get(message?.number)?.(message.answer);
    open.delete(message?.number);
  });
  return (request) => new Promise((answer) => {
    open.set(++last, answer);
    model.send({ number: last, request });
  });
}
