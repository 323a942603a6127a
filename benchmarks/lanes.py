"""What two lanes hide: forward and backward of a small DiT on 2 gloo ranks, over links that are made slow.

Every sequence is split evenly over both ranks, so that one plan exchanges the same bytes in one lane and in two. A
message counts as arrived once a link of ``--mb-per-s`` would have carried it; 0 leaves gloo as it is. All variants run
in turn in one process group; each round is timed from a common start to the slowest rank's end. Prints JSON: seconds
(the best of the rounds, because other work on the machine only adds), and the share of the exchange that stays visible.

    python benchmarks/lanes.py --mb-per-s 0,100,50,25
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from knapformer import Balancer, CostModel, Lengths, Plan
from knapformer.execution.transport import Messages, Transport, Waits
from knapformer.models import DiT, DiTConfig
from knapformer.parallel import checkpoint

HEADS, HEAD_WIDTH, BLOCKS = 8, 32, 4
LENGTHS = [2048, 2048]


@dataclass
class SlowLink:
    """A transport whose messages arrive no sooner than a link of ``bytes_per_s`` could carry them in their order."""

    transport: Transport
    bytes_per_s: float = 0.0
    is_free_at: float = 0.0

    def launch(self, received: torch.Tensor, sent: torch.Tensor, messages: Messages) -> Sequence[Waits]:
        works = self.transport.launch(received, sent, messages)
        if self.bytes_per_s:
            num_bytes = max(sent.numel(), received.numel())
            self.is_free_at = max(self.is_free_at, time.perf_counter()) + num_bytes / self.bytes_per_s
        return [Due(work, self.is_free_at) for work in works]


@dataclass
class Due:
    """A message that is not there before its time."""

    work: Waits
    at: float

    def wait(self) -> object:
        done = self.work.wait()
        time.sleep(max(0.0, self.at - time.perf_counter()))
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def even(lengths: Lengths, lanes: int) -> Plan:
    """Every sequence over both ranks; every other one in lane 1."""
    tokens = lengths.tokens.tolist()
    plan = Plan.from_placements(
        lengths=tokens,
        homes=lengths.homes.tolist(),
        segments=[[(0, 0, n // 2), (1, n // 2, n)] for n in tokens],
        tiles=[[(0, 0, HEADS // 2, 0, n), (1, HEADS // 2, HEADS, 0, n)] for n in tokens],
        world_size=2,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        planner="even",
    )
    return replace(plan, lane=[i % 2 for i in range(len(tokens))] if lanes > 1 else [])


def rank_main(rank: int, folder: str, rates: list[float], rounds: int, recompute: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    axes = (8, 12, 12)
    config = DiTConfig(
        in_channels=16,
        conditioning_channels=16,
        num_heads=HEADS,
        head_width=HEAD_WIDTH,
        rope_axes=axes,
        num_blocks=BLOCKS,
    )
    model = DiT(config)
    model.reset_parameters(init_std=0.05)
    if recompute:
        checkpoint(model)
    runs = {lanes: make_run(model, rank, lanes) for lanes in (1, 2)}
    best: dict[str, dict[int, float]] = {}
    for rate in rates:
        times: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(rounds):
            for lanes, (link, run) in runs.items():
                link.bytes_per_s = 1e6 * rate
                dist.barrier()
                began = time.perf_counter()
                run()
                slowest = torch.tensor(time.perf_counter() - began)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                times[lanes].append(float(slowest))
        best[f"{rate:g}"] = {lanes: min(own) for lanes, own in times.items()}
    gradients = [torch.cat([x.flatten() for x in run()]) for _, run in runs.values()]
    difference = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    if rank == 0:
        print(json.dumps(summary(best, difference, rounds, recompute), indent=1))
    dist.barrier()
    dist.destroy_process_group()


def make_run(model: DiT, rank: int, lanes: int) -> tuple[SlowLink, Any]:
    """A step's forward and backward in so many lanes, and the link that it uses."""
    cost = CostModel(HEADS * HEAD_WIDTH, HEADS)
    balancer = Balancer(cost, planner=lambda lengths: even(lengths, lanes), check_calls=False)
    assert balancer.channel.transport is not None
    link = SlowLink(balancer.channel.transport)
    balancer.channel = replace(balancer.channel, transport=link)
    own = LENGTHS if rank == 0 else []
    step = balancer.prepare(own)
    generator = torch.Generator().manual_seed(1)
    x, conditioning = torch.randn(sum(own), 16, generator=generator), torch.randn(len(own), 16, generator=generator)
    ids = torch.arange(sum(own))[:, None].expand(-1, 3) % 64
    x, ids, conditioning = step.route(x), step.route(ids.contiguous()), step.route_conditioning(conditioning)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        y = model(x, ids, conditioning, step.row_index, attention=step.attention)
        y.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    return link, run


def summary(best: dict[str, dict[int, float]], difference: float, rounds: int, recompute: bool) -> dict[str, Any]:
    unhindered = {lanes: best["0"][lanes] for lanes in (1, 2)} if "0" in best else None
    rows = []
    for rate, found in best.items():
        row = {"mb_per_s": float(rate), "one_lane_s": found[1], "two_lanes_s": found[2], "gain": found[1] / found[2]}
        if unhindered and rate != "0":
            row["exchange_s"] = found[1] - unhindered[1]
            row["still_visible"] = max(0.0, found[2] - unhindered[2]) / row["exchange_s"]
        rows.append(row)
    return {
        "schema": "knapformer.lanes/1",
        "machine": platform.platform(),
        "torch": torch.__version__,
        "date": str(date.today()),
        "rounds": rounds,
        "recompute": recompute,
        "gradients_differ_by": difference,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb-per-s", default="0,100,50,25", help="links, by comma; 0 is gloo as it is")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--recompute", action="store_true", help="checkpoint whole blocks")
    options = parser.parse_args()
    rates = [float(rate) for rate in options.mb_per_s.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, rates, options.rounds, options.recompute), nprocs=2)


if __name__ == "__main__":
    main()
