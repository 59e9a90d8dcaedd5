// Evaluations: their results, and the prompts whose results differ between two of them.

const CHANGES = {
  changed: ["prompts that changed", (row) => row.change !== 0],
  worse: ["worse", (row) => row.change < 0],
  better: ["better", (row) => row.change > 0],
  all: ["all prompts", () => true],
};

/** pass@1 with its interval, drawn between 0 and 1; `kind` says what the interval is. */
function intervalBar(summary, color, kind = "95 % interval") {
  const [low, mid, high] = ["_low", "", "_high"].map((end) => 100 * (summary[`pass@1${end}`] ?? NaN));
  const bar = el("span", { class: "interval", title: `${kind} ${percent(low / 100)} to ${percent(high / 100)}` });
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
function rewardMeans(one) {
  const means = Object.keys(one).filter((key) => /^rewards\/\w+\/mean$/.test(key));
  return means.map((key) => `${visible(key)} ${show(one[key])}`).join(" · ");
}

function evaluationTable(run) {
  const passes = [
    ...new Set(run.evaluations.summaries.flatMap((one) => Object.keys(one).filter((key) => /^pass@\d+$/.test(key)))),
  ].slice(1);
  const hasMeans = run.evaluations.summaries.some(rewardMeans);
  const headings = [
    "evaluation",
    "batch",
    "pass@1",
    "",
    "change from the first",
    ...passes,
    "mean reward",
    "prompts",
    "samples",
    ...(hasMeans ? ["rewards"] : []),
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
      el("td", {}, intervalBar(one, runColor(run))),
      el("td", { text: changeText(one) }),
      passes.map((name) => el("td", { text: percent(one[name]) })),
      ["reward", "prompts", "samples"].map((name) => el("td", { text: show(one[name]) })),
      hasMeans ? el("td", { class: "dim", text: rewardMeans(one) }) : null,
    ),
  );
  return table(headings, rows, "numbers");
}

/** The sets that any run has evaluated; "" is the only one of a run without named sets. */
const setsOf = (data) => [
  ...new Set(data.runs.flatMap((run) => run.evaluations.summaries.map((one) => one.set ?? ""))),
];

/** The evaluations of a set that have a pass@1. */
const withPassAt1 = (run, set) => madeOf(run, set).filter((one) => !missing(one["pass@1"]));

/** The first and the last evaluation of a set; null for a run without any. */
function firstAndLast(run, set) {
  const made = withPassAt1(run, set);
  return made.length ? [made[0], made.at(-1)] : null;
}

/** A row of the table of all runs: pass@1 before and after, with the interval over prompts. */
function runResult(run, set) {
  const name = el("td", { dir: "auto" }, swatch(runColor(run)), ` ${visible(run.name)}`);
  const found = firstAndLast(run, set);
  if (!found) return el("tr", {}, name, el("td", { class: "dim", colspan: 7, text: "not evaluated" }));
  const [first, last] = found;
  const interval = ["_low", "_high"].map((end) => percent(last[`pass@1${end}`])).join(" to ");
  return el(
    "tr",
    {},
    name,
    el("td", { text: first === last ? "–" : percent(first["pass@1"]) }),
    el(
      "td",
      { title: last.unscored_reason && visible(last.unscored_reason) },
      el("b", { text: percent(last["pass@1"]) }),
      el("span", { class: "warn", text: unscoredText(last) }),
    ),
    el("td", {}, intervalBar(last, runColor(run))),
    el("td", { text: interval }),
    el("td", { text: first === last ? "–" : changeText(last) }),
    el("td", { text: show(last.step) }),
    el("td", { text: `${show(last.prompts)} × ${show(last.samples)}` }),
  );
}

/** The evaluations that all seeds have made, in the order of their batches: for each batch the summaries of the seeds. */
function evaluationsOfAllSeeds(runs, set) {
  const summariesOfSeeds = runs.map((run) => new Map(withPassAt1(run, set).map((one) => [one.step, one])));
  const batches = [...summariesOfSeeds[0].keys()].filter((batch) => summariesOfSeeds.every((seed) => seed.has(batch)));
  return batches.map((batch) => summariesOfSeeds.map((seed) => seed.get(batch)));
}

/** The number of seeds that have not made the last evaluation of the others yet. */
function countUnfinished(runs, set) {
  const lastBatches = runs.map((run) => withPassAt1(run, set).at(-1)?.step ?? -1);
  const latest = Math.max(...lastBatches);
  return lastBatches.filter((batch) => batch < latest).length;
}

/** A row of a method: the mean of its seeds, and the lowest and the highest of them, at the last batch that all of them have
 *  evaluated: a mean of policies after different numbers of batches would say nothing. */
