"""The planners in C++ (csrc/), registered: what each is called, what it does about caps, what it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from knapformer import _core
from knapformer.errors import CapacityError
from knapformer.given.cost import CostModel
from knapformer.plans.plan import COLUMNS, Plan
from knapformer.plans.problem import NO_CAP, make_problem
from knapformer.plans.registry import EFFORTS, Caps, Request, register_planner


@register_planner("home", summary="nothing moves: plain data parallelism")
def _home(request: Request) -> Plan:
    return _solve("home", request)


@register_planner("whole", summary="moves whole sequences, heaviest first, then improves", caps=Caps.KEEPS_GIVEN)
def _whole(request: Request) -> Plan:
    return _solve("whole", request)


@register_planner("ulysses", summary="splits every sequence evenly over a node")
def _ulysses(request: Request) -> Plan:
    return _solve("ulysses", request)


@register_planner("bags", summary="KnapFormer's greedy over fixed bags of ranks", needs_bags=True)
def _bags(request: Request) -> Plan:
    return _solve("bags", request, list(request.topology.bag_sizes))


@register_planner("moldable", summary="what to split, over which ranks and how, anew for each step", caps=Caps.KEEPS)
def _moldable(request: Request) -> Plan:
    return _solve("moldable", request, function="two_lanes" if request.lanes > 1 else "moldable")


def deal_lanes(plan: Plan, cost: CostModel) -> Plan:
    """``plan`` with its sequences dealt to two lanes; unchanged where nothing is split."""
    problem = make_problem(plan.lengths, plan.homes, plan.world_size, cost)
    return replace(plan, lane=_core.deal_lanes(problem, plan.columns))


def _solve(name: str, request: Request, *options: Any, function: str | None = None) -> Plan:
    lengths, caps = request.lengths, request.caps
    problem = make_problem(
        lengths.tokens, lengths.homes, lengths.num_ranks, request.cost, caps, EFFORTS.index(request.effort)
    )
    found = getattr(_core, function or name)(problem, *options)
    if found is None:
        raise CapacityError(
            f"{name} cannot place {lengths.num_tokens} tokens in whole sequences of up to "
            f"{int(lengths.tokens.max())} under caps of {min(caps)}..{max(caps)} tokens per rank, {sum(caps)} in all"
        )
    columns, reason = found
    arrays: dict[str, Any] = dict(zip(COLUMNS, columns, strict=True))
    counts = arrays["segment_end"] - arrays["segment_start"]
    check_caps(name, np.bincount(arrays["segment_rank"], counts, minlength=lengths.num_ranks), caps)
    return Plan(
        world_size=lengths.num_ranks,
        num_heads=request.cost.num_heads,
        num_kv_heads=request.num_kv_heads,
        planner=name,
        lengths=lengths.tokens,
        homes=lengths.homes,
        **arrays,
        group_offset=request.group_offset,
        max_tokens_per_rank=caps,
        reason=reason,
    )


def check_caps(planner: str, held: np.ndarray[Any, Any], caps: tuple[int, ...]) -> None:
    """Raise ``CapacityError`` where a rank holds more tokens than its cap.

    Args:
        planner: name, for the error.
        held: (N,) tokens of each rank.
        caps: of each rank; empty means none.
    """
    if not caps:
        return
    over = np.flatnonzero(held > np.asarray([min(cap, NO_CAP) for cap in caps]))
    if len(over):
        rank = int(over[0])
        raise CapacityError(f"{planner} would give rank {rank} {int(held[rank])} tokens, its cap is {caps[rank]}")
