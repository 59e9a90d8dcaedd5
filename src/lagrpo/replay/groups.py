"""What every row says of itself and its group, and what the schedule says of versions: whole lists, weight syncs,
versions, masks, sigma, advantages."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from lagrpo.replay import formulas
from lagrpo.replay.findings import Check, Report
from lagrpo.replay.source import UNCLEAR, Row, Source, groups_of, scored_groups
from lagrpo.rng import uniforms

PER_TOKEN = ("token_ids", "logp_alpha", "versions", "sampled")
ALWAYS = ("batch", "stage", "source", "epoch", "prompt_key", "completion", "pi_k_version", "finished", "outcome")
FLOAT32 = 2.0**-22  # advantages are float32 on disk: their relative rounding, with room for sums


def whole_rows(source: Source, report: Report) -> list[Row]:
    """The rows whose columns fit together; the others are reported, and no other check reads them."""
    found = report.check("rows")
    whole, unclear = [], source.unclear
    for row in (row for batch in sorted(source.batches.keys() - unclear) for row in source.batches[batch]):
        ill = ill_column(source, row)
        values = [len(row[name] or ()) for name in PER_TOKEN] if ill.startswith("lengths") else row[ill] if ill else ""
        found.equal(row.file, row.place, ill, values, "another value" if ill else "")
        whole += [] if ill else [row]
    for batch in range(1, max([*source.metrics, *source.batches]) + 1):
        name = f"rollouts/step-{batch:06d}.parquet"
        found.equal(name, "", "the file", "there" if batch in source.batches else "missing", "there")
        if batch in source.batches.keys() - unclear:
            check_numbers(source.at(batch), source.batches[batch], name, found)
    report.skip("rows: batches", UNCLEAR, len(unclear & source.batches.keys()))
    return whole


def ill_column(source: Source, row: Row) -> str:
    """The name of a column that does not fit the others, or what its place says; "" where all fit together."""
    if absent := [name for name in ALWAYS if row[name] is None]:
        return absent[0]
    kind, reward, batch = row["outcome"], row["reward"], row["batch"]
    lengths = {len(row[name] or ()) for name in PER_TOKEN}
    fit = {
        "lengths of token_ids, logp_alpha, versions and sampled": len(lengths) == 1,
        "batch": f"{batch:06d}" in row.file,
        "stage": row["stage"] == (batch - 1) // source.at(batch).settings.schedule.batches + 1,
        "gold": is_json(row["gold"]),
        "outcome": kind in ("scored", "unscored", "failed"),
        "reward": row.scored == (reward is not None and math.isfinite(reward)),
        "advantage": row.scored == (row["advantage"] is not None),
        "log_ratio": (row["log_ratio"] is None) == (row["kl_alpha"] is None),
    }
    return next((name for name, fits in fit.items() if not fits), "")


def is_json(text: str | None) -> bool:
    try:
        json.loads(text or "")
    except ValueError:
        return False
    return True


def check_numbers(source: Source, rows: Sequence[Row], file: str, found: Check) -> None:
    """How many groups a batch has, and how many completions they have."""
    groups = list(groups_of(rows))
    found.equal(file, "", "number of groups", len(groups), source.settings.schedule.prompts)
    generated = sum(members[0]["source"] == "sampler" for members in groups)
    found.equal(file, "", "number of groups that the sampler generated", generated, source.fresh)
    for members in groups:
        numbers = [row["completion"] for row in members]
        count = source.settings.sampling.G if members[0]["source"] == "sampler" else len(members)
        found.equal(file, members[0].place, "numbers of the completions", numbers, list(range(count)))


def check_syncs(source: Source, report: Report) -> None:
    """`synced` of every line, and the weight sync of its batch in events.jsonl with its reason and version."""
    found = report.check("weight syncs", note="when the schedule says so")
    events = {event["batch"]: event for event in source.events if event["event"] == "weight_sync"}
    generated, said = 0, 0.0  # since the last weight sync: batches, and what the last of them said
    for batch, (number, line) in sorted(source.metrics.items()):
        reason = sync_reason(source, batch, generated, said)
        found.equal("metrics.jsonl", f"line {number} (batch {batch})", "synced", line["synced"], int(bool(reason)))
        recorded = {name: events.get(batch, {}).get(name) for name in ("reason", "version")}
        expected = {"reason": reason or None, "version": line["version"] if reason else None}
        found.equal("events.jsonl", f"batch {batch}", "weight_sync", recorded, expected)
        generated, said = (1, 0.0) if reason else (generated + 1, said)
        value = line.get("kl_sequence") if source.at(batch).settings.schedule.kind == "budget" else None
        said = said if value is None else value


def sync_reason(source: Source, batch: int, generated: int, said: float) -> str:
    """Why new weights are synced before a batch, "" where they are not: docs/off-policy.md, "Terms"."""
    schedule = source.at(batch).settings.schedule
    if batch == 1:
        return "start"
    if schedule.kind == "lagged":
        return "schedule"
    if schedule.kind == "every":
        return "schedule" if ((batch - 1) % schedule.batches + 1) % schedule.v == 0 else ""
    if said > (schedule.delta or 0.0):
        return "budget"
    return "cap" if generated >= schedule.v else ""


def alpha_of(source: Source, batch: int) -> int | None:
    """The version that the schedule lets generate a batch, from the weight syncs in metrics.jsonl; None where they do
    not reach so far."""
    schedule, metrics = source.at(batch).settings.schedule, source.metrics
    if schedule.kind == "lagged":
        later = [r.batch for r in source.resumptions if r.touches("schedule.") and r.batch + r.ahead < batch]
        line = metrics.get(max([1, batch - schedule.v, *(after + 1 for after in later)]))
        return line[1]["version"] if line else None
    synced = [b for b in range(1, batch + 1) if b in metrics and metrics[b][1]["synced"]]
    return metrics[synced[-1]][1]["version"] if synced and batch in metrics else None


def check_versions(source: Source, rows: Sequence[Row], report: Report) -> None:
    """The tokens have the version that the schedule announced, and π_k has the version in the batch's metrics. With
    vLLM's `span` a completion may have tokens of later versions too."""
    found = report.check("versions")
    for row in rows:
        versions, batch = row.sampled("versions"), row["batch"]
        settings = source.at(batch).settings
        spanning = settings.vllm.in_flight == "span" and settings.sampling.sampler == "vllm"
        if batch in source.metrics:
            found.equal(row.file, row.place, "pi_k_version", row["pi_k_version"], source.metrics[batch][1]["version"])
        else:
            report.skip("versions: rows", f"batch {batch} has no line in metrics.jsonl: the run ended there")
        oldest = min(versions) if versions and min(versions) >= 0 else None
        lag = None if oldest is None else row["pi_k_version"] - oldest
        found.equal(row.file, row.place, "lag", row["lag"], lag)
        alpha = alpha_of(source, batch)
        if row.generated and alpha is not None and oldest is not None:
            strange = [v for v in versions if v < alpha or (v != alpha and not spanning)]
            found.equal(row.file, row.place, "versions", strange[0] if strange else alpha, alpha)


