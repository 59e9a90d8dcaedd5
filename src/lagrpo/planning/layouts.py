"""Who serves and who learns, and how long a batch takes then.

    colocated     every rank samples its share of the groups, then learns:  g + L + Y/v
    s serve       generation and learning overlap within the v batches of a weight sync:
                  (max(w·g + v·L, v·g + u·L) + Y)/v

g are the seconds in which a batch is generated, beside others where v batches are asked for together; L those of
learning from one (collectives, scoring, judging and recording included); Y those of a weight sync. Servers that have
room for w batches at a time generate them in waves, and u batches come with the last wave. With v = 1 servers and
learners wait for each other, g + L + Y; as v grows a batch tends to the slower of the two, max(g, L). Where all ranks
share one machine nothing is gained by overlapping.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from lagrpo.planning.rates import Rates
from lagrpo.planning.work import Model, Work, decoding_steps, learning, micro_batches, prefill, scoring

PASSES = 3
"""How often the bytes of a weight sync by directory move: written, read back, loaded."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`servers` GPUs generate for `ranks` that learn; without servers each rank samples its share. `layers`: the ranks
    also shard the working weights (FSDP2), and gather them layer by layer. `node`: GPUs of a node; `wire`: how weights
    reach the servers."""

    servers: int
    ranks: int
    node: int = 8
    wire: str = "nccl"
    layers: bool = False

    @property
    def name(self) -> str:
        if self.servers:
            return f"{self.servers} + {self.ranks}"
        return f"{self.ranks} colocated" if self.ranks > 1 else "1 does both"

    @property
    def gpus(self) -> int:
        return self.servers + self.ranks


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one batch, the mean between two weight syncs. `generating` is what the sampler works, `sampling` the part of
    it for which the learner waits; `learning` without `collectives`."""

    generating: float
    sampling: float
    judging: float
    learning: float
    collectives: float
    scoring: float
    sync: float
    rest: float

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """What the total is made of."""
        return {name: value for name, value in asdict(self).items() if name != "generating"}


def batch_seconds(model: Model, work: Work, rates: Rates, layout: Layout) -> Seconds:
    """What a batch takes in a layout."""
    own = rates.divided(layout.ranks)
    groups = math.ceil(work.prompts / layout.ranks)
    parts = {
        "learning": learning_seconds(model, work, own, groups, layout.ranks),
        "collectives": work.i * _collectives(model, work, rates, layout),
        "scoring": scoring(model, work, groups) / own.learning,
        "rest": work.completions * rates.rest,
    }
    generating, wave = generating_seconds(model, work, rates, layout)
    judging = max(work.completions * rates.late, work.completions * rates.judge / work.judges - generating)
    judging = max(0.0, judging)
    waiting = _waiting(work, rates, layout, generating, wave, sum(parts.values()) + judging)
    sync = sync_seconds(model, rates, layout) / work.per_sync
    return Seconds(generating=generating, sampling=waiting, judging=judging, sync=sync, **parts)


def learning_seconds(model: Model, work: Work, rates: Rates, groups: float, ranks: int = 1) -> float:
    """Seconds in which a rank learns from these groups: operations, micro-batches, its part of the optimizer."""
    each = micro_batches(work, groups) * rates.launch + rates.update / ranks
    return learning(model, work, groups) / rates.learning + work.i * each


def generation(model: Model, work: Work, rates: Rates, groups: float) -> float:
    """Seconds in which one sampler generates the completions of these groups: a step reads the weights or multiplies by
    them, whichever takes longer, then reads the keys and values of the rows under way; and the prompts are read once.
    """
    steps = decoding_steps(work, groups)
    if not steps:
        return 0.0
    rows, context = groups * work.G * work.lengths.mean / steps, work.lengths.prompt + work.lengths.mean / 2
    products = max(model.weights / rates.reading, rows * 2 * (model.matrices + model.head) / rates.decoding)
    attention = max(rows * context * model.kv / rates.reading, model.attention(rows * context) / rates.decoding)
    return steps * (rates.step + products + attention) + prefill(model, work, groups) / rates.decoding


def generating_seconds(model: Model, work: Work, rates: Rates, layout: Layout) -> tuple[float, int]:
    """Seconds of generating a batch, and how many batches a wave has: those that are generated at the same time."""
    if not layout.servers:
        each = math.ceil(work.fresh * work.together / layout.ranks)
        return generation(model, work, rates.divided(layout.ranks), each) / work.together, work.together
    wave = 1
    if work.fresh:
        wave = max(1, min(work.together, work.max_num_seqs * layout.servers // (work.fresh * work.G)))
    each = math.ceil(work.fresh * wave / layout.servers)
    seconds = generation(model, work, rates.divided(layout.servers), each) / wave
    return seconds / rates.server_speed, wave


def _waiting(work: Work, rates: Rates, layout: Layout, generating: float, wave: int, learning: float) -> float:
    """Seconds of a batch for which the learner waits for completions, of `generating` that they take."""
    if not layout.servers or rates.shared or (work.kind == "lagged" and not work.v):
        return generating
    if work.kind == "lagged":
        return max(0.0, generating - learning)
    v = work.together
    last = v - (math.ceil(v / wave) - 1) * wave
    finish = max(wave * generating + v * learning, v * generating + last * learning)
    return finish / v - learning


def _collectives(model: Model, work: Work, rates: Rates, layout: Layout) -> float:
    """Seconds of an update between the ranks: gradients in float32 to their owners, working weights back to all. With
    `layers`, in every micro-batch: weights for the forward and for the backward pass, and gradients, but for those of
    adapters, which are whole."""
    if layout.ranks == 1:
        return 0.0
    speed = rates.link if layout.ranks <= layout.node else rates.network
    moved = model.synced + 4 * model.trained
    if layout.layers:
        times = micro_batches(work, math.ceil(work.prompts / layout.ranks))
        moved = times * 2 * model.weights + (1 if model.adapters else times) * 4 * model.trained
        moved += model.synced if model.adapters else 0
    return moved * (layout.ranks - 1) / layout.ranks / speed


def update_bytes(model: Model, ranks: int) -> float:
    """Bytes that each rank sends in an update: its part of reduce-scatter and all-gather."""
    return (model.synced + 4 * model.trained) * (ranks - 1) / ranks


def sync_seconds(model: Model, rates: Rates, layout: Layout) -> float:
    """Seconds of a weight sync: its bytes, and what is constant."""
    return (rates.server_sync if layout.servers else rates.sync) + sync_bytes_seconds(model, rates, layout)


def sync_bytes_seconds(model: Model, rates: Rates, layout: Layout) -> float:
    """Seconds for the bytes of a weight sync."""
    across = layout.gpus > layout.node
    if not layout.servers or layout.wire == "ipc":
        return model.synced / rates.divided(layout.ranks).copying
    if layout.wire == "nccl":
        return model.synced / (rates.network if across else rates.link)
    return PASSES * model.synced / (min(rates.disk, rates.network) if across else rates.disk)


def layouts(gpus: int, node: int, wire: str, servers: int | None = None) -> list[Layout]:
    """Every split of the GPUs, colocated first; only that with `servers` where it is given."""
    possible = range(gpus) if servers is None else [servers]
    return [Layout(n, gpus - n, node, wire) for n in possible]
