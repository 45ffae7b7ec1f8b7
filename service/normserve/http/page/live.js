// Reads GET /metrics every two seconds, as Prometheus does, and shows what happened between readings: the same
// figures as everywhere else, of every process of a fleet, and nothing that the server must keep for this page.

import { askForKey, credentials, isRefused, isWaitingForKey } from "./key.js";
import { Interval, Reading } from "./metrics.js";
import { Plot } from "./plots.js";
import * as units from "./units.js";

const EVERY_MS = 2000;
// Rates are taken over so many readings: enough for a figure that can be read, few enough to be live.
const WINDOW = 3;
const PATIENCE_MS = 5000;

const STAGES = [
  ...["recv", "relay_in", "parse", "queue", "copy_in", "kernel", "copy_out"],
  ...["resume", "serialize", "relay_out", "send"],
];
const OPERATIONS = ["layer_norm", "rms_norm", "group_norm"].flatMap((op) => [`${op} forward`, `${op} backward`]);
const OUTCOMES = { 2: "answered", 4: "refused", 5: "failed" };
const LEFT = "client left";
const PEAK = "peak";

const isOperation = (labels) => labels.op.endsWith("_norm");
const isResult = (labels) => isOperation(labels) && labels.code_class === "2xx";
const operation = (labels) => `${labels.op} ${labels.pass}`;
const outcome = ({ op, code }) => {
  if (!isOperation({ op })) return null;
  return code === "499" ? LEFT : (OUTCOMES[code[0]] ?? null);
};

const plots = {
  kernel: new Plot("plot-kernel", units.bandwidth, { log: true, dashed: PEAK, known: OPERATIONS }),
  stages: new Plot("plot-stages", units.duration, { stacked: true, known: STAGES }),
  latency: new Plot("plot-latency", units.duration, { known: ["p50", "p99"] }),
  requests: new Plot("plot-requests", units.rate, { known: ["answered", "refused", LEFT, "-", "failed"] }),
  throughput: new Plot("plot-throughput", units.bandwidth, { known: ["tcp", "unix"] }),
};

const readings = [];

function show(id, text) {
  document.getElementById(id).textContent = text;
}

function showState(text, isGood) {
  const element = document.getElementById("state");
  element.textContent = text;
  element.className = `state ${isGood ? "good" : "bad"}`;
}

function ordered(values, names) {
  return new Map(names.filter((name) => values.has(name)).map((name) => [name, values.get(name)]));
}

function showInterval(interval) {
  const { after: now } = interval;
  const everything = () => "all";
  const peak = Math.max(...now.all("normserve_device_copy_bandwidth_bytes_per_second").map((each) => each.value));

  const kernel = ["normserve_kernel_bytes_total", "normserve_kernel_seconds_total"];
  const kernels = interval.ratio(...kernel, operation);
  const lines = ordered(kernels, OPERATIONS);
  plots.kernel.add(now.time, Number.isFinite(peak) ? lines.set(PEAK, peak) : lines);
  const mean = interval.ratio(...kernel, everything).get("all");
  show("kernel", units.bandwidth(mean));
  show("share", mean === undefined ? "nothing ran just now" : `${units.percent(mean / peak)} of peak bandwidth`);

  const stage = "normserve_stage_duration_seconds";
  const stages = interval.ratio(`${stage}_sum`, `${stage}_count`, (labels) => labels.stage);
  plots.stages.add(now.time, stages.has("kernel") ? ordered(stages, STAGES) : new Map());

  const [median, tail] = [0.5, 0.99].map((share) =>
    interval.quantile(share, "normserve_request_duration_seconds", isResult),
  );
  plots.latency.add(now.time, median === null ? new Map() : new Map([["p50", median], ["p99", tail]]));
  show("latency", units.duration(median));
  show("tail", median === null ? "median" : `median; p99 ${units.duration(tail)}`);

  const answered = interval.growth("normserve_requests_total", outcome);
  const rates = new Map([...answered].map(([name, count]) => [name, count / interval.seconds]));
  plots.requests.add(now.time, rates.size ? rates : new Map([["answered", 0]]));
  const wrong = (rates.get("refused") ?? 0) + (rates.get("failed") ?? 0);
  show("requests", units.rate([...rates.values()].reduce((sum, each) => sum + each, 0)));
  show("errors", wrong ? `of which ${units.rate(wrong)} refused or failed` : "none refused, none failed");

  const ofOperation = (labels) => (isOperation(labels) ? labels.transport : null);
  const served = interval.growth("normserve_body_bytes_total", ofOperation);
  const throughput = new Map([...served].map(([transport, bytes]) => [transport, bytes / interval.seconds]));
  plots.throughput.add(now.time, throughput);
  show("throughput", units.bandwidth([...throughput.values()].reduce((sum, each) => sum + each, 0)));
}

