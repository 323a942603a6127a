"""What routing costs on gloo ranks, beside a bare ``all_to_all_single`` of the same splits into a fresh output.

Every rank holds ``--megabytes`` of rows of ``--width`` float32 numbers in ``--sequences`` sequences, each of which is
split evenly over all ranks. In each repetition, one after another: the bare collective, the library's sends and
receives of the same bytes, the whole of ``Step.route`` with its copies, and its backward. The ranks keep memory that
they free: whether glibc returns it to the system in between depends on what else was freed. Prints JSON: medians over
the repetitions of the slowest rank's time, and their ratios to the bare collective.

    python benchmarks/routing.py --ranks 2 --megabytes 8
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from knapformer import Balancer, CostModel, __version__
from knapformer.execution.transport import Messages, send_and_receive
from knapformer.measure.heap import keep_freed_memory

TARGETS = {"transfer": 1.25, "route": 2.0, "route_backward": 2.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=8.0, help="per rank, of 2**20 bytes")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=6, help="per rank")
    parser.add_argument("--repetitions", type=int, default=150)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (vars(arguments), folder), nprocs=arguments.ranks)
        times = json.loads((Path(folder) / "times.json").read_text())
    bare = statistics.median(times["bare"])
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratios = {name: medians[name] / bare for name in TARGETS}
    print(
        json.dumps(
            {
                "benchmark": "routing",
                "date": date.today().isoformat(),
                "settings": vars(arguments),
                "median_s": medians,
                "ratio_to_bare": ratios,
                "target_ratio": TARGETS,
                "is_met": {name: ratios[name] <= target for name, target in TARGETS.items()},
                "hardware": {"processor": processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
                "versions": {
                    "knapformer": __version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            },
            indent=2,
        )
    )


def measure(rank: int, settings: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    num_ranks = settings["ranks"]
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    num_rows = int(settings["megabytes"] * 2**20) // (4 * settings["width"])
    lengths = uneven(num_rows, settings["sequences"])
    step = Balancer(CostModel(), planner="ulysses").prepare(lengths, num_rows=num_rows)
    x = torch.randn(num_rows, settings["width"], requires_grad=True)
    gradient = torch.randn(step.num_tokens, settings["width"])
    splits = bytes_to_each(step, settings["width"] * 4)
    received, sent = (torch.ones(sum(sizes), dtype=torch.uint8) for sizes in splits)
    kept: dict[str, Tensor] = {}
    jobs: dict[str, Callable[[], Any]] = {
        "bare": lambda: dist.all_to_all_single(torch.empty_like(received), sent, *splits),
        "transfer": lambda: transfer(torch.empty_like(received), sent, *splits),
        "route": lambda: kept.update(y=step.route(x)),
        "route_backward": lambda: torch.autograd.grad(kept.pop("y"), x, gradient),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for repetition in range(settings["repetitions"] + 5):
        for name, job in jobs.items():
            dist.barrier()
            began = time.perf_counter()
            job()
            seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if repetition >= 5:
                times[name].append(float(seconds))
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def transfer(received: Tensor, sent: Tensor, bytes_from: list[int], bytes_to: list[int]) -> None:
    """As the library does it."""
    assert dist.group.WORLD is not None
    peers = [rank for rank in range(len(bytes_to)) if rank != dist.get_rank()]
    messages = Messages(peers, [bytes_from[rank] for rank in peers], [bytes_to[rank] for rank in peers])
    for work in send_and_receive(received, sent, messages, dist.group.WORLD):
        work.wait()


def uneven(total: int, count: int) -> list[int]:
    """``count`` lengths in an arithmetic row that sum to ``total``."""
    weights = range(1, count + 1)
    bounds = [total * sum(weights[:i]) // sum(weights) for i in range(count + 1)]
    return [b - a for a, b in pairwise(bounds)]


def bytes_to_each(step: Any, row_bytes: int) -> tuple[list[int], list[int]]:
    """Bytes that this rank receives from, and sends to, every rank in ``step.route``."""
    plan = step.plan
    home, rows = plan.homes[plan.segment_sequence], (plan.segment_end - plan.segment_start) * row_bytes
    moved = home != plan.segment_rank
    to, by = moved & (home == step.rank), moved & (plan.segment_rank == step.rank)
    sent = [int(rows[to & (plan.segment_rank == rank)].sum()) for rank in range(step.num_ranks)]
    received = [int(rows[by & (home == rank)].sum()) for rank in range(step.num_ranks)]
    return received, sent


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