def check_masks(source: Source, rows: Sequence[Row], report: Report) -> None:
    """Why a completion is not in the objective, and sigma of its group."""
    found = report.check("masks, sigma", "sigma")
    for members in groups_of(rows):
        made = source.at(members[0]["batch"]).recipe.composition
        rewards = [row["reward"] for row in members if row.scored]
        mask = "zero_variance" if len(set(rewards)) == 1 and made.mask_zero_variance else ""
        for row in members:
            found.equal(row.file, row.place, "masked", row["masked"], mask if row.scored else row["outcome"])
            sigma = formulas.sigma(rewards, made.eps_std) if row.scored else None
            found.near(row.file, row.place, "sigma", row["sigma"], sigma, 1e-9 * (1 + (sigma or 0)))


def check_advantages(source: Source, rows: Sequence[Row], report: Report) -> None:
    """The advantages of each group from its rewards."""
    names = dict.fromkeys(era.recipe.composition.advantage for era in source.eras)
    found = report.check("advantages", note=f"{', '.join(names)}, by the formula written out in replay/formulas.py")
    for scored in scored_groups(rows):
        era = source.at(scored[0]["batch"])
        made, address = (
            era.recipe.composition,
            (era.settings.run.seed, "advantage", scored[0]["batch"], scored[0].group),
        )
        rewards, lengths = [row["reward"] for row in scored], [row.length for row in scored]
        r = formulas.shaped(rewards, lengths, era.settings.sampling.max_tokens, made)
        expected = formulas.advantages(r, made, uniforms(len(scored), *address).tolist())
        scale = FLOAT32 * (1 + max(abs(value) for value in expected))
        for row, advantage in zip(scored, expected, strict=True):
            found.near(row.file, row.place, "advantage", row["advantage"], advantage, scale)
