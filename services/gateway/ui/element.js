// Building elements: a name, its attributes, its children.

const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

/** An HTML element. Attributes of value undefined or false are left out; `text` is its text, `on*` are listeners. */
export function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined));
  return element;
}

/** `dt` and `dd` of each pair, in a `dl` of that class. */
export function facts(className, pairs) {
  const rows = pairs.map(([name, value, title]) =>
    make("div", { title }, make("dt", { text: name }), make("dd", { text: value })),
  );
  return make("dl", { class: className }, ...rows);
}

export const fixed = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
