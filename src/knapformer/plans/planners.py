"""Planners: pure functions from lengths to a plan. The algorithms are C++ (csrc/), each written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from knapformer import _core
from knapformer.errors import CapacityError, ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.given.topology import Topology
from knapformer.plans.evaluation import Evaluation, evaluate
from knapformer.plans.plan import Plan
from knapformer.plans.problem import NO_CAP, Caps, as_lengths, as_topology, cost_on, make_problem, rank_caps

__all__ = ["PLANNERS", "Evaluation", "evaluate", "make_plan"]

PLANNERS = ("home", "whole", "ulysses", "bags", "moldable")
"""``home`` moves nothing; ``whole`` moves whole sequences; ``ulysses`` splits each over a node; ``bags`` is
KnapFormer's greedy over fixed bags; ``moldable`` chooses anew for each step what to split, over which ranks, how."""

_COLUMNS = (
    "segment_offsets",
    "segment_rank",
    "segment_start",
    "segment_end",
    "tile_offsets",
    "tile_rank",
    "tile_head_start",
    "tile_head_end",
    "tile_query_start",
    "tile_query_end",
)


def make_plan(
    lengths: Lengths | Sequence[Sequence[int]],
    *,
    planner: str = "moldable",
    topology: Topology | str | None = None,
    cost: CostModel | None = None,
    max_tokens_per_rank: Caps = "auto",
    num_kv_heads: int | None = None,
    group_offset: int = 0,
) -> Plan:
    """Plan one step of one balancing group. The same arguments give the same plan on every rank and every run.

    Args:
        lengths: sequence lengths of each rank.
        planner: one of ``PLANNERS``.
        topology: bags, for ``bags``, which repeat where the ranks are a multiple of their total; ranks per node, for
            all planners, where it names them (else the cost model's machine does).
        cost: default ``CostModel()``.
        max_tokens_per_rank: hard caps. ``"auto"`` is 1.5 × the mean for ``moldable`` and no cap for the others, which
            cannot cut a sequence to fit. Given explicitly, ``whole`` keeps them or fails; ``home``, ``ulysses`` and
            ``bags`` know no caps and fail where their plan breaks one.
        num_kv_heads: of the plan; default ``cost.num_heads``.
        group_offset: world rank of local rank 0.

    Raises:
        ConfigurationError: an unknown planner, or a topology or machine that does not fit the ranks.
        LengthsError: lengths that are none.
        CapacityError: the caps cannot hold the step.
    """
    if planner not in PLANNERS:
        raise ConfigurationError(f"unknown planner {planner!r}; known: {', '.join(PLANNERS)}")
    lengths = as_lengths(lengths)
    topology = as_topology(topology)
    cost = cost_on(cost, topology)
    caps = rank_caps(max_tokens_per_rank, lengths)
    if isinstance(max_tokens_per_rank, str) and planner != "moldable":
        caps = ()
    problem = make_problem(lengths.tokens, lengths.homes, lengths.num_ranks, cost, caps)
    if planner == "bags" or topology.bag_sizes:
        topology.num_groups(lengths.num_ranks)
    bags = (list(topology.bag_sizes),) if planner == "bags" else ()
    columns = getattr(_core, planner)(problem, *bags)
    if columns is None:
        raise CapacityError(
            f"{planner} cannot place {lengths.num_tokens} tokens in whole sequences of up to "
            f"{int(lengths.tokens.max())} under caps of {min(caps)}..{max(caps)} tokens per rank, {sum(caps)} in all"
        )
    arrays: dict[str, Any] = dict(zip(_COLUMNS, columns, strict=True))
    _check_caps(planner, arrays, caps, lengths.num_ranks)
    return Plan(
        world_size=lengths.num_ranks,
        num_heads=cost.num_heads,
        num_kv_heads=cost.num_heads if num_kv_heads is None else num_kv_heads,
        planner=planner,
        lengths=lengths.tokens,
        homes=lengths.homes,
        **arrays,
        group_offset=group_offset,
        max_tokens_per_rank=caps,
    )


def _check_caps(planner: str, arrays: dict[str, Any], caps: tuple[int, ...], num_ranks: int) -> None:
    if not caps:
        return
    held = np.bincount(
        arrays["segment_rank"], arrays["segment_end"] - arrays["segment_start"], minlength=num_ranks
    ).astype(np.int64)
    over = np.flatnonzero(held > np.asarray([min(cap, NO_CAP) for cap in caps]))
    if len(over):
        rank = int(over[0])
        raise CapacityError(f"{planner} would give rank {rank} {held[rank]} tokens, its cap is {caps[rank]}")
