// The channel between the pools: one ribbon for each pair that hands KV over. How wide: what moved in the last minute.
// Something under way runs along it. For eyes only; the table below says the same.

import { byId, bytes, drawn, say, set } from "/dashboard/dom.js";

export function channel(flows) {
  const svg = byId("flow");
  const box = svg.getBoundingClientRect();
  const moved = flows.reduce((sum, flow) => sum + flow.bytes, 0);
  const underWay = flows.reduce((sum, flow) => sum + flow.under_way, 0);
  say(byId("flow-caption"), underWay ? `${underWay} under way` : moved ? `${bytes(moved)} a minute` : "KV");
  if (!box.width || !box.height) return; // narrow screens have the table alone
  const most = Math.max(1, ...flows.map((flow) => flow.bytes));
  const ribbons = [];
  for (const flow of flows) {
    const from = middle("prefill", flow.prefill, box);
    const to = middle("decode", flow.decode, box);
    if (from === null || to === null) continue;
    const bend = box.width * 0.5;
    const d = `M0,${from} C${bend},${from} ${box.width - bend},${to} ${box.width},${to}`;
    const width = 1.5 + 8 * Math.sqrt(flow.bytes / most) * (flow.bytes > 0);
    ribbons.push(drawn("path", { d, class: "ribbon", "stroke-width": width.toFixed(1) }));
    if (flow.under_way) {
      ribbons.push(drawn("path", { d, class: "current", "stroke-width": Math.max(2, width / 2).toFixed(1) }));
    }
  }
  set(svg, "viewBox", `0 0 ${box.width} ${box.height}`);
  if (same(svg, ribbons)) return; // else the current would begin anew each second
  svg.replaceChildren(...ribbons);
}

function same(svg, ribbons) {
  const shape = (node) => ["d", "class", "stroke-width"].map((name) => node.getAttribute(name)).join("|");
  return svg.childNodes.length === ribbons.length && ribbons.every((node, at) => shape(node) === shape(svg.childNodes[at]));
}

// Where this worker's card is, seen from the channel.
function middle(role, name, box) {
  const card = [...document.querySelectorAll(`.pool[data-role="${role}"] .worker`)].find((one) => one.dataset.key === name);
  if (!card) return null;
  const { top, height } = card.getBoundingClientRect();
  return Math.round(top + Math.min(height / 2, 40) - box.top);
}
