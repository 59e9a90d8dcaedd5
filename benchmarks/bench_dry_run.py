"""Peak memory of runs, beside the memory that a dry run says. See README.md.

make bench-dry-run
python benchmarks/bench_dry_run.py --only "135m" "135m, 2 ranks"

Each run makes two batches in processes of its own. Nearly all completions have their full length,
so the runs need what the dry run counts. Memory does not depend on other programs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
from measuring import Load, Report, gigabytes, machine
from processes import CHECKOUT, train_with_peaks
from work import HASHED, common_options

from lagrpo.settings.load import load_settings
from lagrpo.settings.schema import Settings
from lagrpo.startup.build_policy import lora_of
from lagrpo.startup.checks import check_settings
from lagrpo.startup.explain import computation_of, empty_model
from lagrpo.startup.memory import Computation, ModelSizes, expected_memory, peak

NAME = "dry_run"
SMALL = str(CHECKOUT / "experiments" / "small" / "model")
BATCHES = 2
# A story has no end within the limit, and a sum of the small model one or two tokens before it.
STORIES = "Write a very long story about a ship with {} sails. Do not stop before 2000 words."
SUMS = "{}+{}="

STORY_ROLLOUT = {"num_generations": 8, "max_prompt_length": 64, "max_completion_length": 32}
SUM_ROLLOUT = {"num_generations": 8, "max_prompt_length": 8, "max_completion_length": 3}
SMALL_MODEL = {"path": SMALL, "dtype": "float32"}
CHECKPOINTING = {"gradient_checkpointing": True}

RUNS: dict[str, dict[str, Any]] = {
    "135m": {},
    "135m, micro-batches of 512 tokens": {"optimizer": {"micro_batch_tokens": 512}},
    "135m, checkpointing": {"optimizer": CHECKPOINTING},
    "135m, adapters": {"model": {"lora_r": 16}},
    "135m, adapters, checkpointing": {"model": {"lora_r": 16}, "optimizer": CHECKPOINTING},
    "135m, completions of 128 tokens": {"rollout": {**STORY_ROLLOUT, "max_completion_length": 128}},
    "135m, sync every 2 batches, KL term": {"schedule": {"sync_every": 2}, "loss": {"beta": 0.04}},
    "135m, float32": {"model": {"dtype": "float32"}},
    "135m, 2 ranks": {"ranks": 2},
    "135m, 2 ranks, fsdp2": {"ranks": 2, "distributed": {"strategy": "fsdp2"}},
    "small": {"model": SMALL_MODEL},
    "small, 512 x 8 completions": {
        "model": SMALL_MODEL,
        "schedule": {"prompts_per_batch": 512},
        "optimizer": {"micro_batch_tokens": 16384},
    },
}


def parse_options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    options = parser.parse_args()
    if options.quick:
        options.only = ["small"]
    return options


def main() -> None:
    options = parse_options()
    load = Load()
    report = Report(NAME, "Memory that a dry run says, and memory that a run took", options.results)
    results = options.results / f"{NAME}.json"
    if results.is_file() and options.only != list(RUNS):
        # Runs that are not made again stay.
        report.raw |= json.loads(results.read_text(encoding="utf-8"))
        del report.raw["machine"]
    for name in options.only:
        report.raw[name] = run(name, options.model)
        print(row(name, report.raw[name]), flush=True)
    report.text("The largest VmHWM of a rank's process in two batches, loading included.")
    report.table("Of a rank", [row(name, report.raw[name]) for name in RUNS if name in report.raw])
    load.add_ended()
    report.write(machine(1, load))


def run(name: str, model: str) -> dict[str, Any]:
    """Trains a few batches. Returns the settings, what they need by the dry run, and the peaks."""
    sections = dict(RUNS[name])
    ranks = sections.pop("ranks", 1)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        settings = settings_of(sections, model, scratch)
        file = scratch / "settings.toml"
        file.write_text(tomli_w.dumps(settings), encoding="utf-8")
        resolved = load_settings(file)
        lm = empty_model(resolved)
        peaks = train_with_peaks(file, {}, ranks, threads=1, scratch=scratch)
        return {
            "settings": without_paths(settings),
            "model": asdict(ModelSizes.of(lm, lora_of(resolved.model))),
            "computation": asdict(computation_of(resolved, lm, ranks, resolved.model.dtype)),
            "peaks": peaks,
        }


def without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that the memory follows from, the same on every machine."""
    kept = {key: value for key, value in settings.items() if key not in ("run", "task")}
    if kept["model"]["path"] == SMALL:
        kept["model"] = kept["model"] | {"path": str(Path(SMALL).relative_to(CHECKOUT))}
    return kept


def settings_of(sections: dict[str, Any], model: str, scratch: Path) -> dict[str, Any]:
    """Settings of a run that only trains. Writes its prompts into `scratch`."""
    is_small = sections.get("model", {}).get("path") == SMALL
    prompts = [SUMS.format(100 + n, 999 - n) if is_small else STORIES.format(n) for n in range(800)]
    lines = [json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts]
    (scratch / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    base: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(scratch), "name": "run"},
        "model": {"path": model, "dtype": "bfloat16"},
        "task": {
            "name": "custom",
            "data": str(scratch / "prompts.jsonl"),
            "answer_column": "answer",
            "rewards": [HASHED],
        },
        "rollout": SUM_ROLLOUT if is_small else STORY_ROLLOUT,
        "schedule": {"prompts_per_batch": 4, "batches": BATCHES},
        "loss": {"beta": 0.0},
        "checkpoint": {"save_total_limit": 0, "save_minutes": 0.0},
        "eval": {"at_start": False},
    }
    return {key: base.get(key, {}) | sections.get(key, {}) for key in base | sections}


def row(name: str, measured: dict[str, Any]) -> dict[str, str]:
    settings = Settings.model_validate(measured["settings"])
    terms = expected_memory(
        ModelSizes(**measured["model"]),
        settings,
        check_settings(settings),
        Computation(**measured["computation"]),
    )
    expected = peak(terms)
    largest = max(measured["peaks"])
    return {
        "run": name,
        "dry run": gigabytes(expected),
        "measured": gigabytes(largest),
        "dry run / measured": f"{expected / largest:.2f}",
    }


if __name__ == "__main__":
    main()
