"""Planners: pure functions from lengths to a plan. ``make_plan`` calls the one of a name, and checks what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from knapformer.errors import ConfigurationError, PlanError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.given.topology import Topology
from knapformer.plans import simpler  # noqa: F401  (registers the references, after the planners of native)
from knapformer.plans.evaluation import Evaluation, evaluate
from knapformer.plans.native import check_caps, deal_lanes
from knapformer.plans.plan import Plan
from knapformer.plans.problem import Caps, as_lengths, as_topology, cost_of_group, cost_on, rank_caps
from knapformer.plans.registry import DEFAULT_EFFORT, PLANNERS, Request, check_effort, find_planner
from knapformer.plans.registry import Caps as CapsKind

__all__ = ["DEFAULT_PLANNER", "PLANNERS", "Evaluation", "evaluate", "make_plan"]

DEFAULT_PLANNER = "moldable"


def make_plan(
    lengths: Lengths | Sequence[Sequence[int]],
    *,
    planner: str = DEFAULT_PLANNER,
    topology: Topology | str | None = None,
    cost: CostModel | None = None,
    max_tokens_per_rank: Caps = "auto",
    num_kv_heads: int | None = None,
    group_offset: int = 0,
    lanes: int | str = 1,
    effort: str = DEFAULT_EFFORT,
) -> Plan:
    """Plan one step of one balancing group. The same arguments give the same plan on every rank and every run.

    Args:
        lengths: sequence lengths of each rank.
        planner: a name of ``PLANNERS``.
        topology: bags, for ``bags``, which repeat where the ranks are a multiple of their total; ranks per node, for
            all planners, where it names them (else the cost model's machine does).
        cost: default ``CostModel()``.
        max_tokens_per_rank: hard caps. ``"auto"`` is 1.5 × the mean for ``moldable`` and no cap for the others, which
            cannot cut a sequence to fit. Given explicitly, ``whole`` keeps them or fails; ``home``, ``ulysses`` and
            ``bags`` know no caps and fail where their plan breaks one.
        num_kv_heads: of the plan; default ``cost.num_heads``.
        group_offset: world rank of local rank 0, where the ranks are consecutive ones of a larger world: with the ranks
            per node it says which node each rank sits on.
        lanes: 2 for ranks that take turns between two lanes, so that one computes while the other's exchange is under
            way; ``"auto"`` for what the cost model calls faster. Where nothing is split there is one lane.
        effort: how much ``moldable`` tries: ``"fast"``, ``"default"`` or ``"thorough"``. Others ignore it.

    Raises:
        ConfigurationError: an unknown planner, or a topology or machine that does not fit the ranks.
        LengthsError: lengths that are none.
        CapacityError: the caps cannot hold the step.
    """
    found, effort = find_planner(planner), check_effort(effort)
    lengths = as_lengths(lengths)
    topology = as_topology(topology)
    cost = cost_of_group(cost_on(cost, topology), group_offset, lengths.num_ranks)
    caps = rank_caps(max_tokens_per_rank, lengths)
    if isinstance(max_tokens_per_rank, str) and found.caps is not CapsKind.KEEPS:
        caps = ()
    if found.needs_bags or topology.bag_sizes:
        topology.num_groups(lengths.num_ranks)
    num_kv_heads = cost.num_heads if num_kv_heads is None else num_kv_heads
    plans = [
        _checked(found.solve(request), request, planner)
        for request in (
            Request(lengths, cost, caps, topology, num_kv_heads, group_offset, number, effort)
            for number in check_lanes(lanes)
        )
    ]
    return min(plans, key=lambda plan: evaluate(plan, cost).makespan_s) if len(plans) > 1 else plans[0]


def check_lanes(lanes: int | str) -> tuple[int, ...]:
    """The numbers of lanes that are tried.

    Raises:
        ConfigurationError: not 1, 2 or ``"auto"``.
    """
    if lanes == "auto":
        return (1, 2)
    if lanes not in (1, 2) or isinstance(lanes, bool):
        raise ConfigurationError(f"lanes must be 1, 2 or 'auto', got {lanes!r}")
    return (int(lanes),)


def _checked(plan: Plan, request: Request, planner: str) -> Plan:
    """``plan``, which must be for what was requested, with the request's scalars and lanes."""
    if not plan.places(request.lengths):
        raise PlanError(f"planner {planner!r} gave a plan for other lengths, homes or ranks: {plan!r}")
    check_caps(planner, plan.rank_tokens, request.caps)
    kv_heads, offset, caps = request.num_kv_heads, request.group_offset, request.caps
    if (plan.num_kv_heads, plan.group_offset, plan.max_tokens_per_rank) != (kv_heads, offset, caps):
        plan = replace(plan, num_kv_heads=kv_heads, group_offset=offset, max_tokens_per_rank=caps)
    return plan if request.lanes in (plan.num_lanes, 1) else deal_lanes(plan, request.cost)
