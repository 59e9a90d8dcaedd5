"""A few minutes on a GPU, used for what is worth most: probes, tests and benchmarks.

python benchmarks/gpu_session.py                    # the steps of FIRST: 580 seconds at most
python benchmarks/gpu_session.py --seconds 300
python benchmarks/gpu_session.py --only bench trl   # other steps, by name
python benchmarks/gpu_session.py --dry-run          # the steps and their limits
python benchmarks/gpu_session.py --quick            # tiny sizes, also on a CPU, without the tests

The steps are in the order of what they tell. Each one is a process with a time limit of its own, so
that one that hangs costs no other its answer. Results go to a few files of $OUT, else of
build/gpu-session, and are written as they come:

    session.json      how each step ended, and after how many seconds
    session.log       everything that the steps printed
    gpu-probes.json   the numbers of the probes
    gpu.md            the table of bench_gpu.py, and in inexact/ that with LAGRPO_EXACT=0
    training.md       the table of gpu_training.py: runs of the embedded model; in small/ that of
                      a model of half a megabyte
    trl-gpu.md        the tables of bench_trl.py

The limits of the steps of FIRST add up to less than the time of a call on a lent machine. `make
measure-gpu` has more time: it runs everything, with a log for
each step. The step `training` needs GSM8K in LAGRPO_DATA, `trl` needs TRL in this Python, and both
need the embedded model.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from measure_gpu import (
    ROOT,
    Step,
    choose_steps,
    last_lines,
    make_parser,
    run,
    step_environment,
)

RESULTS = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-session")
# A step that would have less time than this is left out.
SHORTEST = 20.0
# The steps that run without --only.
FIRST = ("small", "peak", "kernels", "tests", "ranks", "agree", "learn", "decode")
CPU_STEPS = (
    "small",
    "ranks",
    "peak",
    "learn",
    "learn-torch",
    "sample",
    "decode",
    "agree",
    "joined",
    "rows",
    "bench",
    "training",
)


def steps(results: Path, *, quick: bool) -> list[Step]:
    """All steps, the most informative first."""
    options = ["--results", str(results), *(["--quick"] if quick else [])]
    benchmarks = ROOT / "benchmarks"
    probe = (sys.executable, str(benchmarks / "probe_gpu.py"), *options)
    own = (sys.executable, str(benchmarks / "probe_kernels.py"), *options)
    bench = (sys.executable, str(benchmarks / "bench_gpu.py"), *options)
    inexact_bench = (
        *("env", "LAGRPO_EXACT=0", *bench, "--results", str(results / "inexact")),
        *("--contexts", "512", "--long-context", "0"),
    )
    training = (sys.executable, str(benchmarks / "gpu_training.py"), *options)
    small = (*training, "--results", str(results / "small"))
    small += ("--only", "small", "--model", str(ROOT / "experiments" / "small" / "model"))
    small += ("--seconds", "55")
    compare = (sys.executable, str(benchmarks / "bench_trl.py"), *options)
    # Both sides in this Python, and only the reward that leaves no group without a signal.
    peer = ("--peer", sys.executable)
    trl = (*compare, *peer, "--warmup", "2", "--updates", "4", "--own-updates", "0")
    # By name: the other files of tests may need packages that a machine with a GPU lacks.
    files = sorted(str(path) for path in (ROOT / "tests").glob("test_triton_*.py"))
    files.insert(0, str(ROOT / "tests" / "test_gpu.py"))
    # Eight processes compile kernels side by side.
    pytest = (sys.executable, "-m", "pytest", "-n", "8", "-v", "--tb", "short")
    # The session's timeout is shorter than the step's, so that there is a summary.
    tests = (*pytest, "--session-timeout", "150", "-m", "gpu or triton", *files)
    # Without the kernels: what users get where Triton does not work.
    torch_tests = ("env", "LAGRPO_KERNELS=torch", *pytest, "--session-timeout", "50", "-m", "gpu")
    # Ranks by NCCL: one on a GPU, two on two GPUs. The same on a CPU, by Gloo.
    marker = "not gpu" if quick else "gpu"
    ranks_file = str(ROOT / "tests" / "test_gpu_ranks.py")
    ranks = (sys.executable, "-m", "pytest", "-v", "--tb", "short", "-m", marker, ranks_file)
    return [
        # Does a run work from start to end, at v = 1 and v = 10?
        Step("small", 60, small),
        # Is the GPU as fast as it should be?
        Step("peak", 40, (*probe, "peak")),
        # Do the kernels run, and how fast?
        Step("kernels", 70, (*own, "kernels")),
        # Are they right, compiled and in bfloat16?
        Step("tests", 170, tests),
        Step("ranks", 60, ranks),
        Step("tests-torch", 60, (*torch_tests, files[0])),
        # Where the time of an update goes; and what the kernels gain.
        Step("learn", 60, (*probe, "learn")),
        Step("learn-torch", 90, (*own, "learn-torch")),
        # Tokens/s of the sampler by rows.
        Step("decode", 60, (*own, "decode")),
        # Is the importance ratio exactly 1?
        Step("agree", 60, (*own, "agree")),
        Step("rows", 45, (*probe, "rows")),
        Step("rows-no-split", 45, (*probe, "rows-no-split")),
        Step("attention", 45, (*probe, "attention")),
        # Where the time of a decoding step goes.
        Step("sample", 90, (*probe, "sample")),
        Step("learn-135m", 60, (*probe, "learn-135m")),
        # Would a small model gain from fewer and wider products?
        Step("joined", 45, (*own, "joined")),
        # The table of the documentation; and what exact products cost.
        Step("bench", 300, bench),
        Step("bench-inexact", 100, inexact_bench),
        # Does the embedded model learn here, at v = 1 and v = 10?
        Step("training", 220, training),
        # An update beside TRL's.
        Step("trl", 170, trl),
    ]


def main() -> None:
    parser = make_parser(__doc__, steps(RESULTS, quick=False), RESULTS)
    parser.add_argument("--seconds", type=float, default=580, help="for all steps together")
    options = parser.parse_args()
    all_steps = steps(options.results, quick=options.quick)
    if not options.only:
        all_steps = [step for step in all_steps if step.name in FIRST]
    selected = choose_steps(all_steps, options, CPU_STEPS)
    check_packages()
    outcomes = run_session(selected, options.results, options.seconds)
    sys.exit(any(outcome != "done" for outcome in outcomes.values()))


def check_packages() -> None:
    """Exits if a package is missing, before the steps fail one by one."""
    command = (sys.executable, str(ROOT / "benchmarks" / "bench_gpu.py"), "--help")
    result = subprocess.run(
        command, env=step_environment(), capture_output=True, encoding="utf-8", check=False
    )
    if result.returncode != 0:
        sys.exit(f"{result.stderr}benchmarks/README.md says how to bring packages")


def run_session(selected: list[Step], results: Path, seconds: float) -> dict[str, str]:
    """Runs steps until `seconds` have passed. Returns how each one ended."""
    results.mkdir(parents=True, exist_ok=True)
    session_log = results / "session.log"
    deadline = time.monotonic() + seconds
    outcomes: dict[str, str] = {}
    took: dict[str, float] = {}
    for step in selected:
        seconds_left = deadline - time.monotonic()
        if seconds_left < min(SHORTEST, step.limit):
            outcomes[step.name] = "left out: no time"
        else:
            limit = int(min(step.limit, seconds_left))
            print(f"\n== {step.name}: at most {limit} s", flush=True)
            step_log = results / "step.log"
            started = time.monotonic()
            outcomes[step.name] = run(Step(step.name, limit, step.command), step_log)
            took[step.name] = round(time.monotonic() - started, 1)
            print(last_lines(step_log), f"== {step.name}: {outcomes[step.name]}", flush=True)
            append(session_log, step, step_log)
        # Written after each step: whatever ends this process, the answers so far are there.
        summary = {"outcomes": outcomes, "seconds": took}
        text = json.dumps(summary, indent=1) + "\n"
        (results / "session.json").write_text(text, encoding="utf-8")
    return outcomes


def append(session_log: Path, step: Step, step_log: Path) -> None:
    """Moves the output of a step to the end of the session's log."""
    with session_log.open("a", encoding="utf-8") as file:
        file.write(f"\n== {step.name}: {shlex.join(step.command)}\n")
        file.write(step_log.read_text(encoding="utf-8", errors="replace"))
    step_log.unlink()


if __name__ == "__main__":
    main()
