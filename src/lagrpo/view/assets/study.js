// The report of a study: verdicts, curves by cell, tables.

const SMOOTHS = [1, 5, 10, 20].map((n) => [n, n === 1 ? "none" : `${n} batches`]);
const VERDICTS = { holds: "right", "does not hold": "wrong" };

const state = { metric: "", panel: "", smooth: 1, seeds: false };

/** Means over the last `width` values, or as many as there are; null where one is unknown. */
function smoothed(values, width) {
  return values.map((value, at) => {
    const near = values.slice(Math.max(0, at - width + 1), at + 1);
    return near.some(missing) ? null : near.reduce((sum, one) => sum + one, 0) / near.length;
  });
}

/** The runs of a cell as one line: mean over the seeds, least and greatest, by batch. */
function overSeeds(curves) {
  const length = Math.min(...curves.map((curve) => curve.length));
  return Array.from({ length }, (_, n) => curves.map((curve) => curve[n]).filter((value) => !missing(value))).map(
    (values) =>
      values.length
        ? [values.reduce((sum, one) => sum + one, 0) / values.length, Math.min(...values), Math.max(...values)]
        : [null, null, null],
  );
}

const colorOf = (number) => runColor(number);
const dashOf = (number) => [[], [8, 4], [2, 3], [8, 3, 2, 3]][Math.floor(number / 6) % 4];
const faded = (color) => `color-mix(in srgb, ${color} 16%, transparent)`;

/** The cells that are drawn: of the chosen label of the last axis, or all. */
function cellsDrawn(data) {
  return data.cells.filter((cell) => !state.panel || cell.at(-1) === state.panel);
}

function linesOf(data, cell) {
  const own = data.runs.filter((run) => run.cell.join("\n") === cell.join("\n"));
  return own.map((run) => [run.seed, smoothed(run.curves[state.metric] ?? [], state.smooth)]);
}

/** Series and columns of the chart: a line and a band for each cell, or a line for each run. */
function chartData(data) {
  const series = [{ label: "batch" }],
    columns = [],
    bands = [];
  cellsDrawn(data).forEach((cell, number) => {
    const lines = linesOf(data, cell),
      color = colorOf(number),
      name = clipped((state.panel ? cell.slice(0, -1) : cell).join(", ") || "all runs", 60);
    if (!lines.length) return;
    const line = { stroke: color, dash: dashOf(number), width: 2, points: { show: false }, value: (_, v) => show(v) };
    if (state.seeds) {
      lines.forEach(([seed, values]) => {
        series.push({ ...line, label: `${name}, seed ${seed}`, width: 1.3 });
        columns.push(values);
      });
      return;
    }
    const found = overSeeds(lines.map(([, values]) => values));
    [0, 1, 2].forEach((n) => columns.push(found.map((three) => three[n])));
    series.push({ ...line, label: name });
    const edge = { stroke: "transparent", points: { show: false }, value: (_, v) => show(v) };
    series.push({ ...edge, label: `${name}: least` }, { ...edge, label: "greatest" });
    bands.push({ series: [series.length - 1, series.length - 2], fill: faded(color) });
  });
  const length = Math.max(0, ...columns.map((column) => column.length));
  const x = Array.from({ length }, (_, n) => n + 1);
  return [series, [x, ...columns.map((column) => [...column, ...Array(length - column.length).fill(null)])], bands];
}

function chartAxis(label, further = {}) {
  const line = { stroke: cssColor("--line"), width: 1 };
  return { label, stroke: cssColor("--dim"), grid: line, ticks: line, labelSize: 20, ...further };
}

function drawCurves(data, box) {
  const [series, columns, bands] = chartData(data);
  if (series.length === 1) {
    box.replaceChildren(el("p", { class: "empty", text: "no run has this metric" }));
    return;
  }
  const options = {
    width: Math.max(240, box.clientWidth - 2),
    height: 340,
    series,
    bands,
    scales: { x: { time: false } },
    axes: [chartAxis("batch"), chartAxis(state.metric, { size: 64, values: (_, ticks) => ticks.map(show) })],
    cursor: { drag: { x: true, y: false } },
  };
  new uPlot(options, columns, box);
}

