// Elements, number formats and the tooltip. Text enters the page as text nodes only, with control
// and bidirectional characters escaped.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== "") node.append(typeof child === "string" ? plain(child) : child);
  }
  return node;
}

const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
const byId = (id) => document.getElementById(id);

function readData(id) {
  const block = byId(id);
  return block === null ? null : JSON.parse(block.textContent);
}

// Numbers that JSON cannot represent are strings: "NaN", "Infinity", "-Infinity".
function shown(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  const number = Number(value);
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "nan" : number > 0 ? "∞" : "-∞";
  const size = Math.abs(number);
  for (const [limit, divisor, unit] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (size >= limit) return `${Number((number / divisor).toPrecision(digits))}${unit}`;
  }
  if (size && size < 1e-3) return number.toExponential(2);
  return String(Number(number.toPrecision(digits)));
}

const signed = (value) => (Number(value) > 0 ? "+" : "") + shown(value, 3);
const seconds = (value) => `${shown(value, 3)} s`;

// Replaces white space and invisible characters by visible marks, for the texts of single tokens.
function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣")
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
      (char) => `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`);
}

// Escapes control characters, and bidirectional ones, which would reorder the surrounding text.
const plain = (text) => text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, visible);

function cut(text, most) {
  if (text.length <= most) return text;
  return most < 4 ? text.slice(0, Math.max(0, most)) : `${text.slice(0, most - 1)}…`;
}

function rows(pairs) {
  return el("table", {}, pairs.filter((pair) => pair).map(([name, value]) =>
    el("tr", {}, el("td", {}, name), el("td", {}, value))));
}

function showTip(event, ...content) {
  const tip = byId("tip");
  tip.replaceChildren(...content.filter((item) => item));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  const top = Math.min(event.clientY + 14, innerHeight - box.height - 8);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}
