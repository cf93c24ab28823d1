// A prompt of the person's own, sent like any client's.

import { request } from "./access.js";
import { Answer } from "./answer.js";
import { byId } from "./dom.js";
import { events } from "./sse.js";

let running = null;

/** @param {() => ?string} model the model's name, once known. */
export function initPlayground(model) {
  byId("try").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null) generate(model());
  });
  byId("try-stop").addEventListener("click", () => running?.abort());
  byId("try-prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("try").requestSubmit();
  });
  byId("try-speculate").addEventListener("change", (event) => {
    byId("try-cap").disabled = !event.target.checked;
  });
}

async function generate(model) {
  const answer = new Answer();
  const chat = byId("try-endpoint").value === "chat";
  running = new AbortController();
  setRunning(true);
  try {
    const response = await request(chat ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body(model, chat)),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await complaint(response));
    await read(response, answer);
  } catch (error) {
    if (error.name === "AbortError") answer.end(null, "you");
    else answer.fail(error.message);
  } finally {
    running = null;
    setRunning(false);
  }
}

async function read(response, answer) {
  let report = null;
  let reason = null;
  for await (const text of events(response)) {
    if (text === "[DONE]") break;
    const chunk = JSON.parse(text);
    if (chunk.error) throw new Error(chunk.error.message);
    for (const choice of chunk.choices) {
      answer.add(choice.token_sources ?? []);
      report = choice.speculation ?? report;
      reason = choice.finish_reason ?? reason;
    }
  }
  answer.end(report, reason);
}

function body(model, chat) {
  const prompt = byId("try-prompt").value;
  const cap = byId("try-cap").value;
  const speculation = { metrics: "detailed" };
  if (!byId("try-speculate").checked) speculation.max_draft_tokens = 0;
  else if (cap) speculation.max_draft_tokens = Number(cap);
  return {
    ...(model ? { model } : {}),
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    temperature: Number(byId("try-temperature").value),
    max_tokens: Number(byId("try-tokens").value),
    stream: true,
    speculation,
  };
}

/** What the server says is wrong. */
async function complaint(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

function setRunning(on) {
  byId("try-send").disabled = on;
  byId("try-stop").hidden = !on;
}
