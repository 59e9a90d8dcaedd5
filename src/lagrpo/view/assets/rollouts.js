// Groups of a batch, or of all batches, in a list; the completions of one of them side by side.

const ROW = 58; // pixels of a row of the list
const CARD_TOKENS = 160; // tokens of a completion in its card
const OPEN_TOKENS = 4000; // tokens of an opened completion, at a time

/** A list that makes only the rows that can be seen. */
function virtualList(count, row) {
  const inner = el("div", { class: "inner", style: { height: `${count * ROW}px` } });
  const list = el("div", { class: "list", role: "listbox", "aria-label": "groups", tabindex: "0" }, inner);
  const fill = () => {
    const from = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
    const to = Math.min(count, from + Math.ceil((list.clientHeight || 800) / ROW) + 8);
    inner.replaceChildren(...Array.from({ length: to - from }, (_, n) => row(from + n)));
  };
  list.addEventListener("scroll", fill);
  return { list, fill };
}

function rewardColor(run, c) {
  const share = height(run, run.rollouts.reward[c]);
  return `color-mix(in srgb, var(--right) ${Math.round(100 * share)}%, var(--wrong))`;
}

/** A square for each completion: its color is its reward; one without a reward is hollow. */
function rewardDots(run, group, most = 48) {
  const dots = [];
  for (let c = group.first; c < Math.min(group.end, group.first + most); c++) {
    const scored = isScored(run, c);
    dots.push(
      el("i", { class: scored ? "dot" : "dot none", style: scored ? { background: rewardColor(run, c) } : undefined }),
    );
  }
  if (group.size > most) dots.push(el("span", { text: `+${group.size - most}` }));
  return el("span", { class: "dots" }, dots);
}

/** What is special about a group, in words. */
function badges(run, group) {
  const unscored = group.size - group.scored,
    found = [];
  if (group.flat)
    found.push(el("span", { class: "badge" }, term("no signal")));
  if (unscored) found.push(el("span", { class: "badge warn", text: `${unscored} without reward` }));
  if (group.epoch < 0)
    found.push(el("span", { class: "badge", text: "replacement", title: "by dynamic sampling" }));
  return found;
}

function groupRow(app, run, group, index, all) {
  const place = all ? `batch ${group.batch} · ` : "";
  const top = el(
    "span",
    { class: "line" },
    el("b", { text: `${place}#${group.key}` }),
    el("span", { class: "prompt", text: clipped(group.text, 90) }),
  );
  const numbers = `mean ${show(group.mean)} · std ${show(group.spread)}`;
  const low = el(
    "span",
    { class: "line" },
    rewardDots(run, group),
    el("span", { class: "dim", text: numbers }),
    badges(run, group),
  );
  const chosen = app.state.group === group.id;
  return el(
    "div",
    {
      class: `row${chosen ? " chosen" : ""}`,
      role: "option",
      "aria-selected": String(chosen),
      style: { top: `${index * ROW}px` },
      on: { click: () => app.update({ group: group.id, completion: -1 }) },
    },
    top,
    low,
  );
}

/** The fields of the filter; on a small screen they are folded until somebody asks for them. */
function filterBar(app) {
  const { data, state } = app,
    run = app.run();
  const set = (name) => (value) => app.update({ [name]: value });
  const batches = [["last", "the last"], ["all", "all"], ...batchesOf(run).map((batch) => [batch, `batch ${batch}`])];
  const chosen = ["last", "all"].includes(state.batch) ? state.batch : chosenBatch(run, state);
  const narrowed = numberOfFilters(state);
  const toggle = button(narrowed ? `filter (${narrowed})` : "filter", "show or hide the filter", () =>
    app.update({ filters: !state.filters }, true),
  );
  toggle.classList.add("fold");
  return el(
    "div",
    { class: `bar filters${state.filters ? " unfolded" : ""}` },
    data.runs.length > 1
      ? choice(
          "run",
          data.runs.map((one) => [one.index, visible(one.name)]),
          state.run,
          (index) => app.update({ run: Number(index), group: "", batch: "last" }),
        )
      : null,
    el(
      "span",
      { class: "field" },
      button("‹", "previous batch: [", () => stepBatch(app, -1)),
      choice("batch", batches, chosen, (batch) => app.update({ batch: Number(batch) || batch, group: "" })),
      button("›", "next batch: ]", () => stepBatch(app, 1)),
    ),
    toggle,
    el(
      "span",
      { class: "folded" },
      choice(
        "sort",
        Object.entries(SORTS).map(([name, [text]]) => [name, text]),
        state.sort,
        set("sort"),
      ),
      choice(
        "outcome",
        Object.entries(OUTCOMES).map(([name, [text]]) => [name, text]),
        state.outcome,
        set("outcome"),
      ),
      BOUNDS.map(([name, label]) =>
        el(
          "span",
          { class: "bounds" },
          field(label, `${name}_low`, state[`${name}_low`], set(`${name}_low`), "number"),
          el("span", { text: "to" }),
          field(`${label}, at most`, `${name}_high`, state[`${name}_high`], set(`${name}_high`), "number"),
        ),
      ),
      field("search", "q", state.q, set("q")),
      button("clear", "clear the filter", () => app.update(NO_FILTER, true)),
    ),
  );
}

