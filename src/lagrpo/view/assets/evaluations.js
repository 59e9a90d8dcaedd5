// Evaluations: their results, and the prompts whose results differ between two of them.

const CHANGES = {
  changed: ["prompts that changed", (row) => row.change !== 0],
  worse: ["worse", (row) => row.change < 0],
  better: ["better", (row) => row.change > 0],
  all: ["all prompts", () => true],
};

/** pass@1 with its interval, drawn between 0 and 1. */
function intervalBar(summary, color) {
  const [low, mid, high] = ["_low", "", "_high"].map((end) => 100 * (summary[`pass@1${end}`] ?? NaN));
  const bar = el("span", { class: "interval", title: `95 % interval ${percent(low / 100)} to ${percent(high / 100)}` });
  if (!Number.isNaN(low + high))
    bar.append(el("i", { class: "range", style: { left: `${low}%`, width: `${high - low}%`, background: color } }));
  if (!Number.isNaN(mid)) bar.append(el("i", { class: "point", style: { left: `${mid}%`, background: color } }));
  return bar;
}

/** The completions without a reward, beside pass@1, which leaves them out. */
function unscoredText(summary) {
  if (!summary.unscored) return "";
  return ` ${summary.unscored} of ${summary.prompts * summary.samples} not scored`;
}

function changeText(summary) {
  if (missing(summary["pass@1_change"])) return "–";
  const [low, high] = ["_low", "_high"].map((end) => signed(100 * summary[`pass@1_change${end}`], 1));
  return `${signed(100 * summary["pass@1_change"], 1)} points (${low} to ${high})`;
}

/** What an evaluation says besides pass@k and the mean reward: the mean of each of several rewards. */
function furtherResults(one) {
  const means = Object.keys(one).filter((key) => /^rewards\/\w+\/mean$/.test(key));
  return means.map((key) => `${visible(key)} ${show(one[key])}`).join(" · ");
}

function evaluationTable(run) {
  const passes = [
    ...new Set(run.evaluations.summaries.flatMap((one) => Object.keys(one).filter((key) => /^pass@\d+$/.test(key)))),
  ].slice(1);
  const further = run.evaluations.summaries.some(furtherResults);
  const headings = [
    "evaluation",
    "step",
    "pass@1",
    "",
    "change from the first",
    ...passes,
    "mean reward",
    "prompts",
    "samples",
    ...(further ? ["further"] : []),
  ];
  const rows = run.evaluations.summaries.map((one) =>
    el(
      "tr",
      {},
      el("td", { text: visible(one.name) }),
      el("td", { text: show(one.step) }),
      el(
        "td",
        { title: one.unscored_reason && visible(one.unscored_reason) },
        percent(one["pass@1"]),
        el("span", { class: "warn", text: unscoredText(one) }),
      ),
      el("td", {}, intervalBar(one, runColor(run.index))),
      el("td", { text: changeText(one) }),
      passes.map((name) => el("td", { text: percent(one[name]) })),
      ["reward", "prompts", "samples"].map((name) => el("td", { text: show(one[name]) })),
      further ? el("td", { class: "dim", text: furtherResults(one) }) : null,
    ),
  );
  return table(headings, rows, "numbers");
}

const rate = (row) => (row && row.scored ? row.correct / row.scored : NaN);

/** The prompts that both evaluations have, those with the greatest change first. */
function compare(run, before, after) {
  const { rows, prompts } = run.evaluations,
    old = new Map((rows[before] ?? []).map((row) => [row.prompt, row]));
  return (rows[after] ?? [])
    .filter((row) => old.has(row.prompt))
    .map((row) => ({ prompt: prompts[row.prompt], index: row.prompt, before: old.get(row.prompt), after: row }))
    .map((row) => ({ ...row, change: rate(row.after) - rate(row.before) || 0 }))
    .sort((a, b) => Math.abs(b.change) - Math.abs(a.change) || a.change - b.change || a.index - b.index);
}

