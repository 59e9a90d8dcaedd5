"""Draw the figures of docs/ that show recorded runs and the package itself; readable in black and white.

    python experiments/figures.py                # docs/images/off-policy.png and docs/images/rooms.svg
    python experiments/figures.py runs/NAME      # also docs/images/view-group.png, of the page of this run, by Chromium

The README's figure comes from benchmarks/bench_curve.py, the one on precision from experiments/precision.py.
"""

from __future__ import annotations

import ast
import base64
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "experiments"))

from study.measures import smoothed  # noqa: E402
from theory import style  # noqa: E402

IMAGES, RECORDS = ROOT / "docs" / "images", ROOT / "experiments" / "papers" / "results"
METHODS = {
    "GRPO": ("GRPO (clip .2)", style.BLUE, "-"),
    "REC one-side, (.6, 2)": ("REC one-side, clip (.6, 2)", style.VERMILLION, "--"),
    "RED-Weight": ("RED-Weight", style.GREEN, "-."),
    "REINFORCE": ("REINFORCE (no correction)", style.INK, ":"),
}
STUDIES = {
    "objectives": ("SmolLM2-135M, 25 batches", 3),
    "objectives-small": ("132k parameters, 100 batches", 5),
}

# Rooms of the package, with what they hold. A room imports only rooms in rows below it.
ROWS: Sequence[Sequence[tuple[str, str]]] = (
    (("cli", "commands"),),
    (("training", "loop, trainer, checkpoints"),),
    (("rollout/vllm", "servers, weight transfer"), ("data", "prompts of a batch, offline data")),
    (
        ("rollout", "local engine, schedule"),
        ("terminal", "progress, tables"),
        ("verify", "replays a run"),
        ("view", "HTML page"),
    ),
    (("settings", "schema, TOML, command line"),),
    (("model", "loading, packed rows, LoRA"), ("tasks", "prompts, environments")),
    (
        ("cpu", "C kernels"),
        ("rewards", "signatures, worker pool"),
        ("core", "recipes, losses, advantages"),
        ("runs", "files of a run"),
    ),
)
STEPS = {
    "cli": "1",
    "training": "1, 4, 5",
    "rollout": "2",
    "rewards": "3",
    "core": "6",
}  # where a batch passes
LEGEND = "A package imports only packages in rows below it. Numbers: the path of a batch."
SMALL = "types.py, rng.py, errors.py, logs.py, machine.py: small files that all but core may import"
WIDTH, BOX, GAP, HEIGHT, STEP, TOP = 920, 218, 12, 44, 54, 34


def main() -> None:
    draw_methods(IMAGES / "off-policy.png")
    (IMAGES / "rooms.svg").write_text(draw_rooms(), encoding="utf-8")
    if len(sys.argv) > 1:
        photograph(Path(sys.argv[1]), IMAGES / "view-group.png")


def photograph(run: Path, path: Path) -> None:
    """A screenshot of the page that `lagrpo view` writes: a group of the last batch but one, and a token's numbers."""
    sys.path.append(str(ROOT / "tests"))
    from browser import Browser

    from lagrpo.view.serve import view

    with tempfile.TemporaryDirectory() as folder:
        file, browser = view([run], Path(folder) / "page.html"), Browser(Path(folder) / "profile")
        page = browser.open(file.as_uri())
        page.click("nav [data-tab=rollouts]")
        page.key("[")
        page.click(".card", 1)
        page.hover(".opened .token", 3)
        path.write_bytes(
            base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])
        )
        browser.close()


def draw_methods(path: Path) -> None:
    """Mean reward of four methods against batches, on-policy and with 10 batches per weight sync, for two models."""
    figure = style.canvas(10, 6.4)
    panels: Any = figure.subplots(len(STUDIES), 2, sharey=True)
    for row, (study, (title, smooth)) in zip(panels, STUDIES.items(), strict=True):
        runs = json.loads((RECORDS / f"{study}.json").read_text(encoding="utf-8"))["runs"]
        for axes, v in zip(row, ("v = 1", "v = 10"), strict=True):
            style.plain(axes, f"{title}, {v}", "batch" if row is panels[-1] else "", "")
            for method, (label, color, dashes) in METHODS.items():
                curves = [
                    r["curves"]["reward"] for r in runs if r["cell"] == {"method": method, "v": v}
                ]
                if len(curves) > 1:
                    columns = [*zip(*(smoothed(curve, smooth) for curve in curves), strict=True)]
                    batches = range(1, len(columns) + 1)
                    axes.fill_between(
                        batches,
                        [*map(min, columns)],
                        [*map(max, columns)],
                        color=color,
                        alpha=0.12,
                        lw=0,
                    )
                    axes.plot(
                        batches, [*map(fmean, columns)], dashes, color=color, lw=2, label=label
                    )
            axes.set(ylim=(0, 1))
        row[0].set_ylabel(f"reward, mean of {smooth} batches")
    panels[0][1].legend(loc="upper left", fontsize=8.5, frameon=False, handlelength=3)
    figure.savefig(path, dpi=110)


def find_imports(room: str, rooms: Sequence[str]) -> set[str]:
    """The other rooms that the modules of a room import."""
    source, found = ROOT / "src" / "lagrpo", set[str]()
    files = (
        [source / f"{room}.py"]
        if (source / f"{room}.py").is_file()
        else sorted((source / room).rglob("*.py"))
    )
    for file in files:
        if room == "rollout" and "vllm" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            names = (
                [f"{module}.{alias.name}" for alias in node.names]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                place = "/".join(name.split(".")[1:]) + "/"
                found |= {
                    max((r for r in rooms if place.startswith(f"{r}/")), key=len, default=room)
                }
    return found - {room}


def draw_rooms() -> str:
    """The rooms as boxes. Raises ValueError if a room imports one that does not stand in a row below it."""
    levels = {name: level for level, row in enumerate(ROWS) for name, _ in row}
    for upper in levels:
        for lower in find_imports(upper, [*levels]):
            if levels[upper] >= levels[lower]:
                raise ValueError(f"{upper} imports {lower}, which does not stand below it")
    parts = []
    for level, row in enumerate(ROWS):
        left, y = (WIDTH - len(row) * BOX - (len(row) - 1) * GAP) / 2, TOP + level * STEP
        parts += [
            line
            for n, room in enumerate(row)
            for line in draw_box(left + n * (BOX + GAP), y, *room)
        ]
    height = TOP + len(ROWS) * STEP + 24
    parts.append(f'<text x="{WIDTH / 2:g}" y="{height - 8:g}" font-size="12">{SMALL}</text>')
    parts.append(f'<text x="{WIDTH / 2:g}" y="20" font-size="12">{LEGEND}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
    body = "\n".join(parts)
    return f'{head} text-anchor="middle">\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'


def draw_box(x: float, y: float, name: str, text: str) -> Iterator[str]:
    """A room: its name, the steps of a batch that it does, and what it holds."""
    step, title = STEPS.get(name), "cli.py" if name == "cli" else f"{name}/"
    look = 'stroke="#222" stroke-width="2.5" fill="#eee"' if step else 'stroke="#888" fill="#fff"'
    yield f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{HEIGHT}" rx="4" {look}/>'
    title = f"{step} · {title}" if step else title
    yield f'<text x="{x + BOX / 2:g}" y="{y + 18:g}" font-size="14" font-weight="bold">{title}</text>'
    yield f'<text x="{x + BOX / 2:g}" y="{y + 35:g}" font-size="12">{text}</text>'


if __name__ == "__main__":
    main()
