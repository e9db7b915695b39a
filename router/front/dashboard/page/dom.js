// Small helpers: making elements, changing them without replacing them, and saying numbers.
//
// The page changes once a second. What is there is changed in place, never built anew: focus, selection and a screen
// reader's place stay where they are. Text is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function drawn(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) set(node, name, value);
  node.append(...children);
  return node;
}

// An attribute; null or false takes it away.
export function set(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : String(value));
}

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// `parent`'s children become those of `items`, in this order; a child with the same key stays the same element.
export function keyed(parent, items, keyOf, create, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    if (child) known.delete(key);
    else {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    update(child, item);
  }
  for (const left of known.values()) left.remove();
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 9.95) return `${value.toFixed(1)} ms`;
  if (value < 999.5) return `${Math.round(value)} ms`;
  if (value < 99_500) return `${(value / 1000).toFixed(value < 9_950 ? 2 : 1)} s`;
  return `${Math.round(value / 1000)} s`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at === 0 || value >= 99.5 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

export function count(value) {
  return Math.round(value).toLocaleString("en").replaceAll(",", " ");
}

export function duration(seconds) {
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  if (seconds < 5_940) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

export function ago(seconds) {
  return seconds < 1 ? "just now" : `${duration(Math.floor(seconds)).replace(".0", "")} ago`;
}

export function plural(number, one, many) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
