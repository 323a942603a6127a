"""Measure the links: latency and bandwidth of an all-to-all inside nodes and between them."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from knapformer.errors import ConfigurationError
from knapformer.execution.groups import BalancingGroup, gather_values, subgroup, wait_for_all
from knapformer.execution.transport import Messages, send_and_receive

SMALL_BYTES, LARGE_BYTES = 1_024, 16_000_000
PROBES, WARM_UP = 12, 2


@dataclass(frozen=True, slots=True)
class Link:
    """What an all-to-all over one kind of link reaches.

    Attributes:
        num_ranks: that exchanged, in each of the groups that did so at once.
        latency_s: of a small one.
        bytes_per_s: that a rank sends in a large one, latency excluded.
    """

    num_ranks: int
    latency_s: float
    bytes_per_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_links(group: BalancingGroup, ranks_per_node: int | None = None) -> dict[str, Link]:
    """``intra_node`` and, on several nodes, ``inter_node``. Every rank of ``group`` calls it; all get the same.

    Args:
        group: ranks, node after node.
        ranks_per_node: by default what torchrun says.

    Raises:
        ConfigurationError: there is one rank only, or nodes do not divide the ranks.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", group.size)) if ranks_per_node is None else ranks_per_node
    if group.size < 2:
        raise ConfigurationError("links need at least two ranks: torchrun --nproc-per-node 2 -m knapformer calibrate …")
    if per_node < 1 or group.size % per_node:
        raise ConfigurationError(f"{group.size} ranks are not a multiple of {per_node} ranks per node")
    nodes = [list(range(first, first + per_node)) for first in range(0, group.size, per_node)]
    kinds = {"intra_node": nodes, "inter_node": [list(column) for column in zip(*nodes, strict=True)]}
    return {name: _measure(group, members) for name, members in kinds.items() if len(members[0]) > 1}


def _measure(group: BalancingGroup, groups: list[list[int]]) -> Link:
    """All groups exchange at once, as they would in a step."""
    assert group.data is not None
    own, size = subgroup(group.data, groups), len(groups[0])
    times = {}
    for num_bytes in (SMALL_BYTES, LARGE_BYTES):
        peers = [rank for rank in range(size) if rank != dist.get_rank(own)]
        messages = Messages(peers, *[[num_bytes // size] * len(peers)] * 2)
        sent = torch.ones(sum(messages.bytes_to), dtype=torch.uint8, device=group.device)
        received = torch.empty_like(sent)
        seconds = []
        for _ in range(PROBES):
            wait_for_all(group)
            began = time.perf_counter()
            for work in send_and_receive(received, sent, messages, own):
                work.wait()
            if group.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        everyones = gather_values(group, seconds[WARM_UP:])
        times[num_bytes] = statistics.median(t for rank in everyones for t in rank)
    moved = LARGE_BYTES * (size - 1) / size
    return Link(size, times[SMALL_BYTES], moved / max(times[LARGE_BYTES] - times[SMALL_BYTES], 1e-9))
