// An answer as it comes, each token coloured by its source.

import { byId, el } from "./dom.js";
import * as format from "./format.js";

export class Answer {
  #tokens = 0;
  #drafted = 0;
  #begun = performance.now();
  #first = null;
  #last = null;

  constructor() {
    this.box = byId("answer");
    this.facts = byId("answer-facts");
    this.box.replaceChildren();
    this.box.setAttribute("aria-busy", "true"); // read out when it is whole, not word by word
    this.facts.replaceChildren();
  }

  /** @param {{text: string, source: "draft" | "target"}[]} tokens */
  add(tokens) {
    if (!tokens.length) return;
    this.#last = performance.now();
    this.#first ??= this.#last;
    const follow = this.box.scrollTop + this.box.clientHeight > this.box.scrollHeight - 40;
    for (const { text, source } of tokens) this.#token(text, source);
    if (follow) this.box.scrollTop = this.box.scrollHeight;
    this.#say();
  }

  /** @param {?object} report the server's speculation report. @param {?string} reason why it ended. */
  end(report, reason) {
    this.box.setAttribute("aria-busy", "false");
    this.#say(report, reason);
  }

  fail(message) {
    this.box.append(el("span", { className: "failed" }, (this.box.textContent ? "\n" : "") + message));
    this.box.setAttribute("aria-busy", "false");
  }

  #token(text, source) {
    this.#tokens += 1;
    this.#drafted += source === "draft";
    if (!text) return;
    const last = this.box.lastElementChild;
    if (last?.dataset.source === source) last.append(text);
    else this.box.append(el("span", { className: "run", "data-source": source }, text));
  }

  #say(report, reason) {
    const said = [["Tokens", format.count(this.#tokens)]];
    if (this.#first !== null) said.push(["First after", format.duration(this.#first - this.#begun).join(" ")]);
    if (this.#last > this.#first) {
      said.push(["Tokens/s", format.number((1e3 * (this.#tokens - 1)) / (this.#last - this.#first))]);
    }
    if (this.#tokens) said.push(["By the drafter", format.percent(this.#drafted / this.#tokens)]);
    if (report?.mean_acceptance_length) said.push(["Acceptance length", format.number(report.mean_acceptance_length)]);
    if (reason) said.push(["Ended by", reason]);
    this.facts.replaceChildren(...said.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }
}
