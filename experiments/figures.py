"""Draws the figures of docs/ that show recorded runs and the package itself.

    python experiments/figures.py                # docs/images/off-policy.png and rooms.svg
    python experiments/figures.py runs/NAME      # also view-group.png, of its page, by Chromium

They are readable in black and white. The README's figure comes from benchmarks/bench_curve.py, the
one on precision from experiments/precision.py.
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
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "experiments"))

from theory import style  # noqa: E402

from lagrpo.study.measures import smoothed  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = ROOT / "docs" / "images"
RECORDS = ROOT / "experiments" / "papers" / "results"
# Name of a method in the records -> its label, color and dashes.
METHODS = {
    "GRPO": ("GRPO (clip .2)", style.BLUE, "-"),
    "REC one-side, (.6, 2)": ("REC one-side, clip (.6, 2)", style.VERMILLION, "--"),
    "RED-Weight": ("RED-Weight", style.GREEN, "-."),
    "REINFORCE": ("REINFORCE (no correction)", style.INK, ":"),
}
# Name of a study -> the title of its panels, and the number of batches that a point averages: the
# study of the small model has four times as many batches.
STUDIES = {
    "objectives": ("SmolLM2-135M, 25 batches", 3),
    "objectives-small": ("132k parameters, 100 batches", 5),
}

# Rooms of the package, with what they hold. A room imports only rooms in rows below it.
ROWS: Sequence[Sequence[tuple[str, str]]] = (
    (("cli", "commands"),),
    (("study", "grids of runs over seeds"),),
    (("lifecycle", "a run from start to end"), ("verify", "replays a run"), ("view", "HTML page")),
    (("startup", "settings to the two sides"),),
    (("resume", "what a resume checks"),),
    (("training", "loop, sampling, trainer"),),
    (
        ("rollout/vllm", "servers, weight transfer"),
        ("data", "prompts of a batch, offline data"),
    ),
    (("rollout", "local engine, schedule"), ("diagnosis", "findings of a run")),
    (("terminal", "progress, tables"),),
    (("settings", "schema, TOML, command line"),),
    (("tasks", "prompts, environments"),),
    (("model", "loading, packed rows, LoRA"), ("distributed", "ranks")),
    (
        ("cpu", "C kernels"),
        ("gpu", "Triton kernels"),
        ("rewards", "signatures, worker pool"),
        ("runs", "files of a run"),
    ),
    (("core", "recipes, losses, advantages"),),
)
# The packages that a batch passes, by the steps of docs/architecture.md.
STEPS = {
    "cli": "1",
    "startup": "1",
    "lifecycle": "7",
    "training": "4, 5",
    "rollout": "2",
    "rewards": "3",
    "core": "6",
}
LEGEND = "A package imports only packages in rows below it. Numbers: the path of a batch."
SMALL = (
    "types.py, rng.py, errors.py, logs.py, machine.py, threads.py: small files that all but core "
    "may import"
)
# Of the drawing: its width, then width, distance and height of a box, height of a row, margin on
# top.
WIDTH = 920
BOX = 218
GAP = 12
HEIGHT = 44
STEP = 54
TOP = 34


def main() -> None:
    draw_methods(IMAGES / "off-policy.png")
    (IMAGES / "rooms.svg").write_text(draw_rooms(), encoding="utf-8")
    if len(sys.argv) > 1:
        photograph(Path(sys.argv[1]), IMAGES / "view-group.png")


def photograph(run: Path, path: Path) -> None:
    """Takes a screenshot of the page of `lagrpo view`.

    It shows a group of the last batch but one, and the numbers of a token.
    """
    sys.path.append(str(ROOT / "tests"))
    from browser import Browser

    from lagrpo.view.serve import view

    with tempfile.TemporaryDirectory() as folder:
        file = view([run], Path(folder) / "page.html")
        browser = Browser(Path(folder) / "profile")
        page = browser.open(file.as_uri())
        page.click("nav [data-tab=rollouts]")
        # The page opens on the last batch; this key goes one back.
        page.key("[")
        page.click(".card", 1)
        # Shows the box with the numbers of the token.
        page.hover(".opened .token", 3)
        screenshot = page.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(screenshot))
        browser.close()


def draw_methods(path: Path) -> None:
    """Draws the reward of four methods by batch, on-policy and with v = 10, for two models."""
    figure = style.canvas(10, 6.4)
    # [studies, 2], the methods on-policy on the left and stale on the right
    panels: Sequence[Sequence[Axes]] = figure.subplots(len(STUDIES), 2, sharey=True)
    for row, (study, (title, smooth)) in zip(panels, STUDIES.items(), strict=True):
        runs = json.loads((RECORDS / f"{study}.json").read_text(encoding="utf-8"))["runs"]
        for axes, v in zip(row, ("v = 1", "v = 10"), strict=True):
            style.plain(axes, f"{title}, {v}", "batch" if row is panels[-1] else "", "")
            for method, (label, color, dashes) in METHODS.items():
                cell = {"method": method, "v": v}
                curves = [run["curves"]["reward"] for run in runs if run["cell"] == cell]
                # One seed has no range to draw.
                if len(curves) < 2:
                    continue
                rewards = list(zip(*(smoothed(curve, smooth) for curve in curves), strict=True))
                lowest = [min(seeds) for seeds in rewards]
                means = [fmean(seeds) for seeds in rewards]
                highest = [max(seeds) for seeds in rewards]
                batches = range(1, len(rewards) + 1)
                axes.fill_between(batches, lowest, highest, color=color, alpha=0.12, lw=0)
                axes.plot(batches, means, dashes, color=color, lw=2, label=label)
            axes.set(ylim=(0, 1))
        row[0].set_ylabel(f"reward, mean of {smooth} batches")
    panels[0][1].legend(loc="upper left", fontsize=8.5, frameon=False, handlelength=3)
    figure.savefig(path, dpi=110)


def find_imports(room: str, rooms: Sequence[str]) -> set[str]:
    """The other rooms that the modules of a room import."""
    imported = set()
    for file in files_of(room):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            if node.module.split(".")[0] != "lagrpo":
                continue
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                # lagrpo.core.kl.k3 → core/kl/k3/: the slash at the end keeps `data` from matching
                # `database`.
                module_path = "/".join(name.split(".")[1:]) + "/"
                owners = [other for other in rooms if module_path.startswith(f"{other}/")]
                # rollout/vllm is a room inside another: the longest name is the owner's.
                imported.add(max(owners, key=len, default=room))
    return imported - {room}


def files_of(room: str) -> list[Path]:
    """The modules of a room."""
    source = ROOT / "src" / "lagrpo"
    if (source / f"{room}.py").is_file():
        return [source / f"{room}.py"]
    files = sorted((source / room).rglob("*.py"))
    if room == "rollout":
        return [file for file in files if "vllm" not in file.parts]
    return files


def draw_rooms() -> str:
    """The rooms as boxes, as SVG.

    Raises ValueError if a room imports one that does not stand in a row below it.
    """
    levels = {name: level for level, row in enumerate(ROWS) for name, _ in row}
    for upper in levels:
        for lower in find_imports(upper, list(levels)):
            if levels[upper] >= levels[lower]:
                raise ValueError(f"{upper} imports {lower}, which does not stand below it")
    parts = []
    for level, row in enumerate(ROWS):
        # Each row is centered, whatever its number of boxes.
        left = (WIDTH - len(row) * BOX - (len(row) - 1) * GAP) / 2
        y = TOP + level * STEP
        for number, (name, text) in enumerate(row):
            parts += draw_box(left + number * (BOX + GAP), y, name, text)
    height = TOP + len(ROWS) * STEP + 24
    middle = f"{WIDTH / 2:g}"
    parts.append(f'<text x="{middle}" y="{height - 8:g}" font-size="12">{SMALL}</text>')
    parts.append(f'<text x="{middle}" y="20" font-size="12">{LEGEND}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" text-anchor="middle">'
    )
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def draw_box(x: float, y: float, name: str, text: str) -> Iterator[str]:
    """A room: its name, the steps of a batch that it does, and its contents."""
    middle = f"{x + BOX / 2:g}"
    title = "cli.py" if name == "cli" else f"{name}/"
    look = 'stroke="#888" fill="#fff"'
    step = STEPS.get(name)
    if step:
        title = f"{step} · {title}"
        look = 'stroke="#222" stroke-width="2.5" fill="#eee"'
    yield f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{HEIGHT}" rx="4" {look}/>'
    yield (f'<text x="{middle}" y="{y + 18:g}" font-size="14" font-weight="bold">{title}</text>')
    yield f'<text x="{middle}" y="{y + 35:g}" font-size="12">{text}</text>'


if __name__ == "__main__":
    main()