/** How many fields of the filter are in use. */
const numberOfFilters = (state) =>
  Object.entries(NO_FILTER).filter(([name, nothing]) => state[name] !== nothing).length;

const NO_FILTER = {
  outcome: "all",
  q: "",
  reward_low: "",
  reward_high: "",
  tokens_low: "",
  tokens_high: "",
  staleness_low: "",
  staleness_high: "",
};

function stepBatch(app, step) {
  const run = app.run(),
    batches = batchesOf(run),
    at = batches.indexOf(chosenBatch(run, app.state));
  const next = batches[Math.min(batches.length - 1, Math.max(0, (at < 0 ? batches.length : at) + step))];
  if (next !== undefined) app.update({ batch: next, group: "" }, true);
}

/** What the list shows, in words, and what was left out of the page. */
function summaryOf(run, state, found) {
  const batch = chosenBatch(run, state),
    rows = run.rollouts.batches,
    row = rows.find(([one]) => one === batch);
  const parts = [`${plural(found.groups.length, "group")}`];
  if (isFiltered(state)) parts.push(`${plural(found.matches, "matching completion")}`);
  if (row) parts.unshift(`batch ${batch}, π_k is version ${row[1]}`);
  if (row && row[3] < row[2]) parts.push(`${show(row[3])} of its ${show(row[2])} completions are in this page`);
  return parts.join(" · ");
}

function listPane(app, run, found) {
  const all = chosenBatch(run, app.state) === null;
  const { list, fill } = virtualList(found.groups.length, (n) => groupRow(app, run, found.groups[n], n, all));
  app.fillList = found.groups.length ? fill : null;
  app.list = found.groups.length ? list : null;
  const empty = run.rollouts.count
    ? "No completions match this filter."
    : "This run has no rollouts yet, or none in this page.";
  return el(
    "div",
    { class: "pane" },
    el("p", { class: "dim summary", text: summaryOf(run, app.state, found) }),
    found.groups.length ? list : el("p", { class: "empty", text: empty }),
  );
}

/** The group of the state where it is there, else the first of the list. */
function chosenGroup(run, state, found) {
  const group = run.rollouts.byId.get(state.group);
  return found.groups.includes(group) ? group : found.groups[0];
}

function groupPane(app, run, group, passes) {
  if (!group) return el("div", { class: "pane detail" });
  const { state } = app;
  const facts = [
    `mean ${show(group.mean)}`,
    `standard deviation ${show(group.spread)}`,
    [term("σ"), ` ${show(run.rollouts.group_std[group.first])}`],
    [term("staleness"), ` ${show(group.staleness)}`],
    `${show(group.length)} tokens on average`,
  ];
  const colorings = Object.entries(COLORINGS);
  const head = el(
    "div",
    { class: "group-head" },
    el("h2", {}, `Prompt ${group.key} in batch ${group.batch}`, badges(run, group)),
    el("p", { class: "dim" }, dotted(facts)),
    el("div", { class: "text prompt-text", dir: "auto", text: visible(group.text) }),
    group.answer
      ? el("p", { class: "gold" }, el("b", { text: "answer " }), el("span", { dir: "auto", text: visible(group.answer) }))
      : null,
    el(
      "div",
      { class: "bar" },
      choice("color", colorings, state.color, (color) => app.update({ color })),
      legend(run, group, state.color),
    ),
  );
  const opened = group.first + state.completion,
    isOpen = state.completion >= 0 && opened < group.end;
  const cards = Array.from({ length: group.size }, (_, n) => card(app, run, group, group.first + n, passes));
  return el(
    "div",
    { class: "pane detail" },
    head,
    isOpen ? openedCompletion(app, run, group, opened) : null,
    el("div", { class: "cards" }, cards),
  );
}

const MARKS = { right: "✓", wrong: "✗", none: "?" };
const kindOf = (run, c) => {
  const isRight = correctnessOf(run, c);
  return Number.isNaN(isRight) ? "none" : isRight ? "right" : "wrong";
};

function completionHead(run, c) {
  const r = run.rollouts,
    kind = kindOf(run, c);
  const reward = isScored(run, c) ? show(r.reward[c]) : outcomeOf(run, c);
  return el(
    "div",
    { class: "card-head" },
    el("b", { class: kind, text: `${MARKS[kind]} ${reward}` }),
    el("span", { class: "advantage" }, term("A"), ` ${signed(r.advantage[c])}`),
    el("span", { class: "dim", text: `${r.sample_index[c] + 1}` }),
  );
}

