"""What a step costs the host on one rank of 32, 128, 1024 and 8192, with a stand-in for the messages. Prints JSON.

No processes: a step of the whole world is planned, and one rank's part of it is made and run; what other ranks would
send is left out. Lengths are those of ``lognormal`` with 8 sequences a rank, and the width is FLUX's, both over 64, so
that layouts are those of FLUX and the arithmetic is small. Of each time the least of the repeats is given: other work
on the machine only adds.

``tables_bytes`` are the arrays and index tensors that one step holds on one rank. To a device that is not the CPU the
host copies the ``columns`` (one row for each run of units), and the device makes the ``index`` of them.

    python benchmarks/host_time.py                    # 32 to 8192 ranks, minutes
    python benchmarks/host_time.py --facade           # 2 real gloo ranks with tiny tensors
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from knapformer import Balancer, CostModel, Lengths, Plan, __version__, make_plan
from knapformer.execution import exchange, transport
from knapformer.execution.attend import BalancedAttention
from knapformer.execution.routes import JointRoute, Region, Route, Units
from knapformer.schedules.attention import attention_schedule
from knapformer.schedules.tokens import RankTokens, token_exchange
from knapformer.step import Step
from knapformer.workloads.workloads import workload

SCALE = 64
HEADS, WIDTH, LAYERS = 24, 2, 57
COST = CostModel(hidden=HEADS * WIDTH, num_heads=HEADS)
CPU = torch.device("cpu")
TARGET_MS, TARGET_MS_PER_PEER, TARGET_PREPARE_MS, TARGET_FACADE_MS = 0.15, 0.03, 5.0, 3.0


class Nowhere:
    """A transport that is done at once and brings zeros."""

    def launch(self, received: Tensor, sent: Tensor, messages: transport.Messages) -> Sequence[transport.Waits]:
        """Split as the real one does, and send nothing."""
        sent.split(list(messages.bytes_to))
        received.zero_().split(list(messages.bytes_from))
        return ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="32,128,1024,8192")
    parser.add_argument("--planner", default="moldable")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--facade", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    content: dict[str, Any] = {
        "benchmark": "host_time",
        "date": date.today().isoformat(),
        "versions": {"knapformer": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }
    if arguments.facade:
        content["facade"] = facade(arguments.repeats)
    else:
        worlds = [world(int(n), arguments.planner, arguments.repeats) for n in arguments.ranks.split(",")]
        content |= {"planner": arguments.planner, "worlds": worlds, "ratio_to_first": ratios(worlds)}
    print(json.dumps(content, indent=1))


def world(num_ranks: int, planner: str, repeats: int) -> dict[str, Any]:
    """One rank's times in a world of ``num_ranks``: a rank with the median number of peers of those that have any."""
    lengths = Lengths.from_ranks(scaled(workload(f"lognormal:{num_ranks}:8", seed=0)))
    plan_ms, plan = least_ms(lambda: make_plan(lengths, planner=planner, cost=COST), 3 if num_ranks < 5000 else 1)
    rank, peers = median_rank(plan)
    tokens = RankTokens.of(plan, rank)
    step = make_step(plan, lengths, rank)
    attention = step.attention._all.lanes[0].made(HEADS, HEADS, CPU)
    x = torch.zeros(int(lengths.tokens[lengths.homes == rank].sum()), HEADS, WIDTH, requires_grad=True)
    q = torch.zeros(step.num_tokens, HEADS, WIDTH, requires_grad=True)
    shared = [torch.zeros(tokens.num_rows - tokens.num_whole_rows, HEADS, WIDTH).view(-1, WIDTH) for _ in range(3)]
    times = {
        "schedule": lambda: (RankTokens.of(plan, rank), token_exchange(plan, lengths, tokens, rank)),
        "attention_schedule": lambda: attention_schedule(plan, tokens, rank, HEADS, HEADS),
        "schedules_and_routes": lambda: routes(plan, lengths, rank, CPU),
        "qkv_exchange": lambda: exchange.exchange(shared, attention.before, step._balancer.channel),
        "layer": lambda: step.attention(q, q, q).sum().backward(),
        "step_of_57_layers": lambda: whole_step(make_step(plan, lengths, rank), x),
    }
    found = {name: least_ms(job, 3 if name.startswith("step") else repeats)[0] for name, job in times.items()}
    return {
        "num_ranks": num_ranks,
        "num_sequences": plan.num_sequences,
        "rank": rank,
        "num_peers": len(peers),
        "plan_ms": plan_ms,
        "least_ms": found,
        "prepare_beyond_planning_ms": {"found": found["schedules_and_routes"], "asked": TARGET_PREPARE_MS},
        "qkv_exchange_ms": {"found": found["qkv_exchange"], "asked": TARGET_MS + TARGET_MS_PER_PEER * len(peers)},
        "tables_bytes": tables(step, plan, lengths, tokens, rank),
    }