function showFacts(now) {
  const { labels } = now.all("normserve_build_info")[0] ?? { labels: {} };
  show("runs", labels.device ? `${labels.version} · ${labels.backend} · ${labels.device}` : "");
  const peak = now.all("normserve_device_copy_bandwidth_bytes_per_second").map((each) => units.bandwidth(each.value));
  const kinds = (name, label) =>
    [...now.by(name, (labels) => labels[label])].map(([kind, value]) => `${units.bytes(value)} ${kind}`).join(", ");
  const facts = {
    Device: labels.device ?? "starting",
    Backend: labels.backend ?? "starting",
    "Peak bandwidth": peak.join(", ") || "not measured yet",
    "Device memory": kinds("normserve_device_memory_bytes", "kind") || "–",
    "Memory of bodies": kinds("normserve_slab_bytes", "state"),
    "In flight": `${now.sum("normserve_inflight_requests")}, ${units.bytes(now.sum("normserve_inflight_bytes"))}`,
    "Waiting for the device": `${now.sum("normserve_queue_requests")}`,
    "Turned away": `${now.sum("normserve_rejected_total")} since the start`,
    "Kernels compiled late": `${now.sum("normserve_compiles_total")} since the start`,
  };
  const [connections, shared] = ["connections", "bytes"].map((what) => now.sum(`normserve_local_${what}`));
  if (connections || shared) facts["Shared memory"] = `${units.bytes(shared)}, ${connections} connections`;
  const processes = now.all("normserve_process_up");
  if (processes.length) facts.Processes = `${now.sum("normserve_process_up")} of ${processes.length} answer`;
  document.getElementById("facts").replaceChildren(
    ...Object.entries(facts).map(([name, value]) => {
      const row = document.createElement("tr");
      row.append(document.createElement("th"), document.createElement("td"));
      [row.firstChild.textContent, row.lastChild.textContent] = [name, value];
      row.firstChild.scope = "row";
      return row;
    }),
  );
}

async function ask(path) {
  return fetch(path, { cache: "no-store", headers: credentials(), signal: AbortSignal.timeout(PATIENCE_MS) });
}

async function read() {
  const answer = await ask("metrics");
  if (isRefused(answer)) {
    showState("an API key is asked for", false);
    askForKey((await answer.json()).detail);
    readings.splice(0);
    return;
  }
  if (!answer.ok) throw new Error(`GET /metrics answered ${answer.status}`);
  const now = new Reading(await answer.text(), Date.now() / 1000);
  const ready = now.sum("normserve_ready");
  const processes = Math.max(1, now.all("normserve_process_up").length);
  if (ready === processes) showState("ready", true);
  else if (ready) showState(`${ready} of ${processes} processes are ready`, false);
  else showState((await (await ask("readyz")).json()).detail, false);
  showFacts(now);
  if (readings.length) showInterval(new Interval(readings[0], now));
  readings.push(now);
  readings.splice(0, readings.length - WINDOW);
}

async function forever() {
  for (;;) {
    const began = performance.now();
    if (!document.hidden && !isWaitingForKey()) {
      try {
        await read();
      } catch {
        showState("the server does not answer", false);
        readings.splice(0);
      }
    }
    await new Promise((resume) => setTimeout(resume, Math.max(0, EVERY_MS - (performance.now() - began))));
  }
}

// What the server takes for its address is not the one by which a proxy is reached.
const here = new URL(".", location.href).href.replace(/\/$/, "");
for (const line of document.querySelectorAll("pre code")) {
  line.textContent = line.textContent.replaceAll(document.body.dataset.url, here);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const plot of Object.values(plots)) if (plot.plot) plot.draw();
});
document.addEventListener("visibilitychange", () => readings.splice(0));
forever();
