// What the controller does and why: the server's sentences, and its drafters.

import { byId, el, setText } from "./dom.js";
import * as format from "./format.js";

const POSITIONS = 4;

export function drawDecision(now) {
  setText(byId("decision-policy"), now.policy === "none" ? "the engine" : now.policy);
  setText(byId("headline"), now.decision.headline);
  byId("headline").dataset.mode = now.decision.mode;
  const reasons = byId("reasons");
  if (reasons.dataset.shown === now.decision.reasons.join("\n")) return;
  reasons.dataset.shown = now.decision.reasons.join("\n");
  reasons.replaceChildren(...now.decision.reasons.map((reason) => el("li", {}, reason)));
}

export function drawDrafters(drafters) {
  byId("drafters-box").hidden = drafters.length === 0;
  byId("drafters").replaceChildren(...drafters.map(row));
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
