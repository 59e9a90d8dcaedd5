"""Compares the peers' own loss code with lagrpo's, on the same random inputs.

    python conformance/compare.py [--cases 100] [--check]

Runs in the environment of `make conformance`. Writes the table between the markers of
reports/conformance.md (--check: only compares). The exit status is 1 if a pairing does not agree,
or differ, as expected.
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
from page import relative_difference, write_table  # noqa: E402
from pairing import Pairing, Side  # noqa: E402
from pairings import PAIRINGS  # noqa: E402
from torch import Tensor  # noqa: E402

BEGIN = "<!-- conformance: begin -->"
END = "<!-- conformance: end -->"
# Our weights of completions are float32, and the peers add up to 1e-8 to their denominators.
AGREE = 1e-5
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
    """The greatest difference of the values and of the gradients over all cases.

    Each is relative to the largest number of its case. `gradient` is None if there is none.
    """

    value: float
    gradient: float | None


def compare(pairing: Pairing, cases: int) -> Difference:
    """Evaluates both sides on the cases of seeds 0, 1, …"""
    value_differences = []
    gradient_differences = []
    for seed in range(cases):
        case = Case.draw(seed)
        their_value, their_gradient = evaluate(pairing.theirs, case)
        our_value, our_gradient = evaluate(pairing.ours, case)
        value_differences.append(relative_difference(their_value, our_value))
        if our_gradient is not None and their_gradient is not None:
            gradient_differences.append(relative_difference(their_gradient, our_gradient))
    return Difference(max(value_differences), max(gradient_differences, default=None))


def evaluate(side: Side, case: Case) -> tuple[Tensor, Tensor | None]:
    """The value of a side, and its gradient in the log-probs under pi [T] if it has one."""
    logp = case.logp.clone().requires_grad_()
    result = side(case, logp)
    if isinstance(result, tuple):
        value, gradient = result
        return value, gradient.flatten()
    if not result.requires_grad:
        return result, None
    # The loss of a pairing is one number. Advantages, [C], have returned above.
    [gradient] = torch.autograd.grad(result.sum(), logp)
    return result.detach(), gradient


def surprise(pairing: Pairing, difference: Difference) -> str:
    """The first part of the result that the table does not expect, or ""."""
    parts = (
        ("value", difference.value, pairing.same in ("both", "value")),
        ("gradient", difference.gradient, pairing.same in ("both", "gradient")),
    )
    for name, number, is_same_expected in parts:
        if number is None:
            continue
        is_same = number <= AGREE
        if is_same_expected and not is_same:
            return f"the {name} differs by {number:.2g}"
        if is_same and not is_same_expected:
            return f"the {name} agrees, within {number:.2g}"
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
    columns = (
        "| peer | function | ours | value | gradient | "
        "| where they differ, or what brings them together |"
    )
    return "\n".join([head, "", columns, "|---|---|---|---|---|---|---|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100, help="random cases of each pairing")
    parser.add_argument("--check", action="store_true", help="compare, and leave the page as it is")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = []
    surprises = []
    for pairing in PAIRINGS:
        difference = compare(pairing, options.cases)
        lines.append(row(pairing, difference))
        print(lines[-1], flush=True)
        text = surprise(pairing, difference)
        if text:
            surprises.append(f"{pairing.peer} {pairing.function} and {pairing.ours_is}: {text}")
    # A page with a wrong row must not be written.
    if not options.check and not surprises:
        write_table(table(lines, options.cases), BEGIN, END)
    print("\n".join(["", *surprises, f"{len(lines)} pairings, {len(surprises)} not as expected"]))
    sys.exit(bool(surprises))


if __name__ == "__main__":
    main()
