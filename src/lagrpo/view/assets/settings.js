// Settings with their meaning, and where the runs ran.

const written = (value) =>
  value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
const same = (values) => new Set(values.map(written)).size <= 1;

/** Whether a setting passes the field and the check boxes. */
function passesSettings(app, name, values, [meaning, preset] = ["", null]) {
  const { state, data } = app,
    sought = state.setting.toLowerCase();
  if (sought && ![name, meaning, ...values.map(written)].some((text) => text.toLowerCase().includes(sought)))
    return false;
  if (state.differing && data.runs.length > 1 && same(values)) return false;
  return !state.changed || !same([...values, preset]);
}

function settingRow(name, values, meaning, preset) {
  const differs = !same(values),
    cells = values.map((value) => {
      const changed = preset !== undefined && written(value) !== written(preset);
      return el("td", { class: changed ? "value changed" : "value", dir: "auto", text: visible(written(value)) });
    });
  return el(
    "tr",
    { class: differs ? "differs" : "" },
    el("td", { class: "name", text: visible(name) }),
    cells,
    preset === undefined ? null : el("td", { class: "dim", text: visible(written(preset)) }),
    el("td", { class: "wide dim", text: visible(meaning) }),
  );
}

function namesOf(runs, part) {
  return [...new Set(runs.flatMap((run) => Object.keys(run[part])))];
}

function settingsTable(app) {
  const { runs, settings } = app.data;
  const rows = namesOf(runs, "settings").flatMap((name) => {
    const values = runs.map((run) => (Object.hasOwn(run.settings, name) ? run.settings[name] : undefined)),
      known = Object.hasOwn(settings, name) ? settings[name] : undefined;
    if (!passesSettings(app, name, values, known)) return [];
    return [settingRow(name, values, known?.[0] ?? "", known ? known[1] : null)];
  });
  if (!rows.length) return el("p", { class: "empty", text: "No settings match." });
  return table(["setting", ...runs.map((run) => visible(run.name)), "default", "meaning"], rows, "settings");
}

function environmentTable(app) {
  const { runs } = app.data;
  const rows = namesOf(runs, "environment").map((name) =>
    settingRow(
      name,
      runs.map((run) => run.environment[name]),
      "",
      undefined,
    ),
  );
  return rows.length
    ? table(["where it ran", ...runs.map((run) => visible(run.name)), ""], rows, "settings")
    : el("p", { class: "empty", text: "The run has no environment.json." });
}

/** The tab of settings. */
function settingsTab(app) {
  const { state, data } = app,
    panes = el("div", {});
  app.refresh = () =>
    panes.replaceChildren(settingsTable(app), el("h2", { text: "Where it ran" }), environmentTable(app));
  app.refresh();
  return el(
    "section",
    { class: "settings" },
    el(
      "div",
      { class: "bar" },
      field("search", "setting", state.setting, (setting) => app.update({ setting })),
      check("only those that are not the default", state.changed, (changed) => app.update({ changed })),
      data.runs.length > 1
        ? check("only those that differ between the runs", state.differing, (differing) => app.update({ differing }))
        : null,
    ),
    panes,
  );
}
