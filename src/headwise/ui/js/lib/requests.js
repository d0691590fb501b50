// Requests to the model behind the page: a server's, or a notebook's.
import { Run } from "./run.js";
/** @import { App, Model } from "../app.js" */
/** @import { Head, RunJson } from "./run.js" */

/** @typedef {(request: any, signal?: AbortSignal) => Promise<any>} Send */

export class Requests {
  /** @param {App} app @param {Send} send */
  constructor(app, send) {
    this.app = app;
    this.send = send;
    this.busy = "";
    this.failed = "";
    /** @type {AbortController | null} */
    this.pending = null;
  }

  /** Request the passes that the state names; a newer request ends an older one. @returns {Promise<void>} */
  async requestRuns() {
    const { app } = this;
    this.pending?.abort();
    const pending = new AbortController();
    this.pending = pending;
    const { text, model, off, target, text2, model2, off2, target2 } = app.state;
    const requests = [{ text, model, off, target }];
    if (text2 !== null) requests.push({ text: text2, model: model2, off: off2, target: target2 });
    const answers = this._all(requests, pending.signal); // on its way before anything is drawn
    this.failed = "";
    this.busy = "running the model …";
    app.bar?.update();
    try {
      const runs = (await answers).map((json) => new Run(json));
      if (pending.signal.aborted) return;
      this.busy = "";
      app.receiveRuns(runs);
    } catch (error) {
      if (pending.signal.aborted) return;
      this.busy = "";
      this._fail(error);
    }
  }

  /** @param {any[]} requests @param {AbortSignal} signal @returns {Promise<RunJson[]>} */
  async _all(requests, signal) {
    const answers = [];
    for (const request of requests) answers.push(await this._answer({ ask: "run", ...request }, signal));
    return answers;
  }

  /** @param {any} request @param {AbortSignal} [signal] */
  async _answer(request, signal) {
    const answer = await this.send(request, signal);
    if (answer.error) throw new Error(answer.error);
    return answer;
  }

  /** Fetch q, k and v behind a head, once. @param {Run} run @param {Head} at */
  async fetchSteps(run, at) {
    const key = at.join(".");
    if (run.requestedSteps.has(key)) return;
    run.requestedSteps.add(key);
    try {
      const { steps } = await this._answer({ ask: "steps", ...passOf(run), head: run.label(at) });
      if (!steps) return;
      run.addSteps(at, steps);
      if (this.app.runs.includes(run)) this.app.update();
    } catch (error) {
      this._fail(error);
    }
  }

  /** Fetch the effects of all heads on one token's logit minus another's, once.
   * @param {Run} run @param {string} answer @param {string} other "" for the model's own predictions */
  async fetchCauses(run, answer, other) {
    const key = causesKey(answer, other);
    if (run.causes.has(key)) return;
    run.causes.set(key, null);
    try {
      const { causes } = await this._answer({ ask: "causes", ...passOf(run), answer, other });
      run.causes.set(key, causes);
    } catch (error) {
      run.causes.set(key, { refusal: error instanceof Error ? error.message : String(error) });
    }
    if (this.app.runs.includes(run)) this.app.update();
  }

  /** @param {unknown} error */
  _fail(error) {
    this.failed = error instanceof Error ? error.message : String(error);
    if (this.app.runs.length) this.app.bar?.update();
    else this.app.showLoading();
  }
}

/** What a pass was requested by. @param {Run} run */
function passOf(run) {
  const { text, target, name, off } = run.json;
  return { text, target: target ?? "", model: name, off: off.map((head) => run.label(head)).join(",") };
}

/** Under which causes are stored. @param {string} answer @param {string} other */
export function causesKey(answer, other) {
  return JSON.stringify([answer, other]);
}

/** A notebook answers by messages; each carries the number of its request. @param {Pick<Model, "on" | "send">} model
 * @returns {Send} */
export function messageChannel(model) {
  /** @type {Map<number, (answer: any) => void>} */
  const open = new Map();
  let last = 0;
  model.on?.("msg:custom", (message) => {
    open.get(message?.number)?.(message.answer);
    open.delete(message?.number);
  });
  return (request) =>
    new Promise((resolve) => {
      last += 1;
      open.set(last, resolve);
      model.send?.({ number: last, request });
    });
}
