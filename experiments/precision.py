"""Compares plain, dithered and float32 master weights at three learning rates.

    python experiments/precision.py              train what is missing, then table and figure
    python experiments/precision.py --report     the table and the figure of the finished runs
    python experiments/tables.py                 put the table into reports/precision.md, too
    python experiments/precision.py --trl .venv-trl/bin/python    TRL's curves, after make check-trl

The embedded model on the task of the demo: 8 prompts x 16 completions per update. A cell is a
learning rate, a mode and a seed, such as 5e-6/dithered/seed0. It is one run of `lagrpo train`, and
its metrics go to a JSON file of their own in RESULTS/cells when it ends. A cell that exists is not
repeated, so the script can be stopped at any time. Three seeds take some hours on one core. The
figure goes to docs/images/precision.png.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from precision_report import figure, table

from lagrpo.types import JsonObject, JsonView

HERE = Path(__file__).resolve().parent
# By learning rate, in the order in which they are trained.
UPDATES = {"5e-6": 24, "2e-5": 16, "1e-6": 60}
MODES: dict[str, dict[str, object]] = {
    "plain": {"model.dtype": "bfloat16", "optimizer.dither_master_weights": False},
    "dithered": {"model.dtype": "bfloat16", "optimizer.dither_master_weights": True},
    # Weights in float32 are their own master weights.
    "float32": {"model.dtype": "float32"},
}
# Names of the metrics of a cell, and the keys in metrics.jsonl.
CURVES = {
    "rewards": "reward",
    "moved": "weight_sync/changed_fraction",
    "grad_norm": "grad_norm",
    "kl_alpha": "rollout/kl",
    "seconds": "time/step",
}
Cell = tuple[str, str, int]
"""Learning rate, mode, seed."""


def name_of(cell: Cell) -> str:
    """The name of a cell.

    >>> name_of(("5e-6", "dithered", 0))
    '5e-6/dithered/seed0'
    """
    lr, mode, seed = cell
    return f"{lr}/{mode}/seed{seed}"


def cells(seeds: Sequence[int]) -> list[Cell]:
    """All cells in the order in which they are trained: seed by seed, then float32, the slowest."""
    half = [(lr, mode, seed) for seed in seeds for lr in UPDATES for mode in ("plain", "dithered")]
    return half + [(lr, "float32", seed) for seed in seeds for lr in UPDATES]


def select_cells(among: Sequence[Cell], parts: Sequence[str] | None) -> list[Cell]:
    """The cells whose name contains one of `parts`; all cells if there are no parts.

    >>> select_cells([("5e-6", "plain", 0), ("5e-6", "float32", 0)], ["float32"])
    [('5e-6', 'float32', 0)]
    """
    return [cell for cell in among if not parts or any(part in name_of(cell) for part in parts)]


def result_path(results: Path, cell: Cell) -> Path:
    return results / "cells" / (name_of(cell).replace("/", "-") + ".json")


def read(results: Path) -> list[JsonObject]:
    """The metrics of every cell that exists."""
    return [read_json(path) for path in sorted((results / "cells").glob("*.json"))]


def read_json(path: Path) -> JsonObject:
    return cast(JsonObject, json.loads(path.read_text(encoding="utf-8")))


def write(path: Path, metrics: JsonView) -> None:
    """Writes under a temporary name, then renames: a file that exists is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(without_paths(json.dumps(metrics, indent=1)) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def command(cell: Cell, runs: Path) -> list[str]:
    """The command line of one cell's run."""
    lr, mode, seed = cell
    settings = {
        "run.output_dir": runs,
        "run.name": name_of(cell).replace("/", "-"),
        "run.seed": seed,
        "schedule.batches": UPDATES[lr],
        "optimizer.learning_rate": lr,
        "optimizer.lr_scheduler_type": "constant",
        **MODES[mode],
    }
    lagrpo = str(Path(sys.executable).parent / "lagrpo")
    words = [lagrpo, "train", str(HERE / "addition" / "full.toml")]
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    return words


def train(cell: Cell, results: Path, threads: int) -> None:
    """Makes a cell's run, in place of an unfinished one, and writes its metrics."""
    lr, mode, seed = cell
    words = command(cell, results / "runs")
    run = results / "runs" / words[words.index("--run.name") + 1]
    # A killed run has no cell. It starts again, so that every cell is one uninterrupted run.
    if run.exists():
        shutil.rmtree(run)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    started = time.monotonic()
    subprocess.run(words, check=True, env=environment)
    before = read_json(run / "evaluations" / "before.json")
    after = read_json(run / "evaluations" / "after.json")
    metrics = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    batches = [json.loads(line) for line in metrics]
    curves = {name: [batch[key] for batch in batches] for name, key in CURVES.items()}
    write(
        result_path(results, cell),
        {
            "lr": lr,
            "mode": mode,
            "seed": seed,
            "updates": len(batches),
            "threads": threads,
            "pass_at_1_before": before["pass@1"],
            "pass_at_1": after["pass@1"],
            "seconds_in_all": time.monotonic() - started,
            **curves,
            # Without the path of lagrpo, which names this machine.
            "command": words[1:],
            "environment": read_json(run / "environment.json"),
        },
    )


def without_paths(text: str) -> str:
    """The text with paths of this repository relative to its root, so that no cell names a machine.

    >>> without_paths(f'["{HERE}/demo.toml", "--run.seed"]')
    '["experiments/demo.toml", "--run.seed"]'
    """
    return text.replace(f"{HERE.parent}/", "").replace(str(HERE.parent), ".")


def train_missing(selected: Sequence[Cell], results: Path, threads: int) -> None:
    """Trains the selected cells that do not exist, one after the other.

    Goes on after a cell that fails, and raises SystemExit at the end if one did.
    """
    failed = []
    for number, cell in enumerate(selected, start=1):
        if result_path(results, cell).exists():
            continue
        print(f"{number} of {len(selected)}: {name_of(cell)}", flush=True)
        try:
            train(cell, results, threads)
        except (subprocess.CalledProcessError, OSError) as error:
            failed.append(name_of(cell))
            print(f"{name_of(cell)} failed: {error}", file=sys.stderr, flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the next call tries them again")


def main() -> None:
    options = parse_options()
    if options.trl:
        from precision_trl import train_trl, trl_cells

        selected = select_cells(trl_cells(options.seeds), options.cells)
        train_trl(options.trl, selected, options.results, options.threads)
    elif not options.report:
        selected = select_cells(cells(options.seeds), options.cells)
        train_missing(selected, options.results, options.threads)
    results = read(options.results)
    print(table(results))
    figure(results, HERE.parent / "docs" / "images" / "precision.png")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(__file__).with_name("precision"),
        help="directory of the cells",
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=(0, 1, 2))
    parser.add_argument(
        "--cells",
        nargs="*",
        help="only cells whose name has one of these in it: 5e-6/plain float32",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--trl", type=Path, metavar="PYTHON", help="a Python that has TRL: train its side instead"
    )
    parser.add_argument("--report", action="store_true", help="do not train")
    return parser.parse_args()


if __name__ == "__main__":
    main()