function curvesSection(data, redraw) {
  if (!data.metrics.length) return null;
  const change = (name, kind) => (value) => {
    state[name] = kind(value);
    redraw();
  };
  const labels = data.cells[0].length > 1 ? [...new Set(data.cells.map((cell) => cell.at(-1)))] : [];
  const box = el("div", { class: "chart" });
  const section = el(
    "section",
    {},
    el("h2", { text: "Curves" }),
    el(
      "div",
      { class: "bar" },
      choice("metric", data.metrics.map((name) => [name, name]), state.metric, change("metric", String)),
      labels.length
        ? choice("of", [["", "all cells"], ...labels.map((name) => [name, name])], state.panel, change("panel", String))
        : null,
      choice("mean of", SMOOTHS, state.smooth, change("smooth", Number)),
      check("each seed", state.seeds, change("seeds", Boolean)),
      el("span", { class: "dim", text: state.seeds ? "" : "line: mean of the seeds; band: least and greatest" }),
    ),
    box,
  );
  return [section, () => drawCurves(data, box)];
}

function rowsOf(rows) {
  const [head, ...rest] = rows;
  return table(head, rest.map((row) => el("tr", {}, row.map((text) => el("td", { text: visible(text) })))), "grid");
}

function claimsSection(data) {
  if (!data.claims.length) return null;
  const rows = data.claims.map((claim) =>
    el(
      "tr",
      {},
      el("td", {}, el("b", { text: visible(claim.says) }), el("div", { class: "dim", text: visible(claim.source) })),
      el("td", { text: visible(claim.tested) }),
      el("td", { text: claim.difference }),
      el("td", {}, el("b", { class: VERDICTS[claim.outcome] ?? "none", text: claim.verdict })),
    ),
  );
  const head = ["claim", "tested as", "difference", "verdict"];
  const caution = el("p", { class: "dim", text: data.caution });
  return el("section", {}, el("h2", { text: "Claims" }), table(head, rows, "grid"), caution);
}

function tablesSection(data) {
  return data.tables.map(({ name, rows }) => el("section", {}, el("h2", { text: name }), rowsOf(rows)));
}

function whereSection(data) {
  const lines = data.where.map((line) => el("li", { text: visible(line) }));
  return el("section", {}, el("h2", { text: "Where" }), el("ul", {}, lines));
}

function renderStudy(data) {
  const page = document.getElementById("page"),
    curves = curvesSection(data, () => renderStudy(data));
  const theme = button("light or dark", "key t", () => {
    toggleStudyTheme();
    renderStudy(data);
  });
  page.replaceChildren(
    el("header", {}, el("h1", { text: visible(data.title) }), el("div", { class: "tools" }, theme)),
    el("p", { text: visible(data.note) }),
    el("p", { class: data.missing ? "warn" : "dim", text: data.about }),
    ...[claimsSection(data), curves?.[0], ...tablesSection(data)].filter(Boolean),
    whereSection(data),
  );
  curves?.[1]();
}

function toggleStudyTheme() {
  const root = document.documentElement,
    dark = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = dark === "dark" ? "light" : "dark";
}

const packed = atob(document.getElementById("data").textContent);
const study = JSON.parse(new TextDecoder().decode(Uint8Array.from(packed, (character) => character.charCodeAt(0))));
state.metric = study.metrics[0] ?? "";
state.smooth = study.smooth;
if (!SMOOTHS.some(([n]) => n === state.smooth)) SMOOTHS.push([state.smooth, `${state.smooth} batches`]);
document.addEventListener("keydown", (event) => {
  if (event.key !== "t" || event.target.closest("input, select")) return;
  toggleStudyTheme();
  renderStudy(study);
});
addEventListener("resize", () => renderStudy(study));
renderStudy(study);
