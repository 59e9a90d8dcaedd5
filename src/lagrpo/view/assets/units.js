// What the page compares: methods. The runs of a method differ only in their seeds, and share a color.

/** Each method, or with `apart` each run by itself: its name, its color and its runs. */
function unitsOf(data, apart) {
  return data.methods.flatMap(([name, indices], method) => {
    const runs = indices.map((index) => data.runs[index]);
    if (!apart) return [{ name, method, runs }];
    return runs.map((run) => ({ name: run.name, method, runs: [run] }));
  });
}

/** The units that are not hidden. */
const shownUnits = (app) => unitsOf(app.data, app.state.apart).filter((unit) => !app.state.hidden.includes(unit.method));

const hasSeeds = (data) => data.methods.some(([, indices]) => indices.length > 1);
const unitColor = (unit) => methodColor(unit.method);
const runColor = (run) => methodColor(run.method);
const swatch = (color) => el("span", { class: "swatch", style: { background: color } });

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** The smallest and the largest value. Math.min(...values) fails for 100,000 values: each is an argument. */
function extremes(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}

/** Whether a metric is drawn as it is: a mean over batches would hide that staleness starts at 0 after each sync. */
const isNeverSmoothed = (metric) => Boolean(evaluated(metric)) || metric.startsWith("staleness/");

/** A metric of a run over its last batches: the mean, or of a maximum the largest. */
function recent(run, metric) {
  const values = series(run, metric)[1].slice(-run.recent).filter((value) => !missing(value));
  if (!values.length) return null;
  return metric.endsWith("max") ? extremes(values)[1] : mean(values);
}

/** The same for a unit: the mean of its seeds that have the metric. */
function recentOfUnit(unit, metric) {
  const values = unit.runs.map((run) => recent(run, metric)).filter((value) => value !== null);
  return values.length ? mean(values) : null;
}

/** Which batches `recent` covers, for all runs of some units. */
function recentText(units, metric) {
  const counts = [...new Set(units.flatMap((unit) => unit.runs.map((run) => run.recent)))];
  return `${metric.endsWith("max") ? "largest" : "mean"} of the last ${counts.join(" or ")} batches`;
}

/** The curve of a run: a point [x, y] by batch. */
function runCurve(run, state) {
  const [batches, values] = series(run, state.metric);
  const place = placer(run, state.x);
  const drawn = smooth(values, isNeverSmoothed(state.metric) ? 1 : state.smooth);
  const points = new Map();
  batches.forEach((batch, at) => {
    const x = place(batch);
    if (x !== null && !missing(drawn[at])) points.set(batch, [x, drawn[at]]);
  });
  return points;
}

/** The curve of a unit: the mean of its seeds with the smallest and the largest, at batches that all of them have. */
function unitCurve(unit, state) {
  const curves = unit.runs.map((run) => runCurve(run, state));
  const positive = (y) => (state.log && y <= 0 ? null : y);
  const points = [...curves[0].keys()]
    .filter((batch) => curves.every((points) => points.has(batch)))
    .map((batch) => {
      const xs = curves.map((points) => points.get(batch)[0]);
      const ys = curves.map((points) => points.get(batch)[1]);
      const [low, high] = [Math.min(...ys), Math.max(...ys)];
      return { batch, x: mean(xs), y: positive(mean(ys)), low: positive(low), high: positive(high) };
    })
    .sort((a, b) => a.x - b.x);
  const column = (name) => points.map((point) => point[name]);
  return { batch: column("batch"), x: column("x"), y: column("y"), low: column("low"), high: column("high") };
}

/** A box that shows each seed by itself, where a method has several. */
function seedsBox(app) {
  if (!hasSeeds(app.data)) return null;
  return check("each seed", app.state.apart, (apart) => app.update({ apart }));
}

/** What a unit is, for a tooltip. */
function unitTitle(unit) {
  if (unit.runs.length === 1) return `${unit.runs[0].path}\n${unit.runs[0].status[1]}`;
  return unit.runs.map((run) => `seed ${run.settings["run.seed"]}: ${run.path}, ${run.status[0]}`).join("\n");
}
