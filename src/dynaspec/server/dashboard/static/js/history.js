// What has been seen: one column a number, ten minutes long, with holes where nobody looked.

const KEPT_S = 600;
const HOLE_S = 5;

export class History {
  columns = { t: [] };

  get latestTime() {
    return this.columns.t.at(-1) ?? null;
  }

  /** Adds columns of points, of which some may be known already. */
  add(points) {
    for (const name of Object.keys(points)) this.columns[name] ??= [];
    points.t.forEach((t, i) => {
      const before = this.latestTime ?? t - 1;
      if (t <= before) return;
      if (t - before > HOLE_S) this.#push((name) => (name === "t" ? (before + t) / 2 : null));
      this.#push((name) => points[name][i]);
    });
    const kept = this.columns.t.findIndex((t) => t >= this.latestTime - KEPT_S);
    if (kept > 0) for (const column of Object.values(this.columns)) column.splice(0, kept);
  }

  /** Columns of means over `width` seconds each, so that a long time is not all jitter; holes stay. */
  averaged(width) {
    const starts = [];
    let bucket = null;
    this.columns.t.forEach((t, i) => {
      if (Math.floor(t / width) !== bucket) starts.push(i);
      bucket = Math.floor(t / width);
    });
    const mean = (column) => starts.map((from, i) => average(column.slice(from, starts[i + 1])));
    return Object.fromEntries(Object.entries(this.columns).map(([name, column]) => [name, mean(column)]));
  }

  /** The last value of a column, or null. */
  latest(name) {
    return this.columns[name]?.at(-1) ?? null;
  }

  #push(value) {
    for (const [name, column] of Object.entries(this.columns)) column.push(value(name));
  }
}

function average(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