function methodResult(unit, set) {
  const unfinished = countUnfinished(unit.runs, set);
  const name = el(
    "td",
    { dir: "auto" },
    swatch(unitColor(unit)),
    ` ${visible(unit.name)} `,
    el("span", { class: "dim", text: plural(unit.runs.length, "seed") }),
    unfinished ? el("span", { class: "warn", text: `, ${show(unfinished)} unfinished` }) : null,
  );
  const evaluations = evaluationsOfAllSeeds(unit.runs, set);
  if (!evaluations.length) {
    const text = unfinished ? "no batch is evaluated by all seeds yet" : "not evaluated";
    return el("tr", {}, name, el("td", { class: "dim", colspan: 7, text }));
  }
  const [{ step, prompts, samples }] = evaluations.at(-1);
  const firsts = evaluations[0].map((one) => one["pass@1"]);
  const lasts = evaluations.at(-1).map((one) => one["pass@1"]);
  const changes = lasts.map((last, seed) => last - firsts[seed]);
  const [low, high] = [Math.min(...lasts), Math.max(...lasts)];
  const spread = { "pass@1": mean(lasts), "pass@1_low": low, "pass@1_high": high };
  const [least, most] = [Math.min(...changes), Math.max(...changes)].map((one) => signed(100 * one, 1));
  const isEvaluatedTwice = evaluations.length > 1;
  return el(
    "tr",
    {},
    name,
    el("td", { text: isEvaluatedTwice ? percent(mean(firsts)) : "–" }),
    el("td", {}, el("b", { text: percent(mean(lasts)) })),
    el("td", {}, intervalBar(spread, unitColor(unit), "seeds from")),
    el("td", { text: `seeds ${percent(low)} to ${percent(high)}` }),
    el("td", {
      text: isEvaluatedTwice ? `${signed(100 * mean(changes), 1)} points (seeds ${least} to ${most})` : "–",
    }),
    el("td", { text: show(step) }),
    el("td", { text: `${show(prompts)} × ${show(samples)}` }),
  );
}

/** pass@1 of all runs, with intervals. */
function resultsOfAll(app) {
  const { data, state } = app;
  const sets = setsOf(data);
  const set = sets.includes(state.set) ? state.set : sets[0];
  const rows = shownUnits(app).map((unit) =>
    unit.runs.length > 1 ? methodResult(unit, set) : runResult(unit.runs[0], set),
  );
  const headings = ["run", "first", "last", "", "interval", "change from the first", "batch", "prompts × samples"];
  return [
    el("h2", { text: "pass@1 of all runs" }),
    el(
      "div",
      { class: "bar" },
      sets.length > 1
        ? choice(
            "set",
            sets.map((one) => [one, one]),
            set,
            (chosen) => app.update({ set: chosen }),
          )
        : null,
      seedsBox(app),
      el("span", {
        class: "dim",
        text: `Of a run: 95 % interval over prompts.${hasSeeds(data) && !state.apart ? " Of seeds: from the lowest to the highest." : ""}`,
      }),
    ),
    table(headings, rows, "numbers"),
  ];
}

const rate = (row) => (row && row.scored ? row.correct / row.scored : NaN);

/** What tells a prompt from all others, in every run. */
const promptKey = ([id, text]) => `${id} ${text}`;

/** The prompts that both evaluations have, those with the greatest change first. A side is { run, number }. */
function compare(before, after) {
  const promptOf = (side, row) => side.run.evaluations.prompts[row.prompt];
  const rowsOf = (side) => side.run.evaluations.rows[side.number] ?? [];
  const old = new Map(rowsOf(before).map((row) => [promptKey(promptOf(before, row)), row]));
  return rowsOf(after)
    .map((row) => {
      const prompt = promptOf(after, row);
      return { prompt, index: row.prompt, before: old.get(promptKey(prompt)), after: row };
    })
    .filter((row) => row.before)
    .map((row) => ({ ...row, change: rate(row.after) - rate(row.before) || 0 }))
    .sort((a, b) => Math.abs(b.change) - Math.abs(a.change) || a.change - b.change || a.index - b.index);
}

/** The mean change of pass@1 over the prompts with scores on both sides; the interval is mean ± 1.96 s / √n. */
function changeOf(rows) {
  const changes = rows.filter((row) => row.before.scored && row.after.scored).map((row) => row.change);
  if (!changes.length) return "";
  const middle = mean(changes);
  const points = `${signed(100 * middle, 1)} points over ${plural(changes.length, "prompt")}`;
  if (changes.length < 10) return points; // too few for an interval
  const squares = changes.reduce((sum, change) => sum + (change - middle) ** 2, 0);
  const half = (1.96 * Math.sqrt(squares / (changes.length - 1))) / Math.sqrt(changes.length);
  return `${points} (95 % interval ${signed(100 * (middle - half), 1)} to ${signed(100 * (middle + half), 1)})`;
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
      correct = row.decided ? row.decided[n] : missing(reward) ? null : reward >= range[1],
      kind = missing(correct) ? "none" : correct ? "right" : "wrong",
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

function promptRows(app, row, before, after) {
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
  const [, text, answer] = row.prompt;
  const rangeOf = ({ run, number }) => run.evaluations.summaries[number].reward_range ?? run.range;
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
          evaluationCompletions(before.run, row.before, before.name, rangeOf(before)),
          evaluationCompletions(after.run, row.after, after.name, rangeOf(after)),
        ),
      ),
    ),
  ];
}

