// The page: its state, which its address holds, the head, the keys, and newer data from the server.

const TABS = {
  trend: ["Trend", trendTab],
  rollouts: ["Rollouts", rolloutsTab],
  evaluations: ["Evaluations", evaluationsTab],
  settings: ["Settings", settingsTab],
  diagnosis: ["Diagnosis", diagnosisTab],
};
const START = {
  tab: "trend",
  metric: "reward",
  x: "batch",
  smooth: 0,
  log: false,
  hidden: [],
  apart: false,
  events: false,
  run: 0,
  batch: "last",
  sort: "spread",
  ...NO_FILTER,
  filters: false,
  group: "",
  completion: -1,
  color: "logp",
  before: "",
  after: "",
  changes: "changed",
  prompt: -1,
  setting: "",
  settings: "differing",
  set: "",
};
const KEPT = new Set([
  "q",
  "reward_low",
  "reward_high",
  "tokens_low",
  "tokens_high",
  "staleness_low",
  "staleness_high",
  "group",
  "completion",
  "color",
  "setting",
]);
const POLL = 2000; // milliseconds

const KEYS = [
  ["1 2 3 4 5", "trend, rollouts, evaluations, settings, diagnosis"],
  ["j k  ↓ ↑", "next group, previous group"],
  ["l h  → ←", "next completion, previous completion"],
  ["] [", "next batch, previous batch"],
  ["c", "color tokens by log α, by ratio, by entropy, by version, not at all"],
  ["/", "search"],
  ["t", "light or dark"],
  ["Escape", "close what is open; leave a field"],
  ["?", "these keys"],
];

/** The state in the address: what differs from the start, each value only where it is of the kind that it must be. */
function readAddress() {
  const state = { ...START },
    given = new URLSearchParams(location.hash.slice(1));
  for (const [name, text] of given) {
    if (!Object.hasOwn(START, name)) continue;
    const start = START[name];
    if (typeof start === "boolean") state[name] = text === "true";
    else if (typeof start === "number") state[name] = Number.isInteger(Number(text)) ? Number(text) : start;
    else if (Array.isArray(start)) state[name] = text.split(",").filter(Boolean).map(Number);
    else state[name] = text;
  }
  const allowed = { tab: TABS, x: AXES, sort: SORTS, outcome: OUTCOMES, color: COLORINGS, changes: CHANGES, settings: SHOWN };
  for (const [name, names] of Object.entries(allowed))
    if (!Object.hasOwn(names, state[name])) state[name] = START[name];
  if (!["last", "all"].includes(state.batch)) state.batch = Number(state.batch) || "last";
  return state;
}

function writeAddress(state) {
  const differing = Object.entries(state).filter(([name, value]) => String(value) !== String(START[name]));
  history.replaceState(null, "", `#${new URLSearchParams(differing.map(([name, value]) => [name, String(value)]))}`);
}

