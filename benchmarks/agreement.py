"""What it costs that ranks agree on every call: steps with and without the comparison, in turn, on gloo ranks.

A step is the demo's: its model, its calls (``prepare``, four routes, attention in every block, ``restore``, backward),
its lengths on two ranks. The price does not depend on how many tokens there are, so it is measured on a step with few,
which ends soon enough for hundreds of repetitions; the demo's own step is timed for the ratio. The price is the median
difference of two steps one after the other, one of each kind, with the standard error of that median; beside it stand
the difference of the fastest steps, and of the medians of the processors' time, which does not see waiting. Writes
JSON to stdout, as ``docs/trust.md`` takes it.

    python benchmarks/agreement.py > benchmarks/2026-12-03-agreement.json
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from knapformer import Balancer, CostModel, __version__
from knapformer.demo.trainee import Batch, Trainee
from knapformer.models.presets import PATCH_CHANNELS, make_config

HEADS, HEAD_WIDTH = 7, 16
DEMO_LENGTHS = (([24], [7056]), ([24] * 8, [64] * 8))
"""Of rank 0 and rank 1: text and visual tokens."""
FEW_LENGTHS = (([2], [40]), ([1] * 8, [1] * 8))
LARGEST_SHARE, LARGEST_EXTRA_MS = 0.01, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--demo-repetitions", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (vars(arguments), folder), nprocs=len(DEMO_LENGTHS))
        times = json.loads((Path(folder) / "times.json").read_text())
    demo_s = min(seconds for seconds, _ in times["demo"]["without"])
    rows = [
        row("the demo's model of 2 blocks", times["few"], demo_s),
        row("19 blocks, as many as FLUX.1 has double ones", times["deep"], None),
    ]
    extra_ms = rows[0]["extra_ms"]
    content = {
        "schema": "knapformer.trust/1",
        "command": "python " + " ".join(sys.argv),
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()} CPU, gloo, 2 ranks",
        "versions": {
            "knapformer": __version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
        },
        "demo_step_s": demo_s,
        "rows": rows,
        "is_met": extra_ms <= LARGEST_EXTRA_MS and extra_ms * 1e-3 <= LARGEST_SHARE * demo_s,
    }
    print(json.dumps(content, indent=1))


def row(what: str, seconds: dict[str, list[list[float]]], demo_s: float | None) -> dict[str, Any]:
    """Milliseconds of the slowest rank's step, and the price."""
    fastest, processor = (
        {name: 1e3 * of(own[at] for own in seconds[name]) for name in ("with", "without")}
        for at, of in enumerate((min, statistics.median))
    )
    pairs = [1e3 * (a - b) for (a, _), (b, _) in zip(seconds["with"], seconds["without"], strict=True)]
    extra_ms = statistics.median(pairs)
    return {
        "step": what,
        "steps_each": len(seconds["with"]),
        "compared_ms": fastest["with"],
        "not_compared_ms": fastest["without"],
        "extra_ms": extra_ms,
        "its_standard_error_ms": median_error(pairs),
        "extra_of_the_fastest_ms": fastest["with"] - fastest["without"],
        "extra_processor_ms": processor["with"] - processor["without"],
        "share_of_the_demo's_step": None if demo_s is None else extra_ms * 1e-3 / demo_s,
    }


def median_error(values: list[float]) -> float:
    """Standard error of the median, by drawing the values anew, which the bootstrap does (Efron, 1979)."""
    draw = random.Random(0)
    return statistics.stdev(statistics.median(draw.choices(values, k=len(values))) for _ in range(200))


def measure(rank: int, settings: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    world_size = len(DEMO_LENGTHS)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    times = {}
    for name, num_blocks, lengths, repetitions in (
        ("few", 1, FEW_LENGTHS, settings["repetitions"]),
        ("deep", 19, FEW_LENGTHS, settings["repetitions"] // 4),
        ("demo", 1, DEMO_LENGTHS, settings["demo_repetitions"]),
    ):
        times[name] = steps(rank, num_blocks, lengths[rank], repetitions)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def steps(rank: int, num_blocks: int, lengths: Any, repetitions: int) -> dict[str, list[list[float]]]:
    """Seconds of each step, and of the processor in it, of the slowest rank. Every rank calls it."""
    config = make_config(
        num_heads=HEADS,
        head_width=HEAD_WIDTH,
        num_double_blocks=num_blocks,
        num_single_blocks=1 if num_blocks == 1 else 0,
    )
    torch.manual_seed(0)
    model, batch = Trainee(config), make_batch(*lengths, config.text_channels)
    cost = CostModel(hidden=HEADS * HEAD_WIDTH, num_heads=HEADS)
    balancers = {name: Balancer(cost, planner="ulysses", check_calls=name == "with") for name in ("with", "without")}
    times: dict[str, list[list[float]]] = {name: [] for name in balancers}
    for repetition in range(repetitions + 2):
        order = list(balancers.items())
        for name, balancer in order if repetition % 2 else reversed(order):
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            model(batch, balancer.prepare(batch.lengths)).sum().backward()
            own = [time.perf_counter() - began, time.process_time() - worked]
            seconds = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            model.zero_grad()
            if repetition >= 2:
                times[name].append(seconds.tolist())
    return times


def make_batch(text: list[int], visual: list[int], text_channels: int) -> Batch:
    """Noise of these lengths."""
    return Batch(
        text,
        visual,
        torch.randn(sum(text), text_channels),
        torch.randn(sum(visual), PATCH_CHANNELS),
        torch.randn(sum(visual), PATCH_CHANNELS),
        torch.zeros(sum(text) + sum(visual), 3, dtype=torch.int64),
        torch.rand(len(visual)),
        torch.zeros(len(visual), dtype=torch.int64),
    )


if __name__ == "__main__":
    main()
