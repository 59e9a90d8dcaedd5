"""Times the exchange between ranks of one update, alone.

Gradients are summed in float32, new weights gathered in bfloat16.

torchrun --nproc-per-node 2 benchmarks/exchange.py NUMBERS ROUNDS

Rank 0 prints the seconds of each round except the first as a JSON list. bench_ranks.py runs it.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lagrpo.training.master_weights import all_gather


def main() -> None:
    numbers, rounds = map(int, sys.argv[1:])
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    ranks = dist.group.WORLD
    assert ranks is not None
    # Rounded up, so that all ranks have shards of one size.
    numbers_per_rank = -(-numbers // ranks.size())
    # Newer versions of torch have it under a new name.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    seconds = []
    for _ in range(rounds + 1):
        # Made before the barrier, so that no rank's clock includes it.
        gradients = torch.ones(numbers_per_rank * ranks.size())
        dist.barrier()
        start = time.perf_counter()
        shard = gradients.new_empty(numbers_per_rank)
        reduce_scatter(shard, gradients, group=ranks)
        # The conversion counts: an update makes it, too.
        weights = all_gather(shard.bfloat16(), ranks)
        seconds.append(time.perf_counter() - start)
        assert float(weights[0]) == ranks.size()
    if ranks.rank() == 0:
        print(json.dumps(seconds[1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
