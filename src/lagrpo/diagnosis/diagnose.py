"""Applies detectors to a run, and tells what they found."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lagrpo.diagnosis.finding import Detector, Finding, percent
from lagrpo.diagnosis.record import RunRecord, load_record
from lagrpo.diagnosis.table import DETECTORS
from lagrpo.diagnosis.timing import PHASES, seconds_of_batch, shares_of_time
from lagrpo.runs.directory import Run
from lagrpo.runs.reading import load_status
from lagrpo.terminal.text import count_of
from lagrpo.types import JsonObject


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of a run. Printed, it is the text of `lagrpo diagnose`."""

    run: str
    status: str
    """finished, failed, running …"""
    batches: int
    completions: int
    """that were read"""
    time: str
    """where the seconds go"""
    findings: tuple[Finding, ...]
    """the costliest first"""

    def __str__(self) -> str:
        counts = f"{count_of(self.batches, 'batch', 'es')}, {self.completions:,} completions read"
        lines = [f"{self.run}: {self.status}, {counts}"]
        if self.time:
            lines.append(self.time)
        if not self.batches:
            lines.append("Nothing to diagnose: no batch is finished.")
        elif not self.findings:
            lines.append("Nothing found.")
        for number, finding in enumerate(self.findings, start=1):
            lines += ["", *_describe(finding, number)]
        return "\n".join(lines)

    def to_json(self) -> JsonObject:
        """Returns the same as a JSON object."""
        return asdict(self)


def _describe(finding: Finding, number: int) -> list[str]:
    """Returns the lines of a finding."""
    lines = [f"{number}. {finding.sentence}"]
    if finding.example:
        lines.append(f"   for example {finding.example}")
    if finding.places:
        lines.append(f"   see  {'; '.join(str(place) for place in finding.places)}")
    if finding.settings:
        lines.append(f"   set  {setting_words(finding)}")
    if finding.advice:
        lines.append(f"   do   {finding.advice}")
    return lines


def setting_words(finding: Finding) -> str:
    """Returns what to set as words of the command line."""
    words = []
    for name, value in finding.settings.items():
        text = str(value).lower() if isinstance(value, bool) else f"{value}"
        if isinstance(value, float):
            text = f"{value:g}"
        words.append(f"--{name} {shlex.quote(text)}")
    return " ".join(words)


def diagnose(run: Run | Path | str, detectors: Sequence[Detector] = ()) -> Diagnosis:
    """Says what is wrong with a run, which may be finished, failed or still running.

    `detectors` join the built-in ones. Raises RunNotFoundError for a directory that is not a run,
    ValueError for damaged files.
    """
    record = load_record(run)
    return Diagnosis(
        run=str(record.path),
        status=load_status(run)[0],
        batches=len(record.metrics),
        completions=len(record.rollouts),
        time=_describe_time(record),
        findings=find_all(record, (*DETECTORS, *detectors)),
    )


def find_all(record: RunRecord, detectors: Sequence[Detector]) -> tuple[Finding, ...]:
    """Returns what the detectors find, the costliest first."""
    findings = []
    if not record.metrics:
        return ()
    for detector in detectors:
        finding = detector.find(record, detector.threshold)
        if finding is not None:
            advice = finding.advice or detector.advice
            findings.append(replace(finding, detector=detector.name, advice=advice))
    findings.sort(key=lambda finding: -finding.cost)
    return tuple(_set_once(findings))


def _set_once(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yields the findings, each without settings that a costlier one changes."""
    changed: set[str] = set()
    for finding in findings:
        settings = {name: value for name, value in finding.settings.items() if name not in changed}
        changed |= settings.keys()
        yield replace(finding, settings=settings)


def _describe_time(record: RunRecord) -> str:
    """Returns seconds per batch and the shares of its phases; "" without a timed batch."""
    seconds = seconds_of_batch(record)
    shares = shares_of_time(record)
    if seconds is None or not shares:
        return ""
    phases = sorted(PHASES, key=lambda name: -shares[name])
    # A percent of the time is not worth a word.
    parts = [f"{PHASES[name]} {percent(shares[name])}" for name in phases if shares[name] >= 0.01]
    return f"{seconds:.2g} seconds per batch: {', '.join(parts)}"
