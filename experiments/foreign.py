"""Writes the completions of a run as offline data for experiments/papers/foreign.toml.

    lagrpo train experiments/addition/sums.toml --run.name other --run.seed 100 \\
        --optimizer.learning_rate 5e-6
    python experiments/foreign.py runs/other

The file is experiments/addition/foreign.jsonl.gz. A line for each completion has token ids,
log-probs and reward as recorded.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from statistics import fmean

from lagrpo.runs import load_rollouts
from lagrpo.runs.files import write_atomically
from lagrpo.types import JsonView

TARGET = Path(__file__).resolve().parent / "addition" / "foreign.jsonl.gz"
# Digits after the point of a log-prob. Rounding moves a token's ratio by at most 5e-6 of itself;
# every digit of a float32 would only make the file larger.
DIGITS = 5


def line(row: JsonView) -> str:
    """A completion as `offline.data` reads it."""
    return json.dumps(
        {
            "prompt": row["prompt_text"],
            "answer": json.loads(row["answer"]),
            "token_ids": row["token_ids"],
            "rollout_logprobs": [round(logp, DIGITS) for logp in row["rollout_logprobs"]],
            "reward": row["reward"],
            "finished": row["finished"],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    try:
        rows = [row for row in load_rollouts(run) if row["outcome"] == "scored"]
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    text = "".join(f"{line(row)}\n" for row in rows)
    # mtime=0, so that the same run gives the same bytes.
    write_atomically(TARGET, gzip.compress(text.encode(), mtime=0))
    mean = fmean(row["reward"] for row in rows)
    print(f"{TARGET}: {len(rows)} completions, mean reward {mean:.3f}")


if __name__ == "__main__":
    main()
