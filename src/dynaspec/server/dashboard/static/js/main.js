// Ties the parts together: what the feed brings goes to all of them.

import { Charts } from "./charts.js";
import { drawDecision, openDetails } from "./decision.js";
import { byId, setText } from "./dom.js";
import { Feed } from "./feed.js";
import * as format from "./format.js";
import { History } from "./history.js";
import { initPlayground } from "./playground.js";
import { drawRequests } from "./requests.js";
import { initTheme } from "./theme.js";
import { Tiles } from "./tiles.js";

const AVERAGED_S = { 60: 1, 300: 3, 600: 5 };
const history = new History();
const tiles = new Tiles(byId("tiles"));
let now = null;
let arrived = 0;

openDetails();
initTheme(byId("theme"), () => charts.recolour());
const charts = new Charts(byId("chart-goodput"), byId("charts"));
initPlayground(() => now?.model);

const feed = new Feed(
  (update) => {
    history.add(update.points);
    now = update.now;
    arrived = performance.now();
    byId("notice").hidden = now.state !== "stopped";
    draw();
  },
  (waitS) => {
    showState("offline", "no connection");
    notify(`No connection to the server. Trying again in ${waitS} s; if it was stopped, start it with dynaspec serve.`);
  },
);
byId("notice-retry").addEventListener("click", () => feed.hurry());
byId("spans").addEventListener("change", drawCharts);
document.addEventListener("visibilitychange", draw);
setInterval(showUptime, 1000);
feed.run();

function draw() {
  if (now === null || document.hidden) return;
  setText(byId("model"), now.model);
  setText(byId("version"), now.version);
  showState(now.state, now.state);
  showUptime();
  if (now.state === "stopped") {
    notify(`${now.stopped} The server must be started again; its log says what happened.`);
    return;
  }
  setText(byId("policy"), now.policy === "none" ? "none (no drafter)" : now.policy);
  drawDecision(now);
  tiles.draw((name) => history.latest(name), now);
  charts.positions.draw(now.minute.positions);
  drawRequests(now);
  setText(
    byId("totals"),
    `Since the start: ${format.count(now.generated)} tokens, ${format.count(now.finished)} requests, ` +
      `${format.count(now.preemptions)} preemptions, ${format.count(now.faults)} drafter faults`,
  );
  drawCharts();
}

function drawCharts() {
  const to = now?.t ?? Date.now() / 1e3;
  const shown = Number(byId("spans").querySelector("input:checked").value);
  charts.draw(history.averaged(AVERAGED_S[shown]), to - shown, to);
}

function showState(state, words) {
  byId("state").dataset.state = state;
  setText(byId("state"), words);
}

/** By the server's clock: this machine's may be off. */
function showUptime() {
  if (!now?.t) return;
  const at = now.t + (performance.now() - arrived) / 1e3;
  setText(byId("uptime"), format.span(Math.max(0, at - now.started_at)));
}

function notify(words) {
  setText(byId("notice-text"), words);
  byId("notice").hidden = false;
}
