import assert from "node:assert/strict";
import { test } from "node:test";
import { messageChannel } from "#js/lib/requests.js";

test("answers of a notebook are matched to their requests", async () => {
  /** @type {any[]} */
  const sent = [];
  /** @type {((message: any) => void)[]} */
  const listeners = [];
  const send = messageChannel({
    on: (_, listen) => listeners.push(listen),
    send: (message) => sent.push(message),
  });
  const answers = [send({ ask: "a" }), send({ ask: "b" })];
  listeners[0]({ number: 2, answer: "B" });
  listeners[0]({ number: 1, answer: "A" });
  assert.deepEqual(await Promise.all(answers), ["A", "B"]);
  assert.deepEqual(
    sent.map(({ number }) => number),
    [1, 2],
  );
});
