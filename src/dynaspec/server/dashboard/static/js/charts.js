// Which charts there are and what each shows.

import { el } from "./dom.js";
import { Plot } from "./plot.js";
import * as format from "./format.js";

const minus = (a, b) => (a ?? []).map((value, i) => (value === null || b[i] === null ? null : Math.max(0, value - b[i])));
const plus = (a, b) => (a ?? []).map((value, i) => (value === null || b[i] === null ? null : value + b[i]));
const column = (name) => (columns) => columns[name];

const GOODPUT = {
  title: "Expected against measured",
  unit: "tokens per second of decoding",
  empty: "A policy that weighs drafting against plain decoding shows here what it expects.",
  series: [
    { label: "expected with drafts", mark: "draft", style: "line", value: column("drafting_per_s") },
    { label: "expected plain", mark: "target", style: "dash", value: column("plain_per_s") },
    { label: "measured", mark: "ink", style: "line", width: 1.25, value: column("measured_per_s") },
  ],
};

const IDLE = "Nothing was decoded in this time. Send a prompt below.";
const UNDRAFTED = "Nothing was drafted in this time.";

const OVER_TIME = [
  {
    title: "Throughput",
    unit: "tokens/s",
    empty: IDLE,
    series: [
      {
        label: "target", mark: "target", style: "fill",
        value: column("emitted_per_s"), said: (c) => minus(c.emitted_per_s, c.accepted_per_s),
      },
      { label: "drafter, accepted", mark: "draft", style: "fill", value: column("accepted_per_s") },
    ],
  },
  {
    title: "Draft length and acceptance",
    unit: "tokens per draft",
    empty: UNDRAFTED,
    series: [
      { label: "drafted", mark: "rest", style: "dash", value: column("draft_length") },
      { label: "accepted", mark: "draft", style: "line", value: column("accepted_length") },
    ],
  },
  {
    title: "Step time",
    unit: "ms",
    empty: IDLE,
    series: [
      {
        label: "other", mark: "rest", style: "fill", value: column("step_ms"),
        said: (c) => minus(c.step_ms, plus(c.draft_ms, c.verify_ms)),
      },
      {
        label: "verify", mark: "target", style: "fill",
        value: (c) => plus(c.draft_ms, c.verify_ms), said: column("verify_ms"),
      },
      { label: "draft", mark: "draft", style: "fill", value: column("draft_ms") },
    ],
  },
  {
    title: "Time to first token",
    unit: "ms, last minute",
    empty: "No request got its first token in this time.",
    series: [
      { label: "median", mark: "ink", style: "line", value: column("ttft_p50_ms") },
      { label: "95th percentile", mark: "rest", style: "dash", value: column("ttft_p95_ms") },
    ],
  },
  {
    title: "Inter-token latency",
    unit: "ms, last minute",
    empty: IDLE,
    series: [
      { label: "median", mark: "ink", style: "line", value: column("itl_p50_ms") },
      { label: "95th percentile", mark: "rest", style: "dash", value: column("itl_p95_ms") },
    ],
  },
];

/** All charts over time. */
export class Charts {
  constructor(goodputBox, box) {
    goodputBox.classList.add("chart");
    this.plots = [new Plot(goodputBox, GOODPUT)];
    for (const definition of OVER_TIME) {
      const figure = el("figure", { className: "card chart" });
      box.append(figure);
      this.plots.push(new Plot(figure, definition));
    }
    this.positions = new Positions();
    box.append(this.positions.figure);
  }

  draw(columns, from, to) {
    for (const plot of this.plots) plot.draw(columns, from, to);
  }

  recolour() {
    for (const plot of this.plots) plot.recolour();
  }
}

/** How many drafts reach each position, and how many are still accepted there. */
class Positions {
  constructor() {
    this.bars = el("div", { className: "bars" });
    this.empty = el("p", { className: "empty", textContent: "Nothing was drafted in the last minute." });
    const key = (className, words) => el("li", {}, el("span", { className, "aria-hidden": "true" }), words);
    const accepted = key("swatch", "accepted");
    accepted.firstChild.style.setProperty("--mark", "var(--draft)");
    this.figure = el(
      "figure", { className: "card chart" },
      el("h3", {}, "Acceptance by position ", el("span", { className: "soft" }, "% of drafts")),
      el("ul", { className: "legend" }, accepted, key("swatch outline", "drafted")),
      el("div", { className: "canvas" }, this.bars, this.empty),
    );
  }

  draw(positions) {
    this.empty.hidden = positions.length > 0;
    while (this.bars.children.length > positions.length) this.bars.lastChild.remove();
    while (this.bars.children.length < positions.length) this.bars.append(bar(this.bars.children.length + 1));
    positions.forEach(({ drafted, accepted }, i) => {
      const made = this.bars.children[i];
      made.title = `Position ${i + 1}: ${format.percent(drafted)} of drafts reach it, ${format.percent(accepted)} are accepted there`;
      made.querySelector(".share").textContent = Math.round(100 * accepted);
      made.querySelector(".drafted").style.height = `${100 * drafted}%`;
      made.querySelector(".accepted").style.height = `${100 * accepted}%`;
    });
  }
}

function bar(position) {
  const part = (className, ...children) => el("span", { className }, ...children);
  return el(
    "div", { className: "bar" },
    part("share"), part("column", part("drafted"), part("accepted")), part("place", String(position)),
  );
}
