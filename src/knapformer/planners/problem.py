"""What the C++ planners are given: lengths, cost and caps as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from knapformer import _core
from knapformer.cost import CostModel
from knapformer.errors import CapacityError, ConfigurationError
from knapformer.lengths import Lengths
from knapformer.topology import Topology

IntArray = npt.NDArray[np.int64]
Caps = int | Sequence[int] | str | None
"""Most tokens per rank: one number, one per rank, ``"auto"`` or ``None`` for no cap."""

AUTO_CAP = 1.5
"""The automatic cap over the mean tokens of a rank."""


def as_lengths(lengths: Lengths | Sequence[Sequence[int]]) -> Lengths:
    """``lengths`` itself, or collected from each rank's own."""
    return lengths if isinstance(lengths, Lengths) else Lengths.from_ranks(lengths)


def as_topology(topology: Topology | str | None) -> Topology:
    """``topology`` itself or parsed; without bags where it is None.

    Raises:
        ConfigurationError: no topology.
    """
    if topology is not None and not isinstance(topology, Topology | str):
        raise ConfigurationError(f"topology must be a Topology or a spec such as g1n2+g2n1, got {topology!r}")
    return Topology.parse(topology) if isinstance(topology, str) else topology or Topology()


def cost_on(cost: CostModel | None, topology: Topology) -> CostModel:
    """``cost`` (default: ``CostModel()``) with the topology's ranks per node, where it names them."""
    cost = CostModel() if cost is None else cost
    if topology.ranks_per_node is None:
        return cost
    return replace(cost, machine=replace(cost.machine, ranks_per_node=topology.ranks_per_node, nodes=()))


def rank_caps(caps: Caps, lengths: Lengths) -> tuple[int, ...]:
    """One cap per rank; empty where there is none.

    Raises:
        ConfigurationError: not a cap, or not one per rank.
        CapacityError: the caps' sum is below the tokens of the step.
    """
    if caps is None:
        return ()
    n = lengths.num_ranks
    if isinstance(caps, str):
        if caps != "auto":
            raise ConfigurationError(f"max_tokens_per_rank must be integers, 'auto' or None, got {caps!r}")
        return (math.ceil(AUTO_CAP * lengths.num_tokens / n),) * n
    per_rank = [caps] * n if isinstance(caps, int | np.integer) else list(caps)
    if len(per_rank) != n:
        raise ConfigurationError(f"max_tokens_per_rank lists {len(per_rank)} ranks, the balancing group has {n}")
    for cap in per_rank:
        if isinstance(cap, bool) or not isinstance(cap, int | np.integer) or cap < 0:
            raise ConfigurationError(f"max_tokens_per_rank must be non-negative integers, got {cap!r}")
    total = sum(map(int, per_rank))
    if total < lengths.num_tokens:
        raise CapacityError(
            f"the step has {lengths.num_tokens} tokens, max_tokens_per_rank allows {total} over {n} ranks: "
            f"{lengths.num_tokens - total} too many"
        )
    return tuple(map(int, per_rank))


def make_problem(
    tokens: IntArray, homes: npt.NDArray[np.int32], num_ranks: int, cost: CostModel, caps: Sequence[int] = ()
) -> _core.Problem:
    """The C++ problem of one balancing group; see csrc/problem.hpp.

    Raises:
        ConfigurationError: speeds or nodes that are not one per rank.
    """
    machine = cost.machine
    return _core.Problem(
        lengths=np.ascontiguousarray(tokens, np.int64),
        homes=np.ascontiguousarray(homes, np.int32),
        attention_s=np.ascontiguousarray(cost.attention_s(tokens), np.float64),
        linear_s_per_token=cost.linear_s_per_token,
        num_heads=cost.num_heads,
        speeds=machine.rank_speeds(num_ranks),
        nodes=machine.rank_nodes(num_ranks),
        intra_bytes_per_s=machine.intra_node_bytes_per_s,
        inter_bytes_per_s=machine.inter_node_bytes_per_s,
        communication_scale=machine.communication_scale,
        bytes_per_head_token=cost.bytes_per_head_token,
        max_tokens=np.asarray(caps, np.int64) if len(caps) else None,
    )
