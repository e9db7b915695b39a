// Recent requests: each a line with the shares of its time, which opens into a waterfall. And what had to be done again.

import { ago, byId, bytes, count, keyed, make, milliseconds, plural, say, set } from "/dashboard/dom.js";

const PARTS = {
  receive: "receive",
  queue: "queue",
  admit: "admit",
  prefill: "prefill",
  transfer: "KV exposed",
  decode: "decode",
  delivery: "deliver",
};
const FEW = 12;
const opened = new Map(); // request -> what was last known of it
let all = false;

export function legend() {
  const words = Object.entries(PARTS).map(([part, name]) => make("li", { "data-part": part }, name));
  byId("legend").replaceChildren(...words);
}

export function requests(recent) {
  const shown = all ? recent : recent.slice(0, FEW);
  const now = new Set(shown.map((one) => one.request));
  for (const one of recent) {
    one.heardAt ??= performance.now();
    if (opened.has(one.request)) opened.set(one.request, one);
  }
  const told = new Set(recent.map((one) => one.request));
  for (const [request, one] of opened) {
    if (one.running && !told.has(request)) opened.set(request, { ...one, running: false, outcome: "not told of any more" });
  }
  const kept = [...opened.values()].filter((one) => !now.has(one.request)); // whoever reads one should not lose it
  byId("no-requests").hidden = recent.length > 0;
  keyed(byId("requests"), [...shown, ...kept], (one) => one.request, newLine, showLine);
  const more = byId("more");
  more.hidden = recent.length <= FEW;
  say(more, all ? `Show ${FEW}` : `Show ${recent.length}`);
  set(more, "aria-expanded", String(all));
  more.onclick = () => {
    all = !all;
    requests(recent);
  };
}

function newLine(one) {
  const parts = {
    id: make("span", { class: "id" }),
    outcome: make("span", { class: "outcome" }),
    route: make("span", { class: "route" }),
    tokens: make("span", { class: "tokens" }),
    total: make("span", { class: "total" }),
    shares: make("span", { class: "shares", "aria-hidden": "true" }),
  };
  const detail = make("div", { class: "detail", id: `detail-${one.request}`, hidden: true });
  const button = make(
    "button",
    { type: "button", class: "line", "aria-expanded": "false", "aria-controls": detail.id },
    parts.id, parts.outcome, parts.route, parts.tokens, parts.total, parts.shares,
  );
  const line = make("li", { class: "request" }, button, detail);
  line.parts = { ...parts, button, detail };
  button.addEventListener("click", () => toggle(line));
  return line;
}

function toggle(line) {
  const { request } = line.known;
  if (opened.has(request)) opened.delete(request);
  else opened.set(request, line.known);
  showLine(line, line.known);
}

function showLine(line, one) {
  const { parts } = line;
  line.known = one;
  line.dataset.tone = tone(one);
  say(parts.id, one.id);
  say(parts.outcome, when(one));
  say(parts.route, route(one));
  say(parts.tokens, tokens(one));
  say(parts.total, milliseconds(one.total_ms));
  keyed(parts.shares, one.parts, keyOf, newShare, (node, part) => {
    node.style.flexGrow = String(part.ms);
    set(node, "data-lost", part.lost); // it may be lost later than it began
  });
  const open = opened.has(one.request);
  set(parts.button, "aria-expanded", String(open));
  parts.detail.hidden = !open;
  if (open) detail(parts.detail, one);
}

const keyOf = (part) => `${part.name} ${part.attempt} ${part.start_ms}`;

function newShare(part) {
  return make("span", { "data-part": part.name });
}

