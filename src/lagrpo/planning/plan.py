"""From settings to a plan: the layouts of the GPUs with their times and memory, what v buys, and every figure that this
rests on. Nothing but config.json is read of the model, and no GPU is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lagrpo.backends.cpu.build import cpu_flags
from lagrpo.backends.hardware import pick_device, pick_dtype
from lagrpo.errors import SettingsError, refusing
from lagrpo.objective.compose import Recipe
from lagrpo.objective.recipes import resolve
from lagrpo.planning.hardware import DEVICES, Device, find_device, in_float32, own_device
from lagrpo.planning.layouts import Layout, Seconds, batch_seconds, layouts, sync_seconds, update_bytes
from lagrpo.planning.measured import REPLACED, Measured, measured_rates
from lagrpo.planning.rates import Rates, stated_rates
from lagrpo.planning.work import Lengths, Model, Work
from lagrpo.policy.lora import count_parameters
from lagrpo.sampling.schedule import Schedule, largest_lag
from lagrpo.settings.plan import PlanSettings
from lagrpo.settings.schema import Settings
from lagrpo.training.build import lora_of
from lagrpo.training.explain import BYTES, HOST, empty_model, expected_memory, memory_with_adapters

MODEL = "a model of a batch's time, not a measurement"
LAGS = (1, 2, 5, 10, 20)
"""The v that every plan compares, beside the settings' own."""


@dataclass(frozen=True, slots=True)
class Option:
    """A layout with the seconds of a batch, and the bytes that one rank and one server need on their device; `room`
    is the memory of a device, None where it is not known."""

    layout: Layout
    seconds: Seconds
    learner: int
    server: int | None
    room: float | None

    @property
    def fits(self) -> bool:
        return self.room is None or max(self.learner, self.server or 0) <= self.room


@dataclass(frozen=True, slots=True)
class Lag:
    """What a batch costs at some v: its seconds, the bytes and seconds of weight syncs in them, the largest lag in
    updates."""

    v: int
    seconds: Seconds
    sync_bytes: float
    largest_lag: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`options` all layouts, `best` the fastest that fits (or the one that was asked for), `lags` what v buys there,
    `memory` of a rank by purpose for each way of sharding."""

    device: str
    gpus: int
    model: Model
    path: str
    work: Work
    rates: Rates
    options: tuple[Option, ...]
    best: Option
    lags: tuple[Lag, ...]
    memory: Mapping[str, Mapping[str, int]]
    sync_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For programs: numbers in bytes and seconds."""
        return {
            "what": MODEL,
            "gpu": self.device,
            "gpus": self.gpus,
            "model": {"path": self.path, **asdict(self.model), "weights_bytes": self.model.weights},
            "batch": asdict(self.work),
            "layouts": [_of_option(option) for option in self.options],
            "best": _of_option(self.best),
            "weight_sync": {"bytes": self.model.synced, "seconds": self.sync_seconds},
            "update_bytes_per_rank": update_bytes(self.model, self.best.layout.ranks),
            "v": [
                {"v": lag.v, "seconds": _of_seconds(lag.seconds), "sync_bytes_per_batch": lag.sync_bytes,
                 "largest_lag": lag.largest_lag}
                for lag in self.lags
            ],
            "memory_per_rank": {name: dict(purposes) for name, purposes in self.memory.items()},
            "figures": [asdict(figure) for figure in self.rates.figures],
        }  # fmt: skip


def _of_option(option: Option) -> dict[str, Any]:
    return {
        "name": option.layout.name,
        **asdict(option.layout),
        "seconds": _of_seconds(option.seconds),
        "learner_bytes": option.learner,
        "server_bytes": option.server,
        "fits": option.fits,
    }


def _of_seconds(seconds: Seconds) -> dict[str, float]:
    return asdict(seconds) | {"total": seconds.total}


