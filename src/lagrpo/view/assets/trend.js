// Metrics over batches: one in large, of several runs, and the telling ones in small beside it.

const AXES = { batch: "step", seconds: "wall time, seconds", num_tokens: "completion tokens" };
const SMOOTHINGS = [
  [1, "none"],
  [5, "5 batches"],
  [20, "20 batches"],
  [100, "100 batches"],
];

const WHOLE = [1, 2, 5].flatMap((n) => [...Array(9).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b);

/** Metrics in small: [metric, when a value is worth a look, why]. */
const TELLING = [
  ["reward"],
  ["frac_reward_zero_std", (value, run) => value > 0.7 && !isSolved(run), "most groups give no signal: equal rewards"],
  ["completions/unscored", (value) => value > 0, "completions could not be scored: see their reasons"],
  ["completions/clipped_ratio", (value) => value > 0.5, "most completions were cut at the token limit"],
  ["completions/mean_length"],
  ["staleness/max"],
  ["rollout/kl"],
  ["rollout/ess", (value) => value < 0.5, "the rollouts are stale: less than half of their tokens count"],
  ["clip_ratio/high_mean", (value) => value > 0.3, "more than 30 % of the tokens are clipped"],
  ["grad_norm"],
  ["weight_sync/changed_fraction", (value) => value < 1e-4, "the weight sync changed hardly any weight"],
  ["time/step"],
];

/** Whether nearly all completions of the last batch have the largest reward: then equal groups are no warning. */
function isSolved(run) {
  const [low, high] = run.range;
  return (run.metrics.get("reward")?.findLast((value) => value !== null) ?? low) > high - 0.1 * (high - low);
}

function meaningOf(data, metric) {
  const [set, pass] = evaluated(metric) ?? [];
  if (pass) return `${pass} of the evaluations${set ? ` of ${set}` : ""}, with 95 % intervals`;
  return (
    Object.values(data.metrics)
      .map((room) => room[metric])
      .find(Boolean) ?? ""
  );
}

/** The metrics that any run has numbers of, in their rooms, as options of a select. */
function metricOptions(data) {
  const known = new Set(
    data.runs.flatMap((run) =>
      [...run.metrics].filter(([, values]) => values.some((v) => v !== null)).map(([name]) => name),
    ),
  );
  const rooms = Object.entries(data.metrics).map(([room, names]) => [
    room,
    Object.keys(names).filter((name) => known.delete(name)),
  ]);
  if (known.size) rooms.push(["Others", [...known]]);
  const passes = new Set(
    data.runs.flatMap((run) =>
      run.evaluations.summaries.flatMap((one) =>
        Object.keys(one)
          .filter((key) => /^pass@\d+$/.test(key))
          .map((key) => (one.set ? `${one.set} ${key}` : key)),
      ),
    ),
  );
  rooms.unshift(["Evaluations", [...passes]]);
  return rooms.filter(([, names]) => names.length).map(([room, names]) => [room, names.map((name) => [name, name])]);
}

function smooth(values, width) {
  if (width <= 1) return values;
  return values.map((value, at) => {
    const near = values.slice(Math.max(0, at - width + 1), at + 1).filter((one) => one !== null);
    return value === null ? null : near.reduce((sum, one) => sum + one, 0) / near.length;
  });
}

/** Where a batch lies on the x axis: its number, or what was spent until its end. */
function placer(run, axis) {
  if (axis === "batch") return (batch) => batch;
  const spent = new Map([[0, 0]]),
    batches = run.metrics.get("step") ?? [];
  const steps = run.metrics.get(axis === "seconds" ? "time/step" : axis) ?? [];
  batches.reduce((sum, batch, at) => {
    spent.set(batch, sum + (steps[at] ?? 0));
    return spent.get(batch);
  }, 0);
  return (batch) => spent.get(batch) ?? null;
}

function curve(run, state) {
  const [batches, values] = series(run, state.metric),
    place = placer(run, state.x);
  const drawn = smooth(values, evaluated(state.metric) ? 1 : Number(state.smooth));
  const points = batches.map((batch, at) => [place(batch), state.log && drawn[at] <= 0 ? null : drawn[at]]);
  const known = points.filter(([x]) => x !== null).sort(([a], [b]) => a - b);
  return [known.map(([x]) => x), known.map(([, y]) => y)];
}

/** Draws stages, weight syncs, warnings and intervals over the chart. */
function marks(runs, state) {
  return (chart) => {
    const { ctx, bbox } = chart,
      ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    runs.forEach((run, row) => markRun(chart, run, state, row));
    ctx.restore();
  };
}

function markRun(chart, run, state, row) {
  const { ctx, bbox } = chart,
    ratio = devicePixelRatio,
    place = placer(run, state.x);
  const at = (batch) => chart.valToPos(place(batch), "x", true),
    bottom = bbox.top + bbox.height;
  ctx.strokeStyle = ctx.fillStyle = runColor(run.index);
  ctx.lineWidth = 2 * ratio;
  const line = (x, from, to) => {
    ctx.beginPath();
    ctx.moveTo(x, from);
    ctx.lineTo(x, to);
    ctx.stroke();
  };
  for (const [stage, batch] of stagesOf(run)) {
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    line(at(batch), bbox.top, bottom);
    ctx.setLineDash([]);
    ctx.fillText(`stage ${stage}`, at(batch) + 4 * ratio, bbox.top + (12 + 13 * row) * ratio);
  }
  for (const event of run.events) {
    if (event.event === "weight_sync")
      line(at(event.step), bottom - (10 + 12 * row) * ratio, bottom - 12 * row * ratio);
    if (MARKED.has(event.event)) ctx.fillText("▲", at(event.step) - 5 * ratio, bottom - (13 + 12 * row) * ratio);
  }
  markIntervals(chart, run, state, at, line);
}

function markIntervals(chart, run, state, at, line) {
  for (const one of series(run, state.metric)[2] ?? []) {
    const ends = ["_low", "_high"].map((end) => one[evaluated(state.metric)[1] + end]);
    if (!ends.some(missing)) line(at(one.step), ...ends.map((end) => chart.valToPos(end, "y", true)));
  }
}

/** The first batch of each stage after the first. */
function stagesOf(run) {
  return run.events.filter((one) => one.event === "reference_sync").map((one) => [one.stage, one.step]);
}

function axisStyle(label) {
  return {
    label,
    stroke: cssColor("--dim"),
    grid: { stroke: cssColor("--line"), width: 1 },
    ticks: { stroke: cssColor("--line"), width: 1 },
    labelSize: 20,
  };
}

/** A margin on both sides, so that marks at the ends are seen. */
function widened(low, high) {
  const margin = high > low ? 0.015 * (high - low) : 1;
  return [low - margin, high + margin];
}

/** The large chart; a click on it opens the batch there. */
function drawChart(box, runs, state, open) {
  const sparse = evaluated(state.metric) !== null;
  const lines = runs.map((run) => ({
    label: clipped(run.name, 40),
    stroke: runColor(run.index),
    width: 2,
    spanGaps: true,
    points: sparse ? { show: true, size: 8 } : { size: 5 },
    value: (_, value) => show(value),
  }));
  const size = { width: Math.max(240, box.clientWidth - 2), height: Math.max(220, Math.min(360, innerHeight * 0.42)) };
  const y = {
    ...axisStyle(state.metric),
    size: 64,
    values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : show(tick))),
  };
  const options = {
    ...size,
    series: [{ label: AXES[state.x], value: (_, value) => show(value) }, ...lines],
    scales: {
      x: { time: false, range: (_, low, high) => widened(low, high) },
      y: { distr: state.log ? 3 : 1 },
    },
    axes: [{ ...axisStyle(AXES[state.x]), incrs: WHOLE }, y],
    hooks: { draw: [marks(runs, state)] },
    cursor: { drag: { x: true, y: false } },
  };
  const chart = new uPlot(options, uPlot.join(runs.map((run) => curve(run, state))), box);
  chart.over.addEventListener("click", () => chart.cursor.idx !== null && open(chart, chart.data[0][chart.cursor.idx]));
  return chart;
}