function detail(node, one) {
  if (!node.firstChild) node.append(make("ol", { class: "waterfall", "aria-label": "Where its time went" }), make("dl", { class: "facts" }));
  const [waterfall, facts] = node.children;
  set(waterfall, "data-total-ms", one.total_ms);
  const rows = [...one.parts, { name: "total", start_ms: 0, ms: one.total_ms, attempt: 0, lost: false }];
  keyed(waterfall, rows, (part) => (part.name === "total" ? "total" : keyOf(part)), newBar, (row, part) => {
    const { bar, time, share, name } = row.parts;
    const most = Math.max(one.total_ms, 0.001);
    bar.style.marginInlineStart = `${(100 * part.start_ms) / most}%`;
    bar.style.width = `${(100 * part.ms) / most}%`;
    set(bar, "data-lost", part.lost);
    set(row, "data-ms", part.ms);
    say(name, label(part, one));
    say(time, milliseconds(part.ms));
    say(share, part.name === "total" ? "" : `${Math.round((100 * part.ms) / most)} %`);
  });
  keyed(facts, factsOf(one), ([name]) => name, ([name]) => make("div", {}, make("dt", {}, name), make("dd")), (pair, [, value]) => say(pair.lastElementChild, value));
}

function newBar(part) {
  const parts = {
    name: make("span", { class: "name" }),
    bar: make("span", { class: "bar", "data-part": part.name }),
    time: make("span", { class: "time" }),
    share: make("span", { class: "share" }),
  };
  const row = make("li", { "data-part": part.name }, parts.name, make("span", { class: "track", "aria-hidden": "true" }, parts.bar), parts.time, parts.share);
  row.parts = parts;
  return row;
}

function label(part, one) {
  if (part.name === "total") return one.running ? "so far" : "total";
  const name = part.lost ? `${PARTS[part.name]}, lost` : PARTS[part.name];
  return part.attempt && one.attempts.length > 1 ? `${name} (${part.attempt})` : name;
}

function factsOf(one) {
  return [
    ["Outcome", one.waiting_for ? `waiting: ${one.waiting_for}` : one.outcome],
    ["First token", milliseconds(one.ttft_ms)],
    ["Prompt", `${plural(one.prompt_tokens, "token", "tokens")}, ${count(one.cached_tokens)} cached`],
    ["Written", one.output_tokens === null ? "–" : plural(one.output_tokens, "token", "tokens")],
    ["KV moved", one.kv_bytes ? `${bytes(one.kv_bytes)} over ${one.transport ?? "?"}` : "none"],
    ...one.attempts.map((attempt, at) => [`Attempt ${at + 1}`, `${attempt.prefill ?? "local"} → ${attempt.decode}: ${attempt.outcome}`]),
  ];
}

function when(one) {
  if (one.running) return one.decode ? "running" : "waiting";
  const endedAgo = one.ago_s - one.total_ms / 1000 + (performance.now() - one.heardAt) / 1000;
  return `${one.outcome.split(":")[0]}, ${ago(Math.max(0, endedAgo))}`;
}

function tone(one) {
  if (one.running) return "busy";
  if (one.outcome === "ok") return "good";
  return ["cancelled", "not told of any more"].includes(one.outcome) ? "off" : "bad";
}

function route(one) {
  if (!one.decode) return "–";
  const path = `${one.prefill ?? "?"} → ${one.decode}`;
  return one.attempts.length > 1 ? `${path}, attempt ${one.attempts.length}` : path;
}

function tokens(one) {
  return one.output_tokens === null ? `${count(one.prompt_tokens)} in` : `${count(one.prompt_tokens)} in, ${count(one.output_tokens)} out`;
}

export function failovers(list) {
  byId("no-failovers").hidden = list.length > 0;
  keyed(byId("failovers"), list.slice(0, 20), (one) => `${one.request} ${one.from} ${one.attempt}`, newFailover, (row, one) => {
    const [when, what, id, why] = row.children;
    say(when, ago(one.ago_s));
    say(what, `${one.from} → ${one.to ?? (one.request_outcome === "running" ? "waiting" : "nobody")}`);
    say(id, one.id);
    say(why, one.why);
  });
}

function newFailover() {
  return make("li", {}, make("span", { class: "when" }), make("span", { class: "route" }), make("span", { class: "id" }), make("span", { class: "why" }));
}
