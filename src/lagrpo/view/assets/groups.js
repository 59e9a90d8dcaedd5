// Which groups are shown, in which order.

const SORTS = {
  spread: ["reward spread, largest first", (group) => -group.spread],
  low: ["mean reward, smallest first", (group) => group.mean],
  high: ["mean reward, largest first", (group) => -group.mean],
  staleness: ["staleness, largest first", (group) => -group.staleness],
  length: ["length, longest first", (group) => -group.length],
  order: ["as in the batch", (group) => group.g],
};

const OUTCOMES = {
  all: ["all", () => true],
  correct: ["correct", (run, c) => isCorrect(run, c)],
  wrong: ["wrong", (run, c) => correctnessOf(run, c) === false],
  unscored: ["unscored", (run, c) => outcomeOf(run, c) === "unscored"],
  failed: ["failed", (run, c) => outcomeOf(run, c) === "failed"],
  cut: ["cut at the limit", (run, c) => !run.rollouts.finished[c]],
  excluded: ["not in the objective", (run, c) => excludedReason(run.rollouts, c) !== ""],
};

/** Bounds of the filter: [name, label, value of a completion]. */
const BOUNDS = [
  ["reward", "reward", (run, c) => run.rollouts.reward[c]],
  ["tokens", "tokens", lengthOf],
  ["staleness", "staleness", (run, c) => run.rollouts.staleness[c]],
];

function within(value, low, high) {
  if (low === "" && high === "") return true;
  if (Number.isNaN(value)) return false;
  return (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));
}

/** A function that says whether a completion passes the filter of the state. */
function makeFilter(run, state) {
  const kind = OUTCOMES[state.outcome][1],
    sought = state.q.toLowerCase();
  const bounds = BOUNDS.filter(([name]) => state[`${name}_low`] !== "" || state[`${name}_high`] !== "");
  return (c, group) =>
    kind(run, c) &&
    bounds.every(([name, , value]) => within(value(run, c), state[`${name}_low`], state[`${name}_high`])) &&
    (!sought ||
      [run.rollouts.texts[c], group.text, reasonOf(run, c)].some((text) => text.toLowerCase().includes(sought)));
}

const excludedReason = (r, c) => r.codes.excluded_reason[r.excluded_reason[c]];
const reasonOf = (run, c) => run.rollouts.codes.reason[run.rollouts.reason[c]];

const isFiltered = (state) =>
  state.outcome !== "all" ||
  state.q !== "" ||
  BOUNDS.some(([name]) => state[`${name}_low`] + state[`${name}_high`] !== "");

/** The batch that the state means: a number, or null for all of them. */
function chosenBatch(run, state) {
  const batches = batchesOf(run);
  if (state.batch === "all") return null;
  if (state.batch === "last" || !batches.length) return batches.at(-1) ?? null;
  return batches.reduce((near, one) => (Math.abs(one - state.batch) < Math.abs(near - state.batch) ? one : near));
}

/** The groups with a completion that passes, sorted, and how many completions pass. */
function findGroups(run, state) {
  const batch = chosenBatch(run, state),
    passes = makeFilter(run, state);
  let matches = 0;
  const found = run.rollouts.groups.filter((group) => {
    if (batch !== null && group.batch !== batch) return false;
    const before = matches;
    for (let c = group.first; c < group.end; c++) matches += passes(c, group);
    return matches > before;
  });
  const key = SORTS[state.sort][1];
  const value = (group) => (Number.isNaN(key(group)) ? Infinity : key(group));
  return { groups: found.sort((a, b) => value(a) - value(b) || a.g - b.g), matches, passes };
}