/** The page; `update` changes its state and draws what follows from it. */
class App {
  constructor(data, root) {
    this.data = data;
    this.root = root;
    this.state = readAddress();
    this.notice = "";
    this.opened = new Set(); // runs whose events are shown
    this.render();
    explainTerms(root);
    document.addEventListener("keydown", (event) => onKey(this, event));
    addEventListener("resize", () => this.state.tab === "trend" && this.render());
    addEventListener("hashchange", () => {
      this.state = readAddress();
      this.render();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.render());
  }

  run() {
    return this.data.runs[this.state.run] ?? this.data.runs[0];
  }

  /** Without `whole`, changes of the filter and the choice draw only what they find, so that fields keep the cursor. */
  update(changes, whole = false) {
    const light = !whole && this.refresh && Object.keys(changes).every((name) => KEPT.has(name));
    Object.assign(this.state, changes);
    hideTip();
    if (light) this.refresh();
    else this.render();
    writeAddress(this.state);
  }

  render() {
    const field = document.activeElement?.matches("input[name]") ? document.activeElement : null;
    this.place = this.root.querySelector(".panes") ? readPlace(this, this.root) : null;
    this.refresh = this.afterMount = this.fillList = null;
    const tab = TABS[this.state.tab][1](this);
    this.root.replaceChildren(head(this), noteList(this), tab, tip);
    this.afterMount?.();
    if (field) restoreField(this.root, field);
  }
}

/** Newer data must not take the cursor out of the field in which somebody types. */
function restoreField(root, old) {
  const field = [...root.querySelectorAll("input")].find((one) => one.name === old.name);
  if (!field) return;
  field.value = old.value;
  field.focus();
  if (old.type === "text") field.setSelectionRange(old.selectionStart, old.selectionEnd);
}

/** How far the runs of a unit are: one word and the batch, or how many are finished. */
function progressOf(unit) {
  const words = [...new Set(unit.runs.map((run) => run.status[0]))];
  const finished = unit.runs.filter((run) => run.status[0] === "finished").length;
  const batches = unit.runs.map((run) => run.metrics.get("step")?.at(-1) ?? 0);
  const [least, most] = [Math.min(...batches), Math.max(...batches)];
  const total = unit.runs[0].total;
  return {
    word: words.length === 1 ? words[0] : `${finished} of ${unit.runs.length} finished`,
    isBad: words.some((word) => word === "failed" || word === "killed"),
    batch: `batch ${least === most ? show(least) : `${show(least)} to ${show(most)}`}${total ? ` of ${show(total)}` : ""}`,
  };
}

/** A button for each method, which hides it. */
function unitChip(app, unit) {
  const hidden = app.state.hidden.includes(unit.method);
  const { word, isBad, batch } = progressOf(unit);
  const others = app.state.hidden.filter((method) => method !== unit.method);
  const toggle = () => app.update({ hidden: hidden ? others : [...others, unit.method] });
  return el(
    "button",
    {
      type: "button",
      class: `chip${hidden ? " off" : ""}`,
      title: visible(unitTitle(unit)),
      "aria-pressed": String(!hidden),
      on: { click: toggle },
    },
    swatch(unitColor(unit)),
    el("b", { dir: "auto", text: visible(unit.name) }),
    unit.runs.length > 1 ? el("span", { text: `${unit.runs.length} seeds` }) : null,
    el("span", { class: `status ${isBad ? "warn" : ""}`, text: visible(word) }),
    el("span", { class: "dim", text: batch }),
  );
}

function head(app) {
  const tabs = Object.entries(TABS).map(([name, [text]], n) =>
    el("button", {
      type: "button",
      role: "tab",
      text,
      title: `key ${n + 1}`,
      "aria-selected": String(app.state.tab === name),
      data: { tab: name },
      on: { click: () => app.update({ tab: name }) },
    }),
  );
  const tools = el(
    "span",
    { class: "tools" },
    button("◐", "light or dark: t", () => toggleTheme(app)),
    button("?", "keys", () => toggleKeys()),
  );
  return el(
    "header",
    {},
    el(
      "div",
      { class: "chips" },
      unitsOf(app.data, false).map((unit) => unitChip(app, unit)),
    ),
    el("nav", { role: "tablist" }, tabs),
    tools,
  );
}

/** What the page leaves out of all runs, and how to see more; "" if it holds everything. */
function leftOut({ runs, most_tokens }) {
  const sum = (value) => runs.reduce((total, run) => total + value(run.rollouts), 0);
  const held = sum((r) => r.count);
  const onDisk = sum((r) => r.completions_on_disk);
  if (held >= onDisk) return "";
  const batches = `${show(sum((r) => r.batches.length))} of ${plural(sum((r) => r.batches_on_disk), "batch", "es")}`;
  const sentences = [`This page holds ${show(held)} of ${show(onDisk)} completions, whole groups from ${batches}.`];
  const limits = new Set(runs.map((run) => run.rollouts.limit));
  if (limits.has("completions")) sentences.push("For more: lagrpo view --completions N.");
  if (limits.has("tokens")) {
    const shares = runs.length > 1 ? ", in equal shares for its runs" : "";
    sentences.push(`A page has at most ${show(most_tokens)} tokens${shares}; lagrpo view RUN --text --batch N prints any batch.`);
  }
  return sentences.join(" ");
}

/** What a run lacks. */
function notesOf(run) {
  const notes = [...run.notes];
  if (!run.rollouts.batches_on_disk) notes.push("No rollouts yet.");
  if (!run.evaluations.summaries.length) notes.push("No evaluations.");
  if (run.evaluations.rows.some((rows) => rows.some((row) => !row.texts)))
    notes.push("The texts of some evaluations were left out.");
  return notes;
}

/** What is missing and what was left out, in one banner; a note that several runs share is there once. */
function noteList(app) {
  const { runs } = app.data;
  const runsByNote = new Map();
  for (const run of runs)
    for (const note of notesOf(run)) runsByNote.set(note, [...(runsByNote.get(note) ?? []), run.name]);
  const notes = [...runsByNote].map(([note, names]) =>
    names.length === runs.length ? note : `${note} (${names.join(", ")})`,
  );
  notes.push(leftOut(app.data));
  const lines = [app.notice, ...notes].filter(Boolean);
  if (!lines.length) return "";
  return el(
    "ul",
    { class: `notes${app.notice ? " warn" : ""}` },
    lines.map((note) => el("li", { text: visible(note) })),
  );
}

function toggleTheme(app) {
  const dark =
    document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = dark === "dark" ? "light" : "dark";
  app.render();
}

function toggleKeys() {
  const open = document.getElementById("keys");
  if (open) return open.remove();
  const rows = KEYS.map(([keys, text]) => el("tr", {}, el("td", { text: keys }), el("td", { text })));
  document.body.append(
    el(
      "dialog",
      { id: "keys", open: true },
      el("h2", { text: "Keys" }),
      table([], rows),
      button("close", "close: Escape", toggleKeys),
    ),
  );
}

const ACTIONS = {
  j: (app) => stepGroup(app, 1),
  ArrowDown: (app) => stepGroup(app, 1),
  k: (app) => stepGroup(app, -1),
  ArrowUp: (app) => stepGroup(app, -1),
  l: (app) => stepCompletion(app, 1),
  ArrowRight: (app) => stepCompletion(app, 1),
  h: (app) => stepCompletion(app, -1),
  ArrowLeft: (app) => stepCompletion(app, -1),
  "]": (app) => stepBatch(app, 1),
  "[": (app) => stepBatch(app, -1),
  c: (app) => app.update({ color: nextOf(Object.keys(COLORINGS), app.state.color) }, true),
};

const nextOf = (names, name) => names[(names.indexOf(name) + 1) % names.length];

function onKey(app, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches?.("input, select, textarea");
  if (event.key === "Escape") return escape(app, event, typing);
  if (typing) return;
  const tab = Object.keys(TABS)[Number(event.key) - 1];
  if (tab) return app.update({ tab });
  if (event.key === "t") return toggleTheme(app);
  if (event.key === "?") return toggleKeys();
  if (event.key === "Enter" || event.key === " ") return event.target.matches?.("[tabindex]") && press(event);
  if (event.key === "/") {
    event.preventDefault();
    return app.root.querySelector('input[name="q"], input[name="setting"]')?.focus();
  }
  if (app.state.tab !== "rollouts" || !Object.hasOwn(ACTIONS, event.key)) return;
  event.preventDefault();
  ACTIONS[event.key](app);
}

function press(event) {
  event.preventDefault();
  event.target.click();
}

function escape(app, event, typing) {
  if (document.getElementById("keys")) toggleKeys();
  else if (typing) event.target.blur();
  else if (app.state.completion >= 0) app.update({ completion: -1 });
}

/** Asks the server for newer data again and again; a page from a file has none. */
async function follow(app) {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, POLL));
    const notice = await fetchNewer(app);
    if (notice === app.notice) continue;
    app.notice = notice;
    app.render();
  }
}

async function fetchNewer(app) {
  try {
    // The address of the page has the token that the server wants.
    const query = new URLSearchParams(location.search);
    query.set("stamp", app.data.stamp);
    const answer = await fetch(`data?${query}`, { cache: "no-store" });
    if (answer.status === 204) return "";
    if (!answer.ok) return `The runs cannot be read at the moment: ${await answer.text()}`;
    app.data = await unpack(await answer.arrayBuffer());
    app.render();
    return "";
  } catch {
    return "The server does not answer. This is the last state it sent.";
  }
}

async function start() {
  const root = document.getElementById("page"),
    source = document.getElementById("data");
  if (typeof DecompressionStream === "undefined")
    return void (root.textContent = "This page needs a browser of 2023 or later.");
  const data = await unpack(fromBase64(source.textContent.trim()));
  source.remove();
  const app = new App(data, root);
  if ("live" in root.dataset) follow(app);
}

start().catch((error) => {
  document.getElementById("page").textContent = `This page is damaged: ${error.message}`;
});
