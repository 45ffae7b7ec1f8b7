"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const room = document.getElementById("plots");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const SERIES = {
    light: ["#0b62c4", "#b4540a", "#1a7f4b", "#8a3ab9", "#b3261e", "#5f6b7a"],
    dark: ["#6cb2ff", "#ff9d4d", "#5fd39a", "#cf9bff", "#ff8a80", "#aab4c2"],
  };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // A few series have colours that are told apart easily; of many, neighbours have neighbouring ones.
  const hue = (n, count) =>
    count > 6
      ? `hsl(${220 - (220 * n) / (count - 1)} 65% ${dark.matches ? 65 : 42}%)`
      : SERIES[dark.matches ? "dark" : "light"][n];

  const number = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    return size >= 100 ? value.toFixed(0) : size >= 1 ? value.toFixed(2) : String(Number(value.toPrecision(2)));
  };

  // Vertical lines with a word beside them.
  const marks = (list) => (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.fillStyle = ctx.strokeStyle = color("--mark");
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    let free = -Infinity;
    for (const { at, text } of list) {
      const x = plot.valToPos(at, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const from = x + 4 * devicePixelRatio;
      if (from >= free) {
        ctx.fillText(text, from, bbox.top + 12 * devicePixelRatio);
        free = from + ctx.measureText(text).width + 8 * devicePixelRatio;
      }
    }
    ctx.restore();
  };

  const plot = ({ title, x, xName, xValues, splits, columns, unit, log, lines = [], points = false }) => {
    const heading = document.createElement("h2");
    heading.textContent = title;
    room.append(heading);
    const axis = { stroke: color("--ink"), grid: { stroke: color("--line") }, ticks: { stroke: color("--line") } };
    const names = Object.keys(columns);
    // A logarithm knows no zero.
    const values = names.map((name) => columns[name].map((v) => (log && !(v > 0) ? null : v)));
    const shown = new uPlot(
      {
        width: room.clientWidth,
        height: 280,
        scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (u, low, high) => [0, (high || 1) * 1.15] } },
        axes: [
          { ...axis, label: xName, ...(xValues && { values: (u, found) => found.map(xValues) }), ...(splits && { splits: () => splits }) },
          { ...axis, label: unit, size: 64, values: (u, found) => found.map((v) => (v == null ? "" : number(v))) },
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
      room
    );
    return shown;
  };

  const level = (value) => data.time.s.map(() => value);

  const all = () => {
    const { time, latency, load } = data;
    const phases = time.phases.map(({ name, s }) => ({ at: s, text: name }));
    const over = { x: time.s, xName: "seconds", lines: phases };
    const shown = [];
    if (load) {
      const lines = [{ at: load.knee, text: "knee" }];
      if (load.sustained != null && load.sustained > load.knee) lines.push({ at: load.sustained, text: "sustained" });
      const against = { x: load.offered, xName: "requests offered a second", lines, points: true };
      shown.push(plot({ ...against, title: "Latency against load", columns: load.percentiles, unit: "ms", log: true }));
      shown.push(
        plot({ ...against, title: "Answered against load", columns: { answered: load.rate, offered: load.offered }, unit: "requests/s" })
      );
    }
    shown.push(plot({ ...over, title: "Throughput", columns: { answered: time.rate }, unit: "requests/s" }));
    const moved = { "end to end": time.bandwidth };
    if (time.ceilings.echo != null) moved["loopback echo"] = level(time.ceilings.echo);
    shown.push(plot({ ...over, title: "Bytes in and out", columns: moved, unit: "GB/s" }));
    if (time.kernels.some((v) => v != null)) {
      const kernels = { kernels: time.kernels };
      if (time.ceilings.copy != null) kernels["device copy"] = level(time.ceilings.copy);
      shown.push(plot({ ...over, title: "Kernel bandwidth", columns: kernels, unit: "GB/s" }));
    }
    shown.push(plot({ ...over, title: "Latency over time", columns: time.percentiles, unit: "ms", log: true }));
    shown.push(
      plot({
        title: "Latency by percentile, from when a request was due",
        x: latency.nines,
        xName: "per cent",
        xValues: (v) => String(Number((100 - 100 * 10 ** -v).toFixed(2))),
        splits: latency.nines,
        columns: latency.parts,
        unit: "ms",
        log: true,
        points: true,
      })
    );
    if (Object.keys(time.errors).length)
      shown.push(plot({ ...over, title: "Rejections and errors", columns: time.errors, unit: "a second" }));
    return shown;
  };

  let shown = all();
  const again = () => {
    for (const each of shown) each.destroy();
    room.replaceChildren();
    shown = all();
  };
  dark.addEventListener("change", again);
  addEventListener("resize", () => shown.forEach((each) => each.setSize({ width: room.clientWidth, height: 280 })));
})();