/** The batch of the first run that lies nearest to a place on the x axis. */
function batchAt(run, axis, x) {
  const place = placer(run, axis),
    batches = run.metrics.get("step") ?? [];
  const distance = (batch) => Math.abs(place(batch) - x);
  return batches.reduce((near, one) => (near === null || distance(one) < distance(near) ? one : near), null);
}

/** A metric in small: a line for each run, the last values, and a sign where one is worth a look. */
function small(runs, [metric, worth, why], state, select) {
  const found = runs.map((run) => [run, curve(run, { ...state, metric, x: "batch", smooth: 1, log: false })]);
  const values = found.flatMap(([, [, ys]]) => ys).filter((y) => y !== null);
  if (!values.length) return null;
  const lasts = found.map(([, [, ys]]) => ys.findLast((y) => y !== null));
  const noted = worth && lasts.some((last, n) => !missing(last) && worth(last, runs[n]));
  const head = el(
    "span",
    { class: "head" },
    el("b", { text: metric }),
    el("span", { text: lasts.map(show).join(" · ") }),
  );
  return el(
    "button",
    {
      type: "button",
      class: `small${noted ? " noted" : ""}`,
      "aria-pressed": String(state.metric === metric),
      title: noted ? why : "",
      on: { click: () => select(metric) },
    },
    head,
    sparkline(found, values),
    noted ? el("span", { class: "why", text: why }) : null,
  );
}

