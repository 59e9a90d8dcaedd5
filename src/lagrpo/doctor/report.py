"""The whole report, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from lagrpo.doctor import computing, machine, packages
from lagrpo.doctor.findings import Finding, Look, look_at
from lagrpo.redaction import redact

SECTIONS: Mapping[str, Sequence[Look]] = {
    "machine": (
        *(machine.look_at_system, machine.look_at_processor, machine.look_at_cores, machine.look_at_memory),
        *(machine.look_at_gpus, machine.look_at_disks),
    ),
    "training": (packages.look_at_packages, computing.look_at_training),
    "extras": (
        packages.look_at_extras,
        packages.look_at_embedded_model,
        packages.look_at_vllm,
        packages.look_at_verifiers,
    ),
}
MARKS = {"ok": "✓", "absent": "–", "broken": "✗"}
WIDTH = 14  # of names


def diagnose(as_json: bool = False) -> bool:
    """Print what this machine has and lacks; whether training can run."""
    sections = {name: list(look_at(looks)) for name, looks in SECTIONS.items()}
    broken = [finding.name for of_section in sections.values() for finding in of_section if finding.state == "broken"]
    if as_json:
        said = {name: [_plain(finding) for finding in of_section] for name, of_section in sections.items()}
        print(json.dumps({"lagrpo": version("lagrpo"), "can_train": not broken, **said}, indent=1))
        return not broken
    print(f"lagrpo {version('lagrpo')}")
    for name, of_section in sections.items():
        print(f"\n{name}")
        for finding in of_section:
            print(redact(shown(finding)))
    print(f"\nTraining cannot run: {', '.join(broken)}." if broken else "\nTraining can run.")
    return not broken


def shown(finding: Finding) -> str:
    """A finding as lines of text.

    >>> print(shown(Finding("kernels", "none", "absent", "speed", "apt-get install gcc")))
      – kernels       none
                      for: speed
                      mend: apt-get install gcc
    """
    lines = [f"  {MARKS[finding.state]} {finding.name:<{WIDTH - 1}} {finding.found}"]
    lines += [f"{'':<{WIDTH + 4}}for: {finding.purpose}"] if finding.purpose else []
    lines += [f"{'':<{WIDTH + 4}}mend: {finding.remedy}"] if finding.remedy else []
    return "\n".join(lines)


def _plain(finding: Finding) -> dict[str, Any]:
    return {name: redact(text) for name, text in asdict(finding).items()}
