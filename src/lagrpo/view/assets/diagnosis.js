// Findings of lagrpo diagnose: what is wrong, the completions that show it, and what to set.

/** The state that shows a completion, or null if the page does not hold it. */
function stateOfPlace(run, { batch, prompt, sample }) {
  const group = run.rollouts.groups.find((one) => one.batch === batch && one.key === prompt);
  if (!group) return null;
  const samples = Array.from(run.rollouts.sample_index.slice(group.first, group.end));
  const completion = samples.indexOf(sample);
  return { ...NO_FILTER, tab: "rollouts", run: run.index, batch, group: group.id, completion };
}

function placeItem(app, run, place) {
  const text = `batch ${place.batch}, prompt ${place.prompt}, sample ${place.sample}`;
  const state = stateOfPlace(run, place);
  return state ? button(text, "show this completion", () => app.update(state, true)) : el("span", { text });
}

function findingItem(app, run, finding) {
  const { sentence, example, places, words, advice } = finding;
  return el(
    "li",
    { class: finding.is_grave ? "grave" : "" },
    el("p", { dir: "auto", text: visible(sentence) }),
    example ? el("p", { class: "dim", dir: "auto", text: visible(`for example ${example}`) }) : null,
    places.length
      ? el(
          "p",
          { class: "places" },
          places.map((place) => placeItem(app, run, place)),
        )
      : null,
    words ? el("p", {}, "set ", el("code", { text: visible(words) })) : null,
    advice ? el("p", { class: "dim", text: visible(advice) }) : null,
  );
}

function diagnosisOf(app, run) {
  const { time, findings } = run.diagnosis;
  const nothing = run.metrics.size ? "Nothing found." : "Nothing to diagnose: no batch is finished.";
  return el(
    "section",
    {},
    app.data.runs.length > 1 ? el("h2", { dir: "auto", text: visible(run.name) }) : null,
    time ? el("p", { class: "dim", text: time }) : null,
    findings.length
      ? el(
          "ol",
          { class: "findings" },
          findings.map((finding) => findingItem(app, run, finding)),
        )
      : el("p", { class: "empty", text: nothing }),
  );
}

/** The tab of findings. */
function diagnosisTab(app) {
  const runs = shownUnits(app).flatMap((unit) => unit.runs);
  return el(
    "section",
    { class: "diagnosis" },
    runs.map((run) => diagnosisOf(app, run)),
  );
}
