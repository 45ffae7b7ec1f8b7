"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const container = document.getElementById("plots");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const HEIGHT = 280;
  const FONT = 12;
  // Between the labels of ticks, in pixels.
  const GAP = 8;
  const SERIES = {
    light: ["#0b62c4", "#b4540a", "#1a7f4b", "#8a3ab9", "#b3261e", "#5f6b7a"],
    dark: ["#6cb2ff", "#ff9d4d", "#5fd39a", "#cf9bff", "#ff8a80", "#aab4c2"],
  };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Up to six series have distinct colors; more have a gradient in their order.
  const hue = (n, count) =>
    count > 6
      ? `hsl(${220 - (220 * n) / (count - 1)} 65% ${dark.matches ? 65 : 42}%)`
      : SERIES[dark.matches ? "dark" : "light"][n];

  const number = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    return size >= 100 ? value.toFixed(0) : size >= 1 ? value.toFixed(2) : String(Number(value.toPrecision(2)));
  };
  const tick = (value) => (value == null ? "" : String(Number(value.toPrecision(6))));

  const font = `${FONT}px system-ui, sans-serif`;
  const measure = document.createElement("canvas").getContext("2d");
  const widthOf = (text) => {
    measure.font = font;
    return measure.measureText(text).width;
  };

  // Vertical lines with a label above the plot, if there is space for it.
  const marks = (list) => (plot) => {
    const { ctx, bbox } = plot;
    const scale = devicePixelRatio;
    ctx.save();
    ctx.fillStyle = ctx.strokeStyle = color("--mark");
    ctx.font = `${FONT * scale}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.setLineDash([4 * scale, 4 * scale]);
    let free = 0;
    for (const { at, text } of list) {
      const x = plot.valToPos(at, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const width = ctx.measureText(text).width;
      const from = Math.min(x, ctx.canvas.width - width - 2 * scale);
      if (from >= free) {
        ctx.fillText(text, from, bbox.top - 5 * scale);
        free = from + width + GAP * scale;
      }
    }
    ctx.restore();
  };

  // Of the given ticks those whose labels do not overlap; the first of `ticks` have precedence.
  const spaced = (ticks, label) => (plot) => {
    const kept = [];
    for (const value of ticks) {
      const at = plot.valToPos(value, "x");
      const width = widthOf(label(value));
      if (kept.every((other) => Math.abs(at - other.at) >= (width + other.width) / 2 + GAP)) kept.push({ value, at, width });
    }
    return kept.map(({ value }) => value).sort((a, b) => a - b);
  };

  const plot = ({ title, note, x, xName, xValues, ticks, columns, unit, log, lines = [], points = false }) => {
    const heading = document.createElement("h2");
    heading.textContent = title;
    container.append(heading);
    if (note) {
      const below = document.createElement("p");
      below.className = "note";
      below.textContent = note;
      container.append(below);
    }
    const axis = {
      stroke: color("--ink"),
      grid: { stroke: color("--line") },
      ticks: { stroke: color("--line") },
      font,
      labelFont: font,
      labelSize: 20,
    };
    const xLabel = xValues ?? tick;
    const names = Object.keys(columns);
    // A logarithmic scale has no zero.
    const values = names.map((name) => columns[name].map((v) => (log && !(v > 0) ? null : v)));
    return new uPlot(
      {
        width: container.clientWidth,
        height: HEIGHT,
        // Space for the labels of marks, and for half of the last tick's label.
        padding: [24, 24, 0, 0],
        scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (u, low, high) => [0, (high || 1) * 1.08] } },
        axes: [
          {
            ...axis,
            label: xName,
            size: 32,
            space: 56,
            values: (u, found) => found.map(xLabel),
            ...(ticks && { splits: spaced(ticks, xLabel) }),
          },
          {
            ...axis,
            label: unit,
            size: (u, labels) => 20 + Math.max(16, ...(labels ?? []).map(widthOf)),
            values: (u, found) => found.map(tick),
          },
        ],
        series: [
          { label: xName, value: (u, v) => (v == null ? "–" : xValues ? xValues(v) : number(v)) },
          ...names.map((name, n) => ({
            label: name,
            stroke: hue(n, names.length),
            width: 1.5,
            points: { show: points },
            value: (u, v) => number(v),
          })),
        ],
        hooks: { draw: [marks(lines)] },
      },
      [x, ...values],
      container
    );
  };

  // An upper bound is a text: as a line far above the data it would press them to zero.
  const bound = (what, gigabytes) => (gigabytes == null ? "" : `Upper bound: ${number(gigabytes)} GB/s, ${what}.`);

  const all = () => {
    const { time, latency, load } = data;
    const over = { x: time.s, xName: "time, s", lines: time.phases.map(({ name, s }) => ({ at: s, text: name })) };
    const shown = [];
    if (load) {
      const lines = [];
      if (load.knee != null) lines.push({ at: load.knee, text: "knee" });
      if (load.sustained != null && load.sustained !== load.knee) lines.push({ at: load.sustained, text: "sustained" });
      lines.sort((a, b) => a.at - b.at);
      const against = { x: load.offered, xName: "offered rate, requests/s", lines, points: true };
      shown.push(plot({ ...against, title: "Latency by offered rate", columns: load.percentiles, unit: "ms", log: true }));
      const rates = { successful: load.rate, offered: load.offered };
      shown.push(plot({ ...against, title: "Throughput by offered rate", columns: rates, unit: "requests/s" }));
    }
    shown.push(plot({ ...over, title: "Throughput", columns: { successful: time.rate }, unit: "requests/s" }));
    shown.push(
      plot({
        ...over,
        title: "Served throughput: bytes of requests and responses",
        note: bound("the loopback echo", time.ceilings.echo),
        columns: { served: time.bandwidth },
        unit: "GB/s",
      })
    );
    if (time.kernels.some((v) => v != null))
      shown.push(
        plot({
          ...over,
          title: "Kernel bandwidth",
          note: bound("a copy on the device", time.ceilings.copy),
          columns: { kernels: time.kernels },
          unit: "GB/s",
        })
      );
    shown.push(plot({ ...over, title: "Latency", columns: time.percentiles, unit: "ms", log: true }));
    const byPercent = new Map(latency.percents.map((percent, n) => [percent, latency.nines[n]]));
    shown.push(
      plot({
        title: "Latency by percentile, from the scheduled time of each request",
        x: latency.nines,
        xName: "percentile",
        xValues: (v) => String(Number((100 - 100 * 10 ** -v).toFixed(2))),
        ticks: [0, 50, 90, 99, 99.9, 75, 95, 99.5, 25].map((percent) => byPercent.get(percent)),
        columns: latency.parts,
        unit: "ms",
        log: true,
        points: true,
      })
    );
    if (Object.keys(time.errors).length)
      shown.push(plot({ ...over, title: "Errors", columns: time.errors, unit: "errors/s" }));
    return shown;
  };

  let shown = all();
  const again = () => {
    for (const each of shown) each.destroy();
    container.replaceChildren();
    shown = all();
  };
  dark.addEventListener("change", again);
  addEventListener("resize", () => shown.forEach((each) => each.setSize({ width: container.clientWidth, height: HEIGHT })));
})();
