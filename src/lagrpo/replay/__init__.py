"""`lagrpo verify RUN`: a run replayed from what it left on disk, by other means than those that made it.

Log-probs and distributions come from plain transformers, one sequence at a time, in float32; group statistics from
formulas written out here. Nothing of the sampler, the packed rows or the kernels is imported. What is shared is what
defines the run: its settings, the addresses of its random numbers (rng.py), the task and its judge.

source.py    a run's files, refused where they are not whole     weights.py   versions on disk, as models
tokens.py    samples, log-probs, divergences of a subset         judging.py   prompts, ends, texts, rewards
groups.py    weight syncs, versions, masks, advantages           evaluations.py  prompts, rewards, pass@k
metrics.py   metrics that follow from rows                       verdicts.py  answers judged again
formulas.py  advantages, written plainly                         findings.py  what was found, and how it is printed
episodes.py  completions of several turns

`verify_run` is all of it at once; docs/verify.md says what each check can see and what it cannot.
"""

from __future__ import annotations

import os
from pathlib import Path

from lagrpo.replay import groups, judging, metrics, tokens
from lagrpo.replay.findings import Report
from lagrpo.replay.source import Source
from lagrpo.replay.weights import Weights
from lagrpo.tasks import Task

ROWS = 128


def verify_run(
    run: Path | str, rows: int = ROWS, everything: bool = False, seed: int = 0, task: Task | None = None
) -> Report:
    """Replay a run. Samples and log-probs are recomputed for `rows` completions, a subset chosen by `seed` and spread
    over the versions on disk (`everything`: for all completions); the other checks read every row. `task` replaces the
    task of the settings where the caller gave the run an object of its own.

    Raises:
        RunNotFoundError: there is no run, or none of its batches is finished.
        UnreadableError: a file of the run is broken or of another format.
    """
    source = Source(run)
    weights = Weights(source)
    report = Report(str(os.path.relpath(source.path)))
    whole = groups.whole_rows(source, report)
    tasks = judging.tasks_of(source, task, report)
    judging.check_texts(source, weights, tasks, whole, report)
    tokens.check(source, weights, whole, None if everything else rows, seed, report)
    groups.check_syncs(source, report)
    groups.check_versions(source, whole, report)
    groups.check_masks(source, whole, report)
    groups.check_advantages(source, whole, report)
    judging.check_rewards(source, tasks, whole, report)
    metrics.check(source, whole, report)
    return report