function evaluationCompletions(run, row, title, range) {
  if (!row.texts)
    return el(
      "div",
      {},
      el("h3", { text: title }),
      el("p", { class: "dim", text: "this page does not hold its texts" }),
    );
  const items = row.texts.map((text, n) => {
    const reward = row.rewards[n],
      correct = !missing(reward) && (row.decided?.[n] ?? reward >= range[1]),
      kind = missing(reward) ? "none" : correct ? "right" : "wrong",
      parts = Object.entries(row.parts ?? {}).map(([name, values]) => `${visible(name)} ${show(values[n])}`);
    return el(
      "li",
      {},
      el("b", { class: kind, text: `${MARKS[kind]} ${show(reward)}` }),
      parts.length ? el("span", { class: "dim", text: ` ${parts.join(" · ")} ` }) : null,
      el("span", { class: "text", dir: "auto", text: visible(run.evaluations.texts[text]) || "(empty)" }),
    );
  });
  return el("div", {}, el("h3", { text: title }), el("ul", { class: "samples" }, items));
}

function promptRows(app, run, row, after) {
  const open = app.state.prompt === row.index,
    kind = row.change < 0 ? "wrong" : row.change > 0 ? "right" : "";
  const share = (one) => `${one.correct} of ${one.scored}`;
  const line = el(
    "tr",
    { class: "clickable", tabindex: "0", on: { click: () => app.update({ prompt: open ? -1 : row.index }) } },
    el("td", { text: `#${row.prompt[0]}` }),
    el("td", { class: "wide", dir: "auto", text: clipped(row.prompt[1], 140) }),
    el("td", { text: share(row.before) }),
    el("td", { text: share(row.after) }),
    el("td", { class: kind, text: row.change ? `${signed(100 * row.change, 0)} points` : "0" }),
  );
  if (!open) return [line];
  const [, text, answer] = row.prompt,
    range = run.evaluations.summaries[after].reward_range ?? run.range;
  return [
    line,
    el(
      "tr",
      { class: "open" },
      el(
        "td",
        { colspan: 5 },
        el("div", { class: "text prompt-text", dir: "auto", text: visible(text) }),
        answer ? el("p", { class: "gold" }, el("b", { text: "answer " }), el("span", { text: visible(answer) })) : null,
        el(
          "div",
          { class: "sides" },
          evaluationCompletions(run, row.before, "before", range),
          evaluationCompletions(run, row.after, "after", range),
        ),
      ),
    ),
  ];
}

/** The tab of evaluations. */
function evaluationsTab(app) {
  const { state, data } = app,
    run = app.run(),
    { summaries } = run.evaluations;
  const runs =
    data.runs.length > 1
      ? choice(
          "run",
          data.runs.map((one) => [one.index, visible(one.name)]),
          state.run,
          (index) => app.update({ run: Number(index), prompt: -1, before: "", after: "" }),
        )
      : null;
  if (!summaries.length)
    return el(
      "section",
      {},
      el("div", { class: "bar" }, runs),
      el("p", { class: "empty", text: "This run has no evaluations." }),
    );
  const names = summaries.map((one, n) => [n, `${visible(one.name)} (step ${one.step})`]);
  const after = Math.min(state.after === "" ? names.length - 1 : Number(state.after), names.length - 1);
  const first = summaries.findIndex((one) => one.set === summaries[after].set);
  const before = Math.min((state.before ?? "") === "" ? first : Number(state.before), names.length - 1);
  const rows = compare(run, before, after),
    shown = rows.filter(CHANGES[names.length > 1 ? state.changes : "all"][1]);
  const count = (name) => rows.filter(CHANGES[name][1]).length;
  return el(
    "section",
    { class: "evaluations" },
    el("div", { class: "bar" }, runs),
    evaluationTable(run),
    el("h2", { text: "Prompt by prompt" }),
    el(
      "div",
      { class: "bar" },
      choice("before", names, before, (value) => app.update({ before: value })),
      choice("after", names, after, (value) => app.update({ after: value })),
      choice(
        "show",
        Object.entries(CHANGES).map(([name, [text]]) => [name, `${text} (${count(name)})`]),
        state.changes,
        (changes) => app.update({ changes }),
      ),
    ),
    shown.length
      ? table(
          ["prompt", "", "correct before", "correct after", "change"],
          shown.slice(0, 1000).flatMap((row) => promptRows(app, run, row, after)),
          "prompts",
        )
      : el("p", { class: "empty", text: "No prompts match." }),
    shown.length > 1000
      ? el("p", { class: "dim", text: `${show(shown.length - 1000)} more prompts are not shown` })
      : null,
  );
}
