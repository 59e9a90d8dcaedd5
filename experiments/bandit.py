"""The tables of theory.bandit, to three decimals.

    python experiments/bandit.py [--steps 4000]

They show where each variant ends, and what tells the masks apart. Expect REINFORCE at .800 with and
without syncs, GRPO at .713 without and 1.000 with, RED-Weight .1 at .940 without:
tests/test_theory_bandit.py has every number.
"""

import argparse

from theory.bandit import curves, masks_table, table

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=4000, help="gradient steps (default: %(default)s)"
    )
    steps = parser.parse_args().steps
    print(table(curves(steps)), masks_table(steps // 2), sep="\n\n")
