// The tokens of a completion, colored by what was recorded for each: its log-prob under alpha, the ratio to pi_k, the
// entropy of pi_k, or its version.

const COLORINGS = {
  logp: "log α of the token",
  ratio: "log π_k − log α",
  entropy: "entropy of π_k",
  version: "version that sampled it",
  none: "no color: the text",
};
const SATURATED = 6; // nats: less likely tokens have the same color
const RATIO_SATURATED = 0.7; // nats, about ln 2, either way
const ENTROPY_SATURATED = 3; // nats
// Of Okabe and Ito, told apart without seeing red or green; neighbors differ in lightness, too.
const VERSION_COLORS = ["#0072b2", "#e69f00", "#cc79a7", "#009e73", "#f0e442", "#56b4e9", "#d55e00", "#999999"];
const LISTED_VERSIONS = 12; // in the legend

/** What was recorded of a token, in nats; NaN where nothing was. */
function nats(values, t) {
  return !values || values[t] === UNKNOWN ? NaN : values[t] / PER_NAT;
}

const ratioOf = (r, t) => nats(r.old_logprobs, t) - nats(r.rollout_logprobs, t);

/** The shade of a value: none at 0, full where it is `most` or more. */
const shade = (hue, value, most) => `hsl(${hue} 95% 50% / ${(0.75 * Math.min(1, value / most)).toFixed(3)})`;

function tokenText(r, t) {
  return r.vocabulary ? r.vocabulary[r.token[t]] : ` ${r.ids[r.token[t]]} `;
}

const versionColor = (version) =>
  `color-mix(in srgb, ${VERSION_COLORS[Math.max(0, version) % VERSION_COLORS.length]} 38%, transparent)`;

/** The version that sampled the first token of a completion. */
function firstVersion(r, c) {
  for (let t = r.first_token[c]; t < r.first_token[c + 1]; t++) if (r.sampled[t]) return r.version[t];
  return -1;
}

/** The background of a token, or null. */
function tokenColor(r, t, coloring) {
  if (!r.sampled[t]) return null;
  if (coloring === "version") return versionColor(r.version[t]);
  const value = { logp: -nats(r.rollout_logprobs, t), ratio: ratioOf(r, t), entropy: nats(r.entropy, t) }[coloring] ?? NaN;
  if (Number.isNaN(value)) return null;
  if (coloring === "ratio") return shade(value > 0 ? 210 : 22, Math.abs(value), RATIO_SATURATED);
  return coloring === "entropy" ? shade(280, value, ENTROPY_SATURATED) : shade(22, value, SATURATED);
}

/** The tokens from `start`, at most `most` of them, as spans that know their place. */
function tokenSpans(run, c, coloring, start, most) {
  const r = run.rollouts,
    first = firstVersion(r, c),
    spans = [];
  const end = Math.min(r.first_token[c + 1], start + most);
  for (let t = start; t < end; t++) {
    const color = tokenColor(r, t, coloring);
    const isLater = coloring === "version" && r.version[t] !== first;
    const kind = r.sampled[t] ? `token${isLater ? " later" : ""}` : "token context";
    const text = visible(tokenText(r, t)).replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
    spans.push(el("span", { class: kind, text, data: { t }, style: color ? { background: color } : undefined }));
  }
  return spans;
}

/** A strip of tokens, with a button for more of them where there are more than `most`. */
function tokenStrip(run, c, coloring, most) {
  const r = run.rollouts,
    strip = el("div", { class: "strip", dir: "auto" });
  const extend = (start) => {
    strip.append(...tokenSpans(run, c, coloring, start, most));
    const left = r.first_token[c + 1] - start - most;
    if (left <= 0) return;
    const more = button(`… ${plural(left, "more token")}`, "show more of them", (event) => {
      event.stopPropagation();
      more.remove();
      extend(start + most);
    });
    strip.append(more);
  };
  extend(r.first_token[c]);
  followPointer(strip, run, c);
  return strip;
}

