// Latency over time: the median as a line, the 95th percentile as the upper edge of a band. Gaps are gaps.

import { drawn, milliseconds, say, set, byId } from "/dashboard/dom.js";

const HEIGHT = 140;
const TOP = 18;
const BOTTOM = 22;

export function chart(id, name, times, windowS) {
  const svg = byId(id);
  const width = Math.max(240, Math.round(svg.clientWidth));
  const { p50, p95 } = times.series;
  const top = niceTop(Math.max(1, ...p95.filter((value) => value !== null)));
  const x = (at) => (at / Math.max(1, p50.length - 1)) * (width - 2) + 1;
  const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    parts.push(drawn("line", { x1: 0, x2: width, y1: y(top * share), y2: y(top * share), class: share ? "grid" : "base" }));
    if (share) parts.push(label(0, y(top * share) - 4, milliseconds(top * share), "start"));
  }
  for (const [from, to] of runs(p95)) {
    const upper = range(from, to).map((at) => `${x(at)},${y(p95[at])}`);
    const lower = range(from, to).reverse().map((at) => `${x(at)},${y(p50[at])}`);
    if (to > from) parts.push(drawn("polygon", { points: [...upper, ...lower].join(" "), class: "band" }));
    parts.push(stroke(upper, "p95"));
    parts.push(stroke(range(from, to).map((at) => `${x(at)},${y(p50[at])}`), "p50"));
  }
  parts.push(label(0, HEIGHT - 6, `${Math.round(windowS / 60)} minutes ago`, "start"));
  parts.push(label(width, HEIGHT - 6, "now", "end"));
  set(svg, "viewBox", `0 0 ${width} ${HEIGHT}`);
  set(svg, "height", HEIGHT);
  set(svg, "aria-label", summary(name, times));
  svg.replaceChildren(...parts);
  say(byId(`${id}-now`), times.count ? `median ${milliseconds(times.p50)}, 95th ${milliseconds(times.p95)}` : "nothing yet");
}

function summary(name, times) {
  if (!times.count) return `${name}: nothing in the last five minutes`;
  return `${name}, last five minutes: median ${milliseconds(times.p50)}, 95th percentile ${milliseconds(times.p95)}, 99th ${milliseconds(times.p99)}`;
}

function label(x, y, text, anchor) {
  return drawn("text", { x, y, "text-anchor": anchor }, text);
}

// One point alone would be invisible as a line.
function stroke(points, kind) {
  if (points.length > 1) return drawn("polyline", { points: points.join(" "), class: kind });
  const [cx, cy] = points[0].split(",");
  return drawn("circle", { cx, cy, r: 2, class: kind });
}

function runs(values) {
  const found = [];
  let from = null;
  values.forEach((value, at) => {
    if (value !== null && from === null) from = at;
    if (value === null && from !== null) {
      found.push([from, at - 1]);
      from = null;
    }
  });
  if (from !== null) found.push([from, values.length - 1]);
  return found;
}

function range(from, to) {
  return Array.from({ length: to - from + 1 }, (_, at) => from + at);
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 10].map((step) => step * power).find((step) => step >= value);
}
