"""Weights: a version, and its tensors by the names that a checkpoint gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor


class Weights(Mapping[str, Tensor]):
    """The weights of a model of transformers: name -> tensor, without a gradient, read one by one from the model as it
    is. Every parameter, tied ones once, and the buffers that a checkpoint has. `version` is how many optimizer updates
    they have had."""

    def __init__(self, lm: Any, version: int = 0) -> None:
        self._lm = lm
        self.version = version

    def __iter__(self) -> Iterator[str]:
        yield from (name for name, _ in self._lm.named_parameters())
        stored = self._lm.state_dict().keys()
        yield from (name for name, _ in self._lm.named_buffers() if name in stored)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tensor:
        try:
            found = attrgetter(name)(self._lm)
        except AttributeError as error:
            raise KeyError(name) from error
        if not isinstance(found, Tensor):
            raise KeyError(name)
        return found.detach()

    def shapes(self) -> dict[str, torch.Size]:
        """Name -> shape."""
        return {name: tensor.shape for name, tensor in self.items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy π_version into this model's own storage.

        Raises:
            ValueError: names or shapes that are not this model's.
        """
        check_weights(weights, self.shapes(), version)
        for name, tensor in self.items():
            tensor.copy_(weights[name])
        self.version = version


def check_weights(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], version: int) -> None:
    """Raise ValueError for names or shapes of version `version` that differ from `shapes`."""
    if odd := sorted(set(shapes) ^ set(weights)):
        raise ValueError(f"weights of version {version} do not fit the model: {len(odd)} names differ, e.g. {odd[0]}")
    for name, shape in shapes.items():
        if shape != weights[name].shape:
            raise ValueError(f"{name} is {tuple(weights[name].shape)} in version {version}, not {tuple(shape)}")
