"""The parts of a batch as a finished run measured them, and the rates that give the same parts in the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lagrpo.errors import SettingsError, refusing
from lagrpo.planning.layouts import Layout, generating_seconds, learning_seconds, sync_bytes_seconds
from lagrpo.planning.rates import SHARES, Figure, Rates
from lagrpo.planning.work import Lengths, Model, Work, scoring
from lagrpo.runs.reading import load_metrics, load_rollouts, open_run
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings

PARTS = ("sampling", "judging", "learning", "scoring", "sync")
READ = 64  # batches whose lengths are read, at the most
REPLACED = ("learning_share", "decoding_share", "bandwidth_share", "step", "launch", "server_speed")
"""Figures of a device that a run measures, beside its kind of weight sync."""
COLUMNS = ["batch", "prompt_token_ids", "token_ids", "finished"]


@dataclass(frozen=True, slots=True)
class Texts:
    """What one batch was: the mean prompt in tokens, and of each completion its tokens and whether it ended by
    itself."""

    prompt: float
    completions: tuple[tuple[int, bool], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A run read back. `seconds` of a batch by part, and `total`, the means over whole cycles from one weight sync to
    the next; `per_sync` those of one weight sync; `learned` the share of tokens that the loss read."""

    path: Path
    settings: Settings
    environment: Mapping[str, Any]
    batches: int
    seconds: Mapping[str, float]
    per_sync: float
    learned: float
    texts: tuple[Texts, ...]

    @staticmethod
    def read(directory: str) -> Measured:
        """Raises SettingsError where there is no run, or none with batches to measure."""
        with refusing("--from"):
            run = open_run(directory)
            settings, metrics = load_settings(run.path / "config.toml"), load_metrics(run)
            environment = json.loads((run.path / "environment.json").read_text())
            used = whole_cycles(metrics, settings.schedule.v if settings.schedule.kind == "every" else 1)
            if not used:
                raise ValueError(f"{run.path} has no batches yet: nothing is measured")
            numbers = [line["batch"] for line in used]
            rows = load_rollouts(run, numbers[:: -(-len(numbers) // READ)], COLUMNS)
        sampled = sum(line["tokens_sampled"] for line in used) * settings.schedule.i
        return Measured(
            path=run.path,
            settings=settings,
            environment=environment,
            batches=len(used),
            seconds=mean_seconds(used),
            per_sync=_sync_seconds(metrics),
            learned=min(1.0, sum(line["tokens_learned"] for line in used) / sampled) if sampled else 0.0,
            texts=_texts(rows),
        )

    @property
    def ranks(self) -> int:
        """How many ranks learned."""
        return int(self.environment.get("ranks") or 1)

    @property
    def layout(self) -> Layout:
        """How the run was laid out: with vLLM its servers generated."""
        vllm = self.settings.vllm
        if self.settings.sampling.sampler == "local":
            return Layout(0, self.ranks)
        return Layout(len(vllm.urls) or vllm.servers, self.ranks, wire=vllm.weight_sync)

    def lengths(self, limit: int) -> Lengths:
        """Of texts as the run had them, completions of at most `limit` tokens: longer ones are cut; those that the run
        cut go on to a larger limit."""
        own = self.settings.sampling.max_tokens
        each = [[min(n, limit) if done or limit <= own else limit for n, done in t.completions] for t in self.texts]
        tokens = [n for batch in each for n in batch]
        return Lengths(fmean(t.prompt for t in self.texts), fmean(tokens), fmean(map(max, each)))


def whole_cycles(metrics: Sequence[Mapping[str, Any]], v: int) -> list[Mapping[str, Any]]:
    """The batches from one weight sync to the next, without the first cycle, in which everything starts up; all
    batches where there is one cycle alone."""
    starts = [place for place, line in enumerate(metrics) if line["synced"]] or [0]
    cycles = [metrics[a:b] for a, b in pairwise([*starts, len(metrics)])]
    whole = cycles[1:] if len(cycles) > 1 and len(cycles[-1]) >= v else cycles[1:-1]
    return [line for cycle in whole or cycles for line in cycle]


def mean_seconds(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of a batch by part, `generating` (what the servers worked; the in-process sampler only works while it is
    waited for), `rest` and `total`."""
    mean = {part: fmean(line[f"seconds_{part}"] for line in metrics) for part in (*PARTS, "total")}
    generating = [line["seconds_generating"] for line in metrics if line["seconds_generating"] is not None]
    mean["generating"] = fmean(generating) if generating else mean["sampling"]
    return mean | {"rest": max(0.0, mean["total"] - sum(mean[part] for part in PARTS))}


def _sync_seconds(metrics: Sequence[Mapping[str, Any]]) -> float:
    """The median weight sync; the first one, which starts things up, only where it is alone."""
    found = [line["seconds_sync"] for line in metrics if line["synced"]]
    return median(found[1:] or found) if found else 0.0


def _texts(rows: Sequence[Mapping[str, Any]]) -> tuple[Texts, ...]:
    batches: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        batches.setdefault(row["batch"], []).append(row)
    return tuple(
        Texts(
            fmean(len(row["prompt_token_ids"]) for row in batch),
            tuple((len(row["token_ids"]), row["finished"]) for row in batch),
        )
        for batch in batches.values()
    )


def cost_of_syncs(metrics: Sequence[Mapping[str, Any]], v: int) -> dict[str, float]:
    """What communication costs a batch, the mean over whole cycles: `syncs`, `bytes`, `seconds` of weight syncs (with
    their parity check), `paused` seconds in which the servers generate nothing for it, `waiting` seconds for
    completions, `total` seconds."""
    used = whole_cycles(metrics, v)
    synced, n = [line for line in used if line["synced"]], len(used)
    return {
        "syncs": len(synced) / n,
        "bytes": sum(line["sync_bytes"] or 0 for line in synced) / n,
        "seconds": sum(line["seconds_sync"] for line in synced) / n,
        "paused": sum(line["seconds_paused"] or 0 for line in synced) / n,
        "waiting": fmean(line["seconds_sampling"] for line in used),
        "total": fmean(line["seconds_total"] for line in used),
    }


def measured_rates(run: Measured, model: Model, work: Work, stated: Rates) -> Rates:
    """The rates that give the run's parts: `work` is what the run did, `stated` what the device is said to reach.

    All rates of learning are the stated ones times one factor, those of sampling times another, so that both take as
    long as in the run. Weight sync, judging and recording are taken as they were measured."""
    seconds, layout = run.seconds, run.layout
    own, groups = stated.divided(layout.ranks), -(-work.prompts // layout.ranks)
    if not (seconds["learning"] and work.learned):
        raise SettingsError(f"--from: {run.path} made no update in the batches that are measured")
    slower = seconds["learning"] / learning_seconds(model, work, own, groups, layout.ranks)
    scored = slower * scoring(model, work, groups) / own.learning
    generated, _ = generating_seconds(model, work, replace(stated, server_speed=1.0), layout)
    longer = seconds["generating"] / generated if generated and seconds["generating"] else 1.0
    constant: Any = "server_sync" if layout.servers else "sync"
    rates = replace(
        stated,
        learning=stated.learning / slower,
        launch=stated.launch * slower,
        update=stated.update * slower,
        decoding=stated.decoding / longer,
        reading=stated.reading / longer,
        step=stated.step * longer,
        late=seconds["judging"] / work.completions,
        rest=(seconds["rest"] + max(0.0, seconds["scoring"] - scored)) / work.completions,
        server_speed=1.0,
        **{constant: max(0.0, run.per_sync - sync_bytes_seconds(model, stated, layout))},
    )
    facts = _facts(run, rates, slower, longer)
    replaced = {SHARES[name] for name in REPLACED} | {fact.name for fact in facts}
    return replace(rates, figures=(*facts, *(figure for figure in stated.figures if figure.name not in replaced)))


def _facts(run: Measured, rates: Rates, slower: float, longer: float) -> list[Figure]:
    """What was measured, in words."""
    source = f"measured: {run.path}, {run.batches} batches"
    sync = "server_sync" if run.layout.servers else "sync"
    times = "times as long as stated"
    return [
        Figure("learning", f"{slower:.3g} {times}", source),
        Figure("learning, operations a second", f"{rates.learning:.3g}", source),
        Figure(SHARES["launch"], f"{rates.launch:.3g}", source),
        Figure("sampling", f"{longer:.3g} {times}", source),
        Figure("products of the sampler, operations a second", f"{rates.decoding:.3g}", source),
        Figure(SHARES["step"], f"{rates.step:.3g}", source),
        Figure(SHARES[sync], f"{getattr(rates, sync):.3g}", source),
        Figure("judging that outlasts sampling, s a completion", f"{rates.late:.3g}", source),
        Figure("recording and the rest, s a completion", f"{rates.rest:.3g}", source),
        Figure("share of completions in the loss", f"{run.learned:.3g}", source),
    ]
