// The requests that have not ended.

import { byId, el, setText } from "./dom.js";
import * as format from "./format.js";

export function drawRequests(now) {
  const shown = now.requests.length;
  setText(byId("requests-note"), shown < now.requests_total ? `the first ${shown} of ${format.count(now.requests_total)}` : "");
  byId("requests").replaceChildren(...(shown ? now.requests.map(row) : [nothing()]));
}

function row(request) {
  const number = (value) => el("td", { className: "number" }, value);
  const state = request.preemptions ? `${request.state}, preempted ${request.preemptions}×` : request.state;
  return el(
    "tr", {},
    el("td", { title: request.id }, request.id), el("td", {}, state),
    number(format.count(request.prompt_tokens)), number(format.count(request.output_tokens)),
    number(request.drafted ? format.count(request.drafted) : "–"), el("td", {}, share(request)),
  );
}

function share({ drafted, accepted }) {
  if (!drafted) return "–";
  const filled = el("span");
  filled.style.width = `${(100 * accepted) / drafted}%`;
  return el(
    "span", { className: "share-cell" },
    format.percent(accepted / drafted), el("span", { className: "meter", "aria-hidden": "true" }, filled),
  );
}

function nothing() {
  return el("tr", { className: "nothing" }, el("td", { colSpan: 6 }, "No request is running or waiting."));
}
