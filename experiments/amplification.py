"""Success amplification along real swaps of pi_ref, beside Mroueh's curve.

    lagrpo study experiments/papers/amplification.toml    make the runs
    python experiments/amplification.py runs/studies/amplification       read them; then the table
    python experiments/amplification.py amplification                    the table of the points

The table shows where each stage took each prompt. The same works for amplification-small. `python
experiments/tables.py` puts the tables into reports/claims.md.

A stage with one sampling policy alpha = pi_ref (v = M) seeks the maximizer of E_pi[A] - beta KL(pi
|| pi_ref). It moves the logit of the success probability p by w(p)/beta, with w(p) = 1/sqrt(p (1-p)
+ eps_std) (Mroueh, arXiv 2503.06639) and, as groups of G normalize by their own deviation, w_G(p)
(`group_weight`). With v = 1 the advantage follows the policy: a stage seeks the p* with
logit p* = logit p_ref + w_G(p*)/beta. Both hold for each prompt by itself.

The points (p of every prompt before and after each stage) go to
experiments/papers/results/NAME-points.json, where NAME is the directory's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from precision_report import interval
from theory.success import group_weight

from lagrpo.runs.files import write_atomically

HERE = Path(__file__).resolve().parent
POINTS = HERE / "papers" / "results"
# The default of the recipes that normalize, which the study does not change.
EPS_STD = 1e-4


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a run: the success probability of each prompt before and after it.

    `samples` is the number of completions that a probability is estimated from.
    """

    beta: float
    v: int
    G: int
    seed: int
    stage: int
    samples: int
    before: list[float]
    after: list[float]


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def weight(p: float, G: int | None) -> float:
    """The difference between the advantages of a right and a wrong answer, in groups of G.

    If G is None, advantages are normalized by the policy's own statistics.
    """
    if G is None:
        return 1 / math.sqrt(p * (1 - p) + EPS_STD)
    return group_weight(p, G, EPS_STD)


def maximizer(p_ref: float, beta: float, G: int | None) -> float:
    """The p at which a stage ends whose advantages are those of pi_ref.

    >>> round(maximizer(0.2, 2.0, None), 3), round(maximizer(0.2, 2.0, 16), 3)
    (0.466, 0.447)
    """
    return sigmoid(logit(p_ref) + weight(p_ref, G) / beta)


def fixed_point(p_ref: float, beta: float, G: int | None) -> float:
    """The p at which a stage ends whose advantages follow the policy.

    It is the lowest p above p_ref with logit p = logit p_ref + w(p)/beta, its logit to 1e-9.

    >>> p = fixed_point(0.2, 2.0, None)
    >>> round(p, 4), abs(logit(p) - logit(0.2) - weight(p, None) / 2) < 1e-6
    (0.4087, True)
    """

    # The search is over logit p, because near p = 1 a step of 1e-9 in p changes the logit a lot.
    def missing(logit_p: float) -> float:
        return logit(p_ref) + weight(sigmoid(logit_p), G) / beta - logit_p

    # A coarse search for the first crossing, then bisection.
    # The grid ends at logit p_ref + 15, where the odds are e^15 = 3e6 times the odds of p_ref.
    grid = [logit(p_ref) + 0.01 * step for step in range(1500)]
    crossings = ((a, b) for a, b in pairwise(grid) if missing(b) <= 0)
    low, high = next(crossings, (grid[-1], grid[-1]))
    while high - low > 1e-9:
        middle = (low + high) / 2
        if missing(middle) > 0:
            low = middle
        else:
            high = middle
    # The end of the grid if nothing crosses before it.
    return sigmoid(high)


def expected(stage: Stage, G: int | None) -> list[float]:
    """The p of each prompt after the stage by theory."""
    # With v = 1 the samples, and so their advantages, follow the policy.
    end = fixed_point if stage.v == 1 else maximizer
    return [end(p, stage.beta, G) for p in stage.before]


def read(study: Path) -> list[Stage]:
    """The stages of every finished run in the directory of a study. Raises ValueError if none."""
    stages = []
    for config in sorted(study.glob("*/config.toml")):
        stages += read_run(config.parent)
    if not stages:
        raise ValueError(
            f"{study}: no finished run of experiments/papers/amplification.toml; make them first"
        )
    return stages


