"""Kills training runs at random instants, resumes them, and compares what they leave with runs that nobody disturbed.

    python tests/chaos.py                            50 kills of a tiny model's runs: `make chaos`
    python tests/chaos.py --kills 5 --model smollm2  the embedded model
    python tests/chaos.py --kills 5 --model smollm2 --vllm .venv-vllm/bin/python    with a vLLM server, too
    python tests/chaos.py --kills 10 --ranks 2       runs of several ranks: all are killed, or one of them

A trial is one run: its process group gets SIGKILL at a random instant keyed by the seed, and it resumes; every third
trial is killed again while it resumes. With the in-process sampler every number must be equal to the bit: the final
weights, float32 masters and moments, metrics but for times, rollouts, evaluations. With vLLM every batch must be there
once, sampled by the versions that the schedule announced. Prints a line per trial; exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pyarrow.parquet as pq
from running import options, tiny_settings, without_timings
from warm import import_all

from lagrpo import cli
from lagrpo.runs import load_events, load_metrics

Sections = Mapping[str, Mapping[str, Any]]
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "on-policy": {"schedule": {"sync_every": 1}},
    "asking ahead": {"schedule": {"sync_every": 3}},
    "dynamic sampling": {"schedule": {"sync_every": 3}, "rollout": {"dynamic_sampling_rounds": 2}},
    "lagged": {"schedule": {"kind": "lagged", "sync_every": 2}},
    "budget": {"schedule": {"kind": "budget", "sync_every": 3, "delta": 0.02}},
}
COMMON: Sections = {
    "checkpoint": {"save_every": 2, "save_minutes": 0},
    "model": {"dtype": "bfloat16"},
    "schedule": {"num_iterations": 2, "stages": 2, "batches": 6, "prompts_per_batch": 3},
    "loss": {"recipe": "grpo"},
    "eval": {"every": 4},
}
REAL: Sections = {
    "run": {"display": "plain"},
    "checkpoint": {"save_every": 2, "save_minutes": 0},
    "task": {"name": "arithmetic", "digits": 1},
    "rollout": {"num_generations": 4, "max_completion_length": 16},
    "schedule": {"num_iterations": 2, "stages": 2, "batches": 4, "prompts_per_batch": 2},
    "loss": {"recipe": "grpo"},
    "optimizer": {"learning_rate": 2e-5},
    "eval": {"every": 3, "num_prompts": 4, "num_samples": 2},
    "verifier": {"workers": 1},
}
OTHERS_END = 120.0  # seconds for the other ranks, when one was killed


class Started:
    """`lagrpo train` in a process group of its own, with what it prints in `log`; forked, as imports take seconds."""

    running: ClassVar[set[int]] = set()

    def __init__(self, words: Sequence[str], log: Path, ranks: int = 1) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            self._be_the_command(words, log, ranks)
        self.running.add(self.pid)

    def _be_the_command(self, words: Sequence[str], log: Path, ranks: int) -> None:
        code: Any = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with log.open("ab", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            if ranks == 1 or become_rank(ranks):
                cli.main(["train", *words])
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else 1)

    def wait(self, seconds: float) -> int | None:
        """The exit code; None if it still runs after so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.running.discard(pid)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        return None

    def kill(self, rank: int | None = None) -> None:
        """All of its processes; or one rank, whereupon the others end by themselves."""
        if rank is not None and rank < len(ranks := sorted(p.pid for p in psutil.Process(self.pid).children())):
            os.kill(ranks[rank], signal.SIGKILL)
            if self.wait(OTHERS_END) is not None:
                return
            raise SystemExit(f"{OTHERS_END:g} s after rank {rank} was killed, others still run")
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.running.discard(self.pid)

    @classmethod
    def end_all(cls) -> None:
        for pid in cls.running:
            os.killpg(pid, signal.SIGKILL)


