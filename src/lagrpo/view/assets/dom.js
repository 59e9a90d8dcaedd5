// Elements, texts and numbers. Whatever comes from a run gets into the page as a text node, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: class, text, attributes, styles and listeners by name, then its children. */
function el(tag, given = {}, ...children) {
  const node = given.svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || name === "svg") continue;
    if (name === "text") node.textContent = value;
    else if (name === "on")
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "style") for (const [key, entry] of Object.entries(value)) node.style.setProperty(key, entry);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

/** Characters that cannot be seen, or that turn the direction of what follows, become names of themselves. */
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

function visible(text) {
  return String(text).replace(UNSEEN, (found) => {
    const code = found.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

function clipped(text, most) {
  const line = visible(text.slice(0, 2 * most))
    .replace(/\s+/g, " ")
    .trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

const ROUNDING = 1e-10; // smaller numbers are rounding errors of log-probs

/** A number as short as it can be read: four significant digits, thousands apart. */
function show(value) {
  if (missing(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size < ROUNDING) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
}

const signed = (value, digits = 3) =>
  missing(value) ? "–" : (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);

/** A share in percent. A tie goes to the even tenth, as Python rounds it in the terminal: 97 of 400 are 24.2 %. */
function percent(value) {
  if (missing(value)) return "–";
  const tenths = 1000 * value;
  const below = Math.floor(tenths);
  const nearest = tenths - below === 0.5 ? below + (below % 2) : Math.round(tenths);
  return `${(nearest / 10).toFixed(1)} %`;
}

const plural = (count, noun, ending = "s") => `${show(count)} ${noun}${count === 1 ? "" : ending}`;

function button(text, title, click, pressed) {
  return el("button", {
    type: "button",
    text,
    title,
    on: { click },
    "aria-pressed": pressed === undefined ? null : String(pressed),
  });
}

/** A select with a label; options are [value, text], or [heading, [options]] for groups of them. */
function choice(label, options, value, change) {
  const option = ([own, text]) => el("option", { value: own, text, selected: String(own) === String(value) });
  const entries = options.map((entry) =>
    Array.isArray(entry[1]) ? el("optgroup", { label: entry[0] }, entry[1].map(option)) : option(entry),
  );
  const select = el("select", { "aria-label": label, on: { change: () => change(select.value) } }, entries);
  return el("label", { class: "field" }, el("span", { text: label }), select);
}

function check(label, on, change) {
  const box = el("input", { type: "checkbox", on: { change: () => change(box.checked) } });
  box.checked = on;
  return el("label", { class: "check" }, box, el("span", { text: label }));
}

/** A field for text or a number, which calls `change` a moment after the last key. */
function field(label, name, value, change, kind = "text") {
  let timer = 0;
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(() => change(input.value.trim()), 120);
  };
  const input = el("input", { type: kind, name, step: "any", value, "aria-label": label, on: { input: later } });
  return el("label", { class: `field ${kind}` }, el("span", { text: label }), input);
}

function table(headings, rows, kind = "") {
  const head = el(
    "tr",
    {},
    headings.map((text) => el("th", { text, scope: "col" })),
  );
  return el("div", { class: "scroll" }, el("table", { class: kind }, el("thead", {}, head), el("tbody", {}, rows)));
}

const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const methodColor = (method) => cssColor(`--run${method % 8}`);