def read_run(run: Path) -> list[Stage]:
    """The stages of a run; none if it has not been evaluated after each of them."""
    from lagrpo.runs import load_evaluations
    from lagrpo.settings.load import read_toml

    settings = read_toml(run / "config.toml")
    schedule = settings["schedule"]
    batches_per_stage = schedule.get("ref_sync_every", schedule["batches"])
    # The batches at which a stage begins or ends. A run without swaps of pi_ref is one stage.
    moments = range(0, schedule["batches"] + 1, batches_per_stage)
    names = {summary["step"]: summary["name"] for summary in load_evaluations(run)}
    # Without the evaluation at its end, a stage has no `after`.
    if not all(moment in names for moment in moments):
        return []
    # One row for each moment: what ends a stage begins the next.
    rates = [success(run / "evaluations" / f"{names[moment]}.parquet") for moment in moments]
    return [
        Stage(
            beta=settings["loss"]["beta"],
            v=schedule["sync_every"],
            G=settings["rollout"]["num_generations"],
            seed=settings["run"]["seed"],
            stage=number,
            samples=settings["eval"]["num_samples"],
            before=before,
            after=after,
        )
        for number, (before, after) in enumerate(pairwise(rates), start=1)
    ]


def load_points(name: str) -> list[Stage]:
    """The stages in NAME-points.json."""
    text = (POINTS / f"{name}-points.json").read_text(encoding="utf-8")
    return [Stage(**stage) for stage in json.loads(text)]


def success(evaluation: Path) -> list[float]:
    """The success probability of each prompt, in the order of the prompts.

    (correct + 1/2) / (samples + 1) lies inside (0, 1), so that its logit is finite.
    """
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(evaluation, columns=["prompt_id", "correct", "samples"])
    rows = sorted(table.to_pylist(), key=lambda row: row["prompt_id"])
    return [round((row["correct"] + 0.5) / (row["samples"] + 1), 5) for row in rows]


def by_cell(stages: Sequence[Stage]) -> dict[tuple[float, int], dict[int, list[Stage]]]:
    """(beta, v) -> number of the stage -> that stage of every seed."""
    cells: dict[tuple[float, int], dict[int, list[Stage]]] = defaultdict(lambda: defaultdict(list))
    for stage in stages:
        cells[stage.beta, stage.v][stage.stage].append(stage)
    return cells


def table(stages: Sequence[Stage]) -> str:
    """Means over the prompts, with intervals over the seeds."""
    rows = [
        "| β | v | stage | seeds | p before | after, by the curve | groups of G | measured "
        "| its distance from that |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    # Stages with one sampling policy (v > 1) come first, then weights of the KL term from small.
    cells = sorted(by_cell(stages).items(), key=lambda item: (-item[0][1], item[0][0]))
    for (beta, v), stages_by_number in cells:
        for number, seeds in sorted(stages_by_number.items()):
            before = [fmean(stage.before) for stage in seeds]
            after = [fmean(stage.after) for stage in seeds]
            by_curve = [fmean(expected(stage, None)) for stage in seeds]
            by_groups = [fmean(expected(stage, seeds[0].G)) for stage in seeds]
            # By seed: the theory starts from what that seed measured before the stage.
            distances = [now - theory for now, theory in zip(after, by_groups, strict=True)]
            columns = [before, by_curve, by_groups, after, distances]
            cells_text = " | ".join(interval(column) for column in columns)
            rows.append(f"| {beta:g} | {v} | {number} | {len(seeds)} | {cells_text} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "study", type=Path, help="directory of the study, as lagrpo study made it, or its name"
    )
    study = parser.parse_args().study
    try:
        if study.is_dir():
            lines = [json.dumps(asdict(stage)) for stage in read(study)]
            text = "[\n" + ",\n".join(lines) + "\n]\n"
            write_atomically(POINTS / f"{study.name}-points.json", text)
        stages = load_points(study.name)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    print(table(stages))


if __name__ == "__main__":
    main()
