// Lines, or stacked areas, over the last ten minutes.  `uPlot` is a global of its own script.

const POINTS = 300;
const HEIGHT = 240;
// The shortest time axis: of a single moment, uPlot would show a whole day, with ticks at midnight.
const LEAST_SPAN_S = 20;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function clock(time) {
  return new Date(1000 * time).toLocaleTimeString([], { hour12: false });
}

/** One plot; a line is added with its first value. */
export class Plot {
  /**
   * @param {string} id of the element
   * @param {(value: number) => string} format of a value
   * @param {{stacked?: boolean, log?: boolean, dashed?: string, known?: string[]}} options log: a logarithmic scale; dashed: the line of an upper
   *   bound; known: names of lines, whose position is that of their colour
   */
  constructor(id, format, { stacked = false, log = false, dashed = null, known = [] } = {}) {
    this.element = document.getElementById(id);
    this.format = format;
    this.stacked = stacked;
    this.log = log;
    this.dashed = dashed;
    this.known = known;
    this.times = [];
    this.lines = new Map();
    this.plot = null;
    new ResizeObserver(() => this.resize()).observe(this.element);
  }

  /** Add a moment; lines without a value have a gap there. */
  add(time, values) {
    let isNew = false;
    for (const name of values.keys()) {
      if (!this.lines.has(name)) {
        this.lines.set(name, Array(this.times.length).fill(null));
        isNew = true;
      }
    }
    this.times.push(time);
    for (const [name, line] of this.lines) line.push(this.shown(values.get(name)));
    for (const column of [this.times, ...this.lines.values()]) column.splice(0, column.length - POINTS);
    if (isNew || !this.plot) this.draw();
    else this.plot.setData(this.data());
    this.showLatest();
  }

  /** A value that the scale has; a logarithmic one has no zero. */
  shown(value) {
    return value === undefined || (this.log && !(value > 0)) ? null : value;
  }

  /** Create the plot again, after a change of lines or colours. */
  draw() {
    this.plot?.destroy();
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
    this.plot = new uPlot(
      {
        width: this.element.clientWidth,
        height: HEIGHT,
        legend: { markers: { width: 2 } },
        // After its creation, and after a change of size, the cursor is at no moment.
        hooks: { ready: [() => this.showLatest()], setSize: [() => this.showLatest()] },
        cursor: { drag: { setScale: false }, points: { size: 6 } },
        scales: {
          x: { range: () => this.span() },
          y: this.log ? { distr: 3 } : { range: (_, __, most) => [0, most > 0 ? 1.08 * most : 1] },
        },
        axes: [
          { ...axis, size: 40, gap: 12, space: 80, values: (_, ticks) => ticks.map(clock) },
          { ...axis, size: 76, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.format(tick))) },
        ],
        series: [{ label: "time", value: (_, time) => (time === null ? "–" : clock(time)) }, ...this.series()],
      },
      this.data(),
      this.element,
    );
  }

  /** The first and the last time of the axis; not those that uPlot takes for a single moment. */
  span() {
    const last = this.times.at(-1);
    return [Math.min(this.times[0], last - LEAST_SPAN_S), last];
  }

  /** The lines in the order of drawing: of areas the highest first, so that it hides none. */
  drawn() {
    return this.stacked ? [...this.lines].reverse() : [...this.lines];
  }

  series() {
    return this.drawn().map(([label, line]) => {
      const place = this.known.indexOf(label);
      const stroke = colour(label === this.dashed ? "text" : `series-${Math.max(0, place)}`);
      return {
        label,
        stroke,
        width: 1.5,
        dash: label === this.dashed ? [8, 6] : undefined,
        fill: this.stacked ? stroke : undefined,
        spanGaps: false,
        points: { show: false },
        value: (_, __, ___, moment) => this.format(moment === null ? null : line[moment]),
      };
    });
  }

  data() {
    const columns = [...this.lines.values()];
    if (!this.stacked) return [this.times, ...columns];
    const sums = columns.map((_, top) =>
      this.times.map((_, moment) =>
        columns[top][moment] === null ? null : columns.slice(0, top + 1).reduce((sum, line) => sum + line[moment], 0),
      ),
    );
    return [this.times, ...sums.reverse()];
  }

  /** Without a cursor, the legend shows the last moment. */
  showLatest() {
    if (!this.plot) return;
    if (this.plot.cursor.left < 0 || this.plot.cursor.left === undefined) {
      this.plot.setLegend({ idx: this.times.length - 1 });
    }
  }

  resize() {
    this.plot?.setSize({ width: this.element.clientWidth, height: HEIGHT });
  }
}
