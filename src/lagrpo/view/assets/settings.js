// Settings with their meaning, and where the runs ran.

const written = (value) =>
  value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
const same = (values) => new Set(values.map(written)).size <= 1;

const SHOWN = {
  differing: "what differs between the runs",
  changed: "what is not the default",
  all: "all",
};

/** Entries of environment.json that no two runs share. */
const OF_EVERY_RUN = new Set(["id", "started", "command"]);

/** What is shown of the settings. A single run differs from none: then it is what is not the default. */
function shownSettings(app) {
  return app.state.settings === "differing" && app.data.methods.length === 1 ? "changed" : app.state.settings;
}

/** Whether a setting is shown: the search looks at all of them, else it is as chosen. */
function passesSettings(app, name, values, [meaning, preset] = ["", null]) {
  const sought = app.state.setting.toLowerCase();
  if (sought) return [name, meaning, ...values.map(written)].some((text) => text.toLowerCase().includes(sought));
  const shown = shownSettings(app);
  if (shown === "differing") return !same(values);
  return shown === "all" || !same([...values, preset]);
}

/** The value that the runs of a unit share, or all their values. */
function valueOf(unit, part, name) {
  const values = unit.runs.map((run) => (Object.hasOwn(run[part], name) ? run[part][name] : undefined));
  return same(values) ? values[0] : values.map(written).join(", ");
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

const headingsOf = (units) => units.map((unit) => visible(unit.name));

function settingsTable(app, units) {
  const { settings } = app.data;
  const runs = units.flatMap((unit) => unit.runs);
  const rows = namesOf(runs, "settings").flatMap((name) => {
    if (name === "run.name" && runs.length > 1) return []; // the headings
    const values = units.map((unit) => valueOf(unit, "settings", name)),
      known = Object.hasOwn(settings, name) ? settings[name] : undefined;
    if (!passesSettings(app, name, values, known)) return [];
    return [settingRow(name, values, known?.[0] ?? "", known ? known[1] : null)];
  });
  if (!rows.length) return el("p", { class: "empty", text: "No settings match." });
  return table(["setting", ...headingsOf(units), "default", "meaning"], rows, "settings");
}

function environmentTable(app, units) {
  const runs = units.flatMap((unit) => unit.runs);
  const names = namesOf(runs, "environment");
  const rows = names.flatMap((name) => {
    const values = units.map((unit) => valueOf(unit, "environment", name));
    if (shownSettings(app) === "differing" && (same(values) || OF_EVERY_RUN.has(name))) return [];
    return [settingRow(name, values, "", undefined)];
  });
  const empty = names.length ? "The runs ran in the same place." : "There is no environment.json.";
  return rows.length
    ? table(["where it ran", ...headingsOf(units), ""], rows, "settings")
    : el("p", { class: "empty", text: empty });
}

/** The tab of settings. */
function settingsTab(app) {
  const { state } = app,
    units = shownUnits(app),
    several = app.data.methods.length > 1,
    panes = el("div", {});
  const choices = Object.entries(SHOWN).filter(([name]) => several || name !== "differing");
  app.refresh = () =>
    panes.replaceChildren(settingsTable(app, units), el("h2", { text: "Where it ran" }), environmentTable(app, units));
  app.refresh();
  return el(
    "section",
    { class: "settings" },
    el(
      "div",
      { class: "bar" },
      field("search", "setting", state.setting, (setting) => app.update({ setting })),
      choice("show", choices, shownSettings(app), (settings) => app.update({ settings })),
    ),
    panes,
  );
}
