// The two pools, and what moves between them.

import { askDrain, askScale } from "/dashboard/actions.js";
import { ago, byId, bytes, count, duration, keyed, make, milliseconds, plural, say, set } from "/dashboard/dom.js";

const STATES = {
  ready: ["good", "ready"],
  draining: ["busy", "draining"],
  starting: ["busy", "starting"],
  connecting: ["busy", "connecting"],
  suspect: ["bad", "silent"],
  lost: ["bad", "lost"],
  away: ["bad", "not reachable"],
  gone: ["bad", "gone"],
  left: ["off", "has left"],
};

export function pools(data) {
  for (const role of ["prefill", "decode"]) pool(role, data.pools[role]);
  table(data.flows);
}

function pool(role, { workers, gone }) {
  const section = document.querySelector(`.pool[data-role="${role}"]`);
  const part = (name) => section.querySelector(`[data-part="${name}"]`);
  const ready = workers.filter((worker) => worker.state === "ready").length;
  const wanted = workers.length + gone.filter((life) => !life.left_in_order).length;
  say(part("summary"), ready === wanted ? plural(ready, "worker", "workers") : `${ready} of ${wanted} ready`);
  part("scale").onclick = () => askScale(role, wanted);
  const away = gone.map((life) => ({ ...life, state: life.left_in_order ? "left" : "gone" }));
  const all = [...workers, ...away].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  keyed(part("workers"), all, (worker) => worker.name, newCard, (card, worker) => show(card, worker, role));
}

function newCard() {
  const bar = make("span", { class: "fill" });
  const parts = {
    name: make("h4"),
    state: make("p", { class: "state" }),
    meter: make("div", { class: "meter", role: "meter", "aria-valuemin": 0, "aria-label": "Blocks in use" }, bar),
    numbers: make("dl", { class: "numbers" }),
    about: make("p", { class: "about quiet" }),
    drain: make("button", { type: "button", class: "plain" }, "Drain", make("span", { class: "unseen" })),
  };
  const card = make(
    "li",
    { class: "worker" },
    make("div", { class: "head" }, parts.name, parts.state),
    parts.meter,
    parts.numbers,
    make("div", { class: "foot" }, parts.about, parts.drain),
  );
  card.parts = { ...parts, bar };
  return card;
}

function show(card, worker, role) {
  const { parts } = card;
  const [tone, text] = STATES[worker.state] ?? ["bad", worker.state];
  const here = worker.blocks !== undefined;
  card.dataset.tone = tone;
  say(parts.name, worker.name);
  say(parts.state, here ? text : `${text} ${ago(worker.heard_s)}`);
  parts.meter.hidden = !here || !worker.blocks;
  if (here && worker.blocks) {
    set(parts.meter, "aria-valuemax", worker.blocks);
    set(parts.meter, "aria-valuenow", worker.blocks_used);
    set(parts.meter, "aria-valuetext", `${worker.blocks_used} of ${worker.blocks}`);
    parts.bar.style.width = `${(100 * worker.blocks_used) / worker.blocks}%`;
  }
  const said = here ? numbers(worker, role) : [];
  keyed(parts.numbers, said, ([name]) => name, newNumber, (node, [, value]) => say(node.lastElementChild, value));
  say(parts.about, about(worker, here));
  parts.about.title = `epoch ${worker.epoch}`;
  parts.drain.hidden = worker.state !== "ready";
  say(parts.drain.lastElementChild, ` ${worker.name}`);
  parts.drain.onclick = () => askDrain(worker.name);
}

function numbers(worker, role) {
  const blocks = ["Blocks", `${count(worker.blocks_used)} / ${count(worker.blocks)}`];
  if (role === "prefill") {
    return [["Running", count(worker.running)], ["Queued", `${count(worker.queued_tokens)} tok`], ["Attempts", count(worker.attempts)], blocks];
  }
  const waiting = worker.waiting + worker.handing_off;
  return [["Batch", count(worker.running)], ["To come", count(waiting)], ["Queued", `${count(worker.queued_tokens)} tok`], blocks];
}

function newNumber([name]) {
  return make("div", {}, make("dt", {}, name), make("dd"));
}

function about(worker, here) {
  const words = [];
  if (here && worker.epoch !== "0".repeat(16)) words.push(`up ${duration(Math.max(1, worker.met_s)).replace(".0", "")}`);
  if (worker.restarts) words.push(plural(worker.restarts, "restart", "restarts"));
  if (here && worker.away_s !== null && worker.met_s < 60) words.push(`back after ${duration(worker.away_s)}`);
  if (worker.slots_set_aside) words.push(plural(worker.slots_set_aside, "slot set aside", "slots set aside"));
  return words.join(", ");
}

function table(flows) {
  const most = [...flows].sort((a, b) => b.under_way - a.under_way || b.bytes - a.bytes).slice(0, 12);
  byId("no-handoffs").hidden = flows.length > 0;
  byId("handoffs").closest("table").hidden = flows.length === 0;
  keyed(byId("handoffs"), most, (flow) => `${flow.prefill} ${flow.decode}`, newPair, (row, flow) => {
    const { under_way, handoffs, exposed_ms } = flow;
    say(row.cells[1], under_way ? `${count(under_way)} (${count(flow.tokens_under_way)} tok)` : "–");
    say(row.cells[2], count(handoffs));
    say(row.cells[3], bytes(flow.bytes));
    say(row.cells[4], milliseconds(exposed_ms));
    set(row, "data-under-way", under_way > 0);
  });
}

function newPair({ prefill, decode }) {
  const names = make("th", { scope: "row" }, prefill, make("span", { class: "arrow", "aria-label": "to" }, "→"), decode);
  const cells = ["Under way", "Hand-offs", "Moved", "Decode waited"].map((name) => make("td", { class: "number", "data-name": name }));
  return make("tr", {}, names, ...cells);
}