def make_plan(settings: Settings, given: PlanSettings, run: Measured | None = None) -> Plan:
    """The plan for these settings on the machines of `given`, with the rates of a run where there is one. Raises
    SettingsError for a GPU, a network or a split that makes no sense, and a model that is not there."""
    device = choose_device(given, run)
    check_split(given, device)
    recipe = _recipe(settings)
    lm = empty_model(settings)
    device, size = _computing(settings, device, run)
    model = Model.of(lm, size, _adapters(lm, settings))
    rates = stated_rates(device, given, model)
    if run is not None:
        of_run = replace(model, adapters=_adapters(lm, run.settings))
        rates = _rates_of_run(run, of_run, stated_rates(device, given, of_run), model)
    work = Work.of(settings, recipe, find_lengths(settings, given, run), _learned(given, run))
    wire = _wire(settings, given, device)
    room = given.memory * 1e9 if given.memory else device.memory
    measure = Measure(settings, recipe, lm.config.get_text_config(), model, work, rates, room)
    options = tuple(measure(layout) for layout in layouts(given.gpus, given.node, wire))
    best = choose(options, given.servers)
    return Plan(
        device=device.name,
        gpus=given.gpus,
        model=model,
        path=settings.model.path,
        work=work,
        rates=rates,
        options=options,
        best=best,
        lags=tuple(measure.lag(best.layout, v) for v in sorted({*LAGS, max(1, work.v)})),
        memory={name: measure.memory(best.layout, name) for name in ("optimizer", "layers")},
        sync_seconds=sync_seconds(model, rates, best.layout),
    )


def _rates_of_run(run: Measured, of_run: Model, stated: Rates, model: Model) -> Rates:
    """What the run measured, for `model`, of which another number of weights may be trained."""
    own = run.settings
    work = Work.of(own, _recipe(own), run.lengths(own.sampling.max_tokens), run.learned)
    rates = measured_rates(run, of_run, work, stated)
    return replace(rates, update=rates.update * model.trained / of_run.trained)


def _recipe(settings: Settings) -> Recipe:
    with refusing("objective"):
        return resolve(settings.objective.recipe, settings.objective.overrides)


def _adapters(lm: Any, settings: Settings) -> int:
    """How many numbers the adapters of the settings have, 0 without any. Raises SettingsError for those that do not fit
    the model."""
    lora = lora_of(settings.model)
    with refusing("model.lora"):
        return count_parameters(lm, lora) if lora else 0


def choose_device(given: PlanSettings, run: Measured | None) -> Device:
    """The device that is named, that the run had, or that is described by its numbers."""
    if given.gpu is not None:
        return find_device(given.gpu)
    if run is not None:
        return find_device(str(run.environment.get("device_name") or "cpu"))
    if given.peak and given.bandwidth and given.memory and given.link:
        return own_device(given.peak * 1e12, given.bandwidth * 1e9, given.memory * 1e9, given.link * 1e9)
    raise SettingsError(
        f"--gpu says which: {', '.join(DEVICES)}. Or --from RUN, or a GPU's numbers: --peak, --bandwidth, --memory, "
        "--link"
    )


def check_split(given: PlanSettings, device: Device) -> None:
    """Raise SettingsError for a split without learners, nodes without a network, rates that are given twice."""
    if given.servers is not None and given.servers >= given.gpus:
        raise SettingsError(f"--servers {given.servers} of --gpus {given.gpus} leaves none that learns")
    if given.gpus > given.node and not given.network and not device.shared:
        raise SettingsError(
            f"--gpus {given.gpus} are more than a node's {given.node}: say how fast the network between nodes is, "
            "--network 400Gb, or how many GPUs a node has, --node"
        )
    if given.from_run is not None:
        twice = [f"--{name.replace('_', '-')}" for name in REPLACED if getattr(given, name) is not None]
        if twice:
            raise SettingsError(f"--from measures what {', '.join(twice)} would state: leave out one of them")


def find_lengths(settings: Settings, given: PlanSettings, run: Measured | None) -> Lengths:
    """Lengths that are given, of the run, or the longest that the settings allow."""
    limit = settings.sampling.max_tokens
    base = run.lengths(limit) if run else Lengths(settings.sampling.max_prompt_tokens, limit, limit)
    mean = min(given.tokens or base.mean, limit)
    longest = limit if given.tokens else base.longest
    return Lengths(given.prompt_tokens or base.prompt, mean, max(mean, longest))


def _learned(given: PlanSettings, run: Measured | None) -> float:
    return given.learned_share or (run.learned if run else 1.0)


