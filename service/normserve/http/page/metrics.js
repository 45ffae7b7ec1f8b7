// What Prometheus would make of the server's metrics: the text read, and rates between two readings.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

function unescaped(text) {
  return text.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));
}

function number(text) {
  return text === "+Inf" ? Infinity : Number(text);
}

/** One scrape. */
export class Reading {
  /**
   * @param {string} text as GET /metrics answers
   * @param {number} time in seconds
   */
  constructor(text, time) {
    this.time = time;
    this.series = new Map();
    for (const line of text.split("\n")) {
      const found = LINE.exec(line);
      if (!found) continue;
      const [, name, written = "", value] = found;
      const labels = Object.fromEntries(Array.from(written.matchAll(LABEL), ([, key, text]) => [key, unescaped(text)]));
      if (!this.series.has(name)) this.series.set(name, new Map());
      this.series.get(name).set(written, { labels, value: number(value) });
    }
  }

  /** Every series of a name, as `{labels, value}`. */
  all(name) {
    return [...(this.series.get(name)?.values() ?? [])];
  }

  /** The sum over all series of a name. */
  sum(name) {
    return this.all(name).reduce((total, each) => total + each.value, 0);
  }

  /** The sums by what `key` says of the labels, without those of which it says nothing. */
  by(name, key) {
    return grouped(this.all(name), key);
  }
}

/** What happened between two readings. */
export class Interval {
  constructor(before, after) {
    this.before = before;
    this.after = after;
    this.seconds = after.time - before.time;
  }

  /** How much counters grew, by what `key` says of their labels; one that starts again starts at nothing. */
  growth(name, key) {
    const earlier = this.before.series.get(name);
    const grown = [];
    for (const [written, { labels, value }] of this.after.series.get(name) ?? []) {
      const was = earlier?.get(written)?.value ?? 0;
      grown.push({ labels, value: value < was ? value : value - was });
    }
    return grouped(grown, key);
  }

  /** Growth of one over growth of the other, where the other grew. */
  ratio(above, below, key) {
    const parts = this.growth(below, key);
    const ratios = new Map();
    for (const [group, value] of this.growth(above, key)) {
      if (parts.get(group) > 0) ratios.set(group, value / parts.get(group));
    }
    return ratios;
  }

  /** A quantile of what a histogram counted in between, of all its series that `keep` keeps; null of nothing. */
  quantile(share, name, keep) {
    const buckets = this.growth(`${name}_bucket`, (labels) => (keep(labels) ? number(labels.le) : null));
    const bounds = [...buckets].sort(([a], [b]) => a - b);
    const total = bounds.at(-1)?.[1] ?? 0;
    if (!(total > 0)) return null;
    let [lower, below] = [0, 0];
    for (const [bound, count] of bounds) {
      if (count >= share * total) {
        if (bound === Infinity) return lower;
        return lower + ((bound - lower) * (share * total - below)) / (count - below);
      }
      [lower, below] = [bound, count];
    }
    return lower;
  }
}

function grouped(series, key) {
  const sums = new Map();
  for (const { labels, value } of series) {
    const group = key(labels);
    if (group !== null) sums.set(group, (sums.get(group) ?? 0) + value);
  }
  return sums;
}
