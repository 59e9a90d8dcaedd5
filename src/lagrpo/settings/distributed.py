"""What the processes of a run have between them, and how long they wait for each other: section distributed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lagrpo.errors import SettingsError
from lagrpo.ranks.rank import Rank
from lagrpo.settings.section import Section


class DistributedSettings(Section):
    """Settings of a run that torchrun starts as several processes, the ranks; others do not read them."""

    shard: Literal["optimizer", "layers"] = "optimizer"
    """What each rank has only a part of. optimizer: float32 masters, moments and what an update needs; every rank has
    all the weights (ZeRO-1). layers: weights and gradients, too; a layer is gathered when it computes (FSDP2, ZeRO-3).
    That is for models that do not fit otherwise: it moves the weights twice for each row of a batch."""
    shard_ranks: int | None = Field(default=None, ge=1)
    """With shard = "layers": so many neighboring ranks have the layers between them, and there are as many copies as
    such groups. By default the ranks of a host, if all hosts have as many."""
    deadline: float = Field(default=3600.0, gt=0)
    """Seconds for one step of a rank: to load the model, to sample its share of what is asked for, to learn from its
    share of a batch."""
    collective: float = Field(default=300.0, gt=0)
    """Seconds for one exchange between all ranks, and for all of them to start."""
    silence: float = Field(default=60.0, ge=5)
    """Seconds without a sign of life after which a rank is given up; every rank leaves one a second."""

    def shards(self, rank: Rank) -> int | None:
        """How many ranks have the layers between them, None where every rank has all. Raises SettingsError where not
        all ranks could be divided so."""
        if self.shard != "layers":
            return None
        alike = rank.size % rank.local_size == 0
        shards = self.shard_ranks or (rank.local_size if alike else rank.size)
        if rank.size % shards:
            raise SettingsError(f"distributed.shard_ranks = {shards} does not divide the {rank.size} ranks")
        return shards
