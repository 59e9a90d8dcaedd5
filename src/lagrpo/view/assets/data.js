// The data of the page: unpacked, and what follows from it for each group.

const ARRAYS = {
  uint8: Uint8Array,
  uint16: Uint16Array,
  int16: Int16Array,
  uint32: Uint32Array,
  int32: Int32Array,
  float32: Float32Array,
  float64: Float64Array,
};
const UNKNOWN = -32768; // in place of a log-prob that was not recorded
const PER_NAT = 1000;

function fromBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

/** The header, with the arrays of each run as run.rollouts.columns. */
async function unpack(packed) {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const content = await new Response(stream).arrayBuffer();
  const length = new DataView(content).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(content, 4, length)));
  const start = 8 * Math.ceil((4 + length) / 8);
  const arrays = header.arrays.map(([kind, at, count]) => new ARRAYS[kind](content, start + at, count));
  header.runs.forEach((run, index) => prepare(run, index, arrays));
  header.methods.forEach(([, indices], method) => {
    for (const index of indices) header.runs[index].method = method;
  });
  return header;
}

function prepare(run, index, arrays) {
  run.index = index;
  run.metrics = new Map(Object.entries(run.metrics));
  const rollouts = run.rollouts;
  for (const [name, number] of Object.entries(rollouts.columns)) rollouts[name] = arrays[number];
  rollouts.count = rollouts.texts.length;
  rollouts.scored = rollouts.codes.outcome.indexOf("scored");
  rollouts.groups = Array.from(rollouts.group_batch, (_, g) => summarize(run, g));
  rollouts.groupOf = new Uint32Array(rollouts.count);
  for (const { g, first, end } of rollouts.groups) rollouts.groupOf.fill(g, first, end);
  rollouts.byId = new Map(rollouts.groups.map((group) => [group.id, group]));
  rollouts.age = new Float32Array(rollouts.count).fill(NaN);
  rollouts.versions = new Uint16Array(rollouts.count);
  for (let c = 0; c < rollouts.count; c++) ageCompletion(rollouts, c);
}

/** The number of versions that sampled a completion, and the mean age of its tokens in updates. */
function ageCompletion(r, c) {
  const policy = r.groups[r.groupOf[c]].version,
    versions = new Set();
  let sum = 0,
    count = 0;
  for (let t = r.first_token[c]; t < r.first_token[c + 1]; t++) {
    if (!r.sampled[t] || r.version[t] < 0) continue;
    versions.add(r.version[t]);
    sum += policy - r.version[t];
    count += 1;
  }
  r.versions[c] = versions.size;
  if (count) r.age[c] = sum / count;
}

/** What is known of a group: mean and spread of its rewards, who has none, staleness and length. */
function summarize(run, g) {
  const r = run.rollouts,
    first = r.group_first[g],
    end = r.group_first[g + 1];
  const group = { g, first, end, size: end - first, batch: r.group_batch[g], prompt: r.group_prompt[g] };
  const [key, text, answer] = r.prompts[group.prompt];
  Object.assign(group, {
    key,
    text,
    answer,
    epoch: r.group_epoch[g],
    version: versionOf(run, group.batch),
    scored: 0,
    staleness: NaN,
    length: 0,
  });
  let sum = 0,
    squares = 0;
  for (let c = first; c < end; c++) {
    group.length += (r.first_token[c + 1] - r.first_token[c]) / group.size;
    if (!(r.staleness[c] <= group.staleness)) group.staleness = Number.isNaN(r.staleness[c]) ? group.staleness : r.staleness[c];
    if (r.outcome[c] !== r.scored) continue;
    group.scored += 1;
    sum += r.reward[c];
  }
  group.mean = group.scored ? sum / group.scored : NaN;
  for (let c = first; c < end; c++) if (r.outcome[c] === r.scored) squares += (r.reward[c] - group.mean) ** 2;
  group.spread = group.scored ? Math.sqrt(squares / group.scored) : NaN;
  group.flat = r.codes.excluded_reason[r.excluded_reason[first]] === "zero_variance" || (group.scored > 1 && squares === 0);
  group.id = `${group.batch}:${key}:${group.epoch}:${ordinal(run, g)}`;
  return group;
}

/** The version of π_k in a batch. */
const versionOf = (run, batch) => run.rollouts.batches.find(([one]) => one === batch)[1];

/** Groups of one prompt in one batch are told apart by a number. */
function ordinal(run, g) {
  const r = run.rollouts;
  let before = 0;
  for (let other = g - 1; other >= 0 && r.group_batch[other] === r.group_batch[g]; other--) {
    before += r.group_prompt[other] === r.group_prompt[g] && r.group_epoch[other] === r.group_epoch[g];
  }
  return before;
}

const outcomeOf = (run, c) => run.rollouts.codes.outcome[run.rollouts.outcome[c]];
const isScored = (run, c) => run.rollouts.outcome[c] === run.rollouts.scored;
/** True, false, or NaN if unknown. With several rewards the run recorded what is correct. */
const correctnessOf = (run, c) => {
  if (!isScored(run, c)) return NaN;
  if (!run.rollouts.correct) return run.rollouts.reward[c] >= run.range[1];
  return Number.isNaN(run.rollouts.correct[c]) ? NaN : run.rollouts.correct[c] === 1;
};
const isCorrect = (run, c) => correctnessOf(run, c) === true;
const lengthOf = (run, c) => run.rollouts.first_token[c + 1] - run.rollouts.first_token[c];
const batchesOf = (run) => run.rollouts.batches.map(([batch]) => batch);

/** The share of the range of rewards that a reward reaches, from 0 to 1. */
function height(run, reward) {
  const [low, high] = run.range;
  return high > low ? Math.min(1, Math.max(0, (reward - low) / (high - low))) : Number(reward >= high);
}

/** pass@k of a set of prompts, or of the only: "hard pass@1" is ["hard", "pass@1"]; null for other metrics. */
function evaluated(metric) {
  const found = /^(?:(\w+) )?(pass@\d+)$/.exec(metric);
  return found ? [found[1] ?? "", found[2]] : null;
}

/** The evaluations of a set. */
const madeOf = (run, set) => run.evaluations.summaries.filter((one) => (one.set ?? "") === set);

/** A metric of a run: [batches, values]; pass@k is of its evaluations. */
function series(run, metric) {
  const [set, name] = evaluated(metric) ?? [];
  if (name) {
    const made = madeOf(run, set).filter((one) => !missing(one[name]));
    return [made.map((one) => one.step), made.map((one) => one[name]), made];
  }
  const batches = run.metrics.get("step") ?? [];
  return [batches, run.metrics.get(metric) ?? batches.map(() => null), null];
}
