"""Draw a figure of the theory: bernoulli, amplification or bandit (see theory/__init__.py).

python experiments/figures.py bernoulli [--output PATH]    the ending of PATH (png, svg, pdf) is its format
"""

import argparse
from pathlib import Path

from theory import FIGURES, figure

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=FIGURES)
    parser.add_argument("--output", type=Path, help="where to; NAME.png here by default")
    asked = parser.parse_args()
    try:
        print(figure(asked.name, asked.output))
    except (ValueError, OSError) as error:
        parser.exit(2, f"--output: {error}\n")
