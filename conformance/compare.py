"""The peers' own loss code beside ours, on the same random inputs. Runs in the environment of `make conformance`:

    python conformance/compare.py [--cases 100] [--check]

Writes the table between the markers of reports/conformance.md (--check: only compares). Ends with 1 if a pairing does
not agree, or differ, as expected.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

import stubs  # noqa: E402 - the path comes first

stubs.install()

import torch  # noqa: E402
from cases import Case  # noqa: E402
from pairing import Pairing, Side  # noqa: E402
from pairings import PAIRINGS  # noqa: E402
from torch import Tensor  # noqa: E402

PAGE = ROOT / "reports" / "conformance.md"
BEGIN, END = "<!-- conformance: begin -->", "<!-- conformance: end -->"
AGREE = 1e-5  # our weights of completions are float32, and the peers add up to 1e-8 to their denominators
LEAST = 1e-2  # values smaller than this are differences of larger terms
PACKAGES = {
    "TRL": "trl",
    "verl": "verl",
    "Trinity-RFT": "trinity-rft",
    "SkyRL": "skyrl",
    "AReaL": "areal",
    "rlax": "rlax",
}


@dataclass(frozen=True)
class Difference:
    """The greatest difference of value and of gradient over the cases, each relative to the largest number of its case;
    None where there is no gradient."""

    value: float
    gradient: float | None


def compare(pairing: Pairing, cases: int) -> Difference:
    """Both sides on the cases of seeds 0, 1, …"""
    values, gradients = [], []
    for seed in range(cases):
        case = Case.draw(seed)
        theirs, their_gradient = side(pairing.theirs, case)
        ours, our_gradient = side(pairing.ours, case)
        values.append(gap(theirs, ours))
        if our_gradient is not None and their_gradient is not None:
            gradients.append(gap(their_gradient, our_gradient))
    return Difference(max(values), max(gradients) if gradients else None)


def side(function: Side, case: Case) -> tuple[Tensor, Tensor | None]:
    """Value and gradient in the log-probs under pi."""
    logp = case.logp.clone().requires_grad_()
    result = function(case, logp)
    if isinstance(result, tuple):
        value, gradient = result
        return value, gradient.flatten()
    if not result.requires_grad:
        return result, None
    return result.detach(), torch.autograd.grad(result.sum(), logp)[0]


def gap(a: Tensor, b: Tensor) -> float:
    """The greatest |a - b|, relative to the greatest of both numbers (or to LEAST, where all are smaller)."""
    largest = max(float(a.abs().max()), float(b.abs().max()), LEAST)
    return float((a.double() - b.double()).abs().max()) / largest


def surprise(pairing: Pairing, difference: Difference) -> str:
    """The part that is not as the table expects; "" where all is."""
    expected = {
        "both": (True, True),
        "gradient": (False, True),
        "value": (True, False),
        "neither": (False, False),
    }
    for name, number, same in zip(
        ("value", "gradient"),
        (difference.value, difference.gradient),
        expected[pairing.same],
        strict=True,
    ):
        if number is not None and (number <= AGREE) != same:
            return f"the {name} {'differs by' if same else 'agrees, within'} {number:.2g}"
    return ""


def row(pairing: Pairing, difference: Difference) -> str:
    """A line of the table."""
    gradient = "" if difference.gradient is None else f"{difference.gradient:.0e}"
    remark = pairing.differs or pairing.note
    verdict = {"both": "same", "neither": "**differs**"}.get(pairing.same, "same gradient")
    cells = (
        pairing.peer,
        pairing.function,
        pairing.ours_is,
        f"{difference.value:.0e}",
        gradient,
        verdict,
        remark,
    )
    return f"| {' | '.join(cells)} |"


def table(lines: list[str], cases: int) -> str:
    """The text between the markers."""
    versions = ", ".join(f"{name} {version(package)}" for name, package in PACKAGES.items())
    versions += f"; torch {version('torch')}, jax {version('jax')}"
    head = f"{len(lines)} pairings, {cases} random cases each. {versions}."
    columns = "| peer | function | ours | value | gradient | | where they differ, or what brings them together |"
    return "\n".join([head, "", columns, "|---|---|---|---|---|---|---|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100, help="random cases of each pairing")
    parser.add_argument("--check", action="store_true", help="compare, and leave the page as it is")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines, surprises = [], []
    for pairing in PAIRINGS:
        difference = compare(pairing, options.cases)
        lines.append(row(pairing, difference))
        print(lines[-1], flush=True)
        if text := surprise(pairing, difference):
            surprises.append(f"{pairing.peer} {pairing.function} and {pairing.ours_is}: {text}")
    if not options.check and not surprises:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(
            f"{before}{BEGIN}\n{table(lines, options.cases)}\n{END}{after}", encoding="utf-8"
        )
    print("\n".join(["", *surprises, f"{len(lines)} pairings, {len(surprises)} not as expected"]))
    sys.exit(bool(surprises))


if __name__ == "__main__":
    main()