function sparkline(found, values) {
  const low = Math.min(...values),
    span = Math.max(...values) - low || 1;
  const xs = found.flatMap(([, [own]]) => own),
    left = Math.min(...xs),
    width = Math.max(...xs) - left || 1;
  const point = (x, y) => `${((100 * (x - left)) / width).toFixed(1)},${(28 - (24 * (y - low)) / span).toFixed(1)}`;
  const lines = found.map(([run, [own, ys]]) => {
    const points = own.map((x, n) => (ys[n] === null ? "" : point(x, ys[n]))).filter(Boolean);
    if (points.length === 1) points.push(points[0].replace(/^[^,]*/, "100"));
    return el("polyline", { svg: true, points: points.join(" "), style: { stroke: runColor(run.index) } });
  });
  return el("svg", { svg: true, viewBox: "0 0 100 32", preserveAspectRatio: "none", "aria-hidden": "true" }, lines);
}

/** What differs since the checkpoint, as [before, now] by name; nothing where nothing does. */
function differences(kind, event) {
  const names = Object.keys(event[kind] ?? {});
  return names.length ? [`${kind}: ${JSON.stringify(event[kind])}`] : [];
}

/** Completions of a batch, or of an evaluation, that have no reward. */
function withoutReward(event) {
  const what = event.evaluation ? ` of the evaluation ${event.evaluation}` : "";
  return `${event.count} of ${event.completions} completions${what} ${event.event}; the first: ${event.reason}`;
}

const EVENT_TEXT = {
  weight_sync: (event) => `weight sync: version ${event.policy_version} (${event.reason})`,
  warning: (event) => event.text,
  reference_sync: (event) => `stage ${event.stage} begins: the reference becomes the policy`,
  checkpoint: (event) => `checkpoint written in ${show(event.seconds)} s`,
  unscored: withoutReward,
  failed: withoutReward,
  resumed: (event) =>
    ["resumed", ...["changed", "moved", "code"].flatMap((kind) => differences(kind, event))].join("; "),
  end: (event) => (event.status === "finished" ? "finished" : `${event.status}: ${event.detail}`),
};
const MARKED = new Set(["warning", "unscored", "failed"]);
const QUIET = new Set(["weight_sync", "reference_sync", "checkpoint"]);

/** What happened, the newest first; weight syncs and checkpoints only where they are asked for. */
function eventList(run, all, open) {
  const shown = run.events.filter((event) => all || !QUIET.has(event.event)).reverse();
  const rows = shown.slice(0, 500).map((event) => {
    const text = EVENT_TEXT[event.event]?.(event) ?? JSON.stringify(event);
    const place = button(`batch ${event.step}`, "open this batch", () => open(run, event.step));
    return el("li", { class: event.event }, place, el("span", { text: visible(text) }));
  });
  if (shown.length > rows.length)
    rows.push(el("li", { text: `… and ${plural(shown.length - rows.length, "older event")}` }));
  return el(
    "ul",
    { class: "events" },
    rows.length ? rows : el("li", { class: "dim", text: "only weight syncs and checkpoints so far" }),
  );
}

/** The tab of trends. */
function trendTab(app) {
  const { data, state } = app,
    runs = data.runs.filter((run) => !state.hidden.includes(run.index));
  const box = el("div", { class: "chart" }),
    open = (run, batch) => app.update({ tab: "rollouts", run: run.index, batch, group: "" });
  const controls = el(
    "div",
    { class: "bar" },
    choice("metric", metricOptions(data), state.metric, (metric) => app.update({ metric })),
    choice("over", Object.entries(AXES), state.x, (x) => app.update({ x })),
    choice("mean of", SMOOTHINGS, state.smooth, (value) => app.update({ smooth: Number(value) })),
    check("logarithmic", state.log, (log) => app.update({ log })),
    el("span", { class: "dim", text: meaningOf(data, state.metric) }),
  );
  const key = el("p", {
    class: "dim key",
    text: "│ weight sync   ▲ warning   ┆ stage   Click: open the batch. Drag: zoom; double-click: all of it.",
  });
  const smalls = el(
    "div",
    { class: "smalls" },
    runs.length ? TELLING.map((one) => small(runs, one, state, (metric) => app.update({ metric }))) : null,
  );
  const events = runs.flatMap((run) => [
    el(
      "h2",
      {},
      el("span", { class: "swatch", style: { background: runColor(run.index) } }),
      `What happened in ${visible(run.name)}`,
    ),
    eventList(run, state.events, open),
  ]);
  const all = check("with weight syncs and checkpoints", state.events, (shown) => app.update({ events: shown }));
  const tab = el("section", { class: "trend" }, controls, box, key, smalls, all, events);
  app.afterMount = () => {
    if (!runs.some((run) => curve(run, state)[0].length))
      return box.replaceChildren(el("p", { class: "empty", text: "No run shown here has this metric yet." }));
    drawChart(box, runs, state, (_, x) => {
      const batch = batchAt(runs[0], state.x, x);
      if (batch !== null) open(runs[0], batch);
    });
  };
  return tab;
}
