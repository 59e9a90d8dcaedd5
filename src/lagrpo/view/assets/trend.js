// Metrics over batches: one in large, of several runs, and the telling ones in small beside it.

const AXES = { batch: "step", seconds: "wall time, seconds", num_tokens: "completion tokens" };
const SMOOTHINGS = [
  [1, "1 batch"],
  [5, "5 batches"],
  [20, "20 batches"],
  [100, "100 batches"],
];

const WHOLE = [1, 2, 5].flatMap((n) => [...Array(9).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b);

const MANY_BATCHES = 50; // above so many, curves are the mean of 5 batches unless another number is chosen

/** Over how many batches curves are averaged. */
function smoothing(app) {
  if (app.state.smooth) return app.state.smooth;
  const batches = app.data.runs.map((run) => run.metrics.get("step")?.length ?? 0);
  return Math.max(...batches) > MANY_BATCHES ? 5 : 1;
}

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

/** Draws stages, weight syncs, warnings and intervals over the chart. */
function marks(units, state) {
  return (chart) => {
    const { ctx, bbox } = chart,
      ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    const rows = markSyncs(chart, units, state);
    units.filter(hasMarks).forEach((unit, row) => markUnit(chart, unit, state, row, rows));
    for (const unit of units) if (unit.runs.length === 1) markIntervals(chart, unit, state);
    ctx.restore();
  };
}

/** The batches before which the rollout engine got new weights. */
const syncsOf = (run) => run.events.filter((one) => one.event === "weight_sync").map((one) => one.step);

/** Whether it got them before every batch: then ticks would say nothing. */
function syncsAlways(run) {
  const synced = new Set(syncsOf(run));
  return (run.metrics.get("step") ?? []).every((batch) => synced.has(batch));
}

function drawLine(ctx, x, from, to) {
  ctx.beginPath();
  ctx.moveTo(x, from);
  ctx.lineTo(x, to);
  ctx.stroke();
}

/** Draws a row of ticks for each schedule of weight syncs, and returns the number of rows. A schedule that several units
 *  share is gray. */
function markSyncs(chart, units, state) {
  const { ctx, bbox } = chart,
    ratio = devicePixelRatio,
    bottom = bbox.top + bbox.height;
  const unitsBySchedule = new Map();
  for (const unit of units) {
    // Seeds share their schedule.
    const schedule = syncsOf(unit.runs[0]).join(" ");
    if (!syncsAlways(unit.runs[0])) unitsBySchedule.set(schedule, [...(unitsBySchedule.get(schedule) ?? []), unit]);
  }
  [...unitsBySchedule.values()].forEach((sharing, row) => {
    const [{ runs }] = sharing;
    const place = placer(runs[0], state.x);
    ctx.strokeStyle = sharing.length > 1 ? cssColor("--dim") : unitColor(sharing[0]);
    ctx.lineWidth = 2 * ratio;
    for (const batch of syncsOf(runs[0])) {
      const x = chart.valToPos(place(batch), "x", true);
      drawLine(ctx, x, bottom - (10 + 12 * row) * ratio, bottom - 12 * row * ratio);
    }
  });
  return unitsBySchedule.size;
}

const hasWarnings = (run) => run.events.some((event) => MARKED.has(event.event));
const hasMarks = (unit) => unit.runs.some((run) => stagesOf(run).length > 0 || hasWarnings(run));

/** Draws the stages and the warnings of a unit, which is number `row` of those that have any. */
function markUnit(chart, unit, state, row, rowsBelow) {
  const { ctx, bbox } = chart,
    ratio = devicePixelRatio,
    run = unit.runs[0],
    place = placer(run, state.x);
  const at = (batch) => chart.valToPos(place(batch), "x", true),
    bottom = bbox.top + bbox.height;
  ctx.strokeStyle = ctx.fillStyle = unitColor(unit);
  ctx.lineWidth = 2 * ratio;
  for (const [stage, batch] of stagesOf(run)) {
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    drawLine(ctx, at(batch), bbox.top, bottom);
    ctx.setLineDash([]);
    ctx.fillText(`stage ${stage}`, at(batch) + 4 * ratio, bbox.top + (12 + 13 * row) * ratio);
  }
  for (const event of unit.runs.flatMap((one) => one.events))
    if (MARKED.has(event.event)) ctx.fillText("▲", at(event.step) - 5 * ratio, bottom - (3 + 12 * (row + rowsBelow)) * ratio);
}

/** Draws the 95 % intervals of the evaluations of a single run. */
function markIntervals(chart, unit, state) {
  const [run] = unit.runs;
  const place = placer(run, state.x);
  chart.ctx.strokeStyle = unitColor(unit);
  chart.ctx.lineWidth = 2 * devicePixelRatio;
  for (const one of series(run, state.metric)[2] ?? []) {
    const ends = ["_low", "_high"].map((end) => one[evaluated(state.metric)[1] + end]);
    if (ends.some(missing)) continue;
    const x = chart.valToPos(place(one.step), "x", true);
    drawLine(chart.ctx, x, ...ends.map((end) => chart.valToPos(end, "y", true)));
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

/** The series of a unit and, for several seeds, of the ends of their band; and the band between these. */
function unitSeries(unit, first, state) {
  const color = unitColor(unit);
  let points = state.smooth > 1 ? { show: false } : { size: 5 };
  if (evaluated(state.metric)) points = { show: true, size: 8 };
  const line = { stroke: color, width: 2, spanGaps: true, points, value: (_, value) => show(value) };
  const label = clipped(unit.name, 40);
  if (unit.method >= 8) line.dash = [6, 4];
  if (unit.runs.length === 1) return { series: [{ ...line, label }], bands: [] };
  const end = { class: "band-end", stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
  const fill = `color-mix(in srgb, ${color} 18%, transparent)`;
  return { series: [{ ...line, label }, end, end], bands: [{ series: [first + 2, first + 1], fill }] };
}

/** The large chart; a click on it opens the unit and the batch of the nearest point. */
function drawChart(box, units, state, open) {
  const lines = [];
  const bands = [];
  const tables = [];
  const curves = units.map((unit) => [unit, unitCurve(unit, state)]);
  for (const [unit, { x, y, low, high }] of curves) {
    const added = unitSeries(unit, lines.length + 1, state);
    lines.push(...added.series);
    bands.push(...added.bands);
    tables.push(unit.runs.length > 1 ? [x, y, low, high] : [x, y]);
  }
  const size = { width: Math.max(240, box.clientWidth - 2), height: Math.max(220, Math.min(420, innerHeight * 0.42)) };
  const y = {
    ...axisStyle(state.metric),
    size: 64,
    values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : show(tick))),
  };
  const options = {
    ...size,
    series: [{ label: AXES[state.x], value: (_, value) => show(value) }, ...lines],
    bands,
    scales: {
      x: { time: false, range: (_, low, high) => widened(low, high) },
      y: { distr: state.log ? 3 : 1 },
    },
    axes: [{ ...axisStyle(AXES[state.x]), incrs: WHOLE }, y],
    hooks: { draw: [marks(units, state)] },
    cursor: { drag: { x: true, y: false } },
  };
  const chart = new uPlot(options, uPlot.join(tables), box);
  chart.over.addEventListener("click", () => {
    const point = pointAtCursor(chart, curves);
    if (point) open(point.unit, point.batch);
  });
  return chart;
}

const NEAR = 5; // pixels

/** The point that is nearest to the cursor along the x axis. Points of several units that are as near as that, give or take
 *  NEAR pixels, are told apart by their height. Null without any point. */
function pointAtCursor(chart, curves) {
  const { left, top } = chart.cursor;
  const points = [];
  for (const [unit, { batch, x, y }] of curves) {
    let nearest = null;
    x.forEach((value, at) => {
      if (y[at] === null) return;
      const across = Math.abs(chart.valToPos(value, "x") - left);
      if (!nearest || across < nearest.across) nearest = { unit, batch: batch[at], across, y: y[at] };
    });
    if (nearest) points.push(nearest);
  }
  const limit = Math.min(...points.map((point) => point.across)) + NEAR;
  const height = (point) => Math.abs(chart.valToPos(point.y, "y") - top);
  return points.filter((point) => point.across <= limit).sort((a, b) => height(a) - height(b))[0] ?? null;
}

/** The last values of a card: a row for each unit, with its color and name. */
function lastValues(lasts) {
  return lasts.map(([unit, value]) =>
    el(
      "span",
      { class: "last", title: visible(unit.name) },
      swatch(unitColor(unit)),
      el("span", { class: "whose", text: clipped(unit.name, 40) }),
      el("span", { text: show(value) }),
    ),
  );
}

/** A metric in small: a line for each unit, the values of the last batches, and a sign where one is worth a look. */
function small(units, [metric, worth, why], state, width, select) {
  const cardState = { metric, x: "batch", smooth: width, log: false };
  const curves = units.map((unit) => [unit, unitCurve(unit, cardState)]);
  const values = curves.flatMap(([, { y }]) => y).filter((y) => y !== null);
  if (!values.length) return null;
  // A cycle of weight syncs: the last batch by itself may be the only fresh one.
  const lasts = units.map((unit) => [unit, recentOfUnit(unit, metric)]);
  const noted = worth ? lasts.filter(([unit, value]) => !missing(value) && worth(value, unit.runs[0])) : [];
  const names = noted.map(([unit]) => unit.name).join(", ");
  const isOne = units.length === 1;
  const reason = isOne || noted.length === units.length ? why : `${names}: ${why}`;
  return el(
    "button",
    {
      type: "button",
      class: `small${noted.length ? " noted" : ""}`,
      "aria-pressed": String(state.metric === metric),
      title: noted.length ? visible(reason) : "",
      on: { click: () => select(metric) },
    },
    el("span", { class: "head" }, el("b", { text: metric }), isOne ? el("span", { text: show(lasts[0][1]) }) : null),
    sparkline(curves, values),
    isOne ? null : lastValues(lasts),
    el("span", { class: "over", text: recentText(units, metric) }),
    noted.length ? el("span", { class: "why", text: visible(reason) }) : null,
  );
}

function sparkline(curves, values) {
  const [low, high] = extremes(values);
  const [left, right] = extremes(curves.flatMap(([, { x }]) => x));
  const span = high - low || 1;
  const width = right - left || 1;
  const point = (x, y) => `${((100 * (x - left)) / width).toFixed(1)},${(28 - (24 * (y - low)) / span).toFixed(1)}`;
  const lines = curves.map(([unit, { x, y }]) => {
    const points = x.map((at, n) => (y[n] === null ? "" : point(at, y[n]))).filter(Boolean);
    if (points.length === 1) points.push(points[0].replace(/^[^,]*/, "100"));
    return el("polyline", { svg: true, points: points.join(" "), style: { stroke: unitColor(unit) } });
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

/** What the marks of the chart mean: only those that it has. */
function keyText(units) {
  const runs = units.flatMap((unit) => unit.runs);
  const parts = ["Click: open the batch. Drag: zoom; double-click: all of it."];
  if (runs.some((run) => stagesOf(run).length)) parts.unshift("┆ stage");
  if (runs.some(hasWarnings)) parts.unshift("▲ warning");
  if (runs.some((run) => !syncsAlways(run))) parts.unshift("│ weight sync");
  if (units.some((unit) => unit.runs.length > 1)) parts.unshift("Line: mean of the seeds. Band: from the lowest to the highest.");
  return parts.join("   ");
}

/** What happened in each run; of several, folded until somebody opens one. */
function eventLists(app, runs, open) {
  if (runs.length === 1) return [el("h2", { text: "What happened" }), eventList(runs[0], app.state.events, open)];
  return runs.map((run) => {
    const marked = run.events.filter((event) => MARKED.has(event.event)).length;
    const details = el(
      "details",
      { class: "happened", open: app.opened.has(run.index) },
      el(
        "summary",
        {},
        swatch(runColor(run)),
        el("span", { text: ` What happened in ${visible(run.name)}` }),
        marked ? el("span", { class: "warn", text: `  ${plural(marked, "warning")}` }) : null,
      ),
      eventList(run, app.state.events, open),
    );
    details.addEventListener("toggle", () => (details.open ? app.opened.add(run.index) : app.opened.delete(run.index)));
    return details;
  });
}

/** The tab of trends. */
function trendTab(app) {
  const { data } = app,
    width = smoothing(app),
    state = { ...app.state, smooth: width },
    units = shownUnits(app),
    runs = units.flatMap((unit) => unit.runs);
  const box = el("div", { class: "chart" }),
    open = (run, batch) => app.update({ tab: "rollouts", run: run.index, batch, group: "" });
  const controls = el(
    "div",
    { class: "bar" },
    choice("metric", metricOptions(data), state.metric, (metric) => app.update({ metric })),
    choice("over", Object.entries(AXES), state.x, (x) => app.update({ x })),
    choice("mean of", SMOOTHINGS, width, (value) => app.update({ smooth: Number(value) })),
    check("logarithmic", state.log, (log) => app.update({ log })),
    seedsBox(app),
    el("span", { class: "dim", text: meaningOf(data, state.metric) }),
  );
  const smalls = el(
    "div",
    { class: `smalls${units.length > 1 ? " several" : ""}` },
    units.length ? TELLING.map((one) => small(units, one, state, width, (metric) => app.update({ metric }))) : null,
  );
  const all = check("with weight syncs and checkpoints", state.events, (shown) => app.update({ events: shown }));
  const tab = el(
    "section",
    { class: "trend" },
    controls,
    box,
    el("p", { class: "dim key", text: keyText(units) }),
    smalls,
    ageFigures(runs),
    all,
    runs.length ? eventLists(app, runs, open) : null,
  );
  app.afterMount = () => {
    if (!units.some((unit) => unitCurve(unit, state).x.length))
      return box.replaceChildren(el("p", { class: "empty", text: "No run shown here has this metric yet." }));
    // Evaluations before training are at batch 0, which has no rollouts.
    drawChart(box, units, state, (unit, batch) => open(unit.runs[0], Math.max(1, batch)));
  };
  return tab;
}
