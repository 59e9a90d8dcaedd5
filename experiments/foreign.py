"""The completions of a run as offline data: experiments/addition/foreign.jsonl.gz, for experiments/papers/foreign.toml.

    lagrpo train experiments/addition/sums.toml --run.name other --run.seed 100 --optimizer.learning_rate 5e-6
    python experiments/foreign.py runs/other

Token ids, log-probs and rewards as recorded, a line for each completion.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from lagrpo.runs import load_rollouts
from lagrpo.runs.files import write_atomically

TARGET = Path(__file__).resolve().parent / "addition" / "foreign.jsonl.gz"
DIGITS = 5  # after the point, of a log-prob


def line(row: dict[str, Any]) -> str:
    """A completion as `offline.data` reads it."""
    kept = {
        "prompt": row["prompt_text"],
        "answer": json.loads(row["answer"]),
        "token_ids": row["token_ids"],
    }
    logp = [round(value, DIGITS) for value in row["rollout_logprobs"]]
    return json.dumps(
        kept | {"rollout_logprobs": logp, "reward": row["reward"], "finished": row["finished"]}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    asked = parser.parse_args()
    try:
        rows = [row for row in load_rollouts(asked.run) if row["outcome"] == "scored"]
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    text = "".join(f"{line(row)}\n" for row in rows)
    write_atomically(TARGET, gzip.compress(text.encode(), mtime=0))
    print(
        f"{TARGET}: {len(rows)} completions, mean reward {fmean(row['reward'] for row in rows):.3f}"
    )


if __name__ == "__main__":
    main()