def become_rank(ranks: int) -> bool:
    """Fork so many ranks; True in each of them. In what forked them, False once all have ended well."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            given = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in given.items()}
            return True
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit(1)
    return False


def merged(*layers: Sections) -> dict[str, dict[str, Any]]:
    names = [name for layer in layers for name in layer]
    return {name: {k: v for layer in layers for k, v in layer.get(name, {}).items()} for name in dict.fromkeys(names)}


def leaves(run: Path, exact: bool) -> dict[str, Any]:
    """What must be the same however often the run was killed."""
    events = [e for e in load_events(run) if e["event"] == "weight_sync" or "WARNING" in e.get("text", "")]
    found: dict[str, Any] = {"batches": [m["step"] for m in load_metrics(run)], "syncs": events}
    found["rollouts"] = sorted(path.name for path in (run / "rollouts").iterdir())
    found["leftovers"] = [str(path) for path in run.rglob("*.tmp")]
    if not exact:
        return found
    found["metrics"] = without_timings(load_metrics(run))
    for table in sorted([*(run / "rollouts").iterdir(), *(run / "evaluations").glob("*.parquet")]):
        found[table.name] = pq.read_table(table).to_pylist()
    for summary in sorted((run / "evaluations").glob("*.json")):
        found[summary.name] = json.loads(summary.read_bytes())
    found["weights"] = (run / "weights/final/model.safetensors").read_bytes()
    (last,) = (run / "checkpoints").glob(f"step-{len(found['batches']):06d}")
    found["masters and moments"] = [file.read_bytes() for file in sorted(last.glob("trainer*.safetensors"))]
    return found


class Trials:
    """Runs of one model under `root`, killed at random instants."""

    def __init__(self, root: Path, base: Sections, exact: bool, seed: int, ranks: int = 1) -> None:
        self.root, self.base, self.exact, self.ranks = root, base, exact, ranks
        self.random = random.Random(seed)
        self._undisturbed: dict[str, tuple[dict[str, Any], float]] = {}

    def undisturbed(self, kind: str) -> tuple[dict[str, Any], float]:
        """What a run of this kind leaves, and the seconds that it took."""
        if kind not in self._undisturbed:
            started, name = time.monotonic(), f"undisturbed {kind}"
            self.finish(name, self.start(name, kind))
            self._undisturbed[kind] = leaves(self.root / name, self.exact), time.monotonic() - started
        return self._undisturbed[kind]

    def trial(self, number: int, kind: str) -> tuple[str, list[str]]:
        """How the run was killed, and what then differs from the undisturbed one."""
        expected, seconds = self.undisturbed(kind)
        name, said = f"trial {number}", []
        for _ in range(2 if number % 3 == 2 else 1):
            after = self.random.uniform(0, seconds)
            victim = None if self.ranks == 1 else self.random.choice([None, *range(self.ranks)])
            run = self.start(name, kind, "--run.resume", "auto")
            if run.wait(after) is None:
                run.kill(victim)
                whom = "" if self.ranks == 1 else ", all ranks" if victim is None else f", rank {victim}"
                metrics = self.root / name / "metrics.jsonl"
                batches = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
                said.append(f"{after:.2f} s, batch {batches}{whom}")
            else:
                said.append("had ended")
        self.finish(name, self.start(name, kind, "--run.resume", "auto"))
        found = leaves(self.root / name, self.exact)
        return "; ".join(said), [key for key in expected if found.get(key) != expected[key]]

    def start(self, name: str, kind: str, *further: str) -> Started:
        own = {"run": {"name": name, "output_dir": str(self.root)}}
        words = options(merged(self.base, KINDS[kind], own))
        return Started([*words, *further], self.root / f"{name}.log", self.ranks)

    def finish(self, name: str, run: Started) -> None:
        if (code := run.wait(1800)) != 0:
            raise SystemExit(f"{name} ended with {code}:\n{(self.root / f'{name}.log').read_text()[-3000:]}")


def tiny(root: Path) -> Sections:
    """Settings of a tiny model, with a third of each batch from the rollouts of a run that is made here."""
    code = "import sys; from tiny import save_tiny; from pathlib import Path; save_tiny(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(root / "model")], check=True, capture_output=True)
    settings = merged(tiny_settings(root / "model", root), COMMON)
    log = root / "earlier.log"
    words = options(merged(settings, {"run": {"name": "earlier"}, "schedule": {"stages": 1, "batches": 2}}))
    if Started(words, log).wait(600) != 0:
        raise SystemExit(log.read_text())
    return merged(settings, {"offline": {"data": str(root / "earlier"), "fraction": 0.34}})


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how many trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a model directory or smollm2; by default a tiny one")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="sample by a vLLM server of this Python")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each run")
    parser.add_argument("--shard", choices=["zero1", "fsdp2"], default="zero1", help="what ranks share out")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="which schedules")
    return parser.parse_args()


def main() -> None:
    asked, started = read_options(), os.getcwd()
    os.chdir(Path(__file__).parent)  # where the tiny model's task is
    import_all()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        base = merged(REAL, {"model": {"path": asked.model}}) if asked.model else tiny(root)
        if asked.vllm:
            os.environ["LAGRPO_VLLM_PYTHON"] = str((Path(started) / asked.vllm).absolute())
            base = merged(base, {"rollout": {"engine": "vllm"}})
        if asked.ranks > 1:
            base = merged(base, {"distributed": {"strategy": asked.shard}})
        trials = Trials(root, base, not asked.vllm, asked.seed, asked.ranks)
        failed = 0
        for number in range(asked.kills):
            kind = asked.kinds[number % len(asked.kinds)]
            killed, differing = trials.trial(number, kind)
            failed += bool(differing)
            outcome = f"DIFFERS: {', '.join(differing)}" if differing else "equal"
            print(f"{number + 1:3} {kind:16} killed after {killed:40} {outcome}", flush=True)
        print(f"{asked.kills - failed} of {asked.kills} equal", flush=True)
        sys.exit(1 if failed else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    finally:
        Started.end_all()
