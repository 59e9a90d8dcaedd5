"""Weights that stay in their files, so that every rank of a sharded model reads only its own rows.

The model itself is on PyTorch's meta device, where tensors have shapes and no numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lagrpo.model.model import Weights


class StoredWeights(Weights):
    """The weights of a model on the meta device, and the safetensors files that have their numbers.

    As a mapping they have names and shapes only. `rows` reads numbers.
    """

    def __init__(self, lm: Any, files: Sequence[str]) -> None:
        from safetensors import safe_open

        super().__init__(lm)
        # Sharding makes the parameters wider.
        self._dtype: torch.dtype = lm.get_output_embeddings().weight.dtype
        # The tensors of the files by their names there. Nothing is read before they are indexed.
        self._stored: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            for stored_name in opened.keys():  # noqa: SIM118  it is not a mapping
                self._stored[stored_name] = opened.get_slice(stored_name)
        # All parameters by name; tied ones are there once for each name.
        self._parameters: dict[str, nn.Parameter] = dict(
            lm.named_parameters(remove_duplicate=False)
        )

    def fit(self, *, has_more_rows: bool = False) -> bool:
        """True if the files have each weight once, under its name in the model and in its shape.

        A tied weight may also be there under its other names. With `has_more_rows` embedding and
        head may have more rows in the files, which are never read.
        """
        embedded = [self._lm.get_input_embeddings().weight, self._lm.get_output_embeddings().weight]
        if not set(self) <= self._stored.keys() <= self._parameters.keys():
            return False
        for name, tensor in self._stored.items():
            parameter = self._parameters[name]
            rows, *width = tensor.get_shape()
            if has_more_rows and any(parameter is weight for weight in embedded):
                rows = min(rows, len(parameter))
            if (rows, *width) != parameter.shape:
                return False
        return True

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        """Reads the rows `first` .. `stop` - 1 of a weight, in the dtype of the model.

        Raises ValueError if the files have other numbers under another name of a tied weight.
        """
        parameter = self._parameters[name]
        rows: Tensor = self._stored[name][first:stop].to(self._dtype)
        for other_name, other in self._stored.items():
            if other_name == name or self._parameters[other_name] is not parameter:
                continue
            if not torch.equal(other[first:stop].to(self._dtype), rows):
                raise ValueError(
                    "config.json sets tie_word_embeddings, but the files have a different output "
                    "head: untie it"
                )
        return rows

    def digest_first_rows(self) -> str:
        """Returns a digest of the first row of every weight, which tells models apart."""
        digest = hashlib.blake2b(digest_size=8)
        for name in self:
            digest.update(name.encode())
            first_row: Tensor = self._stored[name][0:1]
            digest.update(first_row.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def find_weight_files(path: str) -> list[str]:
    """Returns the safetensors files of a directory or hub id, which are downloaded.

    The list is empty if it has none.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    only_file = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if only_file is not None:
        return [only_file]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        return []
    files, _ = get_checkpoint_shard_files(path, index)
    return list(files)
