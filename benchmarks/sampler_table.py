"""Ways to make steps of a data set, beside one another: time, waiting, samples seen, and how well kinds mix.

    python benchmarks/sampler_table.py [--ranks 32] [--steps 200] [-o FILE]         # predicted
    python benchmarks/sampler_table.py --measured [--ranks 4] [--steps 8]          # and run on so many gloo ranks

Prints JSON. Two data sets, drawn with a fixed seed:

    open-sora-buckets   Open-Sora 2.0's stage 2 buckets, each as often as its samples come (workloads/opensora.py)
    corpus              Open-Sora 1.1's corpus: 79 % videos of its clip lengths, images as large as those of LAION-400M
                        with both sides of at least 256, captions of its histograms. That every video has 256 px, and a
                        token is 16 x 16 pixels of every fourth frame, is our choice.

An epoch is as long as so many random steps. Every way gets the same tokens a rank. The predicted time is that of the
cost model for Open-Sora 2.0's shape on H100s with recomputation, over the epoch; what a step costs whatever it holds
(FSDP, optimizer) is left out. `over_perfect_balance` is the time over that of the same work evenly on all ranks;
`speed_over_random` compares work per second, because what is dropped is not like the rest. `computing` is the largest
over the mean of the ranks' linear + attention time, less 1, in the mean over steps weighted by time. `mixing` is how
far the mean log length of a step's samples strays, as a variance over that of random steps of as many samples: 1 is
chance, and more means that kinds come in clumps. What `one bucket on all ranks` drops falls with
the length of the epoch.

Measured, lengths are a 32nd, the model is a small DiT, and a rank's time is the CPU time of its thread, so that
other programs on the machine do not count; waiting does not show in it. A step takes as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from knapformer import Balancer, CostModel, Lengths, evaluate, make_plan
from knapformer.given.shapes import model_shape
from knapformer.measure.environment import environment
from knapformer.models import DiT
from knapformer.models.config import DiTConfig
from knapformer.predict.hardware import hardware
from knapformer.workloads.arrangement import Arrangement
from knapformer.workloads.histograms import CLIP_FRAMES, VIDEO_PERCENT, draw_text_tokens
from knapformer.workloads.opensora import BUCKET_TABLES
from knapformer.workloads.sampling import Epoch

Steps = list[list[list[int]]]
"""Of each step and rank, positions in the data set."""

SCALE = 32
"""Measured lengths are shorter by it."""


def open_sora_buckets(count: int) -> np.ndarray:
    rng, table = random.Random(0), BUCKET_TABLES["open-sora-2.0-stage2"]
    samples = [weight * bucket.batch_size for weight, bucket in zip(table.weights, table.buckets, strict=True)]
    drawn = rng.choices(table.buckets, samples, k=count)
    kinds = ["image" if bucket.frames == 1 else "video" for bucket in drawn]
    return np.asarray([b.visual_tokens + draw_text_tokens(rng, k) for b, k in zip(drawn, kinds, strict=True)])


def corpus(count: int) -> np.ndarray:
    rng = random.Random(0)
    starts = [48, *(end for end, _ in CLIP_FRAMES[:-1])]

    def draw() -> int:
        if rng.random() < VIDEO_PERCENT / 100:
            at = rng.choices(range(len(CLIP_FRAMES)), [percent for _, percent in CLIP_FRAMES])[0]
            frames = rng.randint(starts[at] + 1, CLIP_FRAMES[at][0])
            return 256 * ((frames - 1) // 4 + 1) + draw_text_tokens(rng, "video")
        side = rng.choices((256, 512, 1024), (51 - 16, 16 - 2.3, 2.3))[0]
        return (side // 16) ** 2 + draw_text_tokens(rng, "image")

    return np.asarray([draw() for _ in range(count)])


DATA: dict[str, tuple[Callable[[int], np.ndarray], int]] = {
    "open-sora-buckets": (open_sora_buckets, 160_000),
    "corpus": (corpus, 70_000),
}
"""Data set, and tokens a rank: about two of its longest samples."""


def batches_of(tokens: np.ndarray, order: np.ndarray, limit: int) -> list[list[int]]:
    """Batches along an order, each of as many samples as the tokens allow."""
    found: list[list[int]] = []
    held = limit
    for sample in order.tolist():
        if held + tokens[sample] > limit:
            found.append([])
            held = 0
        found[-1].append(sample)
        held += int(tokens[sample])
    return found


def in_steps(batches: list[list[int]], num_ranks: int) -> Steps:
    """So many batches a step; the last step may leave ranks without one."""
    return [
        [*batches[at : at + num_ranks], *[[]] * (at + num_ranks - len(batches))]
        for at in range(0, len(batches), num_ranks)
    ]


def by_chance(tokens: np.ndarray, num_ranks: int, limit: int) -> Steps:
    return in_steps(batches_of(tokens, np.random.default_rng(1).permutation(len(tokens)), limit), num_ranks)


def length_grouped(tokens: np.ndarray, num_ranks: int, limit: int) -> Steps:
    """A batch has like lengths; which batches meet in a step is chance."""
    rng = np.random.default_rng(1)
    shuffled = rng.permutation(len(tokens))
    batches = batches_of(tokens, shuffled[np.argsort(tokens[shuffled], kind="stable")], limit)
    return in_steps([batches[i] for i in rng.permutation(len(batches))], num_ranks)


def one_bucket(tokens: np.ndarray, num_ranks: int, limit: int) -> Steps:
    """All ranks take the same bucket, lengths within 9 %; what fills no step of a bucket is dropped."""
    rng, steps = np.random.default_rng(1), []
    bucket = np.round(np.log2(tokens) * 8).astype(int)
    for value in np.unique(bucket):
        own = rng.permutation(np.flatnonzero(bucket == value))
        size = max(1, limit // int(tokens[own].max())) * num_ranks
        for at in range(0, len(own) - size + 1, size):
            steps.append(own[at : at + size].reshape(num_ranks, -1).tolist())
    return [steps[i] for i in rng.permutation(len(steps))]


def sampled(tokens: np.ndarray, num_ranks: int, limit: int, cost: CostModel, *, balance: bool) -> Steps:
    arrangement = Arrangement(num_ranks, tokens_per_rank=limit, balance=balance, cost=cost)
    epoch = Epoch(tokens, arrangement, seed=1, epoch=0)
    return [list(epoch.step(i).batches) for i in range(epoch.num_steps)]


def ways(tokens: np.ndarray, num_ranks: int, limit: int, cost: CostModel) -> dict[str, tuple[Steps, str]]:
    """Steps, and what plans them."""
    chance = by_chance(tokens, num_ranks, limit)
    free = sampled(tokens, num_ranks, limit, cost, balance=True)
    return {
        "random": (chance, "home"),
        "length-grouped": (length_grouped(tokens, num_ranks, limit), "home"),
        "one bucket on all ranks": (one_bucket(tokens, num_ranks, limit), "home"),
        "BalancedBatchSampler": (sampled(tokens, num_ranks, limit, cost, balance=False), "home"),
        "random, bags": (chance, "bags"),
        "random, moldable": (chance, "moldable"),
        "BalancedBatchSampler(balance=True), bags": (free, "bags"),
        "BalancedBatchSampler(balance=True), moldable": (free, "moldable"),
    }


def mixing(tokens: np.ndarray, steps: Steps) -> float:
    logs, total, expected = np.log(tokens), 0.0, 0.0
    for step in steps[:-1]:
        own = [sample for batch in step for sample in batch]
        total += (logs[own].mean() - logs.mean()) ** 2
        expected += logs.var() / len(own)
    return total / expected


def layouts(num_ranks: int) -> list[str]:
    return [f"g{size}n{num_ranks // size}" for size in (1, 2, 4, 8, 16, 32) if size <= num_ranks]


def predict(tokens: np.ndarray, steps: Steps, planner: str, cost: CostModel) -> dict[str, Any]:
    """The epoch's cost; ``bags`` with the fixed layout that takes the least time."""
    num_ranks, best = len(steps[0]), None
    for layout in layouts(num_ranks) if planner == "bags" else [None]:
        lengths = [Lengths.from_ranks([tokens[own].tolist() for own in step]) for step in steps]
        found = [evaluate(make_plan(own, planner=planner, topology=layout, cost=cost), cost) for own in lengths]
        seconds = np.asarray([e.step_time_s for e in found])
        if best is None or seconds.sum() < best["seconds"]:
            waited = np.asarray([e.discrepancy for e in found])
            perfect = sum(e.step_time_s / e.over_lower_bound for e in found)
            best = {
                "seconds": float(seconds.sum()),
                "over_perfect_balance": float(seconds.sum() / perfect),
                "computing": float((waited * seconds).sum() / seconds.sum()),
                "layout": layout,
            }
    return best or {}