/** What is known of a token, as [name, value] pairs. */
function tokenFacts(run, c, t) {
  const r = run.rollouts,
    logp = nats(r.rollout_logprobs, t),
    ratio = ratioOf(r, t),
    entropy = nats(r.entropy, t);
  const facts = [
    ["token", `${t - r.first_token[c] + 1} of ${lengthOf(run, c)}`],
    ["text", JSON.stringify(visible(tokenText(r, t))).slice(1, -1)],
    ["id", String(r.ids[r.token[t]])],
  ];
  if (!r.sampled[t]) return [...facts, ["context", "not sampled"]];
  const low = r.rollout_logprobs[t] === UNKNOWN + 1 ? "≤ " : "";
  facts.push(["log α", Number.isNaN(logp) ? "not recorded" : `${low}${logp.toFixed(3)} nats`]);
  if (!Number.isNaN(logp)) facts.push(["α", Math.exp(logp).toPrecision(3)]);
  if (!Number.isNaN(ratio)) facts.push(["log π_k − log α", `${ratio.toFixed(3)} nats`]);
  if (!Number.isNaN(entropy)) facts.push(["entropy of π_k", `${entropy.toFixed(3)} nats`]);
  if (r.version[t] < 0) return [...facts, ["version", "offline data"]];
  return [...facts, ["version", String(r.version[t])], ["staleness", String(r.groups[r.groupOf[c]].version - r.version[t])]];
}

const tip = el("div", { id: "tip", role: "tooltip", hidden: true });

function showTip(facts, x, y) {
  tip.replaceChildren(
    ...facts.map(([name, value]) => el("div", {}, el("b", { text: name }), el("span", { text: value }))),
  );
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 20 + box.height > innerHeight ? y - box.height - 12 : y + 20}px`;
}

const hideTip = () => {
  tip.hidden = true;
};

function followPointer(strip, run, c) {
  const point = (event) => {
    const place = event.target.dataset?.t;
    if (place === undefined) return hideTip();
    showTip(tokenFacts(run, c, Number(place)), event.clientX, event.clientY);
  };
  strip.addEventListener("mousemove", point);
  strip.addEventListener("mouseleave", hideTip);
}

/** The versions that sampled a group, each with its color, and what the line below a token means. */
function versionNotes(run, group) {
  const r = run.rollouts,
    counts = new Map();
  let isMixedGroup = false;
  for (let c = group.first; c < group.end; c++) isMixedGroup ||= isMixed(run, c);
  for (let t = r.first_token[group.first]; t < r.first_token[group.end]; t++)
    if (r.sampled[t] && r.version[t] >= 0) counts.set(r.version[t], (counts.get(r.version[t]) ?? 0) + 1);
  const versions = [...counts].sort((a, b) => a[0] - b[0]);
  const notes = versions.slice(0, LISTED_VERSIONS).map(([version, count]) =>
    el(
      "span",
      { class: "version" },
      swatch(versionColor(version)),
      el("span", { text: `version ${version}: ${plural(count, "token")}` }),
    ),
  );
  if (versions.length > LISTED_VERSIONS) notes.push(el("span", { text: `and ${versions.length - LISTED_VERSIONS} more` }));
  if (isMixedGroup) notes.push(el("span", { class: "token later", text: "not the version of the completion's first token" }));
  return notes;
}

/** What the colors mean, and what was not recorded. */
function legend(run, group, coloring) {
  const notes = [];
  if (coloring === "logp") {
    const scale = el("span", { class: "scale" });
    notes.push(el("span", { text: "log α: 0" }), scale, el("span", { text: `−${SATURATED} nats or less` }));
  }
  if (coloring === "version") notes.push(...versionNotes(run, group));
  if (coloring === "ratio") {
    const text = `orange: less likely under π_k than under α, blue: more likely; full color at ${RATIO_SATURATED} nats`;
    notes.push(el("span", { text: run.rollouts.old_logprobs ? text : "log π_k was not recorded" }));
  }
  if (coloring === "entropy") {
    const text = `entropy of π_k at each token; full color at ${ENTROPY_SATURATED} nats`;
    notes.push(el("span", { text: run.rollouts.entropy ? text : "not recorded: the loss need not compute it" }));
  }
  if (run.rollouts.vocabulary_note) notes.push(el("span", { class: "warn", text: run.rollouts.vocabulary_note }));
  return el("div", { class: "legend" }, notes);
}
