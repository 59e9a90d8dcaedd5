// Age and length of completions, where some have tokens of several versions: do the long ones go with the old ones?

const AGE_BINS = { across: 32, up: 16 };
const AGE_PLOT = { width: 640, height: 240, left: 48, right: 12, top: 10, bottom: 40 };

const isMixed = (run, c) => run.rollouts.versions[c] > 1;
const hasMixed = (run) => run.rollouts.versions.some((count) => count > 1);

/** The completions of a run whose age is known, as [length in tokens, mean age of its tokens in updates], by length. */
function agePoints(run) {
  const points = [];
  run.rollouts.age.forEach((age, c) => {
    if (!Number.isNaN(age)) points.push([lengthOf(run, c), age]);
  });
  return points.sort((a, b) => a[0] - b[0]);
}

const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Mean ages of the shortest and of the longest third of the completions, in words. */
function ageText(points) {
  const third = Math.max(1, Math.floor(points.length / 3));
  const [short, long] = [points.slice(0, third), points.slice(-third)].map((part) => meanOf(part.map(([, age]) => age)));
  return `mean age ${show(short)} updates in the shortest third, ${show(long)} in the longest`;
}

/** The completions in bins of length and age: [first length, lowest age, [points]], and the size of a bin. */
function ageBins(points) {
  const low = points[0][0],
    most = Math.max(1e-9, extremes(points.map(([, age]) => age))[1]);
  const width = Math.max(1, Math.ceil((points.at(-1)[0] - low + 1) / AGE_BINS.across)),
    tall = most / AGE_BINS.up;
  const bins = new Map();
  for (const point of points) {
    const x = Math.floor((point[0] - low) / width),
      y = Math.min(AGE_BINS.up - 1, Math.floor(point[1] / tall)),
      key = x * AGE_BINS.up + y;
    if (!bins.has(key)) bins.set(key, [low + x * width, y * tall, []]);
    bins.get(key)[2].push(point);
  }
  return { bins: [...bins.values()], width, tall, low, most };
}

/** A number of completions in a bin is the depth of its color; the line is the mean age at a length. */
function ageFigure(run) {
  const points = agePoints(run),
    { bins, width, tall, low, most } = ageBins(points),
    { left, top } = AGE_PLOT;
  const columns = Math.ceil((points.at(-1)[0] - low + 1) / width);
  const across = (AGE_PLOT.width - left - AGE_PLOT.right) / columns,
    down = AGE_PLOT.height - top - AGE_PLOT.bottom;
  const x = (length) => left + (across * (length - low)) / width,
    y = (age) => top + down * (1 - age / most);
  const largest = Math.max(...bins.map(([, , inside]) => inside.length));
  const rects = bins.map(([length, age, inside]) => {
    const lengths = width === 1 ? plural(length, "token") : `${show(length)} to ${show(length + width - 1)} tokens`;
    const text = `${plural(inside.length, "completion")} of ${lengths}, ${show(age)} to ${show(age + tall)} updates old`;
    return el(
      "rect",
      {
        svg: true,
        x: x(length) + 0.5,
        y: y(age + tall) + 0.5,
        width: Math.max(1, across - 1),
        height: Math.max(1, (down * tall) / most - 1),
        "fill-opacity": (0.15 + 0.85 * Math.sqrt(inside.length / largest)).toFixed(3),
      },
      el("title", { svg: true, text }),
    );
  });
  const byLength = new Map();
  for (const [length, , inside] of bins) byLength.set(length, [...(byLength.get(length) ?? []), ...inside]);
  const line = [...byLength]
    .sort((a, b) => a[0] - b[0])
    .map(([length, inside]) => `${x(length) + across / 2},${y(meanOf(inside.map(([, age]) => age)))}`);
  const label = (at, up, text, anchor) => el("text", { svg: true, x: at, y: up, "text-anchor": anchor, text });
  const bottom = AGE_PLOT.height - AGE_PLOT.bottom;
  const last = points.at(-1)[0];
  return el(
    "svg",
    { svg: true, class: "ages", viewBox: `0 0 ${AGE_PLOT.width} ${AGE_PLOT.height}`, role: "img", "aria-label": ageText(points) },
    el("path", { svg: true, d: `M${left} ${top}V${bottom}H${AGE_PLOT.width - AGE_PLOT.right}` }),
    rects,
    el("polyline", { svg: true, points: line.join(" ") }),
    label(left - 6, top + 10, show(most), "end"),
    label(left - 6, bottom, "0", "end"),
    label(left, bottom + 16, show(low), "start"),
    label(AGE_PLOT.width - AGE_PLOT.right, bottom + 16, show(last), "end"),
    label((left + AGE_PLOT.width) / 2, AGE_PLOT.height - 6, "tokens of a completion", "middle"),
    el("text", { svg: true, "text-anchor": "middle", transform: `translate(14 ${top + down / 2}) rotate(-90)`, text: "age, updates" }),
  );
}

/** The figures of the runs that have completions with tokens of several versions. */
function ageFigures(runs) {
  const mixed = runs.filter(hasMixed);
  if (!mixed.length) return null;
  return el(
    "div",
    { class: "age-figures" },
    el("h2", { text: "Age and length of completions" }),
    mixed.map((run) =>
      el(
        "figure",
        {},
        el(
          "figcaption",
          { class: "dim" },
          mixed.length > 1 ? [swatch(runColor(run)), el("b", { text: ` ${visible(run.name)}: ` })] : null,
          `${ageText(agePoints(run))}. Darker: more completions; line: their mean age.`,
        ),
        ageFigure(run),
      ),
    ),
  );
}
