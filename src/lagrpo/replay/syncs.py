"""Weight syncs: whether the sampler got new weights when the schedule says so, decided by the batches before."""

from __future__ import annotations

from lagrpo.replay.findings import Report
from lagrpo.replay.source import Source

DECIDES = {"budget": "kl_sequence", "certified": "lag_certified"}
"""The metric in metrics.jsonl by which a schedule decides."""


def check(source: Source, report: Report) -> None:
    """`synced` of every line, and the weight sync of its batch in events.jsonl with its reason and version."""
    found = report.check("weight syncs", note="when the schedule says so")
    events = {event["batch"]: event for event in source.events if event["event"] == "weight_sync"}
    generated, said = 0, 0.0  # since the last weight sync: batches, and what the last of them said
    for batch, (number, line) in sorted(source.metrics.items()):
        reason = due(source, batch, generated, said)
        place = f"line {number} (batch {batch})"
        found.equal("metrics.jsonl", place, "synced", line["synced"], int(bool(reason)))
        event = events.get(batch, {})
        recorded = {name: event.get(name) for name in ("reason", "version")}
        expected = {"reason": reason, "version": line["version"]} if reason else {"reason": None, "version": None}
        found.equal("events.jsonl", f"batch {batch}", "weight_sync", recorded, expected)
        generated, said = (1, 0.0) if reason else (generated + 1, said)
        value = line.get(DECIDES.get(source.settings.schedule.kind, ""))
        said = said if value is None else value


def due(source: Source, batch: int, generated: int, said: float) -> str:
    """Why new weights are synced before a batch, "" where they are not: docs/off-policy.md, "Definitions"."""
    schedule = source.settings.schedule
    if batch == 1:
        return "start"
    if schedule.kind == "lagged":
        return "schedule"
    if schedule.kind == "every":
        k = (batch - 1) % schedule.batches + 1
        return "schedule" if k % schedule.v == 0 else ""
    if said > (schedule.delta or 0.0):
        return schedule.kind
    return "cap" if generated >= schedule.v else ""