/** The side of a comparison that the state names as RUN:NUMBER; null if there is no such evaluation. */
function readSide(app, text) {
  const [index, number] = text.split(":").map(Number);
  const run = app.data.runs[index];
  const summary = run?.evaluations.summaries[number];
  if (!summary) return null;
  const name = app.data.runs.length > 1 ? `${run.name}, ${summary.name}` : summary.name;
  return { run, number, summary, name: visible(name), value: `${index}:${number}` };
}

/** The change from one side to the other in words. For the first evaluation of a run and a later one of the same set it is
 *  what the run recorded, whose interval also knows how many samples each prompt has. */
function changeBetween(before, after, rows) {
  const { set } = after.summary;
  const first = before.run.evaluations.summaries.findIndex((one) => one.set === set);
  const isRecorded = before.run === after.run && before.number === first && !missing(after.summary["pass@1_change"]);
  return isRecorded ? changeText(after.summary) : changeOf(rows);
}

/** The number of the last evaluation of a set, or of any set; -1 without one. */
function lastOfSet(run, set) {
  const { summaries } = run.evaluations;
  const ofSet = summaries.findLastIndex((one) => (one.set ?? "") === set);
  return ofSet >= 0 ? ofSet : summaries.length - 1;
}

/** Both sides that are compared. At first the first and the last evaluation of a run, or the last ones of two runs. */
function sidesOf(app) {
  const { state, data } = app;
  const evaluatedRuns = data.runs.filter((run) => run.evaluations.summaries.length);
  const [one, two] = evaluatedRuns;
  const other = evaluatedRuns.find((run) => run.method !== one.method) ?? two;
  const last = lastOfSet(one, "");
  const { set } = one.evaluations.summaries[last];
  const start = other
    ? [`${one.index}:${last}`, `${other.index}:${lastOfSet(other, set ?? "")}`]
    : [`${one.index}:${one.evaluations.summaries.findIndex((each) => each.set === set)}`, `${one.index}:${last}`];
  return [readSide(app, state.before) ?? readSide(app, start[0]), readSide(app, state.after) ?? readSide(app, start[1])];
}

/** The evaluations of all runs as options of a select. */
function evaluationOptions(data) {
  const several = data.runs.length > 1;
  const groups = data.runs.map((run) => [
    visible(run.name),
    run.evaluations.summaries.map((one, n) => {
      const name = `${visible(one.name)} (batch ${one.step})`;
      return [`${run.index}:${n}`, several ? `${clipped(run.name, 30)}: ${name}` : name];
    }),
  ]);
  return several ? groups.filter(([, options]) => options.length) : groups[0][1];
}

/** Two evaluations, of one run or of two, prompt by prompt. */
function promptByPrompt(app) {
  const { state, data } = app;
  const [before, after] = sidesOf(app);
  const rows = compare(before, after);
  const isSame = before.value === after.value;
  const shown = rows.filter(CHANGES[isSame ? "all" : state.changes][1]);
  const count = (name) => rows.filter(CHANGES[name][1]).length;
  const options = evaluationOptions(data);
  const empty = rows.length ? "No prompts match." : "These evaluations have no prompts in common.";
  return [
    el("h2", { text: "Prompt by prompt" }),
    el(
      "div",
      { class: "bar" },
      choice("compare", options, before.value, (value) => app.update({ before: value, prompt: -1 })),
      choice("with", options, after.value, (value) => app.update({ after: value, prompt: -1 })),
      choice(
        "show",
        Object.entries(CHANGES).map(([name, [text]]) => [name, `${text} (${count(name)})`]),
        state.changes,
        (changes) => app.update({ changes }),
      ),
      isSame ? null : el("span", { class: "change", text: changeBetween(before, after, rows) }),
    ),
    shown.length
      ? table(
          ["prompt", "", `correct: ${clipped(before.name, 40)}`, `correct: ${clipped(after.name, 40)}`, "change"],
          shown.slice(0, 1000).flatMap((row) => promptRows(app, row, before, after)),
          "prompts",
        )
      : el("p", { class: "empty", text: empty }),
    shown.length > 1000
      ? el("p", { class: "dim", text: `${show(shown.length - 1000)} more prompts are not shown` })
      : null,
  ];
}

/** The tab of evaluations. */
function evaluationsTab(app) {
  const { state, data } = app,
    run = app.run();
  const several = data.runs.length > 1;
  if (!data.runs.some((one) => one.evaluations.summaries.length))
    return el("section", {}, el("p", { class: "empty", text: "There are no evaluations." }));
  const runs = choice(
    "run",
    data.runs.map((one) => [one.index, visible(one.name)]),
    state.run,
    (index) => app.update({ run: Number(index) }),
  );
  const ofRun = run.evaluations.summaries.length
    ? evaluationTable(run)
    : el("p", { class: "empty", text: "This run has no evaluations." });
  if (!several) return el("section", { class: "evaluations" }, ofRun, promptByPrompt(app));
  return el(
    "section",
    { class: "evaluations" },
    resultsOfAll(app),
    promptByPrompt(app),
    el("h2", { text: "All evaluations of one run" }),
    el("div", { class: "bar" }, runs),
    ofRun,
  );
}