function completionFacts(run, c) {
  const r = run.rollouts,
    facts = [plural(lengthOf(run, c), "token")];
  if (!r.finished[c]) facts.push("cut at the limit");
  if (!Number.isNaN(r.staleness[c])) facts.push([term("staleness"), ` ${show(r.staleness[c])}`]);
  if (isMixed(run, c)) facts.push(plural(r.versions[c], "version"));
  if (!Number.isNaN(r.log_ratio[c])) facts.push(["log ", term("π_k/α"), ` ${signed(r.log_ratio[c])}`]);
  for (const name of r.rewards) facts.push(`${visible(name)} ${show(r[`reward_${name}`][c])}`);
  const excluded = excludedReason(r, c);
  if (excluded) facts.push(`not in the objective: ${visible(excluded)}`);
  return el("p", { class: "dim facts" }, dotted(facts));
}

function completionBody(run, c, coloring, most) {
  const r = run.rollouts;
  if (coloring !== "none" && lengthOf(run, c)) return tokenStrip(run, c, coloring, most);
  const text = visible(r.texts[c]),
    limit = 8 * most;
  const shown = text.length > limit ? `${text.slice(0, limit)} … ${show(text.length - limit)} more characters` : text;
  return el("div", { class: "strip", dir: "auto", text: shown || "(empty)" });
}

function card(app, run, group, c, passes) {
  const chosen = app.state.completion === c - group.first,
    reason = reasonOf(run, c);
  return el(
    "article",
    {
      class: `card${chosen ? " chosen" : ""}${passes(c, group) ? "" : " faded"}`,
      tabindex: "0",
      on: { click: () => app.update({ completion: chosen ? -1 : c - group.first }) },
    },
    completionHead(run, c),
    completionFacts(run, c),
    reason ? el("p", { class: "reason", text: visible(reason) }) : null,
    completionBody(run, c, app.state.color, CARD_TOKENS),
  );
}

/** One completion over the whole width, with all that is recorded of it. */
function openedCompletion(app, run, group, c) {
  const r = run.rollouts,
    reason = reasonOf(run, c);
  const numbers = [
    [[term("A", "advantage")], signed(r.advantage[c])],
    [[term("σ"), " of its group"], show(r.group_std[c])],
    [[term("π_k/α", "log π_k − log α")], signed(r.log_ratio[c], 4)],
    [["source"], r.codes.source[r.source[c]]],
    [["epoch"], String(group.epoch)],
  ];
  return el(
    "article",
    { class: "opened" },
    el(
      "div",
      { class: "bar" },
      completionHead(run, c),
      button("close", "close: Escape", () => app.update({ completion: -1 })),
    ),
    completionFacts(run, c),
    el(
      "dl",
      {},
      numbers.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { text: visible(value) }))),
    ),
    reason ? el("p", { class: "reason", text: visible(reason) }) : null,
    completionBody(run, c, app.state.color, OPEN_TOKENS),
  );
}

/** The tab of rollouts. The filter stays while what it finds is drawn anew. */
function rolloutsTab(app) {
  const panes = el("div", { class: "panes" });
  app.refresh = () => {
    const run = app.run(),
      found = findGroups(run, app.state),
      group = chosenGroup(run, app.state, found);
    const place = app.place ?? readPlace(app, panes);
    app.found = found;
    app.state.group = group?.id ?? "";
    panes.replaceChildren(listPane(app, run, found), groupPane(app, run, group, found.passes));
    restorePlace(app, panes, place);
    app.drawn = { group: app.state.group, completion: app.state.completion };
    app.place = null;
  };
  app.afterMount = app.refresh;
  return el("section", { class: "rollouts" }, filterBar(app), panes);
}

/** How far the list and the group are scrolled. */
function readPlace(app, node) {
  return { list: node.querySelector(".list")?.scrollTop ?? 0, detail: node.querySelector(".detail")?.scrollTop ?? 0 };
}

function restorePlace(app, panes, place) {
  if (app.list) app.list.scrollTop = place.list;
  const same = app.drawn?.group === app.state.group;
  if (same) panes.querySelector(".detail").scrollTop = place.detail;
  if (!same || app.drawn.completion !== app.state.completion)
    panes.querySelector(".opened")?.scrollIntoView({ block: "nearest" });
  app.fillList?.();
  if (!same) showChosenRow(app);
}

function showChosenRow(app) {
  const at = app.found.groups.findIndex((group) => group.id === app.state.group);
  if (at < 0 || !app.list) return;
  const top = at * ROW,
    bottom = top + ROW - app.list.clientHeight;
  if (app.list.scrollTop > top) app.list.scrollTop = top;
  else if (app.list.scrollTop < bottom) app.list.scrollTop = bottom;
  app.fillList();
}

function stepGroup(app, step) {
  const { groups } = app.found,
    at = groups.findIndex((group) => group.id === app.state.group);
  const next = groups[Math.min(groups.length - 1, Math.max(0, at + step))];
  if (next) app.update({ group: next.id, completion: -1 });
}

function stepCompletion(app, step) {
  const group = app.run().rollouts.byId.get(app.state.group);
  if (group) app.update({ completion: Math.min(group.size - 1, Math.max(0, app.state.completion + step)) });
}
