"""What overlapping the exchange with whole sequences' attention gains: attention alone, forward and backward, on gloo.

    python benchmarks/overlap.py [--ranks 2] [--rounds 15]

Both variants run on the same tensors, in turn, in one process group; each round is timed from a common start to the
slowest rank's end. Prints JSON: the ratio of medians (above 1: overlap is faster) for a few mixes of lengths.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from knapformer import Balancer, CostModel

HEADS, HEAD_WIDTH = 8, 32
MIXES = {
    "one long sequence, many short": [[2048], [256] * 6],
    "one long sequence, a middle one": [[2048], [1024]],
    "everything split": [[2048], []],
}


def measure(balancer: Balancer, lengths: list[int]) -> float:
    """Seconds of one attention, forward and backward, on this rank."""
    step = balancer.prepare(lengths)
    generator = torch.Generator().manual_seed(balancer.group.rank)
    q, k, v = (torch.randn(step.num_tokens, HEADS, HEAD_WIDTH, generator=generator).requires_grad_() for _ in range(3))
    dist.barrier()
    began = time.perf_counter()
    step.attention(q, k, v).sum().backward()
    return time.perf_counter() - began


def rank_main(rank: int, world_size: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    cost = CostModel(HEADS * HEAD_WIDTH, HEADS, gamma=1.3, flops_per_s=5e10)
    variants = {overlap: Balancer(cost, overlap=overlap, max_tokens_per_rank=None) for overlap in (True, False)}
    found: dict[str, Any] = {}
    for name, ranks in MIXES.items():
        lengths = ranks[rank] if rank < len(ranks) else []
        times: dict[bool, list[float]] = {True: [], False: []}
        for index in range(rounds + 2):
            for overlap in (True, False) if index % 2 else (False, True):
                slowest = torch.tensor(measure(variants[overlap], lengths))
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if index >= 2:
                    times[overlap].append(float(slowest))
        medians = {overlap: statistics.median(own) for overlap, own in times.items()}
        found[name] = {
            "overlapped_ms": 1e3 * medians[True],
            "one_after_another_ms": 1e3 * medians[False],
            "gain": medians[False] / medians[True],
        }
    if rank == 0:
        machine = {"machine": platform.platform(), "torch": torch.__version__, "date": str(date.today())}
        print(json.dumps({**machine, "ranks": world_size, "rounds": rounds, "mixes": found}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (options.ranks, folder, options.rounds), nprocs=options.ranks)


if __name__ == "__main__":
    main()
