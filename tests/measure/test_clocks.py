"""The busy clock counts what a rank computes, and not what it waits for."""

from __future__ import annotations

import time

import torch
from launch import run_ranks

from knapformer import Balancer
from knapformer.execution.groups import BalancingGroup, gather_values, wait_for_all
from knapformer.measure.clocks import ThreadClock

WAIT_S = 0.8


def compute(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def busy(rank: int, _world_size: int) -> dict[str, float]:
    """Rank 1 comes late to an exchange, forward and backward; rank 0 waits for it."""
    balancer = Balancer(planner="ulysses")
    x = torch.ones(64 * (1 - rank), 8, requires_grad=True)
    step = balancer.prepare([len(x)])
    found = {}
    for name, work_s in (("waiting", 0.0), ("computing", 0.3)):
        clock = ThreadClock()
        clock.start()
        began = time.perf_counter()
        compute(work_s)
        if rank == 1:
            time.sleep(WAIT_S)
        loss = step.restore(step.route(x)).sum()
        if rank == 1:
            time.sleep(WAIT_S)
        loss.backward()
        found[name] = clock.stop()
        found[f"{name} wall"] = time.perf_counter() - began
    return found


def test_waiting_for_an_exchange_is_not_busy_time():
    for times in run_ranks(busy, 2):
        assert times["waiting wall"] > 2 * WAIT_S > 10 * times["waiting"]
        assert 0.3 <= times["computing"] < 0.3 + WAIT_S / 4


def gather(rank: int, world_size: int) -> tuple[list[object], float]:
    group = BalancingGroup.create()
    values = gather_values(group, {"rank": rank, "text": "ä" * rank, "none": None, "list": [0.1] * rank})
    time.sleep(0.4 * (rank == 0))
    began = time.perf_counter()
    wait_for_all(group)
    return values, time.perf_counter() - began


def test_values_are_gathered_in_order_of_rank():
    results = run_ranks(gather, 3)
    expected = [{"rank": r, "text": "ä" * r, "none": None, "list": [0.1] * r} for r in range(3)]
    assert [values for values, _ in results] == [expected] * 3
    assert min(results[1][1], results[2][1]) > 0.1
