// The few numbers that matter most, as they are now.

import { el, setText } from "./dom.js";
import * as format from "./format.js";

export class Tiles {
  #tiles;

  constructor(box) {
    this.#tiles = {
      throughput: tile(box, "Tokens per second"),
      requests: tile(box, "Running requests"),
      ttft: tile(box, "Time to first token"),
      itl: tile(box, "Inter-token latency"),
      acceptance: tile(box, "Acceptance length"),
      kv: tile(box, "KV cache", true),
    };
  }

  /** @param {(name: string) => ?number} latest a column's last value. @param {object} now */
  draw(latest, now) {
    const { throughput, requests, ttft, itl, acceptance, kv } = this.#tiles;
    const use = now.kv_blocks ? now.kv_blocks_used / now.kv_blocks : null;
    throughput(format.number(latest("emitted_per_s")), "", `engine busy ${format.percent(latest("busy"))}`);
    requests(format.count(now.running), "", `${format.count(now.waiting)} waiting`);
    latency(ttft, latest("ttft_p50_ms"), latest("ttft_p95_ms"));
    latency(itl, latest("itl_p50_ms"), latest("itl_p95_ms"));
    const rate = now.minute?.acceptance_rate;
    const accepted = rate == null ? "no drafts in the last minute" : `${format.percent(rate)} of drafted accepted`;
    acceptance(format.number(now.minute?.acceptance_length), "tokens", accepted);
    kv(format.percent(use), "", `prefix hits ${format.percent(now.prefix_hit_rate)}`, use);
  }
}

function latency(show, median, high) {
  const [value, unit] = format.duration(median);
  show(value, unit, median == null ? "none in the last minute" : `p95 ${format.duration(high).join(" ")}`);
}

/** A tile; returns what shows value, unit, note and, with a meter, a share. */
function tile(box, label, metered = false) {
  const value = el("span");
  const unit = el("span", { className: "unit" });
  const note = el("dd", { className: "note" });
  const filled = el("span");
  const meter = metered ? [el("dd", { className: "meter", "aria-hidden": "true" }, filled)] : [];
  box.append(
    el("div", { className: "tile" }, el("dt", {}, label), el("dd", { className: "value" }, value, unit), note, ...meter),
  );
  return (number, what, words, share) => {
    setText(value, number);
    setText(unit, number === "–" ? "" : what);
    setText(note, words);
    filled.style.width = `${100 * (share ?? 0)}%`;
  };
}
