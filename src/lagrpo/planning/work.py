"""What a batch asks of a machine: operations and bytes, from the sizes of the model and the lengths of the texts.

    rows      n·(p + G·l)                      of n groups: prompts of p tokens once, G completions of l tokens
    forward   2·((D + A)·rows + H·n·G·l) + 4·layers·channels·(pairs of a token and one that it sees)
    update    3 times that, or with adapters 2 times and 2·A·rows, as frozen matrices get no gradient;
              once more with activation checkpointing

D are the numbers in the matrices of the layers, H those of the head, A those of adapters. benchmarks/README.md counts
alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lagrpo.backends.attention import Shape
from lagrpo.objective.compose import Recipe
from lagrpo.settings.schema import Settings
from lagrpo.training.build import offline_prompts

OPTIMIZER = 34
"""Bytes that an update moves for each parameter: the gradient read for its norm and for the step (8), masters and two
moments read and written (24), the working weight written (2)."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model: `matrices` numbers in the matrices of its layers, `head` those of its head, `channels` query
    heads times their size, `kv_channels` the same of keys, `size` bytes of a number, `adapters` the numbers of adapters
    beside frozen weights, 0 where all weights are trained."""

    parameters: int
    matrices: int
    head: int
    layers: int
    channels: int
    kv_channels: int
    size: int
    adapters: int = 0

    @staticmethod
    def of(lm: Any, size: int, adapters: int = 0) -> Model:
        """Of a model that may be on the device meta, without storage."""
        from torch import nn

        text = lm.config.get_text_config()
        shape, head = Shape.of(text), lm.get_output_embeddings().weight
        others = [module for module in lm.modules() if not isinstance(module, nn.Embedding)]
        own = {p: p.numel() for module in others for p in module.parameters(recurse=False) if p.ndim > 1}
        return Model(
            parameters=lm.num_parameters(),
            matrices=sum(own.values()) - own[head],
            head=head.numel(),
            layers=shape.layers,
            channels=shape.heads * shape.d,
            kv_channels=shape.kv_heads * shape.d,
            size=size,
            adapters=adapters,
        )

    @property
    def weights(self) -> int:
        """Bytes of one copy."""
        return self.parameters * self.size

    @property
    def trained(self) -> int:
        """How many numbers an update changes."""
        return self.adapters or self.parameters

    @property
    def synced(self) -> int:
        """Bytes that a weight sync moves."""
        return self.trained * self.size

    @property
    def kv(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_channels * self.size

    def attention(self, pairs: float) -> float:
        """Operations of the attention, forward."""
        return 4.0 * self.layers * self.channels * pairs


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a prompt and of a completion, and of the longest completion of a batch."""

    prompt: float
    mean: float
    longest: float


@dataclass(frozen=True, slots=True)
class Work:
    """A batch: `prompts` groups of `G` completions, `fresh` of them sampled; `learned` the share that the loss reads;
    `forwards` the passes without gradient over it (π_ref); `backward` how many forward passes one update costs."""

    prompts: int
    fresh: int
    G: int
    i: int
    v: int
    kind: str
    prefetch: bool
    max_num_seqs: int
    lengths: Lengths
    learned: float = 1.0
    forwards: int = 0
    backward: int = 3
    scores: bool = True
    judges: int = 1
    micro_batch: int = 4096

    @staticmethod
    def of(settings: Settings, recipe: Recipe, lengths: Lengths, learned: float = 1.0) -> Work:
        s, sampling = settings.schedule, settings.sampling
        return Work(
            prompts=s.prompts,
            fresh=s.prompts - offline_prompts(settings),
            G=sampling.G,
            i=s.i,
            v=s.v,
            kind=s.kind,
            prefetch=sampling.prefetch and not sampling.dynamic_sampling,
            max_num_seqs=sampling.max_num_seqs,
            lengths=lengths,
            learned=learned,
            forwards=int(recipe.needs_pi_ref),
            backward=3 - bool(settings.model.lora.r) + settings.optimizer.activation_checkpointing,
            scores=settings.run.score_lag,
            judges=settings.verifier.workers,
            micro_batch=settings.optimizer.micro_batch_tokens,
        )

    @property
    def completions(self) -> int:
        return self.prompts * self.G

    @property
    def per_sync(self) -> int:
        """Batches between two weight syncs; of budget and certified the most."""
        return 1 if self.kind == "lagged" else self.v

    @property
    def together(self) -> int:
        """Batches that the sampler is asked for at once."""
        return self.v if self.prefetch and self.kind == "every" else 1

    def rows(self, groups: float) -> float:
        """Tokens that pass the layers when these groups are learned from."""
        return groups * (self.lengths.prompt + self.G * self.lengths.mean)


def forward(model: Model, work: Work, groups: float) -> float:
    """Operations of a forward pass over the completions of these groups, prompts once."""
    p, mean = work.lengths.prompt, work.lengths.mean
    pairs = groups * (p * p / 2 + work.G * mean * (p + mean / 2))
    in_layers, in_head = (model.matrices + model.adapters) * work.rows(groups), model.head * groups * work.G * mean
    return 2.0 * (in_layers + in_head) + model.attention(pairs)


def learning(model: Model, work: Work, groups: float) -> float:
    """Operations of all i updates on these groups, with the passes that they need beside."""
    own = work.i * 2.0 * model.adapters * work.rows(groups)
    return work.learned * ((work.i * work.backward + work.forwards) * forward(model, work, groups) + own)


def micro_batches(work: Work, groups: float) -> int:
    """How many micro-batches these groups are."""
    return math.ceil(work.rows(groups) * work.learned / work.micro_batch)


def scoring(model: Model, work: Work, groups: float) -> float:
    """Operations of scoring what the loss leaves out, for metrics of the lag: in batches whose α lags behind."""
    lagging = 1.0 if work.kind == "lagged" and work.v else 1 - 1 / max(1, work.per_sync)
    return (1 - work.learned) * lagging * forward(model, work, groups) if work.scores else 0.0


def prefill(model: Model, work: Work, groups: float) -> float:
    """Operations of reading the prompts of these groups."""
    p = work.lengths.prompt
    return groups * (2.0 * (model.matrices * p + model.head) + model.attention(p * p / 2))


def decoding_steps(work: Work, groups: float) -> float:
    """Steps until all completions of these groups have ended, where ended ones make room for others:
    completions·mean/rows + longest - mean. With room for all of them that is the longest."""
    completions = groups * work.G
    rows = min(work.max_num_seqs, completions)
    return completions * work.lengths.mean / rows + work.lengths.longest - work.lengths.mean if completions else 0.0
