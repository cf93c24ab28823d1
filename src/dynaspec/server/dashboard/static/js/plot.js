// One chart over time: uPlot, a legend that says the numbers, and words where there is nothing to draw.

import { el, setText } from "./dom.js";
import * as format from "./format.js";
import { colour } from "./theme.js";

const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const STEPS_S = [1, 5, 10, 15, 30, 60, 120, 300, 600];
const { uPlot } = window;

/**
 * A series: `{label, mark, style, value, note}`. `mark` names its colour; `style` is `fill` (from the series below, or
 * from 0), `line` or `dash`; `value(columns)` gives the column to draw; `said(columns)` the one that the legend says, if
 * another, as where series are stacked.
 */
export class Plot {
  #columns = { t: [] };
  #range = [0, 1];

  /** `box` gets heading, legend and chart. `unit` is said in the heading. */
  constructor(box, { title, unit, series, read = format.number, floor = 0, empty }) {
    this.series = series;
    this.read = read;
    this.values = series.map(() => el("b"));
    this.empty = el("p", { className: "empty", textContent: empty });
    this.canvas = el("div", { className: "canvas" }, this.empty);
    box.append(
      el("h3", {}, `${title} `, el("span", { className: "soft" }, unit)),
      el("ul", { className: "legend" }, ...series.map((one, i) => legendEntry(one, this.values[i]))),
      this.canvas,
    );
    this.plot = new uPlot(options(series, floor, () => this.#range, () => this.#say()), this.#data(), this.canvas);
    new ResizeObserver(() => this.#fit()).observe(this.canvas);
  }

  /** Shows columns from one unix second to another. */
  draw(columns, from, to) {
    this.#columns = columns;
    this.#range = [from, to];
    const data = this.#data();
    this.plot.setData(data);
    this.empty.hidden = data.slice(1).some((column) => column.some((y, i) => y !== null && data[0][i] >= from));
    this.#say();
  }

  /** Colours have changed. */
  recolour() {
    this.plot.redraw(false, true);
  }

  #data() {
    const none = this.#columns.t.map(() => null);
    return [this.#columns.t, ...this.series.map((one) => (this.#columns.t.length ? one.value(this.#columns) : none))];
  }

  #fit() {
    const { width, height } = this.canvas.getBoundingClientRect();
    if (width) this.plot.setSize({ width, height });
  }

  /** The numbers at the cursor, or the latest ones. */
  #say() {
    const at = this.plot?.cursor.idx ?? this.#columns.t.length - 1;
    this.series.forEach((one, i) => {
      const column = this.#columns.t.length ? (one.said ?? one.value)(this.#columns) : [];
      setText(this.values[i], this.read(column[at]));
    });
  }
}

function legendEntry(series, value) {
  const swatch = el("span", { className: `swatch ${series.style === "fill" ? "" : series.style}`, "aria-hidden": "true" });
  swatch.style.setProperty("--mark", `var(--${series.mark}${series.style === "fill" ? "-fill" : ""})`);
  return el("li", {}, swatch, series.label, value);
}

function options(series, floor, range, say) {
  return {
    width: 300,
    height: 170,
    padding: [8, 14, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: "live" }, drag: { x: false, y: false }, y: false, points: { size: 6 } },
    scales: { x: { range }, y: { range: (_, low, high) => [0, nice(Math.max(high ?? 0, floor))] } },
    axes: [
      axis({ values: (_, ticks, __, ___, step) => ticks.map(step < 60 ? format.seconds : format.minutes), space: 60, size: 26, incrs: STEPS_S }),
      axis({ values: (_, ticks) => ticks.map(format.short), space: 36, size: 42 }),
    ],
    series: [{}, ...series.map(drawn)],
    bands: series.flatMap((one, i) => band(one, series[i + 1], i + 1)),
    hooks: { setCursor: [say] },
  };
}

function axis(more) {
  return {
    font: FONT,
    stroke: () => colour("soft"),
    grid: { stroke: () => colour("line"), width: 1 },
    ticks: { show: false },
    gap: 6,
    ...more,
  };
}

function drawn(series, index, all) {
  const stacked = series.style === "fill" && all[index + 1]?.style === "fill";
  return {
    stroke: () => colour(series.mark),
    width: series.width ?? 1.75,
    dash: series.style === "dash" ? [5, 4] : undefined,
    fill: series.style === "fill" && !stacked ? () => colour(`${series.mark}-fill`) : undefined,
    points: { show: false, filter: lonely, size: 4, width: 1, fill: () => colour(series.mark) },
  };
}

/** Points between two holes, which no line shows. */
function lonely(plot, index) {
  const column = plot.data[index];
  const missing = (i) => column[i] === null || column[i] === undefined;
  return [...column.keys()].filter((i) => !missing(i) && missing(i - 1) && missing(i + 1));
}

/** Between a filled series and the one stacked below it. */
function band(series, below, index) {
  if (series.style !== "fill" || below?.style !== "fill") return [];
  return [{ series: [index, index + 1], fill: () => colour(`${series.mark}-fill`) }];
}

/** The next round number above, so that the axis does not move with every point. */
function nice(high) {
  if (!(high > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(high));
  return unit * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * unit >= high * 1.04 || step === 10);
}
