// Asks once a second what there is, and shows it. Hidden or paused, it does not ask.

import { chart } from "/dashboard/charts.js";
import { ago, byId, count, keyed, make, milliseconds, say } from "/dashboard/dom.js";
import { channel } from "/dashboard/flow.js";
import { forget, headers, known, remember } from "/dashboard/key.js";
import { pools } from "/dashboard/pools.js";
import { failovers, legend, requests } from "/dashboard/requests.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 4000;
const state = { paused: false, locked: false, key: 0, last: null, broken: false, heardAt: 0, timer: 0 };

async function look() {
  clearTimeout(state.timer);
  if (state.paused || state.locked || document.hidden) return;
  const began = performance.now();
  await ask();
  freshness();
  clearTimeout(state.timer); // somebody may have looked meanwhile
  state.timer = setTimeout(look, Math.max(100, EVERY_MS - (performance.now() - began)));
}

async function ask() {
  const key = state.key; // counts: an answer to a key that was forgotten meanwhile is nobody's
  const { status, data } = await heard();
  if (key !== state.key) return;
  if (status === 401 || status === 403) lock(status);
  else if (data !== null) {
    state.last = data;
    state.heardAt = performance.now();
    draw(data);
  }
}

async function heard() {
  try {
    const answer = await fetch("/dashboard/data", {
      headers: headers(),
      cache: "no-store",
      credentials: "omit",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    return { status: answer.status, data: answer.ok ? await answer.json() : null };
  } catch {
    return { status: 0, data: null }; // nobody answered: how old the picture is says so
  }
}

// What this page does not understand must not look like a live picture: some of it would be from before.
function draw(data) {
  try {
    show(data);
    state.broken = false;
  } catch (error) {
    state.broken = true;
    byId("health").dataset.state = "bad";
    say(byId("health"), "this page cannot draw what the router tells; load it again");
    console.error(error);
  }
}

// Also shown again, as it was, when the window changes: that makes it no newer.
function show(data) {
  byId("main").hidden = false;
  byId("sign-out").hidden = !known();
  say(byId("model"), data.model);
  const health = byId("health");
  health.dataset.state = data.ready ? "good" : "bad";
  say(health, data.ready ? "serving" : data.reasons.join("; "));
  figures(data);
  pools(data);
  channel(data.flows);
  chart("ttft", "Time to first token", data.recent.ttft, data.recent.window_s);
  chart("itl", "Time between tokens", data.recent.itl, data.recent.window_s);
  requests(data.requests);
  failovers(data.failovers);
}

function figures({ streams, queue, recent }) {
  const hits = recent.prompt_tokens ? `${Math.round((100 * recent.cached_tokens) / recent.prompt_tokens)} %` : "–";
  const rows = [
    ["Streams", count(streams), "being served"],
    ["Waiting", count(queue.waiting), `of ${count(queue.limit)} at most`],
    ["First token", milliseconds(recent.ttft.p50), `95th ${milliseconds(recent.ttft.p95)}`],
    ["Between tokens", milliseconds(recent.itl.p50), `95th ${milliseconds(recent.itl.p95)}`],
    ["Cached", hits, "of prompt tokens"],
    ["Ended", count(recent.ended), recent.bad ? `${count(recent.bad)} badly` : "in five minutes"],
  ];
  keyed(byId("figures"), rows, ([name]) => name, newFigure, (node, [, value, more]) => {
    say(node.children[1], value);
    say(node.children[2], more);
  });
}

function newFigure([name]) {
  return make("div", {}, make("dt", {}, name), make("dd", { class: "value" }), make("dd", { class: "quiet" }));
}

function freshness() {
  const seconds = (performance.now() - state.heardAt) / 1000;
  const stale = state.last !== null && seconds > 3;
  document.body.classList.toggle("stale", state.broken || (stale && !state.paused));
  const age = state.last === null ? "" : stale ? `as of ${ago(seconds)}` : "live";
  say(byId("freshness"), state.broken ? "cannot be drawn" : state.paused ? "paused" : age);
  if (state.last === null && !state.locked) say(byId("health"), "the router does not answer");
}

function lock(status) {
  state.locked = true;
  state.key += 1;
  state.last = null; // nothing to show again when the window changes
  state.broken = false;
  const refused = known();
  forget();
  byId("main").hidden = true;
  byId("sign-out").hidden = true;
  byId("key-form").hidden = false;
  byId("health").dataset.state = "unknown";
  say(byId("health"), "locked");
  say(byId("key-why"), !refused ? "" : status === 403 ? "This key is no operator’s." : "This key is not known here.");
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  remember(byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  state.locked = false;
  look();
});

byId("sign-out").addEventListener("click", () => {
  forget();
  lock(401);
});

byId("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  byId("pause").setAttribute("aria-pressed", String(state.paused));
  say(byId("pause"), state.paused ? "Go on" : "Pause");
  freshness();
  look();
});

document.addEventListener("visibilitychange", look);
addEventListener("resize", () => state.last && draw(state.last));
setInterval(freshness, 1000);
legend();
look();
