// Whether speculation helps and how that is decided: the server's sentences, and its drafters.

import { byId, el, setText } from "./dom.js";
import * as format from "./format.js";

const POSITIONS = 4;

/** What explains the first sentence stands open where there is room for it. */
export function openDetails() {
  byId("how").open = window.matchMedia("(min-width: 900px)").matches;
}

export function drawDecision({ decision, drafters }) {
  setText(byId("headline"), decision.headline);
  byId("headline").dataset.mode = decision.mode;
  setText(byId("note"), decision.note);
  byId("how").hidden = decision.reasons.length + drafters.length === 0;
  byId("drafters-box").hidden = drafters.length === 0;
  byId("drafters").replaceChildren(...drafters.map(row));
  const reasons = byId("reasons");
  if (reasons.dataset.shown === decision.reasons.join("\n")) return;
  reasons.dataset.shown = decision.reasons.join("\n");
  reasons.replaceChildren(...decision.reasons.map((reason) => el("li", {}, reason)));
}

function row({ name, on, acceptance, cost }) {
  const shares = acceptance.slice(0, POSITIONS).map((share) => (share === null ? "–" : Math.round(100 * share)));
  const expected = shares.length ? `${shares.join(" · ")} %` : "–";
  const pass = cost.pass_s ? format.duration(1e3 * cost.pass_s).join(" ") : "–";
  const state = el("span", { className: "switch", "data-on": String(on) }, on ? "on" : "off after faults");
  return el(
    "tr", {},
    el("td", {}, name), el("td", {}, state), el("td", {}, expected), el("td", { className: "number" }, pass),
  );
}
