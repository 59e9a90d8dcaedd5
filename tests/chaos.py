"""Kills training runs at random instants, resumes them, and compares them with undisturbed runs.

    python tests/chaos.py                            50 kills of a tiny model's runs: `make chaos`
    python tests/chaos.py --kills 5 --model smollm2  the embedded model
    python tests/chaos.py --kills 5 --model smollm2 --vllm .venv-vllm/bin/python
                                                     with a vLLM server, too

A trial is one run. Its process group gets SIGKILL at a random instant, keyed by the seed, and the
run resumes; every third trial is killed again while it resumes. With the in-process sampler every
number must be equal to the bit: the final weights, float32 masters and moments, metrics except
times, rollouts, evaluations. With vLLM every batch must be there once, sampled by the versions that
the schedule announced. Prints a line per trial; exits with 1 if a trial differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from running import options, tiny_settings, without_timings
from tiny import save_tiny
from warm import forks

from lagrpo import cli
from lagrpo.runs import load_events, load_metrics
from lagrpo.types import JsonObject, JsonView

Sections = Mapping[str, JsonView]
KINDS: dict[str, dict[str, JsonObject]] = {
    "on-policy": {"schedule": {"sync_every": 1}},
    "asking ahead": {"schedule": {"sync_every": 3}},
    "dynamic sampling": {"schedule": {"sync_every": 3}, "rollout": {"dynamic_sampling_rounds": 2}},
    "lagged": {"schedule": {"constant_lag": 2}, "loss": {"entropy_target": 3.0}},
    "budget": {"schedule": {"sync_every": 3, "sync_at_kl": 0.02}},
    "continuous": {"schedule": {"max_staleness": 4}, "rollout": {"max_num_seqs": 8}},
}
COMMON: Sections = {
    "checkpoint": {"save_every": 2, "save_minutes": 0},
    "model": {"dtype": "bfloat16"},
    "schedule": {"num_iterations": 2, "batches": 12, "prompts_per_batch": 3, "ref_sync_every": 6},
    "loss": {"recipe": "grpo"},
    "eval": {"every": 4},
}
REAL: Sections = {
    "checkpoint": {"save_every": 2, "save_minutes": 0},
    "task": {"name": "arithmetic", "options": {"digits": 1}},
    "rollout": {"num_generations": 4, "max_completion_length": 16},
    "schedule": {"num_iterations": 2, "batches": 8, "prompts_per_batch": 2, "ref_sync_every": 4},
    "loss": {"recipe": "grpo"},
    "optimizer": {"learning_rate": 2e-5},
    "eval": {"every": 3, "num_prompts": 4, "num_samples": 2},
}


def merged(*layers: Sections) -> dict[str, JsonObject]:
    names = [name for layer in layers for name in layer]
    return {
        name: {k: v for layer in layers for k, v in layer.get(name, {}).items()}
        for name in dict.fromkeys(names)
    }


def leaves(run: Path, exact: bool) -> JsonObject:
    """Returns everything that must be the same however often the run was killed."""
    events = [event for event in load_events(run) if event["event"] == "weight_sync"]
    outputs: JsonObject = {"batches": [m["step"] for m in load_metrics(run)], "syncs": events}
    outputs["rollouts"] = sorted(path.name for path in (run / "rollouts").iterdir())
    outputs["leftovers"] = [str(path) for path in run.rglob("*.tmp")]
    if not exact:
        return outputs
    outputs["metrics"] = without_timings(load_metrics(run))
    for table in sorted([*(run / "rollouts").iterdir(), *(run / "evaluations").glob("*.parquet")]):
        outputs[table.name] = pq.read_table(table).to_pylist()
    for summary in sorted((run / "evaluations").glob("*.json")):
        outputs[summary.name] = json.loads(summary.read_bytes())
    outputs["weights"] = [
        file.read_bytes() for file in sorted((run / "weights/final").glob("*.safetensors"))
    ]
    (last,) = (run / "checkpoints").glob(f"step-{len(outputs['batches']):06d}")
    outputs["masters and moments"] = [
        file.read_bytes() for file in sorted(last.glob("trainer*.safetensors"))
    ]
    return outputs


def start(words: Sequence[str], log: Path) -> Any:
    """`lagrpo train` in a process group of its own, with what it prints in `log`."""
    process = forks.Process(target=_be_the_command, args=(words, log, os.getcwd()))
    process.start()
    return process


def _be_the_command(words: Sequence[str], log: Path, directory: str) -> None:
    os.setsid()
    os.chdir(directory)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    cli.main(["train", *words])


def finish(process: Any, log: Path) -> None:
    process.join(1800)
    if process.exitcode != 0:
        raise SystemExit(
            f"ended with {process.exitcode}:\n{log.read_text(encoding='utf-8')[-3000:]}"
        )


class Trials:
    """Runs of one model under `root`, killed at random instants."""

    def __init__(self, root: Path, base: Sections, exact: bool, seed: int) -> None:
        self.root, self.base, self.exact, self.random = root, base, exact, random.Random(seed)
        self.undisturbed: dict[
            str, tuple[JsonObject, float]
        ] = {}  # what a run of a kind leaves, and its seconds

    def trial(self, number: int, kind: str) -> tuple[str, list[str]]:
        """Kills a run; returns how it was killed and the differences from the undisturbed run."""
        if kind not in self.undisturbed:
            started = time.monotonic()
            outputs = self.run(f"undisturbed {kind}", kind)
            self.undisturbed[kind] = outputs, time.monotonic() - started
        (expected, seconds), name, lines = self.undisturbed[kind], f"trial {number}", []
        for _ in range(2 if number % 3 == 2 else 1):
            after = self.random.uniform(0, seconds)
            process = start(self.words(name, kind), self.root / f"{name}.log")
            process.join(after)
            if process.is_alive():
                with suppress(ProcessLookupError):  # it has no group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
                lines.append(f"{after:.2f} s")
            else:
                lines.append("had ended")
        outputs = self.run(name, kind)
        return "; ".join(lines), [key for key in expected if outputs.get(key) != expected[key]]

    def run(self, name: str, kind: str) -> JsonObject:
        """Starts or resumes a run, lets it end, and returns what it leaves."""
        log = self.root / f"{name}.log"
        finish(start(self.words(name, kind), log), log)
        return leaves(self.root / name, self.exact)

    def words(self, name: str, kind: str) -> list[str]:
        sections = {"run": {"name": name, "output_dir": str(self.root)}}
        return [*options(merged(self.base, KINDS[kind], sections)), "--resume", "auto"]


def tiny(root: Path) -> Sections:
    """Settings of a tiny model, with a third of each batch from the rollouts of a run that is made
    here."""
    settings = merged(tiny_settings(save_tiny(root / "model"), root), COMMON)
    words = options(merged(settings, {"run": {"name": "earlier"}, "schedule": {"batches": 2}}))
    finish(start(words, root / "earlier.log"), root / "earlier.log")
    return merged(settings, {"offline": {"data": str(root / "earlier"), "fraction": 0.34}})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="how many trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a model directory or smollm2; by default a tiny one")
    parser.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="sample by a vLLM server of this Python"
    )
    parser.add_argument(
        "--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="which schedules"
    )
    options = parser.parse_args()
    if options.vllm:
        os.environ["LAGRPO_VLLM_PYTHON"] = str(options.vllm.absolute())
    os.chdir(Path(__file__).parent)  # where the tiny model's task is
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        base = merged(REAL, {"model": {"path": options.model}}) if options.model else tiny(root)
        base = merged(base, {"rollout": {"engine": "vllm"}}) if options.vllm else base
        trials, failed = Trials(root, base, not options.vllm, options.seed), 0
        for number in range(options.kills):
            kind = options.kinds[number % len(options.kinds)]
            killed, differing = trials.trial(number, kind)
            failed += bool(differing)
            outcome = f"DIFFERS: {', '.join(differing)}" if differing else "equal"
            print(f"{number + 1:3} {kind:16} killed after {killed:40} {outcome}", flush=True)
        print(f"{options.kills - failed} of {options.kills} equal", flush=True)
        sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
