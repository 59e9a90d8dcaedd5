"""The ranks beside rank 0: they build their own learner and samplers, and do what rank 0 announces until it closes."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from lagrpo.logs import shown_by
from lagrpo.model.learner import Learner
from lagrpo.model.masters import fingerprint
from lagrpo.objective.compose import Recipe
from lagrpo.ranks.world import World
from lagrpo.rollout.local import BorrowingSampler, LocalSampler
from lagrpo.settings.schema import Settings
from lagrpo.training.build import build_learner, build_local_sampler, build_policy
from lagrpo.training.environments import OF_RUN, Talk
from lagrpo.training.lead import generate_on, sample_share, sync_own
from lagrpo.training.shards import ShardWriter
from lagrpo.training.shares import Share

Command = Callable[[Any], Any]


def follow(world: World, settings: Settings, recipe: Recipe) -> Any:
    """Be one of the ranks that rank 0 leads, and return the run's result. Signals are rank 0's business: torchrun sends
    them to all. Raises RankError where rank 0 is gone, and what keeps this rank from going on, which rank 0 is told."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with shown_by(None, logging.WARNING), ExitStack() as last:
            return world.follow(build(world, settings, recipe, last))
    except BaseException as error:
        world.fail(error)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def build(world: World, settings: Settings, recipe: Recipe, last: ExitStack) -> Mapping[str, Command]:
    """What this rank does, by the name of the command; `last` ends what it starts."""
    sampling = settings.sampling
    policy = build_policy(settings.model, sampling.temperature, settings.longest, seed=settings.run.seed)
    found = fingerprint(policy.all_weights)
    sampler = build_local_sampler(settings, policy) if sampling.sampler == "local" else None
    learner, evaluator = build_learner(settings, recipe, policy, world)
    share = Share(learner, world)
    writer = ShardWriter(world, learner)
    samplers = [found for found in (sampler, evaluator) if found is not None]

    def talk(found: Mapping[str, Talk]) -> None:
        evaluator.known = {name: talk.start(settings, policy.chat, last) for name, talk in found.items()}
        if sampler is not None:
            sampler.episodes = evaluator.known.get(OF_RUN)

    return {
        "ready": lambda _: found,
        "starting the environments": talk,
        "copying for a checkpoint": writer.write,
        "evaluation": lambda asked: sample_share(evaluator, world, *asked),
        "adopting a manner": evaluator.adopt,
        **learning(learner, share, world, samplers),
        **(borrowing(evaluator) if isinstance(evaluator, BorrowingSampler) else {}),
        **(sampling_of(sampler, learner, world) if sampler is not None else {}),
    }


def learning(learner: Learner, share: Share, world: World, samplers: list[LocalSampler]) -> Mapping[str, Command]:
    def pack(asked: Any) -> None:
        for sampler in samplers:
            sampler.rest()
        share.pack(*asked)

    return {
        "packing": pack,
        "learning": lambda _: share.first(),
        "learning again": lambda _: share.step(),
        "updating": lambda _: share.update(),
        "scoring": share.score,
        "scoring a row": lambda _: share.idle(),
        "gathering weights": lambda whose: share.give(whose),
        "ending the stage": learner.end_stage,
        "loading a checkpoint": lambda asked: world.in_step(lambda: learner.load_state(*asked)),
        "loading weights": lambda asked: learner.load_weights(*asked),
        "loading the reference": lambda _: learner.load_reference(),
    }


def borrowing(evaluator: BorrowingSampler) -> Mapping[str, Command]:
    return {
        "gathering for an evaluation": lambda _: evaluator.borrow(),
        "ending an evaluation": lambda _: evaluator.rest(),
    }


def sampling_of(sampler: LocalSampler, learner: Learner, world: World) -> Mapping[str, Command]:
    return {
        "sampling": lambda asked: sample_share(sampler, world, *asked),
        "weight sync": lambda version: sync_own(sampler, learner, world, version),
        "parity check": lambda asked: generate_on(sampler, world.rank, *asked),
        "parity scores": sampler.scores,
    }
