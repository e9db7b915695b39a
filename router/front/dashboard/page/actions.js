// What operators do from here. Every action is asked about first.

import { byId, say } from "/dashboard/dom.js";
import { headers } from "/dashboard/key.js";

const dialog = byId("ask");
let wanted = null; // what a yes means; null while nothing is asked
let toasted = 0;

export function askDrain(worker) {
  open({
    title: `Drain ${worker}?`,
    text: "It takes no new work. What runs there may end, or goes on elsewhere after a while; then it starts again under the same name.",
    yes: "Drain",
    act: () => post("/admin/drain", { program: worker }),
    done: `${worker} is draining.`,
  });
}

export function askScale(pool, now) {
  open({
    title: `Scale the ${pool} pool`,
    text: `${now} ${now === 1 ? "worker is" : "workers are"} there now. Those that have to go drain first.`,
    yes: "Scale",
    count: now,
    act: () => post("/admin/scale", { pool, workers: byId("count").valueAsNumber }),
    done: `The ${pool} pool is being changed.`,
  });
}

function open(question) {
  wanted = question;
  say(byId("ask-title"), question.title);
  say(byId("ask-text"), question.text);
  say(byId("ask-yes"), question.yes);
  say(byId("ask-problem"), "");
  byId("ask-count").hidden = question.count === undefined;
  byId("count").value = question.count ?? "";
  byId("ask-yes").disabled = false;
  dialog.showModal();
}

async function act() {
  const question = wanted;
  if (question === null || byId("ask-yes").disabled) return;
  if (!byId("ask-count").hidden && !byId("count").reportValidity()) return;
  byId("ask-yes").disabled = true;
  const problem = await question.act();
  if (wanted !== question) toast(problem || question.done); // closed meanwhile, or another one is open
  else if (problem) {
    byId("ask-yes").disabled = false;
    say(byId("ask-problem"), problem);
  } else {
    dialog.close();
    toast(question.done);
  }
}

async function post(path, body) {
  try {
    const answer = await fetch(path, {
      method: "POST",
      headers: { ...headers(), "content-type": "application/json", "x-headrace-action": "1" },
      body: JSON.stringify(body),
      credentials: "omit",
    });
    if (answer.ok) return "";
    return (await answer.json()).error?.message ?? `it answered ${answer.status}`;
  } catch {
    return "The router does not answer.";
  }
}

function toast(text) {
  const node = byId("toast");
  say(node, text);
  node.dataset.shown = "";
  clearTimeout(toasted);
  toasted = setTimeout(() => {
    delete node.dataset.shown;
    say(node, "");
  }, 4000);
}

byId("ask-no").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => {
  if (!dialog.open) wanted = null; // else the next question is open already
});
byId("ask-yes").addEventListener("click", act);
byId("count").addEventListener("keydown", (event) => {
  if (event.key === "Enter") act();
});