def _size(settings: Settings, device: Device, run: Measured | None) -> int:
    """Bytes of a number of the weights: as set; else bfloat16 on a GPU, and on a CPU what it would be here, or was."""
    if settings.model.dtype != "auto":
        return BYTES[settings.model.dtype]
    if not device.shared:
        return 2
    known = run.environment.get("dtype") if run else None
    return BYTES[str(known) if known in BYTES else pick_dtype("auto", pick_device("cpu"))[0]]


def _computing(settings: Settings, device: Device, run: Measured | None) -> tuple[Device, int]:
    """The device as it is for the dtype that it computes in, and the bytes of a number of the weights."""
    size = _size(settings, device, run)
    return in_float32(device, cpu_flags()) if size == BYTES["float32"] else device, size


def _wire(settings: Settings, given: PlanSettings, device: Device) -> str:
    """How weights reach servers. Raises SettingsError for adapters otherwise than by directory, as vLLM loads them."""
    if settings.model.lora.r:
        if given.weight_sync not in (None, "directory"):
            raise SettingsError(f"--weight-sync {given.weight_sync}: vLLM loads adapters (model.lora) from a directory")
        return "directory"
    if given.weight_sync:
        return given.weight_sync
    if settings.sampling.sampler == "vllm":
        return settings.vllm.weight_sync
    return "directory" if device.shared else "nccl"


def choose(options: Sequence[Option], servers: int | None) -> Option:
    """The layout with so many servers, or the fastest that fits; where none fits the fastest."""
    if servers is not None:
        return next(option for option in options if option.layout.servers == servers)
    return min(options, key=lambda option: (not option.fits, option.seconds.total))


@dataclass(frozen=True, slots=True)
class Measure:
    """Looks at layouts: their times, and their memory in `room` bytes."""

    settings: Settings
    recipe: Recipe
    config: Any
    model: Model
    work: Work
    rates: Rates
    room: float | None

    def __call__(self, layout: Layout) -> Option:
        """The layout; with the layers sharded where the settings say so, or only that makes it fit."""
        option = self._as(replace(layout, layers=layout.ranks > 1 and self.settings.distributed.shard == "layers"))
        if not option.fits and layout.ranks > 1:
            sharded = self._as(replace(layout, layers=True))
            return sharded if sharded.fits else option
        return option

    def _as(self, layout: Layout) -> Option:
        memory = self.memory(layout, "layers" if layout.layers else "optimizer")
        learner = sum(size for name, size in memory.items() if self.room is None or name not in HOST)
        seconds = batch_seconds(self.model, self.work, self.rates, layout)
        return Option(layout, seconds, learner, self._server(layout), self.room)

    def memory(self, layout: Layout, shard: str) -> dict[str, int]:
        """Bytes of a rank that learns, by purpose."""
        sampler = "vllm" if layout.servers else "local"
        sampling = self.settings.sampling.model_copy(update={"sampler": sampler})
        distributed = self.settings.distributed.model_copy(update={"shard": shard})
        settings = self.settings.model_copy(update={"sampling": sampling, "distributed": distributed})
        shards = self.settings.distributed.shard_ranks or min(layout.ranks, layout.node)
        further: dict[str, Any] = {"size": self.model.size, "ranks": layout.ranks, "shards": shards}
        if self.model.adapters:
            numbers = self.model.parameters, self.model.adapters
            return memory_with_adapters(settings, self.recipe, self.config, numbers, **further)
        return expected_memory(settings, self.recipe, self.config, self.model.parameters, **further)

    def _server(self, layout: Layout) -> int | None:
        """Bytes that a server needs: its weights, and keys and values of the rows that it decodes."""
        if not layout.servers:
            return None
        work, longest = self.work, self.settings.sampling.max_prompt_tokens + self.settings.sampling.max_tokens
        rows = min(work.max_num_seqs, math.ceil(work.fresh * work.together / layout.servers) * work.G)
        return self.model.weights + self.model.adapters * self.model.size + rows * longest * self.model.kv

    def lag(self, layout: Layout, v: int) -> Lag:
        """What a batch costs where weights are synced every v batches."""
        s, work = self.settings.schedule, replace(self.work, v=v)
        lag = largest_lag(Schedule(s.kind, v, s.delta), s.stages, s.batches, s.i)
        seconds = batch_seconds(self.model, work, self.rates, layout)
        return Lag(v, seconds, self.model.synced * bool(layout.servers) / work.per_sync, lag)
