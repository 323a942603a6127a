"""What the C++ planners are given: lengths, cost and caps as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from knapformer import _core
from knapformer.errors import CapacityError, ConfigurationError, LengthsError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import MAX_RANKS, Lengths
from knapformer.given.topology import Topology

IntArray = npt.NDArray[np.int64]
Caps = int | Sequence[int] | str | None
"""Most tokens per rank: one number, one per rank, ``"auto"`` or ``None`` for no cap."""

NO_CAP = 2**42
"""Tokens beyond which a cap is none; as in csrc/problem.hpp."""

MAX_STEP_S = 1e30
"""Of one layer, all of the step on the slowest rank or over the slowest link."""

AUTO_CAP = 1.5
"""The automatic cap over the mean tokens of a rank."""


def as_lengths(lengths: Lengths | Sequence[Sequence[int]]) -> Lengths:
    """``lengths`` itself, or collected from each rank's own.

    Raises:
        LengthsError: these are none, or of no rank or too many.
    """
    lengths = lengths if isinstance(lengths, Lengths) else Lengths.from_ranks(lengths)
    if not 1 <= lengths.num_ranks <= MAX_RANKS:
        raise LengthsError(f"a step has 1 to {MAX_RANKS} ranks, got the lengths of {lengths.num_ranks}")
    return lengths


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
    if not isinstance(cost, CostModel):
        raise ConfigurationError(f"cost must be a CostModel, got {cost!r}")
    if topology.ranks_per_node is None:
        return cost
    return replace(cost, machine=replace(cost.machine, ranks_per_node=topology.ranks_per_node, nodes=()))


def cost_of_group(cost: CostModel, offset: int, num_ranks: int) -> CostModel:
    """``cost`` for the ``num_ranks`` ranks of the world from ``offset`` on: a group may begin inside a node."""
    if not isinstance(offset, int | np.integer) or offset < 1:
        return cost
    return on_ranks(cost, range(int(offset), int(offset) + num_ranks))


def on_ranks(cost: CostModel, world_ranks: Sequence[int]) -> CostModel:
    """``cost`` for a balancing group of these ranks of the world."""
    machine = cost.machine.holding(world_ranks)
    return cost if machine is cost.machine else replace(cost, machine=machine)


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
    is_array = isinstance(caps, np.ndarray)
    if not is_array and not isinstance(caps, int | np.integer | Sequence):
        raise ConfigurationError(f"max_tokens_per_rank must be integers, 'auto' or None, got {caps!r}")
    per_rank = [caps] * n if isinstance(caps, int | np.integer) else list(np.atleast_1d(caps) if is_array else caps)
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
    tokens: IntArray,
    homes: npt.NDArray[np.int32],
    num_ranks: int,
    cost: CostModel,
    caps: Sequence[int] = (),
    effort: int = 1,
) -> _core.Problem:
    """The C++ problem of one balancing group; see csrc/problem.hpp.

    ``effort`` is a position in ``registry.EFFORTS``; 1 is the default.

    Raises:
        ConfigurationError: speeds or nodes that are not one per rank, or a cost that no machine has.
    """
    machine = cost.machine
    _check_magnitude(tokens, machine.rank_speeds(num_ranks), cost)
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
        latency_s=machine.latency_s,
        interference=machine.interference,
        link_margin=machine.link_margin,
        max_tokens=np.asarray([min(cap, NO_CAP) for cap in caps], np.int64) if len(caps) else None,
        effort=effort,
    )


def _check_magnitude(tokens: IntArray, speeds: npt.NDArray[np.float64], cost: CostModel) -> None:
    """Times far from any machine's would overflow where they are added, squared or divided."""
    if not len(tokens):
        return
    slowest_link = min(cost.machine.intra_node_bytes_per_s, cost.machine.inter_node_bytes_per_s)
    with np.errstate(over="ignore"):
        work_s = float(cost.work_s(tokens).sum() / speeds.min())
        sent_bytes = 4.0 * float(tokens.sum()) * cost.num_heads * cost.bytes_per_head_token
        waited_s = 2.0 * len(speeds) * cost.machine.latency_s
    for what, seconds in (
        ("computing", work_s),
        ("sending", cost.machine.communication_scale * (sent_bytes / slowest_link + waited_s)),
    ):
        if not seconds <= MAX_STEP_S:
            raise ConfigurationError(
                f"under this cost model {what} takes up to {seconds:.3g} s for one layer of this step, expected at "
                f"most {MAX_STEP_S:.0g} s: check flops_per_s, gamma, the FLOPs and the machine"
            )
