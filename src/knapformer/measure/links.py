"""Measure the links inside nodes and between them: latency and bandwidth, from all-to-alls of several sizes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from knapformer.errors import ConfigurationError
from knapformer.execution.groups import BalancingGroup, gather_values, subgroup, wait_for_all
from knapformer.execution.transport import Messages, send_and_receive

SENT_BYTES = (1_024, 64_000, 512_000, 2_000_000, 8_000_000, 32_000_000)
"""Of a rank, to all its peers together."""

PROBES, WARM_UP = 12, 2


@dataclass(frozen=True, slots=True)
class Link:
    """What an all-to-all over one kind of link reaches.

    Attributes:
        num_ranks: that exchanged, in each of the groups that did so at once.
        latency_s: once for each peer of a rank: α of the α-β model (given/cost.py, ``Machine.latency_s``).
        bytes_per_s: that a rank sends, latency excluded: 1/β.
        mape: mean absolute percentage error of the fit, as a fraction.
        samples: (bytes that a rank sent, median seconds) that it was fitted to.
    """

    num_ranks: int
    latency_s: float
    bytes_per_s: float
    mape: float
    samples: tuple[tuple[int, float], ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_links(
    group: BalancingGroup, ranks_per_node: int | None = None, sent_bytes: Sequence[int] = SENT_BYTES
) -> dict[str, Link]:
    """``intra_node`` and, on several nodes, ``inter_node``. Every rank of ``group`` calls it; all get the same.

    Args:
        group: ranks, node after node.
        ranks_per_node: by default what torchrun says.
        sent_bytes: of a rank to all its peers together, one measurement each.

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
    return {name: _measure(group, members, sent_bytes) for name, members in kinds.items() if len(members[0]) > 1}


def _measure(group: BalancingGroup, groups: list[list[int]], sent_bytes: Sequence[int]) -> Link:
    """All groups exchange at once, as they would in a step."""
    assert group.data is not None
    own, size = subgroup(group.data, groups), len(groups[0])
    peers = [rank for rank in range(size) if rank != dist.get_rank(own)]
    samples = []
    for num_bytes in sent_bytes:
        parts = [num_bytes // len(peers)] * len(peers)
        messages = Messages(peers, parts, parts)
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
        samples.append((len(sent), statistics.median(t for rank in everyones for t in rank)))
    return fit_link(size, samples)


def fit_link(num_ranks: int, samples: Sequence[tuple[int, float]]) -> Link:
    """``seconds = latency_s · peers + bytes / bytes_per_s`` by non-negative least squares on relative errors.

    Args:
        num_ranks: that exchange; each has one peer less.
        samples: (bytes that a rank sends to all peers together, seconds).

    Raises:
        ConfigurationError: seconds do not grow with the bytes.
    """
    sent, seconds = (np.asarray(column, np.float64) for column in zip(*samples, strict=True))
    terms = np.stack([np.full(len(sent), num_ranks - 1.0), sent], axis=1) / seconds[:, None]
    scale = terms.max(axis=0)
    latency_s, s_per_byte = np.linalg.lstsq(terms / scale, np.ones(len(sent)), rcond=None)[0] / scale
    if latency_s < 0:  # the optimum without it
        latency_s, s_per_byte = 0.0, terms[:, 1].sum() / (terms[:, 1] ** 2).sum()
    if s_per_byte <= 0:
        raise ConfigurationError(f"an exchange must take longer with more bytes, got (bytes, seconds) {list(samples)}")
    mape = float(np.abs(terms @ [latency_s, s_per_byte] - 1.0).mean())
    return Link(num_ranks, float(latency_s), float(1.0 / s_per_byte), mape, tuple(samples))
