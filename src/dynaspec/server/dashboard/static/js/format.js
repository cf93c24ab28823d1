// Numbers as people read them. "–" stands for what is not known.

const NONE = "–";
const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const preciseClock = new Intl.DateTimeFormat([], {
  hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Three significant digits, but whole numbers from 100 on. */
export function number(value) {
  if (value == null || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 100) return whole.format(value);
  return size === 0 ? "0" : value.toFixed(size >= 10 ? 1 : 2);
}

/** The same with few characters: 1.2k, 3.4M. */
export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${trimmed(value / 1e6)}M`;
  if (size >= 1e3) return `${trimmed(value / 1e3)}k`;
  return String(Number(value.toPrecision(3)));
}

export const count = (value) => (value == null ? NONE : whole.format(value));

export function percent(share) {
  if (share == null) return NONE;
  if (share > 0 && share < 0.001) return "<0.1 %";
  return `${share > 0 && share < 0.01 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;
}

export const seconds = (at) => preciseClock.format(new Date(1e3 * at));

export const minutes = (at) => clock.format(new Date(1e3 * at));

/** Milliseconds as [number, unit]. */
export function duration(ms) {
  if (ms == null) return [NONE, ""];
  return ms >= 1e3 ? [number(ms / 1e3), "s"] : [number(ms), "ms"];
}

/** A time span such as "3 h 12 min". */
export function span(total) {
  const parts = [
    [Math.floor(total / 86400), "d"],
    [Math.floor(total / 3600) % 24, "h"],
    [Math.floor(total / 60) % 60, "min"],
    [Math.floor(total) % 60, "s"],
  ];
  const first = parts.findIndex(([value]) => value > 0);
  return first < 0 ? "0 s" : parts.slice(first, first + 2).map((part) => part.join(" ")).join(" ");
}

function trimmed(value) {
  return String(Number(value.toPrecision(2)));
}