def table(name: str, num_ranks: int, num_steps: int, cost: CostModel, scale: int = 1) -> dict[str, Any]:
    draw, limit = DATA[name]
    tokens = draw(20_000)
    count = int(num_steps * num_ranks * limit / tokens.mean())
    tokens, limit = np.maximum(draw(count) // scale, 1), limit // scale
    rows = {}
    for way, (steps, planner) in ways(tokens, num_ranks, limit, cost).items():
        if not steps:
            continue  # the epoch is too short for one step of any bucket
        seen = np.unique([sample for step in steps for own in step for sample in own])
        found = predict(tokens, steps, planner, cost)
        rows[way] = {
            "steps": len(steps),
            "samples_seen_percent": 100 * len(seen) / count,
            **found,
            "mixing": mixing(tokens, steps),
        }
    for row in rows.values():
        row["speed_over_random"] = rows["random"]["over_perfect_balance"] / row["over_perfect_balance"]
    spread = np.percentile(tokens, [1, 50, 99, 100]).astype(int).tolist()
    return {"samples": count, "tokens_per_rank": limit, "tokens_1_50_99_100_percent": spread, "ways": rows}


CONFIG = DiTConfig(
    in_channels=16, conditioning_channels=16, num_heads=6, head_width=32, rope_axes=(8, 12, 12), num_blocks=2
)
MEASURED_COST = CostModel(hidden=192, num_heads=6, gamma=1.3, flops_per_s=3e10)


def run_step(balancer: Balancer, model: DiT, lengths: list[int]) -> float:
    """CPU seconds of this rank in one step."""
    began = time.thread_time()
    step = balancer.prepare(lengths)
    rows = torch.randn(sum(lengths), CONFIG.in_channels)
    position_ids = torch.arange(sum(lengths))[:, None].expand(-1, 3).contiguous()
    x, positions = step.route(rows), step.route(position_ids)
    conditioning = step.route_conditioning(torch.randn(len(lengths), CONFIG.conditioning_channels))
    out = model(x, positions, conditioning, step.row_index, attention=step.attention)
    step.restore(out).square().sum().backward()
    model.zero_grad()
    return time.thread_time() - began


def rank_main(rank: int, num_ranks: int, folder: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model, found = DiT(CONFIG), {}
    for name, (draw, limit) in DATA.items():
        tokens = draw(20_000)
        tokens = np.maximum(draw(int(num_steps * num_ranks * limit / tokens.mean())) // SCALE, 1)
        own = {}
        for way, (steps, planner) in ways(tokens, num_ranks, limit // SCALE, MEASURED_COST).items():
            if not steps:
                continue
            layout = predict(tokens, steps, planner, MEASURED_COST)["layout"]
            balancer = Balancer(MEASURED_COST, planner=planner, topology=layout)
            if not own:  # the first step of a process is slow
                run_step(balancer, model, tokens[steps[0][rank]].tolist())
            mine = torch.tensor([run_step(balancer, model, tokens[step[rank]].tolist()) for step in steps])
            everyone = [torch.empty_like(mine) for _ in range(num_ranks)]
            dist.all_gather(everyone, mine)
            times, seen = torch.stack(everyone), [s for step in steps for batch in step for s in batch]
            slowest = times.max(dim=0).values
            own[way] = {
                "seconds": float(slowest.sum()),
                "predicted_seconds_of_work": float(MEASURED_COST.work_s(tokens[seen]).sum()),
                "computing": float(slowest.sum() / times.mean(dim=0).sum()) - 1,
            }
        for row in own.values():
            speed, random_speed = (r["predicted_seconds_of_work"] / r["seconds"] for r in (row, own["random"]))
            row["speed_over_random"] = speed / random_speed
        found[name] = own
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("-o", dest="file", type=Path)
    options = parser.parse_args()
    num_ranks = options.ranks or (4 if options.measured else 32)
    num_steps = options.steps or (8 if options.measured else 200)
    result: dict[str, Any] = {"date": str(date.today()), "ranks": num_ranks, **environment()}
    if options.measured:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_main, (num_ranks, folder, num_steps), nprocs=num_ranks)
            result["measured"] = json.loads(Path(folder, "found.json").read_text())
        result["predicted"] = {n: table(n, num_ranks, num_steps, MEASURED_COST, SCALE) for n in DATA}
    else:
        cost = hardware("h100").cost(model_shape("open-sora-2.0"))
        result["predicted"] = {name: table(name, num_ranks, num_steps, cost) for name in DATA}
    text = json.dumps(result, indent=1)
    print(text)
    if options.file:
        options.file.write_text(text + "\n")


if __name__ == "__main__":
    main()