def scaled(ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[max(1, n // SCALE) for n in own] for own in ranks]


def median_rank(plan: Plan) -> tuple[int, np.ndarray]:
    """A rank, and its peers in attention."""
    found = []
    for rank in range(min(plan.world_size, 256)):
        peers = attention_schedule(plan, RankTokens.of(plan, rank), rank).before.peers
        if len(peers):
            found.append((len(peers), rank, peers))
    found.sort(key=lambda entry: entry[:2])
    _, rank, peers = found[len(found) // 2]
    return rank, peers


def make_step(plan: Plan, lengths: Lengths, rank: int) -> Step:
    """As ``Balancer.prepare`` makes it after the ranks have agreed."""
    balancer: Any = SimpleNamespace(
        group=SimpleNamespace(rank=rank, device=CPU, control=None),
        channel=transport.Channel(Nowhere(), rank),
        cost=COST,
        kernel="auto",
        overlap=True,
    )
    return Step(balancer, plan, lengths, {})


def whole_step(step: Step, x: Tensor) -> None:
    """Route, 57 layers of attention and nothing else, restore; forward and backward."""
    y = step.route(x)
    for _ in range(LAYERS):
        y = step.attention(y, y, y)
    step.restore(y).sum().backward()


def routes(plan: Plan, lengths: Lengths, rank: int, device: torch.device) -> None:
    """Everything that ``prepare`` makes after planning, and a step's first route."""
    tokens = RankTokens.of(plan, rank)
    schedule = attention_schedule(plan, tokens, rank, HEADS, HEADS)
    BalancedAttention(schedule, transport.Channel(None, rank), device, num_heads=HEADS, num_kv_heads=HEADS)
    Route.of(token_exchange(plan, lengths, tokens, rank), device)


def tables(step: Step, plan: Plan, lengths: Lengths, tokens: RankTokens, rank: int) -> dict[str, int]:
    """Bytes of the plan, of the schedules' columns and of the index tensors, after a forward and a backward pass."""
    schedule = attention_schedule(plan, tokens, rank, HEADS, HEADS)
    joint = (schedule.before, schedule.after)
    columns = sum(nbytes(blocks) for e in joint for blocks in (e.taken, e.given))
    exchanged = token_exchange(plan, lengths, tokens, rank)
    columns += sum(nbytes(b) for b in (exchanged.send, exchanged.receive, exchanged.keep_from, exchanged.keep_to))
    index = sum(
        held(route)
        for attention in step.attention._all.lanes[0]._made.values()
        for route in (attention.before, attention.after)
    )
    index += sum(held(route) for route in step._moves._routes.values())
    return {"plan": nbytes(plan), "columns": columns, "index": index}


def nbytes(owner: Any) -> int:
    """Of the arrays that an object with slots holds."""
    arrays = (getattr(owner, name) for name in owner.__slots__ if hasattr(owner, name))
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def held(route: Route | JointRoute) -> int:
    """Bytes of a route's index tensors, made by now."""
    if isinstance(route, JointRoute):
        return sum(held_by(region) for region in (route.taken, route.given))
    return sum(held_by(units) for units in (route.send, route.receive, route.keep_from, route.keep_to))


def held_by(part: Region | Units) -> int:
    tensors = vars(part).values() if isinstance(part, Region) else [part.index]
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


def ratios(worlds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each time over that of the smallest world."""
    first = worlds[0]["least_ms"]
    return {str(w["num_ranks"]): {name: ms / first[name] for name, ms in w["least_ms"].items()} for w in worlds}


def least_ms(job: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    least, result = float("inf"), None
    for _ in range(repeats):
        began = time.perf_counter()
        result = job()
        least = min(least, (time.perf_counter() - began) * 1e3)
    return least, result


def facade(repeats: int) -> dict[str, Any]:
    """A step of 4 layers on 2 gloo ranks with tiny tensors, beside the same messages without the library."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(facade_rank, (repeats, folder), nprocs=2)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found


def facade_rank(rank: int, repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    balancer = Balancer(COST, planner="ulysses")

    def step() -> None:
        prepared = balancer.prepare([16, 8])
        y = prepared.route(torch.zeros(24, HEADS, WIDTH, requires_grad=True))
        for _ in range(4):
            y = prepared.attention(y, y, y)
        prepared.restore(y).sum().backward()

    def bare() -> None:
        """As many messages of as many bytes, and the gathers of ``prepare``."""
        for parts in (GATHERS, *[[MESSAGE]] * EXCHANGES):
            for numbers in parts:
                if parts is GATHERS:
                    dist.all_gather_single(torch.empty(2 * numbers), torch.empty(numbers))
                else:
                    works = [dist.isend(torch.empty(numbers), 1 - rank), dist.irecv(torch.empty(numbers), 1 - rank)]
                    for work in works:
                        work.wait()

    for _ in range(5):
        step(), bare()
    step_ms, bare_ms = float("inf"), float("inf")
    for _ in range(repeats * 5):
        step_ms = min(step_ms, least_ms(step, 1)[0])
        bare_ms = min(bare_ms, least_ms(bare, 1)[0])
    if rank == 0:
        beyond = {"found": step_ms - bare_ms, "asked": TARGET_FACADE_MS}
        content = {"step_ms": step_ms, "bare_messages_ms": bare_ms, "beyond_ms": beyond}
        (Path(folder) / "found.json").write_text(json.dumps(content))
    dist.barrier()
    dist.destroy_process_group()


GATHERS, EXCHANGES, MESSAGE = [4, 4, 5], 2 * (4 * 2 + 2), 12 * HEADS * WIDTH
"""Numbers that ``prepare`` gathers; exchanges of a step of 4 layers, forward and backward; numbers of one of them."""


if __name__ == "__main__":
    main()
