"""Ranks that have nothing for one another do not wait for one another, as the makespan supposes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks

from knapformer import Balancer, CostModel, Machine
from knapformer.execution import transport

PATIENCE_S = 5.0


def all_to_all(received: Any, sent: Any, messages: Any, group: Any) -> list[Any]:
    bytes_from, bytes_to = [0] * dist.get_world_size(group), [0] * dist.get_world_size(group)
    for peer, come, go in zip(messages.peers, messages.bytes_from, messages.bytes_to, strict=True):
        bytes_from[peer], bytes_to[peer] = come, go
    return [dist.all_to_all_single(received, sent, bytes_from, bytes_to, group=group, async_op=True)]


def meet(rank: int, _world: int, folder: str, *, bare: bool) -> None:
    """Pairs of ranks share their sequences; the second pair begins only when the first has done a whole step."""
    if bare:
        transport.send_and_receive = all_to_all
    cost = CostModel(hidden=16, num_heads=2, machine=Machine(ranks_per_node=2))
    step = Balancer(cost, planner="ulysses").prepare([40, 30] if rank % 2 == 0 else [])
    assert step.plan.is_split.all() and step.num_tokens == 35
    first_pair = [Path(folder) / str(other) for other in (0, 1)]
    began = time.monotonic()
    while rank > 1 and not all(file.exists() for file in first_pair):
        assert time.monotonic() - began < PATIENCE_S, "the first pair waits for the second"
        time.sleep(0.01)
    x = torch.randn(70 if rank % 2 == 0 else 0, 2, 8, requires_grad=True)
    routed = step.route(x)
    step.restore(step.attention(routed, routed, routed)).square().sum().backward()
    if rank < 2:
        first_pair[rank].touch()
    dist.barrier()


def first(rank: int, world: int, folder: str) -> None:
    meet(rank, world, folder, bare=False)


def first_by_collective(rank: int, world: int, folder: str) -> None:
    meet(rank, world, folder, bare=True)


def test_a_meeting_does_not_wait_for_another(tmp_path):
    run_ranks(first, 4, str(tmp_path))


def test_a_collective_would(tmp_path):
    """The negative control: the same step over torch's all-to-all."""
    with pytest.raises(AssertionError, match="the first pair waits for the second"):
        run_ranks(first_by_collective, 4, str(tmp_path), timeout_s=30)
