"""What the ranks exchange in one update, alone: gradients summed in float32, new weights gathered in bfloat16.

torchrun --nproc-per-node 2 benchmarks/exchange.py NUMBERS ROUNDS

Rank 0 prints the seconds of each round, the first left out, as JSON. bench_ranks.py runs it.
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
    each = -(-numbers // ranks.size())
    seconds = []
    for _ in range(rounds + 1):
        gradients = torch.ones(each * ranks.size())
        dist.barrier()
        start = time.perf_counter()
        part = gradients.new_empty(each)
        (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(
            part, gradients, group=ranks
        )
        weights = all_gather(part.bfloat16(), ranks)
        seconds.append(time.perf_counter() - start)
        assert float(weights[0]) == ranks.size()
    if ranks.rank() == 0:
        print(json.dumps(seconds[1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
